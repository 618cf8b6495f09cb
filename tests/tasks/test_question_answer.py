"""The task `qa`: own questions and answers, any column names, several graders; and code in a file of one's own."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from shoal.tasks import Finite, Outcome, Split, make_task
from shoal.tasks.code_files import ALLOWED, allow_code, pin_code
from shoal.tasks.datasets.question_answer import choice_in
from shoal.tasks.registry import pin_task
from shoal.wire.run_spec import TaskSpec


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def outcomes(options: dict[str, Any], *replies: str) -> str:
    """Returns the first letters of the outcomes of replies to the only problem."""
    task = make_task(TaskSpec(name="qa", options=options))
    problem = task.problem("eval", 0)
    return "".join(task.reward(problem, reply, 1).outcome.value[0] for reply in (problem.answer, *replies))


@pytest.mark.parametrize(
    ("grader", "answer", "replies", "expected"),
    [
        ("exact", "Paris", ["Paris ", "paris", "It is Paris", ""], "rrwwu"),
        ("exact", ["one", "1"], ["1", "2"], "rrw"),
        ("number", "1,200", ["so #### 1200", "\\boxed{1200.0}", "1200 or 7", "none"], "rrrwu"),
        ("number", 72, ["72.0", "73"], "rrw"),
        ("number", 72.0, ["72", "<think>72</think> 7"], "rrw"),
        ("math", "\\frac{1}{2}", ["\\boxed{0.5}", "\\boxed{2}", "0.5"], "rrwu"),
        ("choice", "(b)", ["The answer is B.", "b", "#### B", "I think it is (C)", "no idea"], "rrrrwu"),
    ],
)
def test_graders(tmp_path: Path, grader: str, answer: Any, replies: list[str], expected: str) -> None:
    path = write_rows(tmp_path, [{"q": "Which?", "a": answer}])
    options = {"path": path, "eval_path": path, "question": "q", "answer": "a", "grader": grader}
    assert outcomes(options, *replies) == expected


def test_a_pattern_that_takes_exponential_time_finds_nothing(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"question": "Which?", "answer": "aa"}])
    options = {"path": path, "eval_path": path, "grader": "regex", "pattern": "It is (a+)!"}
    assert outcomes(options, "Hm. It is b! It is aa!", "It is a!", "aa") == "rrwu"
    options["pattern"] = "((a+)+)!"
    assert outcomes(options, "aa!", "a" * 40) == "uru", "a right reply cannot be made of this pattern"


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("A", "A"),
        ("A cat is (D)", "D"),
        ("I would say C", "C"),
        ("answer: e", "E"),
        ("A dog", None),
        ("", None),
    ],
)
def test_choice_of_a_reply(reply: str, letter: str | None) -> None:
    assert choice_in(reply) == letter


def test_csv_and_parquet_are_read_with_any_column_names(tmp_path: Path) -> None:
    csv, parquet = tmp_path / "rows.csv", tmp_path / "rows.parquet"
    csv.write_text('\ufeffprompt,ground_truth\n"Say ""a, b""\ntwice",a b\nSay c,c\n', encoding="utf-8")
    pyarrow.parquet.write_table(pa.table({"prompt": ["Say c"], "ground_truth": ["c"]}), parquet)
    options = {"question": "prompt", "answer": "ground_truth", "template": "{question}!", "style": "bare"}
    task = make_task(TaskSpec(name="qa", options={"path": str(csv), "eval_path": str(parquet), **options}))
    assert isinstance(task, Finite) and (task.size("train"), task.size("eval")) == (1, 1)
    assert (
        task.problem("train", 0).prompt == 'Say "a, b"\ntwice!' and task.problem("train", 0).answer == "a b"
    )
    assert not task.chat
    csv.write_text("prompt,ground_truth\none,2,3\n")
    with pytest.raises(ValueError, match=r"rows.csv, row 2: 2 columns expected"):
        make_task(TaskSpec(name="qa", options={"path": str(csv)})).problem("train", 0)


@pytest.mark.parametrize(
    "text", ["\ufeff{json}", "\ufeff{csv}", "{tabs}", "{semicolons}", "{windows}", "\ufeff[{array}]"]
)
def test_files_of_other_programs_are_read(tmp_path: Path, text: str) -> None:
    rows = [(f"{n}, and 1?", str(n + 1)) for n in range(30)]
    lines = [json.dumps({"question": asked, "answer": right}) for asked, right in rows]
    texts = {
        "json": "\n".join(lines),
        "array": ",".join(lines),
        "windows": "\r\n".join(lines),
        "csv": "question,answer\r\n" + "".join(f'"{asked}",{right}\r\n' for asked, right in rows),
        "tabs": "question\tanswer\n" + "".join(f"{asked}\t{right}\n" for asked, right in rows),
        "semicolons": "question;answer\n" + "".join(f"{asked};{right}\n" for asked, right in rows),
    }
    path = tmp_path / "rows.data"
    path.write_text(text.format(**texts), encoding="utf-8", newline="")
    task = make_task(TaskSpec(name="qa", options={"path": str(path), "template": "{question}"}))
    assert isinstance(task, Finite) and task.size("train") + task.size("eval") == 30
    splits: tuple[Split, ...] = ("train", "eval")
    found = {task.problem(split, n).prompt for split in splits for n in range(task.size(split))}
    assert found == {asked for asked, _ in rows}


def test_fields_of_objects_are_columns(tmp_path: Path) -> None:
    rows = [{"id": n, "qa": {"q": f"{n}?", "right": n}} for n in range(20)]
    path = write_rows(tmp_path, rows)
    options: dict[str, Any] = {"path": path, "question": "qa.q", "answer": "qa.right"}
    problem = make_task(TaskSpec(name="qa", options=options)).problem("train", 0)
    assert problem.prompt.startswith(f"{problem.answer}?")
    with pytest.raises(
        ValueError, match=r'row 1: no column .question.; .* question = "..." of id, qa.q, qa.right'
    ):
        make_task(TaskSpec(name="qa", options={"path": path})).problem("train", 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            json.dumps({"data": [{"question": "1?", "answer": 1}]}).encode(),
            "row 1: no column 'question'; the rows are the list 'data': write that list alone into a file",
        ),
        (
            json.dumps({"data": [{"question": "1?", "answer": 1}]}, indent=1).encode(),
            "its first JSON object takes several lines",
        ),
        ('{"question": "1?", "answer": 1}'.encode("utf-16"), "is in UTF-16; save it as UTF-8: iconv"),
        (
            b"".join(b'{"question": "%d?"%s}\n' % (n, b', "answer": 1' * (n % 2)) for n in range(10)),
            "5 of 10 rows are unusable, more than max_bad_share = 0.02 (all for this reason). Correct the file, raise",
        ),
        (
            b"".join(b'{"question": "%d?", "answer": {"is": %d}}\n' % (n, n) for n in range(10)),
            "row 1: the answer in 'answer' is {'is': 0}, expected a text or a number. No row can be used",
        ),
    ],
)
def test_unusable_files_are_explained(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(message)):
        make_task(TaskSpec(name="qa", options={"path": str(path)})).problem("train", 0)


def test_the_held_out_share_is_seeded(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"question": f"{n}?", "answer": n} for n in range(400)])
    tasks = [
        make_task(TaskSpec(name="qa", options={"path": path, "eval_share": 0.1, "eval_seed": seed}))
        for seed in (0, 1)
    ]
    held = []
    for task in tasks:
        assert isinstance(task, Finite) and 20 <= task.size("eval") <= 60
        held.append({task.problem("eval", n).answer for n in range(task.size("eval"))})
        trained = {task.problem("train", n).answer for n in range(task.size("train"))}
        assert not held[-1] & trained and len(held[-1] | trained) == 400
    assert held[0] != held[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grader": "fuzzy"}, "grader='fuzzy' is unknown; known: exact, number"),
        ({"grader": "regex"}, "needs `pattern`"),
        ({"grader": "regex", "pattern": "("}, "correct the regular expression"),
        ({"template": "Go"}, "must contain {question}"),
        ({"eval_share": 1}, "eval_share=1 must be above 0 and below 1"),
        (
            {"question": "prompt"},
            "row 1: no column 'prompt'; name the column with the question: question = ",
        ),
        ({"grader": "number"}, "row 1: the answer 'x' is not a number"),
        ({"grader": "choice", "answer": "long"}, "row 1: the answer 'word' is not a letter"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write_rows(tmp_path, [{"question": "Which?", "answer": "x", "long": "word"}])
    with pytest.raises(ValueError, match=message):
        make_task(TaskSpec(name="qa", options={"path": path, **options})).problem("train", 0)


# -- code in a file -----------------------------------------------------------------------------------------

GRADER = """
from os import system
def grade(reply, answer, question):
    return None if not reply else 2 if reply == "two" else 0.5 if question in reply else reply == answer
"""
TASK = """
from dataclasses import dataclass
from shoal.tasks import Outcome, Problem, Reward
@dataclass(frozen=True)
class Echo:
    word: str = "hi"
    chat: bool = False
    def problem(self, split, seed):
        return Problem(self.word, self.word)
    def reward(self, problem, text, num_tokens):
        return Reward(float(text == problem.answer), Outcome.RIGHT)
"""


@pytest.fixture(autouse=True)
def no_files_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED, "")


def test_a_python_function_grades(tmp_path: Path) -> None:
    path, file = write_rows(tmp_path, [{"question": "why", "answer": "x"}]), tmp_path / "own_grader.py"
    file.write_text(GRADER)
    spec = TaskSpec(name="qa", options={"path": path, "eval_path": path, "grader": f"{file}:grade"})
    with pytest.raises(
        ValueError, match=r"own_grader.py is not one that this machine may execute.*SHOAL_TASK_FILES="
    ):
        make_task(spec)
    allow_code(spec)
    task = make_task(spec)
    problem = task.problem("eval", 0)
    rewards = [task.reward(problem, reply, 1) for reply in ("x", "why?", "no", "")]
    assert [reward.value for reward in rewards] == [1.0, 0.5, 0.0, 0.0]
    assert rewards[-1].outcome is Outcome.UNPARSEABLE
    with pytest.raises(ValueError, match="returned 2; a grader returns a number from 0 to 1"):
        task.reward(problem, "two", 1)
    with pytest.raises(ValueError, match="defines no class or function 'system'"):
        make_task(spec.model_copy(update={"options": spec.options | {"grader": f"{file}:system"}}))


def test_a_grader_may_return_a_number_of_numpy(tmp_path: Path) -> None:
    path, file = write_rows(tmp_path, [{"question": "why", "answer": "x"}]), tmp_path / "numpy_grader.py"
    file.write_text(
        "import numpy\nGIVEN = {'a': numpy.float32(0.25), 'b': numpy.bool_(True), 'c': numpy.array(0.5), 'd': numpy.ones(2)}\n"
        "def grade(reply, answer):\n    return GIVEN[reply]\n"
    )
    spec = TaskSpec(name="qa", options={"path": path, "eval_path": path, "grader": f"{file}:grade"})
    allow_code(spec)
    task = make_task(spec)
    problem = task.problem("eval", 0)
    assert [task.reward(problem, reply, 1).value for reply in "abc"] == [0.25, 1.0, 0.5]
    with pytest.raises(ValueError, match=r"returned array\(\[1., 1.\]\); a grader returns a number"):
        task.reward(problem, "d", 1)


def test_the_terms_have_the_digest_of_a_task_file_and_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, digest = tmp_path / "echo_task.py", hashlib.sha256(TASK.encode()).hexdigest()
    file.write_text(TASK)
    spec = TaskSpec(name=f"{file}:Echo", options={"word": "ho"})
    allow_code(spec)
    public = pin_task(spec)
    assert public == TaskSpec(name="echo_task.py:Echo", options={"word": "ho", "code_sha256": digest})
    assert pin_code(public) == public, "pinned already"
    assert make_task(public).problem("train", 0).prompt == "ho"
    monkeypatch.setenv(ALLOWED, "")
    with pytest.raises(ValueError, match=r"echo_task.py is not one that this machine may execute"):
        make_task(public.model_copy(update={"options": public.options | {"word": "other"}}))


def test_another_file_of_that_name_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "echo_task.py"
    file.write_text(TASK + "\nraise SystemExit('executed')\n")
    allow_code(TaskSpec(name=f"{file}:Echo"))
    with pytest.raises(
        ValueError, match=r"echo_task.py has SHA-256 .*, the run's terms say 0000.*; get the run's"
    ):
        make_task(TaskSpec(name="echo_task.py:Echo", options={"code_sha256": "0" * 64}))


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("    chat: bool = False\n", "", "Echo has no `chat`; add chat = True if prompts are a user's turns"),
        ("def reward", "def grade", "Echo has no `reward`; add a method reward"),
    ],
)
def test_a_task_without_a_part_is_explained(tmp_path: Path, line: str, instead: str, message: str) -> None:
    file = tmp_path / f"part{len(instead)}.py"
    file.write_text(TASK.replace(line, instead))
    spec = TaskSpec(name=f"{file}:Echo")
    allow_code(spec)
    with pytest.raises(ValueError, match=message):
        make_task(spec)


def test_an_error_in_a_task_file_names_its_line(tmp_path: Path) -> None:
    for source, message in (("x = 1\ny = x / 0\n", "line 2: ZeroDivisionError"), ("def f(:\n", "line 1: ")):
        file = tmp_path / f"bad{len(source)}.py"
        file.write_text(source)
        spec = TaskSpec(name=f"{file}:Echo")
        allow_code(spec)
        with pytest.raises(ValueError, match=f"{file.name}, {message}"):
            make_task(spec)


def test_workers_load_no_task() -> None:
    """A lease has prompts. The name of a task in it must never make a worker execute a file or a package."""
    rollout = Path(__file__).parents[2] / "src" / "shoal" / "rollout"
    modules = [path for path in rollout.rglob("*.py") if "adversary" not in path.parts]
    assert len(modules) > 10
    assert [path.name for path in modules if "shoal.tasks" in path.read_text()] == []


def test_a_question_may_be_a_conversation(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "Capital of France?"},
    ]
    path = write_rows(tmp_path, [{"prompt": turns, "answer": "Paris"}])
    options: dict[str, Any] = {"path": path, "eval_path": path, "question": "prompt"}
    options["template"] = "{question} One word."
    problem = make_task(TaskSpec(name="qa", options=options)).problem("eval", 0)
    assert problem.messages == (("system", "Be terse."),)
    assert problem.prompt == "Capital of France? One word."
    answered = [*turns, {"role": "assistant", "content": "Paris"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "?"}]}]
    tool = [{"role": "tool", "content": "7"}, *turns]
    for number, bad in enumerate(([], turns[:1], answered, [{"user": "?"}], 7, parts, tool)):
        (folder := tmp_path / str(number)).mkdir()
        options["path"] = options["eval_path"] = write_rows(folder, [{"prompt": bad, "answer": "Paris"}])
        with pytest.raises(ValueError, match="expected a text, or a list of messages"):
            make_task(TaskSpec(name="qa", options=options)).problem("eval", 0)


def test_conversations_that_end_alike_are_different_questions(tmp_path: Path) -> None:
    end = {"role": "user", "content": "Go on."}
    rows = [{"question": [{"role": "user", "content": f"Tell {n}"}, end], "answer": n} for n in range(60)]
    path = write_rows(tmp_path, rows)
    task = make_task(TaskSpec(name="qa", options={"path": path}))
    assert isinstance(task, Finite)
    assert task.size("eval") > 0 and task.size("eval") + task.size("train") == 60
    prompt = task.problem("train", 0).prompt
    assert prompt == "Go on.\nReply with the answer only." == task.problem("eval", 0).prompt
    longest = len(f"Tell 9\n\n{prompt}")
    short = make_task(TaskSpec(name="qa", options={"path": path, "max_chars": longest}))
    assert isinstance(short, Finite) and short.size("eval") + short.size("train") == 10, "all turns count"


def test_a_file_of_other_columns_says_how_to_name_them(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"Frage": f"{n}?", "Antwort": n} for n in range(50)])
    with pytest.raises(ValueError, match=r'question = "..." of Frage, Antwort') as raised:
        make_task(TaskSpec(name="qa", options={"path": path})).problem("train", 0)
    assert "skip_rows" not in str(raised.value), "it would skip every row"
