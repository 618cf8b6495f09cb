"""Rows as GENESYS made them for SYNTHETIC-1: `prompt`, `task_type`, and `verification_info`, which is JSON.

    verifiable_math    {"ground_truth": "42"}                      the boxed answer, by math-verify
    verifiable_code    {"language": "python", "test_cases": [      the last ```python block, every case must pass
                          {"type": "stdin_stdout", "input": "1 2", "output": "3"},
                          {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}]}

Rows of any other type need a judge that we do not have, and are refused by number.
"""

import json
from collections.abc import Sequence
from typing import Any

from shoal.tasks.datasets.data_set import Format, Row, Style
from shoal.tasks.datasets.math_problems import find_bad_expression, grade_expression
from shoal.tasks.datasets.programs import grade_program, in_block
from shoal.tasks.task import Problem, Reward


def read_genesys(row: Row, style: Style) -> Problem:
    prompt: str = row["prompt"] if row.get("prompt") is not None else row["problem"]
    info = row["verification_info"]
    info = json.loads(info) if isinstance(info, str) else info
    readers = {"verifiable_math": _read_math, "verifiable_code": _read_code}
    if row["task_type"] not in readers:
        raise ValueError(
            f"task_type {row['task_type']!r} cannot be verified; known: {', '.join(readers)}. Remove such rows"
        )
    return readers[row["task_type"]](prompt.strip(), info, row.get("gold_standard_solution"))


def _read_math(prompt: str, info: dict[str, Any], solution: str | None) -> Problem:
    truth = info["ground_truth"]
    if not isinstance(truth, str) or not truth.strip():
        raise ValueError(f"ground_truth is {truth!r}, expected a text")
    return Problem(prompt, f"\\boxed{{{truth.strip()}}}", check=truth.strip())


def _read_code(prompt: str, info: dict[str, Any], solution: str | None) -> Problem:
    if info.get("language", "python") != "python":
        raise ValueError(f"language {info['language']!r} cannot be run, only python")
    cases = info["test_cases"]
    if not cases:
        raise ValueError("test_cases is empty: any program would pass")
    scripts = [(_joined(case["input"]), _joined(case["output"])) for case in cases if not _is_call(case)]
    tests = [_call(case) for case in cases if _is_call(case)]
    answer = solution or ""
    if "```python" not in answer:
        answer = in_block(answer)
    return Problem(prompt, answer, json.dumps({"tests": tests, "scripts": scripts}))


def _is_call(case: dict[str, Any]) -> bool:
    kind = case.get("type", "stdin_stdout")
    if kind not in ("stdin_stdout", "function_call"):
        raise ValueError(f"test case of type {kind!r}; known: stdin_stdout, function_call")
    return bool(kind == "function_call")


def _call(case: dict[str, Any]) -> str:
    """JSON has no tuples, so a tuple counts as the list that stands for it."""
    arguments = case["input"] if isinstance(case["input"], list) else [case["input"]]
    given = f"{case['fn_name']}(*json.loads({json.dumps(arguments)!r}))"
    wanted = f"json.loads({json.dumps(case['output'])!r})"
    return f"import json\ngiven = {given}\nassert (list(given) if isinstance(given, tuple) else given) == {wanted}"


def _joined(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "\n".join(value)


def grade_genesys(problem: Problem, text: str) -> Reward:
    return grade_program(problem, text) if _is_program(problem) else grade_expression(problem, text)


def find_bad_genesys(problems: Sequence[Problem]) -> dict[int, str]:
    places = [index for index, problem in enumerate(problems) if not _is_program(problem)]
    if not places:
        return {}
    bad = find_bad_expression([problems[index] for index in places])
    return {places[index]: reason for index, reason in bad.items()}


def _is_program(problem: Problem) -> bool:
    return problem.check.startswith('{"tests": ')


GENESYS = Format(name="genesys", read=read_genesys, grade=grade_genesys, find_bad=find_bad_genesys)
