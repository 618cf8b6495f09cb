"""`shoal tasks` and `shoal tasks show`."""

import json
import threading
from pathlib import Path

import pytest

from shoal.cli.main import parse, run_command
from shoal.tasks.code_files import ALLOWED
from shoal.tasks.registry import TASKS


def shoal(*words: str) -> int:
    return run_command(parse(words), threading.Event())


def test_tasks_lists_what_is_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.tasks.registry.entry_points", lambda group: [])
    assert shoal("tasks") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(TASKS)]] == list(TASKS)
    assert all(" built in " in line and len(line) > 40 for line in lines[: len(TASKS)])


def test_show_prints_problems_with_a_right_and_a_wrong_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("tasks", "show", "sort", "--option", "length=3") == 0
    out = capsys.readouterr().out
    assert out.count("reward  1 (right)") == 3 and out.count("(wrong)") == 3 and "3. " in out


def test_show_uses_the_files_that_the_command_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOWED, "")
    (tmp_path / "grader.py").write_text("def grade(reply, answer):\n    return 0.25 if reply else 0\n")
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}?", "answer": n}) + "\n" for n in range(9))
    )
    words = ("tasks", "show", "qa", "--option", f"path={tmp_path}/rows.jsonl")
    assert shoal(*words, "--option", f"grader={tmp_path}/grader.py:grade") == 0
    assert capsys.readouterr().out.count("reward  0.25 (wrong)") == 6
    assert shoal("tasks", "show", "nothing") == 2
    assert "unknown task 'nothing'" in capsys.readouterr().err


def test_show_prints_problems_of_a_data_set_for_evaluation_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "prompt": "def double(x):\n",
        "entry_point": "double",
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert shoal("tasks", "show", "humaneval", "--option", f"path={tmp_path}/rows.jsonl") == 0
    out = capsys.readouterr().out
    assert "reward  1 (right)" in out and "(unparseable)" in out


@pytest.mark.parametrize(
    ("name", "needs"), [("gsm8k", "path"), ("judge", "path, judge_path"), ("listed", "path")]
)
def test_a_task_without_the_options_that_it_needs_says_so(
    capsys: pytest.CaptureFixture[str], name: str, needs: str
) -> None:
    assert shoal("tasks", "show", name) == 2
    assert f"task {name!r} needs {needs}; set it in" in capsys.readouterr().err
