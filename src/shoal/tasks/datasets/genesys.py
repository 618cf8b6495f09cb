"""The rows of SYNTHETIC-1 and of the INTELLECT-2 data set: how they become problems, and how answers are graded.

`verification_info` is an object, or its text: JSON in the INTELLECT-2 data set, a Python literal in SYNTHETIC-1. By `task_type`:

    verifiable_math         {"ground_truth": "42"}, or a number, or a list of which one must be given; in a \\boxed{}
    verifiable_code         {"language": "python", "test_cases": [
                               {"type": "stdin_stdout", "input": "1 2", "output": "3"},
                               {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}]}
    prime_rl_code           {"test_cases": JSON text of {"inputs": [...], "outputs": [...], "fn_name": "add"}};
                            without fn_name, inputs and outputs are those of a script
    code_output_prediction  {"ground_truth": "..."}: the field `output` of a JSON object in the answer;
                            verifiable_code_understanding is an older name of it

`llm_judgeable_groundtruth_similarity` needs a model as judge (judged_answers.py), and programs in other languages cannot be run: such
rows are unusable. Other rows are unusable if a field is missing or has another type.
"""

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from shoal.tasks.datasets.data_set import Format, Row, Style, object_in, read_value
from shoal.tasks.grading.entry_points import is_reserved
from shoal.tasks.grading.math_grader import compare_any, find_bad_golds, last_boxed
from shoal.tasks.grading.program_grader import grade_program, in_block
from shoal.tasks.task import RIGHT, UNPARSEABLE, WRONG, Problem, Reward, reply_of

JUDGED = ("llm_judgeable_groundtruth_similarity",)
"""Types whose answers only a model can judge."""

MAX_TEST_BYTES = 32 << 20
"""Largest tests of one row. Larger ones would fill the validator's memory."""

BRACKETS = 50
"""Opening brackets of a reply that are tried as the start of a JSON object, from the last one."""

_SETUP = """
import json

def _plain(value):
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value

def _with_int_keys(value):
    try:
        return {int(key): item for key, item in value.items()}
    except (AttributeError, ValueError):
        return value

def _equals(given, wanted, wrapped):
    printed, given = str(given).strip(), _plain(given)
    choices = [wanted, wanted[0]] if wrapped and isinstance(wanted, list) and len(wanted) == 1 else [wanted]
    return any(
        given == one or given == _with_int_keys(one) or (isinstance(one, str) and one.strip() in (printed, str(given)))
        for one in choices
    )
"""
"""Code of the tests of function calls. JSON has neither tuples nor numbers as keys, and some rows have the printed value as text."""
_SETUP_NAMES = frozenset({"_plain", "_with_int_keys", "_equals"})


def read_genesys(row: Row, style: Style) -> Problem:
    """Reads `prompt`, `task_type` and `verification_info`, as in INTELLECT-2 and SYNTHETIC-1. Raises KeyError or ValueError."""
    prompt = next((row[name] for name in ("prompt", "problem") if row.get(name) is not None), None)
    if prompt is None:
        raise KeyError("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"prompt is {prompt!r}, expected a text")
    kind = row["task_type"]
    if kind in JUDGED:
        raise ValueError(f"task_type {kind!r} needs a model as judge; use the task 'judge' for these rows")
    if kind not in _READERS:
        raise ValueError(f"task_type {kind!r} cannot be verified; known: {', '.join(_READERS)}")
    info = object_in(row["verification_info"], "verification_info")
    return _READERS[kind](prompt.strip(), info, row.get("gold_standard_solution"))


def _read_math(prompt: str, info: dict[str, Any], solution: object) -> Problem:
    truth = info["ground_truth"]
    golds = [_gold(one) for one in (truth if isinstance(truth, list) else [truth])]
    if not golds:
        raise ValueError("ground_truth is an empty list")
    return Problem(prompt, f"\\boxed{{{golds[0]}}}", check=json.dumps({"golds": golds}))


def _gold(truth: object) -> str:
    if isinstance(truth, int | float) and not isinstance(truth, bool) and math.isfinite(truth):
        return str(truth)
    if not isinstance(truth, str) or not truth.strip():
        raise ValueError(f"ground_truth is {truth!r}, expected a text, a number, or a list of them")
    text = truth.strip()
    if "\\boxed" not in text:
        return text
    boxed = last_boxed(text)
    if not boxed:
        raise ValueError(f"the \\boxed of ground_truth {text[:80]!r} is empty or not closed")
    return boxed


def _read_code(prompt: str, info: dict[str, Any], solution: object) -> Problem:
    if info.get("language", "python") != "python":
        raise ValueError(f"language {info['language']!r} cannot be run; only python can")
    cases = info["test_cases"]
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise ValueError("test_cases is not a list of objects")
    scripts = [(_joined(case["input"]), _joined(case["output"])) for case in cases if not _is_call(case)]
    calls = [case for case in cases if _is_call(case)]
    names = sorted({_function_name(case["fn_name"]) for case in calls})
    _check_expected(scripts, [case["output"] for case in calls])
    tests = [_call(case["fn_name"], _listed(case["input"]), case["output"]) for case in calls]
    return _program_problem(prompt, solution, tests, scripts, names)


def _read_prime_code(prompt: str, info: dict[str, Any], solution: object) -> Problem:
    cases = info["test_cases"]
    cases = json.loads(cases) if isinstance(cases, str) else cases
    inputs, outputs = cases["inputs"], cases["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("inputs and outputs of test_cases are not lists of the same length")
    pairs = list(zip(inputs, outputs, strict=True))
    if cases.get("fn_name") is None:
        scripts = [(_joined(given), _joined(wanted)) for given, wanted in pairs]
        _check_expected(scripts, [])
        return _program_problem(prompt, solution, [], scripts, [])
    name = _function_name(cases["fn_name"])
    _check_expected([], outputs)
    tests = [_call(name, _arguments(given), wanted, wrapped=True) for given, wanted in pairs]
    return _program_problem(prompt, solution, tests, [], [name])


def _read_prediction(prompt: str, info: dict[str, Any], solution: object) -> Problem:
    wanted = info["ground_truth"]
    answer = json.dumps({"output": wanted})
    return Problem(prompt, f"```json\n{answer}\n```", check=json.dumps({"prediction": wanted}))


_READERS: dict[str, Callable[[str, dict[str, Any], object], Problem]] = {
    "verifiable_math": _read_math,
    "verifiable_code": _read_code,
    "prime_rl_code": _read_prime_code,
    "code_output_prediction": _read_prediction,
    "verifiable_code_understanding": _read_prediction,
}


# -- tests of programs ------------------------------------------------------------------------------------


def _program_problem(
    prompt: str, solution: object, tests: list[str], scripts: list[tuple[str, str]], names: Sequence[str]
) -> Problem:
    check: dict[str, Any] = {"tests": [_SETUP, *tests] if tests else [], "scripts": scripts}
    check |= {"judge_imports": True, "methods": list(names)}
    if renamed := {_name_in_tests(name): name for name in names if _name_in_tests(name) != name}:
        check["entry_points"] = renamed
    text = json.dumps(check)
    if len(text) > MAX_TEST_BYTES:
        raise ValueError(f"the tests have {len(text)} bytes, at most {MAX_TEST_BYTES} are allowed")
    answer = solution if isinstance(solution, str) else ""
    return Problem(prompt, answer if "```" in answer else in_block(answer), text)


def _check_expected(scripts: list[tuple[str, str]], values: list[Any]) -> None:
    """Raises ValueError if a program that prints nothing and whose functions return nothing would pass all tests."""
    if not scripts and not values:
        raise ValueError("test_cases is empty: any program would pass")
    if not any(printed.strip() for _, printed in scripts) and all(one in (None, [None]) for one in values):
        raise ValueError("no test case expects a result: a program that does nothing would pass")


def _is_call(case: Row) -> bool:
    kind = case.get("type", "stdin_stdout")
    if kind not in ("stdin_stdout", "function_call"):
        raise ValueError(f"test case of type {kind!r}; known: stdin_stdout, function_call")
    return bool(kind == "function_call")


def _call(name: str, arguments: list[Any], wanted: Any, *, wrapped: bool = False) -> str:
    """Returns a test of a function call. With `wrapped`, the value may be alone in a list, as in the rows of APPS."""
    given = f"{_name_in_tests(name)}(*json.loads({json.dumps(arguments)!r}))"
    if len(arguments) == 1 and isinstance(arguments[0], dict):
        given = f"{_name_in_tests(name)}(_with_int_keys(json.loads({json.dumps(arguments[0])!r})))"
    return f"assert _equals({given}, json.loads({json.dumps(wanted)!r}), {wrapped})"


def _function_name(name: object) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"fn_name is {name!r}, expected the name of a function")
    return name


def _name_in_tests(name: str) -> str:
    """Returns the name by which a test calls the program's function: another one if the test itself may need the name."""
    return f"program_{name}" if is_reserved(name) or name in _SETUP_NAMES else name


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _listed(given: Any) -> list[Any]:
    """Returns the arguments of a call. A list, or a text that contains a list, has all arguments; any other value is the only argument."""
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "("):
        with contextlib.suppress(ValueError):
            return _as_list(read_value(given, "input"))
    return _as_list(given)


def _arguments(given: Any) -> list[Any]:
    """Returns the arguments of a call: a list, or a text with one JSON value in each line."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    return _as_list(given)


def _joined(value: Any) -> str:
    """Returns the input or output of a script: a text, a list of lines, or None for nothing."""
    if value is None:
        return ""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


# -- grading ----------------------------------------------------------------------------------------------


def grade_genesys(problem: Problem, text: str) -> Reward:
    """Grades an answer by the kind of its problem's check."""
    if problem.check.startswith('{"tests": '):
        return grade_program(problem, text)
    check: dict[str, Any] = json.loads(problem.check)
    if "prediction" not in check:
        boxed = last_boxed(reply_of(text))
        return UNPARSEABLE if not boxed else compare_any(check["golds"], boxed)
    found = _last_object(reply_of(text), "output")
    if found is None:
        return UNPARSEABLE
    given, wanted = found["output"], check["prediction"]
    # 7 and "7" are the same output.
    return RIGHT if given == wanted or _as_text(given) == _as_text(wanted) else WRONG


def _as_text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else json.dumps(value)


def _last_object(text: str, field: str) -> dict[str, Any] | None:
    """Returns the last JSON object in the text that has the field and is not part of another, or None.

    Only the last BRACKETS opening brackets are tried: a hostile text could have millions.
    """
    decoder, start = json.JSONDecoder(), len(text)
    best: tuple[int, dict[str, Any]] | None = None
    for _ in range(BRACKETS):
        start = text.rfind("{", 0, start)
        if start < 0:
            break
        try:
            found, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and field in found and (best is None or end > best[0]):
            best = end, found
    return None if best is None else best[1]


def find_bad_genesys(problems: Sequence[Problem]) -> dict[int, str]:
    """Returns the problems without a gold expression that math-verify can parse."""
    indices = [index for index, problem in enumerate(problems) if problem.check.startswith('{"golds": ')]
    if not indices:
        return {}
    bad = find_bad_golds([json.loads(problems[index].check)["golds"] for index in indices])
    return {indices[index]: reason for index, reason in bad.items()}


GENESYS = Format(name="genesys", read=read_genesys, grade=grade_genesys, find_bad=find_bad_genesys)
