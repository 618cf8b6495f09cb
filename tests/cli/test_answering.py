"""`shoal eval` and `shoal data filter` on the tiny model: figures that depend on the seed only, and a filter that resumes."""

import json
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.cli.commands.sample_answers import pose
from shoal.cli.main import main, parse, run_command
from shoal.tasks import Finite, Problem, Reward, Split, make_task
from shoal.tasks.datasets.file_options import digest_of
from shoal.tasks.task import WRONG
from shoal.tasks.task_errors import TaskError
from shoal.wire.run_spec import TaskSpec

# Digits are a tenth of what a random model says, so that some answers are right.
COUNT = ["--task", "count", "--option", "length=5", "--option", "alphabet=3", "--option", "style=bare"]
SMALL = ["--max-new-tokens", "12", "--max-rows", "64", "--threads", "1"]


def test_figures_follow_from_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["eval", "tiny", *COUNT, *SMALL, "--prompts", "20", "--k", "2", "--samples", "4", "--json"]
    found = []
    for extra in ([], ["--max-rows", "16"], ["--seed", "1"]):
        assert main([*ask, *extra]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] != found[2]
    figures = found[0]
    assert (figures["prompts"], figures["samples"], figures["k"]) == (20, 4, 2)
    assert 0 < figures["pass_at_1"] < figures["pass_at_k"] < 1
    assert figures["pass_at_1"] + figures["wrong"] + figures["unparseable"] == pytest.approx(1)
    low, high = figures["pass_at_1_interval"]
    assert low < figures["pass_at_1"] < high


def test_lengths_are_compared_with_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["eval", "tiny", "--task", "add", *SMALL, "--prompts", "6", "--k", "2", "--json"]
    assert main([*ask, "--budgets", "4", "40", "--budget-alpha", "0.01"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert 0 < figures["off_budget_mean"] <= 39
    assert figures["reward_mean"] == pytest.approx(figures["pass_at_1"] - 0.01 * figures["off_budget_mean"])
    assert main(ask) == 0
    assert json.loads(capsys.readouterr().out)["off_budget_mean"] is None


def test_printed_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "tiny", *COUNT, *SMALL, "--prompts", "3", "--k", "2"]) == 0
    out = capsys.readouterr().out
    assert "tiny on count: 3 held-out prompts, 2 answers each" in out
    for word in ("pass@1", "pass@2", "unparseable", "(Wilson, n = prompts)"):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["eval", "tiny"], "--task is missing"),
        (["eval", "tiny", *COUNT, "--k", "4", "--samples", "2"], "raise it"),
        (["eval", "tiny", *COUNT, "--version", "3"], "--version needs a run's folder or a coordinator's URL"),
        (["eval", "nowhere", *COUNT], "unknown model 'nowhere'"),
        (["data", "filter", "--model", "tiny", *COUNT, "--out", "x", "--budgets", "9"], "in the run file"),
        (["eval", "tiny", "--task", "gsm8k", "--option", "path=nowhere"], "no data file at nowhere"),
        (["eval", "http://127.0.0.1:9", *COUNT], "check the URL"),
        (["data", "filter", "--model", "tiny", *COUNT, "--out", "x"], "give --problems, how many are wanted"),
        (
            ["data", "filter", "--model", "tiny", *COUNT, "--out", "x", "--band", "0.5", "0.1"],
            "give the lower end first",
        ),
    ],
)
def test_wrong_arguments_are_explained(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) in (2, 3)
    assert said in capsys.readouterr().err


def test_held_out_problems_are_posed_once_each(tmp_path: Path) -> None:
    few = make_task(TaskSpec(name="sort", options={"length": 2}))
    posed = pose(few, "eval", 1000, 0)
    assert len({one.problem.prompt for one in posed}) == len(posed) < 30
    rows = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(50)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    task = make_task(TaskSpec(name="gsm8k", options={"path": str(path), "eval_path": str(path)}))
    assert [one.problem.answer for one in pose(task, "eval", 1000, 0)] == [str(n) for n in range(50)]
    some = [one.problem.answer for one in pose(task, "eval", 10, 0)]
    assert len(set(some)) == 10 and some == [one.problem.answer for one in pose(task, "eval", 10, 0)]
    assert some != [one.problem.answer for one in pose(task, "eval", 10, 1)]


def test_a_filter_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "kept.jsonl"
    progress, report = (out.with_name(f"kept.jsonl.{name}") for name in ("progress.jsonl", "report.json"))
    ask = ["data", "filter", "--model", "tiny", *COUNT, *SMALL, "--problems", "40", "--out", str(out)]
    assert main(ask) == 0
    said, kept, lines = capsys.readouterr().out, out.read_text(), progress.read_text().splitlines()
    assert len(lines) == 41 and "40 problems, 8 answers each" in said
    found = json.loads(report.read_text())
    assert sum(found["histogram"]) == 40 and found["kept"] == len(kept.splitlines())
    assert found["kept"] == sum(found["histogram"][1:5]) > 0
    # Cut off in the middle of a line, as a crash does.
    out.unlink()
    progress.write_text("\n".join(lines[:12]) + '\n{"place": 9')
    assert main(ask) == 0
    assert out.read_text() == kept
    assert sorted(progress.read_text().splitlines()) == sorted(lines)
    # Another band needs no new answers.
    before = progress.read_bytes()
    assert main([*ask, "--band", "0", "0"]) == 0
    assert progress.read_bytes() == before
    assert len(out.read_text().splitlines()) == found["histogram"][0]
    # Other settings are another filter.
    capsys.readouterr()
    assert main([*ask, "--temperature", "0.5"]) == 2
    assert "other settings" in capsys.readouterr().err


def test_a_stopped_filter_says_how_to_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = [
        "data",
        "filter",
        "--model",
        "tiny",
        *COUNT,
        *SMALL,
        "--problems",
        "5",
        "--out",
        str(tmp_path / "x"),
    ]
    stop = threading.Event()
    stop.set()
    assert run_command(parse(ask), stop) == 130
    assert "stopped with 0 of 5 problems done; the same command continues" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


OWN_TASK = """
from shoal.tasks.task import RIGHT, WRONG, Problem

class Doubled:
    chat = False

    def problem(self, split, seed):
        return Problem(f"Double {seed}", "unknown", check=str(2 * seed))

    def reward(self, problem, text, num_tokens):
        return RIGHT if text == problem.check else WRONG
"""


def test_what_a_filter_writes_is_read_by_a_task(tmp_path: Path) -> None:
    out = tmp_path / "kept.jsonl"
    filter_ = ["data", "filter", "--model", "tiny", *SMALL, "--k", "2", "--band", "0", "1", "--out", str(out)]
    assert main([*filter_, *COUNT, "--problems", "5"]) == 0
    listed = make_task(TaskSpec(name="listed", options={"path": str(out)}))
    assert listed.problem("train", 0).prompt.endswith("=")
    (tmp_path / "own.py").write_text(OWN_TASK)
    assert (
        main(
            [
                *filter_[:-1],
                str(tmp_path / "own"),
                "--task",
                f"{tmp_path / 'own.py'}:Doubled",
                "--problems",
                "3",
            ]
        )
        == 0
    )
    first = json.loads((tmp_path / "own").read_text().splitlines()[0])
    assert int(first["check"]) == 2 * int(first["prompt"].split()[1])
    assert list(first["task"]["options"].values()) == [digest_of(tmp_path / "own.py")], "the code is pinned"
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(30)]
    source, kept = tmp_path / "rows.jsonl", tmp_path / "rows-kept.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    ask = [
        *filter_[:-1],
        str(kept),
        "--task",
        "gsm8k",
        "--option",
        f"path={source}",
        "--option",
        "style=bare",
    ]
    assert main([*ask, "--option", f"eval_path={source}"]) == 2, "nothing is left to train on"
    assert main(ask) == 0
    found = [json.loads(line) for line in kept.read_text().splitlines()]
    assert sorted(found, key=str) == sorted(rows, key=str), "the band is everything"
    before, after = (
        make_task(TaskSpec(name="gsm8k", options={"path": str(path)})) for path in (source, kept)
    )
    assert isinstance(before, Finite) and isinstance(after, Finite)
    held_out = {before.problem("eval", n).prompt for n in range(before.size("eval"))}
    assert held_out == {after.problem("eval", n).prompt for n in range(after.size("eval"))} != set()
    assert main([*ask, "--band", "1", "1"]) == 0
    assert len(kept.read_text().splitlines()) == len(held_out), (
        "nothing is always right, and held out is held out"
    )


@dataclass(frozen=True, kw_only=True)
class Unseeded:
    """A task whose problems depend on more than the seed, or cannot be posed at all."""

    chat: bool = False
    fails: bool = False

    def problem(self, split: Split, seed: int) -> Problem:
        if self.fails:
            raise KeyError("oops")
        return Problem(secrets.token_hex(8), "1")

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        return WRONG


@pytest.mark.parametrize(
    ("fails", "words"), [(True, r"KeyError: 'oops' \(.*test_answering.py:"), (False, "depend on the seed")]
)
def test_a_task_that_poses_badly_is_named(fails: bool, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        pose(Unseeded(fails=fails), "eval", 2, seed=0)
