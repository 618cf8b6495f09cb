"""Data sets from files in their authors' layouts: prompts, grades, and errors that name the row."""

import codecs
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.tasks import Finite, Outcome, Split, Task, make_task
from shoal.wire.run_spec import TaskSpec

R, W, U = Outcome.RIGHT, Outcome.WRONG, Outcome.UNPARSEABLE

GSM8K: dict[str, Any] = {
    "question": "Ann has 3 bags of 4 apples. How many apples has she?",
    "answer": "3*4 = <<3*4=12>>12\n#### 12",
}
SVAMP: dict[str, Any] = {
    "ID": "x-1",
    "Body": "A pen costs 7 dollars",
    "Question": "What do 3 pens cost?",
    "Equation": "( 7.0 * 3.0 )",
    "Answer": 21.0,
}
MATH: dict[str, Any] = {"problem": "What is $1/2 + 1/3$?", "answer": "\\frac{5}{6}", "difficulty": 1.0}
MBPP: dict[str, Any] = {
    "task_id": 1,
    "prompt": "Write a function that doubles a number.",
    "code": "def double(x):\n  return 2 * x",
    "test_imports": ["import math"],
    "test_list": ["assert double(2) == 4", "assert math.isclose(double(0.5), 1)"],
}
HUMANEVAL: dict[str, Any] = {
    "task_id": "T/0",
    "prompt": 'import math\n\ndef half(x: int) -> int:\n    return x // 2\n\n\ndef twice_half(x: int) -> int:\n    """ Twice the half. """\n',
    "entry_point": "twice_half",
    "canonical_solution": "    return 2 * half(x)\n",
    "test": "def check(candidate):\n    assert candidate(5) == 4\n    assert candidate(4) == 4\n    assert half(9) == 4\n",
}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def rows_like(row: dict[str, Any], field: str, count: int) -> list[dict[str, Any]]:
    return [row | {field: f"{row[field]} ({number})"} for number in range(count)]


def make(name: str, **options: str) -> Task:
    return make_task(TaskSpec(name=name, options=dict(options)))


@pytest.mark.parametrize(
    ("name", "row", "asks", "graded"),
    [
        (
            "gsm8k",
            GSM8K,
            "How many apples has she?\nThink step by step, then give the answer as a number after ####.",
            [("3*4=12\n#### 12", R), ("#### 13", W), ("dunno", U)],
        ),
        (
            "svamp",
            SVAMP,
            "A pen costs 7 dollars. What do 3 pens cost?\nThink step by step",
            [("7*3 = 21", R), ("\\boxed{21}", R), ("20", W), ("many", U)],
        ),
        (
            "math",
            MATH,
            "put the final answer within \\boxed{}.",
            [("\\boxed{5/6}", R), ("\\boxed{\\frac{10}{12}}", R), ("\\boxed{5}", W), ("5/6", U)],
        ),
        (
            "mbpp",
            MBPP,
            "It must pass:\nassert double(2) == 4\nassert math.isclose",
            [
                ("```python\ndef double(x): return x + x\n```", R),
                ("<think>```python\nno\n```</think> so ```py\ndef double(x): return x + x\n```", R),
                ("```python\ndef double(x): return 4\n```", W),
                (
                    "```python\ndef double(x): return x * 2\n```\nor\n```python\ndef double(x): return x\n```",
                    W,
                ),
                ("```python\nimport os; os._exit(0)\n```", W),
                ("def double(x): return x + x", U),
                ("<think>```python\ndef double(x): return x + x\n```</think>", U),
            ],
        ),
        (
            "humaneval",
            HUMANEVAL,
            "Complete this function.\n```python\nimport math",
            [
                ("```python\ndef twice_half(x):\n    return half(x) + half(x)\n```", R),
                ("```python\ndef twice_half(x):\n    return x\n```", W),
                ("```python\ndef other(x):\n    return x\n```", W),
                ("", U),
            ],
        ),
    ],
)
def test_prompts_and_grades(
    tmp_path: Path, name: str, row: dict[str, Any], asks: str, graded: list[tuple[str, Outcome]]
) -> None:
    options = {"path": write(tmp_path / "rows.jsonl", [row])}
    if name != "humaneval":
        options["eval_path"] = write(tmp_path / "test.jsonl", [row])
    task = make(name, **options)
    assert isinstance(task, Finite) and task.size("eval") == 1 and task.chat
    problem = task.problem("eval", 7)
    assert asks in problem.prompt
    assert task.reward(problem, problem.answer, 1).outcome is R, "its own answer"
    for text, outcome in graded:
        reward = task.reward(problem, text, 1)
        assert (reward.outcome, reward.value) == (outcome, float(outcome is R)), text


def test_json_json_lines_and_parquet_give_the_same_problems(tmp_path: Path) -> None:
    rows = rows_like(GSM8K, "question", 20)
    lines, array, parquet = tmp_path / "a.jsonl", tmp_path / "a.json", tmp_path / "a.parquet"
    write(lines, rows)
    array.write_text(json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    marked = [path.with_name(f"marked-{path.name}") for path in (lines, array)]
    for path, source in zip(marked, (lines, array), strict=True):
        path.write_bytes(codecs.BOM_UTF8 + source.read_bytes())  # as some editors and shells write UTF-8
    found = [
        [make("gsm8k", path=str(path)).problem("train", n) for n in range(15)]
        for path in (lines, array, parquet, *marked)
    ]
    assert all(one == found[0] for one in found)


def test_rows_are_held_out_by_hash_or_by_file(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", rows_like(GSM8K, "question", 100))
    task = make("gsm8k", path=path)
    assert isinstance(task, Finite)
    sizes = task.size("train"), task.size("eval")
    assert sum(sizes) == 100 and 5 <= sizes[1] <= 40
    splits: tuple[Split, Split] = ("train", "eval")
    asked = {
        split: {task.problem(split, n).prompt for n in range(size)}
        for split, size in zip(splits, sizes, strict=True)
    }
    assert not asked["train"] & asked["eval"] and len(asked["train"]) == sizes[0]
    # Two questions of the test file are also in the training file: they are not trained on.
    test = write(
        tmp_path / "test.jsonl", rows_like(GSM8K, "question", 2) + rows_like(SVAMP_AS_GSM8K, "question", 3)
    )
    split = make("gsm8k", path=path, eval_path=test)
    assert isinstance(split, Finite) and (split.size("train"), split.size("eval")) == (98, 5)


SVAMP_AS_GSM8K = {"question": "What do 3 pens cost?", "answer": "#### 21"}


def test_long_prompts_may_be_left_out(tmp_path: Path) -> None:
    rows = [GSM8K, GSM8K | {"question": "Why? " * 100}]
    path, test = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", [SVAMP_AS_GSM8K])
    for limit, left in ((0, 2), (300, 1)):
        task = make_task(
            TaskSpec(name="gsm8k", options={"path": path, "eval_path": test, "max_chars": limit})
        )
        assert isinstance(task, Finite) and task.size("train") == left


def test_styles_bare_and_direct(tmp_path: Path) -> None:
    task = make(
        "gsm8k",
        path=write(tmp_path / "a.jsonl", [GSM8K] * 3),
        eval_path=str(tmp_path / "a.jsonl"),
        style="bare",
    )
    assert not task.chat
    direct = make(
        "gsm8k", path=str(tmp_path / "a.jsonl"), eval_path=str(tmp_path / "a.jsonl"), style="direct"
    )
    assert (
        direct.chat and direct.problem("eval", 0).prompt == f"{GSM8K['question']} Reply with the number only."
    )
    assert task.problem("eval", 0).prompt == f"Question: {GSM8K['question']}\nAnswer:"


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"question": "?", "answer": "12"}, "no ####"),
        ("gsm8k", {"question": "?", "answer": "#### twelve"}, "'twelve' is not a number"),
        ("gsm8k", {"problem": "?", "answer": "#### 1"}, "no field 'question'"),
        ("svamp", SVAMP | {"Answer": "x"}, "could not convert"),
        ("math", MATH | {"answer": ""}, "expected a string"),
        ("math", MATH | {"answer": None}, "expected a string"),
        ("math", MATH | {"answer": "\\left( \\right."}, "math-verify cannot parse"),
        ("mbpp", MBPP | {"test_list": []}, "any program would pass"),
        ("mbpp", MBPP | {"test_list": [" "]}, "any program would pass"),
        ("mbpp", MBPP | {"test_list": "assert double(2) == 4"}, "expected a list of tests"),
        ("mbpp", MBPP | {"prompt": None}, "prompt is None, expected a text"),
        ("gsm8k", GSM8K | {"question": " "}, "question is ' ', expected a text"),
        ("gsm8k", GSM8K | {"question": "half a pair \ud835"}, "surrogates not allowed"),
        ("math", MATH | {"problem": ""}, "problem is '', expected a text"),
        ("humaneval", HUMANEVAL | {"entry_point": "nothing"}, "substring not found"),
        ("humaneval", HUMANEVAL | {"test": None}, "None is not a string"),
    ],
)
def test_a_bad_row_is_an_error_that_names_it(
    tmp_path: Path, name: str, row: dict[str, Any], message: str
) -> None:
    good = {"gsm8k": GSM8K, "svamp": SVAMP, "math": MATH, "mbpp": MBPP, "humaneval": HUMANEVAL}[name]
    path = write(tmp_path / "rows.jsonl", [good, good, row])
    task = make(name, path=path)
    with pytest.raises(ValueError) as caught:
        task.problem("eval", 0)
    text = str(caught.value)
    assert f"{path}, row 3: " in text and message in text and 'skip_rows = "3"' in text
    if name != "humaneval":
        assert make(name, path=path, skip_rows="3", eval_path=write(tmp_path / "t.jsonl", [good])).problem(
            "eval", 0
        )


def test_unusable_files_and_options(tmp_path: Path) -> None:
    for content, message in (
        ("{", "row 1: not JSON"),
        ("[1]", "row 1: int, expected an object"),
        ("[", "not JSON"),
    ):
        path = tmp_path / f"{len(content)}{content[0] == '['}.json"
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            make("gsm8k", path=str(path)).problem("train", 0)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz is compressed; unpack it with gunzip"):
        make("gsm8k", path=str(tmp_path / "rows.jsonl.gz")).problem("train", 0)
    with pytest.raises(ValueError, match="no data file at nowhere"):
        make("gsm8k", path="nowhere").problem("train", 0)
    with pytest.raises(ValueError, match=r"\. is a folder; give a data file, such as train\.jsonl"):
        make("gsm8k", path=".").problem("train", 0)
    with pytest.raises(ValueError, match=r"task 'gsm8k' has no option 'pth'; did you mean path\?"):
        make("gsm8k", pth="rows.jsonl")
    with pytest.raises(ValueError, match=r"task 'gsm8k' needs path; set it in .*--option path=\.\.\."):
        make("gsm8k")
    with pytest.raises(ValueError, match="too few rows to hold any out"):
        make("gsm8k", path=write(tmp_path / "few.jsonl", [GSM8K])).problem("eval", 0)
    with pytest.raises(ValueError, match="evaluation only"):
        make("humaneval", path=write(tmp_path / "h.jsonl", [HUMANEVAL])).problem("train", 0)
    with pytest.raises(ValueError, match="must be row numbers"):
        make("gsm8k", path="x", skip_rows="3-4")


GENESYS: list[dict[str, Any]] = [
    {
        "problem_id": "m1",
        "task_type": "verifiable_math",
        "prompt": "What is 1/2 + 1/3?",
        "verification_info": json.dumps({"ground_truth": "\\frac{5}{6}"}),
    },
    {
        "problem_id": "c1",
        "task_type": "verifiable_code",
        "prompt": "Read two numbers, print their sum.",
        "verification_info": json.dumps(
            {
                "language": "python",
                "test_cases": [
                    {"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"},
                    {"type": "stdin_stdout", "input": ["4 5"], "output": ["9"]},
                ],
            }
        ),
        "gold_standard_solution": "print(sum(map(int, input().split())))",
    },
    {
        "problem_id": "c2",
        "task_type": "verifiable_code",
        "prompt": "Write pair(a, b).",
        "verification_info": {
            "test_cases": [
                {"type": "function_call", "fn_name": "pair", "input": [1, "x"], "output": [1, "x"]}
            ]
        },
        "gold_standard_solution": "```python\ndef pair(a, b): return a, b\n```",
    },
]


def test_genesys_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", GENESYS)
    task = make("genesys", path=path, eval_path=path)
    math, script, call = (task.problem("eval", number) for number in range(3))
    for problem in (math, script, call):
        assert task.reward(problem, problem.answer, 1).outcome is R
    pairs = [
        (math, "\\boxed{5/6}", R),
        (math, "\\boxed{6/5}", W),
        (math, "5/6", U),
        (script, "```python\na, b = input().split()\nprint(int(a) + int(b))\n```", R),
        (script, "```python\nprint(3)\n```", W),
        (script, "```python\nprint(3)\nraise SystemExit(1)\n```", W),
        (script, "print(3)", U),
        (call, "```python\ndef pair(a, b): return [a, b]\n```", R),
        (call, "```python\ndef pair(a, b): return [b, a]\n```", W),
    ]
    for problem, text, outcome in pairs:
        assert task.reward(problem, text, 1).outcome is outcome, text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task_type": "llm_judgeable_groundtruth_similarity"}, "needs a model as judge"),
        ({"verification_info": "{}"}, "no field 'ground_truth'"),
        ({"verification_info": "no"}, "Expecting value"),
        ({"task_type": "swe"}, "cannot be verified"),
        ({"verification_info": json.dumps({"ground_truth": ""})}, "expected a text"),
        ({"verification_info": json.dumps({"ground_truth": "\\left( \\right."})}, "math-verify cannot parse"),
        ({"task_type": "verifiable_code", "verification_info": {"test_cases": []}}, "any program would pass"),
        (
            {"task_type": "verifiable_code", "verification_info": {"language": "rust", "test_cases": [1]}},
            "cannot be run",
        ),
    ],
)
def test_unusable_genesys_rows_are_errors(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "rows.jsonl", [GENESYS[1], GENESYS[0] | change])
    with pytest.raises(ValueError, match=message) as caught:
        make("genesys", path=path).problem("train", 0)
    assert f"{path}, row 2: " in str(caught.value)
