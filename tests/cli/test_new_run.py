"""`shoal init`: guesses from a data file, answers at a terminal, and a written file that is valid."""

import argparse
import csv
import io
import json
import re
import sys
from pathlib import Path

import pytest
from test_contributor import shoal

from shoal.cli.run.new_run import Asker, guess_grader, make_plan
from shoal.cli.run.runfile import load_run_file


@pytest.mark.parametrize(
    ("answers", "grader"),
    [
        (["1", "-2.5", "1,000"], "number"),
        (["A", "(b)", "C."], "choice"),
        (["\\frac{1}{2}", "2"], "math"),
        (["Paris", "4"], "exact"),
    ],
)
def test_the_grader_is_guessed_from_the_answers(answers: list[str], grader: str) -> None:
    assert guess_grader(answers) == grader


SUMS = ("--model", "tiny", "--data", "sums.jsonl", "--device", "cpu")
"""Options for the file of the fixture `questions`."""


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"id": n, "prompt": f"{n}+{n}=", "ground_truth": str(2 * n)} for n in range(60)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_options_alone_write_a_file_that_runs(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("init", "sums.toml", *SUMS, "--steps", "30", "--yes")
    assert shoal(*words) == 0
    said = capsys.readouterr().out
    assert "sums.toml: written and tried" in said and "shoal run sums.toml" in said
    text = Path("sums.toml").read_text()
    assert text.count("#") > 8
    file = load_run_file(Path("sums.toml"))
    assert (file.run.name, file.run.model, file.run.last_version) == ("sums", "tiny", 30)
    options = file.task[0].options
    assert (options["question"], options["answer"], options["grader"]) == ("prompt", "ground_truth", "number")
    assert file.trainer.supervised_steps == 15  # one for four rows: more would learn 60 answers by heart
    assert shoal("run", "sums.toml", "--dry-run") == 0
    assert re.search(r"problems +48 to train on, 12 held out\n", capsys.readouterr().out)
    assert shoal(*words) == 2
    assert "exists already" in capsys.readouterr().err
    assert shoal(*words, "--force") == 0


def test_other_columns_and_formats(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open("capitals.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["land", "capital", "river"])
        rows.writerows([[f"land {n}?", f"city {n}", "Seine"] for n in range(60)])
    words = ("init", "capitals.toml", "--model", "tiny", "--data", "capitals.csv", "--device", "cpu")
    assert shoal(*words) == 2
    assert (
        "Column with the question (land, capital, river): nothing was given; use --question"
        in capsys.readouterr().err
    )
    assert shoal(*words, "--question", "land", "--answer", "capital") == 0
    assert load_run_file(Path("capitals.toml")).task[0].options["grader"] == "exact"
    assert shoal(*words, "--question", "land", "--answer", "town", "--force") == 2
    assert "has no column 'town'" in capsys.readouterr().err


def test_a_regular_expression_needs_a_pattern(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("init", "r.toml", *SUMS, "--grader", "regex")
    assert shoal(*words) == 2
    assert "nothing was given; use --pattern" in capsys.readouterr().err and not Path("r.toml").exists()
    assert shoal(*words, "--pattern", r"(\d+)") == 0
    assert load_run_file(Path("r.toml")).task[0].options["pattern"] == r"(\d+)"


def test_two_columns_are_a_question_and_an_answer(questions: Path) -> None:
    Path("pairs.csv").write_text("Frage,Antwort\n" + "".join(f"{n}+1=,{n + 1}\n" for n in range(60)))
    assert shoal("init", "pairs.toml", "--model", "tiny", "--data", "pairs.csv", "--device", "cpu") == 0
    options = load_run_file(Path("pairs.toml")).task[0].options
    assert (options["question"], options["answer"], options["grader"]) == ("Frage", "Antwort", "number")


def test_columns_that_are_objects(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": n, "qa": {"question": f"{n}+1=", "answer": n + 1}} for n in range(60)]
    Path("nested.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("whole.json").write_text(json.dumps({"data": [row["qa"] for row in rows]}))
    assert shoal("init", "a.toml", "--model", "tiny", "--data", "nested.jsonl", "--device", "cpu") == 0
    assert "questions         column 'qa.question'; answers: column 'qa.answer'" in capsys.readouterr().out
    assert shoal("init", "b.toml", "--model", "tiny", "--data", "whole.json", "--device", "cpu") == 2
    assert "whole.json is one JSON object; its rows are the list 'data'" in capsys.readouterr().err


def test_a_file_that_cannot_run_is_mentioned(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("init", "a.toml", "--model", "no-such", "--data", "sums.jsonl", "--device", "cpu") == 2
    said = capsys.readouterr().err
    assert "a.toml: written, but it cannot run yet" in said and "run.model = 'no-such'" in said


def test_a_dry_run_counts_the_rows(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("some.jsonl").write_text(questions.read_text() + '{"prompt": "1+1="}\n')
    assert shoal("init", "a.toml", "--model", "tiny", "--data", "some.jsonl", "--device", "cpu") == 0
    assert shoal("run", "a.toml", "--dry-run") == 0
    found = re.search(
        r"problems +48 to train on, 12 held out; 1 of 61 rows unusable", capsys.readouterr().out
    )
    assert found


def test_a_task_by_name(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("init", "sorting.toml", "--model", "tiny", "--data", "sort", "--device", "cpu") == 0
    assert load_run_file(Path("sorting.toml")).task[0].name == "sort"
    assert load_run_file(Path("sorting.toml")).trainer.supervised_steps == 100
    assert shoal("init", "x.toml", "--model", "tiny", "--data", "nothing", "--device", "cpu") == 2
    assert "'nothing' is neither a file nor a task" in capsys.readouterr().err


def test_questions_are_asked_at_a_terminal(questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\nsums.jsonl\n\n\nexact\n"))
    fields = ("model", "data", "question", "answer", "grader", "name", "workers", "max_new_tokens", "pattern")
    options = argparse.Namespace(
        **dict.fromkeys(fields), file=Path("a.toml"), steps=50, think=False, device="cpu"
    )
    plan = make_plan(options, Asker(asks=True))
    assert (plan.model, plan.task, plan.options["grader"]) == ("tiny", "qa", "exact")
    assert plan.options["question"] == "prompt"
