"""Formats of published data sets: how their rows become problems, and how answers are graded.

    gsm8k, svamp, math   mathematics in words
    mbpp, humaneval      programs that must pass tests
    genesys              SYNTHETIC-1: expressions and programs

Files are read as their authors publish them.
"""

import json
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from shoal.tasks.datasets.data_set import Format, Row, Style
from shoal.tasks.grading.entry_points import is_reserved
from shoal.tasks.grading.math_grader import (
    find_bad_expression,
    find_bad_number,
    grade_expression,
    grade_plain_number,
)
from shoal.tasks.grading.program_grader import grade_program, in_block
from shoal.tasks.task import Problem, Reward

ASK_NUMBER: dict[Style, str] = {
    "chat": "{}\nThink step by step, then give the answer as a number after ####.",
    "direct": "{} Reply with the number only.",
    "bare": "Question: {}\nAnswer:",
}
ASK_BOXED: dict[Style, str] = {
    "chat": "{}\nThink step by step, then put the final answer within \\boxed{{}}.",
    "direct": "{}\nReply with the final answer within \\boxed{{}} only.",
    "bare": "Question: {}\nAnswer:",
}
ASK_PROGRAM = "{}\nReply with the whole program in one ```python block."


def read_gsm8k(row: Row, style: Style) -> Problem:
    """Reads `question`, and `answer`: worked lines, then `#### 1,234`."""
    _, mark, answer = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"the answer has no ####: {row['answer'][-80:]!r}")
    return Problem(ASK_NUMBER[style].format(row["question"].strip()), answer.strip().replace(",", ""))


def read_svamp(row: Row, style: Style) -> Problem:
    """Reads `Body`, `Question` and the number `Answer`."""
    body = row["Body"].strip()
    question = f"{body}{'' if body.endswith(('.', '?', '!')) else '.'} {row['Question'].strip()}"
    return Problem(ASK_NUMBER[style].format(question), _format_number(row["Answer"]))


def read_math(row: Row, style: Style) -> Problem:
    """Reads `problem` and the expression `answer`."""
    if not isinstance(row["answer"], str) or not row["answer"].strip():
        raise ValueError(f"the answer is {row['answer']!r}, expected a string")
    return Problem(
        ASK_BOXED[style].format(row["problem"].strip()),
        f"\\boxed{{{row['answer'].strip()}}}",
        check=row["answer"].strip(),
    )


def read_mbpp(row: Row, style: Style) -> Problem:
    """Reads `prompt` (or `text`), `test_list`, `test_imports` (or `test_setup_code`), and the right answer `code`."""
    tests = [_text(test) for test in row["test_list"]]
    if not tests:
        raise ValueError("test_list is empty: any program would pass")
    setup = "\n".join(row.get("test_imports", [])) or row.get("test_setup_code", "")
    question = f"{row['prompt'] if 'prompt' in row else row['text']}\nIt must pass:\n" + "\n".join(tests)
    check: dict[str, Any] = {"tests": [setup, *tests]}
    # Row 126 asks for a function named `sum`. Only the reference program can say so, never an answer.
    defined = re.findall(r"^def (\w+)\(", row["code"], re.MULTILINE)
    if builtin := {name: name for name in defined if is_reserved(name) and f"{name}(" in "".join(tests)}:
        check["entry_points"] = builtin
    return Problem(_ask_program(question, style), in_block(row["code"]), json.dumps(check))


def read_humaneval(row: Row, style: Style) -> Problem:
    """Reads `prompt`, the head of a function; `test`, which defines `check(candidate)`; and `entry_point`, the candidate's name."""
    prompt, entry = row["prompt"], row["entry_point"]
    before = prompt[: prompt.rindex(f"def {entry}(")]
    question = f"Complete this function.\n```python\n{prompt.rstrip()}\n```"
    check = {"before": before, "tests": [row["test"], f"check({entry})"]}
    return Problem(
        _ask_program(question, style), in_block(prompt + _text(row["canonical_solution"])), json.dumps(check)
    )


def read_genesys(row: Row, style: Style) -> Problem:
    """Reads `prompt`, `task_type`, and `verification_info`, which is JSON, as GENESYS wrote them for SYNTHETIC-1.

        verifiable_math    {"ground_truth": "42"}                      the boxed answer, by math-verify
        verifiable_code    {"language": "python", "test_cases": [      the last ```python block; every case must pass
                              {"type": "stdin_stdout", "input": "1 2", "output": "3"},
                              {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}]}

    Raises ValueError for other types: grading them needs a model as judge.
    """
    prompt: str = row["prompt"] if row.get("prompt") is not None else row["problem"]
    info = row["verification_info"]
    info = json.loads(info) if isinstance(info, str) else info
    readers = {"verifiable_math": _read_genesys_math, "verifiable_code": _read_genesys_code}
    if row["task_type"] not in readers:
        raise ValueError(
            f"task_type {row['task_type']!r} cannot be verified; known: {', '.join(readers)}. Remove such rows"
        )
    return readers[row["task_type"]](prompt.strip(), info, row.get("gold_standard_solution"))


def _read_genesys_math(prompt: str, info: dict[str, Any], solution: str | None) -> Problem:
    truth = info["ground_truth"]
    if not isinstance(truth, str) or not truth.strip():
        raise ValueError(f"ground_truth is {truth!r}, expected a string")
    return Problem(prompt, f"\\boxed{{{truth.strip()}}}", check=truth.strip())


def _read_genesys_code(prompt: str, info: dict[str, Any], solution: str | None) -> Problem:
    if info.get("language", "python") != "python":
        raise ValueError(f"language {info['language']!r} cannot be run; only python can")
    cases = info["test_cases"]
    if not cases:
        raise ValueError("test_cases is empty: any program would pass")
    scripts = [(_joined(case["input"]), _joined(case["output"])) for case in cases if not _is_call(case)]
    tests = [_call(case) for case in cases if _is_call(case)]
    answer = solution or ""
    if "```python" not in answer:
        answer = in_block(answer)
    check: dict[str, Any] = {"tests": tests, "scripts": scripts}
    names = {case["fn_name"] for case in cases if _is_call(case)}
    if renamed := {_name_in_tests(name): name for name in sorted(names) if _name_in_tests(name) != name}:
        check["entry_points"] = renamed
    return Problem(prompt, answer, json.dumps(check))


def _is_call(case: dict[str, Any]) -> bool:
    kind = case.get("type", "stdin_stdout")
    if kind not in ("stdin_stdout", "function_call"):
        raise ValueError(f"test case of type {kind!r}; known: stdin_stdout, function_call")
    return bool(kind == "function_call")


def _call(case: dict[str, Any]) -> str:
    """Returns a test of a function call. JSON has no tuples, so a returned tuple is compared as a list."""
    arguments = case["input"] if isinstance(case["input"], list) else [case["input"]]
    given = f"{_name_in_tests(case['fn_name'])}(*json.loads({json.dumps(arguments)!r}))"
    wanted = f"json.loads({json.dumps(case['output'])!r})"
    return f"import json\ngiven = {given}\nassert (list(given) if isinstance(given, tuple) else given) == {wanted}"


def _name_in_tests(name: str) -> str:
    """Returns the name by which a test calls the program's function: another one if the test itself may need the name."""
    return f"program_{name}" if is_reserved(name) or name == "given" else name


def _joined(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "\n".join(value)


def grade_genesys(problem: Problem, text: str) -> Reward:
    """Grades a program by its tests, any other answer as an expression."""
    return grade_program(problem, text) if _is_program(problem) else grade_expression(problem, text)


def find_bad_genesys(problems: Sequence[Problem]) -> dict[int, str]:
    """Returns the problems whose gold expression math-verify cannot parse."""
    indices = [index for index, problem in enumerate(problems) if not _is_program(problem)]
    if not indices:
        return {}
    bad = find_bad_expression([problems[index] for index in indices])
    return {indices[index]: reason for index, reason in bad.items()}


def _is_program(problem: Problem) -> bool:
    return problem.check.startswith('{"tests": ')


def _format_number(number: int | float) -> str:
    """Formats 51.0 as `51`: without a needless decimal point, and never with an exponent."""
    return f"{Decimal(repr(float(number))).normalize():f}"


def _ask_program(question: str, style: Style) -> str:
    return ASK_PROGRAM.format(question) if style != "bare" else f"{ASK_PROGRAM.format(question)}\n\n"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return value


GSM8K = Format(name="gsm8k", read=read_gsm8k, grade=grade_plain_number, find_bad=find_bad_number)
SVAMP = Format(name="svamp", read=read_svamp, grade=grade_plain_number, find_bad=find_bad_number)
MATH = Format(name="math", read=read_math, grade=grade_expression, find_bad=find_bad_expression)
MBPP = Format(name="mbpp", read=read_mbpp, grade=grade_program)
HUMANEVAL = Format(name="humaneval", read=read_humaneval, grade=grade_program, evaluation_only=True)
GENESYS = Format(name="genesys", read=read_genesys, grade=grade_genesys, find_bad=find_bad_genesys)
