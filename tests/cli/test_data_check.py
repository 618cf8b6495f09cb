"""`shoal data check`: unusable rows with their reasons, questions of other data sets, gold answers that their own tests refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.tasks.datasets.overlap import QuestionSet

QUESTION = "Ann has 3 bags of $4$ apples. How many apples has she?"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def code(number: int, wanted: str, solution: str) -> dict[str, Any]:
    cases = [{"type": "stdin_stdout", "input": "", "output": wanted}]
    return {
        "task_type": "verifiable_code",
        "prompt": f"Print a number ({number}).",
        "verification_info": {"language": "python", "test_cases": cases},
        "gold_standard_solution": solution,
    }


def test_rows_without_a_use_are_listed_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [code(number, "7", "print(7)") for number in range(20)]
    rows += [code(20, "8", "print(7)"), {"task_type": "verifiable_math", "prompt": "?"}]
    asked = f"Solve this problem.\nAnn has 3 bags of 4  APPLES. How many apples has she? {'Answer in a box.'}"
    info = {"ground_truth": 12}
    rows.append({"task_type": "verifiable_math", "prompt": asked, "verification_info": info})
    path, test = write(tmp_path / "rows.jsonl", rows), tmp_path / "test.jsonl"
    held = write(tmp_path / "held.jsonl", [code(99, "7", "print(7)")])
    write(test, [{"question": QUESTION, "answer": "#### 12"}])
    out = tmp_path / "good.jsonl"
    command = [
        "data",
        "check",
        "--task",
        "genesys",
        "--option",
        f"path={path}",
        "--option",
        f"eval_path={held}",
    ]
    command += ["--against", f"gsm8k={test}", "--gold", "--out", str(out)]
    assert main(command) == 1, "more unusable rows than max_bad_share"
    printed = capsys.readouterr().out
    assert "23 rows, 1 unusable" in printed and "20 to train on" in printed
    assert "row 21: its own answer is wrong: a test may be wrong or never end" in printed
    assert "row 22: no field 'verification_info'" in printed
    assert "row 23: asked in a data set of --against" in printed
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows[:20]
    left_out = (tmp_path / "good.jsonl.unusable.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in left_out] == [21, 22, 23]
    assert main(["data", "check", "--task", "genesys", "--option", f"path={out}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["unusable"], report["task_types"]) == (20, 0, {"verifiable_code": 20})


def test_gold_answers_of_held_out_rows_are_graded_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [code(number, "8", "print(7)") for number in range(12)]
    path, out = write(tmp_path / "rows.jsonl", rows), tmp_path / "good.jsonl"
    assert main(["data", "check", "--task", "genesys", "--option", f"path={path}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eval"] > 0
    ask = ["data", "check", "--task", "genesys", "--option", f"path={path}", "--gold", "--json"]
    assert main([*ask, "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["train"], report["eval"]) == (0, 0) and len(report["left_out"]) == 12
    assert out.read_text() == ""


def test_a_task_without_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "--task", "add"]) == 2
    assert "does not read a data set" in capsys.readouterr().err


def test_questions_are_found_in_other_words() -> None:
    questions = QuestionSet([QUESTION, "What is $\\dfrac{1}{2}$?"])
    assert questions.is_asked_in("Please: ann has 3 bags of 4 apples.  how many apples has she, then?")
    assert questions.is_asked_in("what is \\frac{1}{2}")
    assert not questions.is_asked_in("Tell me what is \\frac{1}{3}")
    assert not questions.is_asked_in("Ann has 3 bags of 5 apples. How many apples has she?")
    assert not questions.is_asked_in("")
