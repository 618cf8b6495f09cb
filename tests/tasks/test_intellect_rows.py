"""Rows of the INTELLECT-2 data set and of SYNTHETIC-1: every task type, and answers as GENESYS and prime-rl take them."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.tasks import Outcome, Problem, Task, make_task
from shoal.tasks.datasets import data_set
from shoal.tasks.datasets.genesys import grade_genesys, read_genesys
from shoal.wire.run_spec import TaskSpec

R, W, U = Outcome.RIGHT, Outcome.WRONG, Outcome.UNPARSEABLE


def row(kind: str, info: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns a row as the data set has it: verification_info is JSON text."""
    return {
        "problem_id": "1",
        "task_type": kind,
        "prompt": "?",
        "verification_info": json.dumps(info),
    } | fields


def prime(**cases: Any) -> dict[str, Any]:
    return row("prime_rl_code", {"test_cases": json.dumps(cases)})


def grade(row: dict[str, Any], text: str) -> Outcome:
    return grade_genesys(read_genesys(row, "chat"), text).outcome


def block(program: str, label: str = "python") -> str:
    return f"Here it is:\n```{label}\n{program}\n```"


SUM = prime(inputs=["1 2\n", ["4 5"]], outputs=["3\n", ["9"]])
TWO_SUM = prime(fn_name="twoSum", inputs=[[[2, 7, 11], 9], [[3, 3], 6]], outputs=[[[0, 1]], [[0, 1]]])
TWO_SUM_BODY = "for i, a in enumerate(nums):\n{0}    for j in range(i):\n{0}        if nums[j] + a == target: return [j, i]"
METHOD = "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        " + (
    TWO_SUM_BODY.format("        ")
)


@pytest.mark.parametrize(
    ("rows", "text", "outcome"),
    [
        (SUM, block("print(sum(map(int, input().split())))"), R),
        (SUM, block("print(sum(map(int, input().split())))", label=""), R),
        (SUM, block("print(3)"), W),
        (SUM, block("print(sum(map(int, input().split())))", label="text"), U),
        (SUM, block("print(sum(map(int, input().split())))", label="Python3"), R),
        (SUM, block("print(sum(map(int, input().split())))\nexit()\nprint(1)"), R),
        (TWO_SUM, block(METHOD), R),
        (TWO_SUM, block("from __future__ import annotations\n" + METHOD), R),
        (TWO_SUM, block(METHOD.replace("Solution", "Other")), R),
        (TWO_SUM, block("def twoSum(nums, target):\n    " + TWO_SUM_BODY.format("    ")), R),
        (TWO_SUM, block("def twoSum(nums, target): return 0, 1"), R),
        (TWO_SUM, block("def twoSum(nums, target): return [1, 0]"), W),
        (TWO_SUM, block("class Solution:\n    def threeSum(self, nums): return [0, 1]"), W),
        # A function that the judge imports is not the program's own.
        (prime(fn_name="gcd", inputs=[[4, 6]], outputs=[2]), block("x = 1"), W),
        (prime(fn_name="count", inputs=[[1]], outputs=[0]), block("x = 1"), W),
        (prime(fn_name="add", inputs=["1\n2"], outputs=["3"]), block("def add(a, b): return a + b"), R),
        (
            prime(fn_name="keys", inputs=[[{"1": 2}]], outputs=[[[1]]]),
            block("def keys(d): return list(d)"),
            R,
        ),
        (prime(inputs=["1"], outputs=["0.33333333"]), block("print(1 / 3)"), R),
        (prime(inputs=["1"], outputs=["0.34"]), block("print(1 / 3)"), W),
        (prime(inputs=["1"], outputs=["3"]), block("print(3.0)"), W),
        (prime(inputs=[None, "1"], outputs=["", "1"]), block("import sys\nprint(sys.stdin.read())"), R),
        (
            prime(fn_name="f", inputs=[[1], [0]], outputs=[None, 1]),
            block("def f(x): return None if x else 1"),
            R,
        ),
    ],
)
def test_prime_rl_code(rows: dict[str, Any], text: str, outcome: Outcome) -> None:
    assert grade(rows, text) is outcome


def test_a_printed_value_may_be_compared_as_text() -> None:
    cases = [{"type": "function_call", "fn_name": "is_even", "input": [2], "output": "True"}]
    rows = row("verifiable_code", {"language": "python", "test_cases": cases})
    assert grade(rows, block("def is_even(n): return n % 2 == 0")) is R
    assert grade(rows, block("def is_even(n): return n % 2 == 1")) is W


@pytest.mark.parametrize(
    ("given", "wanted", "program", "outcome"),
    [
        ([1, 2], "(1, 2)", "def f(a, b): return a, b", R),
        ([1, 2], (1, 2), "def f(a, b): return a, b", R),
        ([1, 2], "(2, 1)", "def f(a, b): return a, b", W),
        ((1, 2), 3, "def f(a, b): return a + b", R),
        ("[1, 2]", "3", "def f(a, b): return a + b", R),
        ("[1, None]", "2", "def f(*all): return len(all)", R),
        (["[1, 2]"], "6", "def f(text): return len(text)", R),
        ("[a", "2", "def f(text): return len(text)", R),
    ],
)
def test_arguments_and_values_of_calls_as_genesys_has_them(
    given: Any, wanted: Any, program: str, outcome: Outcome
) -> None:
    case = {"type": "function_call", "fn_name": "f", "input": given, "output": wanted}
    rows = row("verifiable_code", {})
    # As in SYNTHETIC-1: the text of a Python literal.
    rows["verification_info"] = str({"language": "python", "test_cases": [case]})
    assert grade(rows, block(program)) is outcome


@pytest.mark.parametrize(
    ("kind", "info", "text"),
    [
        (
            "verifiable_math",
            {"ground_truth": "it's \\frac{1}{2}", "none": None},
            "\\boxed{it's \\frac{1}{2}}",
        ),
        ("code_output_prediction", {"ground_truth": "it's"}, '{"output": "it\'s"}'),
        ("verifiable_code_understanding", {"ground_truth": "7"}, '{"output": "7"}'),
    ],
)
def test_verification_info_may_be_a_python_literal(kind: str, info: dict[str, Any], text: str) -> None:
    rows = row(kind, {}) | {"verification_info": str(info)}
    with pytest.raises(ValueError):
        json.loads(rows["verification_info"])
    assert grade(rows, text) is R
    assert grade(rows, "no answer") is U


def test_a_text_that_is_neither_json_nor_a_literal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("{'ground_truth': 1", "{'ground_truth': f()}", "{[]: 1}", "nan"):
        with pytest.raises(
            ValueError, match=r"verification_info is not JSON \(.*\) and not a Python literal"
        ):
            read_genesys(row("verifiable_math", {}) | {"verification_info": text}, "chat")
    monkeypatch.setattr(data_set, "MAX_LITERAL_CHARS", 10)
    with pytest.raises(ValueError, match="with 19 characters too long to be read as a Python literal"):
        read_genesys(row("verifiable_math", {}) | {"verification_info": "{'ground_truth': 1}"}, "chat")


@pytest.mark.parametrize(
    ("truth", "text", "outcome"),
    [
        ("42", "\\boxed{42}", R),
        (42, "\\boxed{42.0}", R),
        (0.5, "\\boxed{1/2}", R),
        (["7", "\\frac{1}{2}"], "\\boxed{0.5}", R),
        (["7", 8], "\\boxed{8}", R),
        (["7", 8], "\\boxed{9}", W),
        ("so \\boxed{12}", "\\boxed{12}", R),
        ("42", "it is 42", U),
    ],
)
def test_gold_answers_of_mathematics(truth: Any, text: str, outcome: Outcome) -> None:
    assert grade(row("verifiable_math", {"ground_truth": truth}), text) is outcome


@pytest.mark.parametrize(
    ("wanted", "text", "outcome"),
    [
        ("7 up", 'So:\n```json\n{"output": "7 up"}\n```', R),
        (7, '{"output": "7"}', R),
        ({"output": 1}, 'first {"output": 2}, then {"output": {"output": 1}}', R),
        ("7", '{"output": "8"}', W),
        ("7", "the output is 7", U),
        ("7", "{" * 100_000, U),
    ],
)
def test_code_output_prediction(wanted: Any, text: str, outcome: Outcome) -> None:
    assert grade(row("code_output_prediction", {"ground_truth": wanted}), text) is outcome


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (prime(inputs=["1"], outputs=[]), "not lists of the same length"),
        (prime(inputs=[], outputs=[]), "any program would pass"),
        (prime(inputs=["1", "2"], outputs=[" \n", None]), "a program that does nothing would pass"),
        (
            prime(fn_name="f", inputs=[[1], [2]], outputs=[None, [None]]),
            "a program that does nothing would pass",
        ),
        (
            row("verifiable_code", {"test_cases": [{"type": "stdin_stdout", "input": "1", "output": ""}]}),
            "a program that does nothing would pass",
        ),
        (prime(fn_name="a b", inputs=[[1]], outputs=[1]), "expected the name of a function"),
        (row("prime_rl_code", {"test_cases": "{"}), "Expecting property name"),
        (row("verifiable_math", {"ground_truth": None}), "expected a text, a number"),
        (row("verifiable_math", {"ground_truth": []}), "empty list"),
        (row("verifiable_math", {"ground_truth": [True]}), "expected a text, a number"),
        (row("verifiable_math", {"ground_truth": "\\boxed{"}), "empty or not closed"),
        (row("verifiable_math", {"ground_truth": "1"}, prompt=""), "prompt is ''"),
        (row("verifiable_math", {}, verification_info=[1]), "expected an object"),
    ],
)
def test_unusable_rows_say_why(rows: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_genesys(rows, "chat")


def test_a_row_without_a_question_names_the_documented_field() -> None:
    rows = row("verifiable_math", {"ground_truth": "1"})
    with pytest.raises(KeyError, match="prompt"):
        read_genesys({name: value for name, value in rows.items() if name != "prompt"}, "chat")
    assert read_genesys(rows | {"prompt": None, "problem": "Why?"}, "chat").prompt == "Why?"


def many(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [
        row("verifiable_math", {"ground_truth": str(number)}, prompt=f"What is {number}?") | fields
        for number in range(count)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    return str(path)


def make(path: str, **options: int | float | str) -> Any:
    return make_task(TaskSpec(name="genesys", options={"path": path, **options}))


def test_few_unusable_rows_are_skipped_and_many_are_an_error(tmp_path: Path) -> None:
    rows = many(100)
    rows[6] = row("llm_judgeable_groundtruth_similarity", {"judging_instructions": ""})
    path = write(tmp_path / "rows.jsonl", rows)
    task = make(path)
    assert task.size("train") + task.size("eval") == 99
    assert task.indices["path"].bad == {
        7: "task_type 'llm_judgeable_groundtruth_similarity' needs a model as judge; use the task 'judge' for "
        "these rows"
    }
    with pytest.raises(
        ValueError, match=r"rows.jsonl, row 7: .* 1 of 100 rows are unusable, .* max_bad_share"
    ):
        make(path, max_bad_share=0.0).problem("train", 0)
    assert make(path, max_bad_share=0.0, skip_rows="7").size("train")
    assert make(path, max_bad_share=0.0, task_types="verifiable_math").indices["path"].num_rows == 99


def test_rows_are_chosen_by_their_solve_rate(tmp_path: Path) -> None:
    rows = [one | {"solve_rate_x": index / 100} for index, one in enumerate(many(100))]
    del rows[50]["solve_rate_x"]
    path = write(tmp_path / "rows.jsonl", rows)
    task = make(path, min_solve_rate=0.125, max_solve_rate=0.5)
    rates = [task.entry("train", seed).row["solve_rate_x"] for seed in range(task.size("train"))]
    assert rates and min(rates) >= 0.125 and max(rates) <= 0.5
    assert task.size("eval") == make(path).size("eval"), "held-out rows are not filtered"
    with pytest.raises(ValueError, match=r"solve_rate_y' must be a column .* it has: solve_rate_x"):
        make(path, max_solve_rate=0.5, solve_rate_field="solve_rate_y").problem("train", 0)
    with pytest.raises(ValueError, match="the smaller one first"):
        make(path, min_solve_rate=0.5, max_solve_rate=0.1)


def test_questions_of_the_test_file_are_not_trained_on_in_other_typesetting(tmp_path: Path) -> None:
    asked = "Compute $\\dfrac{1}{2} + x$."
    variants = ["compute  \\frac{1}{2}+x", "Compute $\\frac{1}{2}\\, + x$?", "Compute $\\frac{1}{2} - x$."]
    rows = [row("verifiable_math", {"ground_truth": "1"}, prompt=one) for one in variants]
    test = write(tmp_path / "test.jsonl", [row("verifiable_math", {"ground_truth": "1"}, prompt=asked)])
    task: Task = make(write(tmp_path / "rows.jsonl", rows), eval_path=test)
    prompts = {task.problem("train", seed).prompt for seed in range(5)}
    assert prompts == {variants[2]}
    assert isinstance(task.problem("eval", 0), Problem)
