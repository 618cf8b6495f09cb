"""`shoal.run`: what the written files contain, and that importing shoal stays light."""

import json
import math
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from shoal.cli.run import python_run
from shoal.cli.run.python_run import RunResult, run, source_with_uses
from shoal.cli.run_folder import RunFolder
from shoal.tasks import Problem, Reward

SCALE = {"full": 1.0}


def halved(value: float) -> float:
    return value / 2


def graded(reply: str, answer: str) -> float:
    """Rewards the right answer with 1 and another number with a half."""
    if reply.strip() == answer:
        return SCALE["full"]
    return halved(1.0) if math.isfinite(len(reply)) and reply.strip().isdigit() else 0.0


class Echo:
    """A task with one problem."""

    chat = False

    def problem(self, split: str, seed: int) -> Problem:
        return Problem("a", "a")

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        raise NotImplementedError


def executed(text: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "task"}
    exec(compile(text, "task.py", "exec"), space)
    return space


def test_a_function_is_written_with_what_it_uses() -> None:
    text = source_with_uses(graded)
    assert "import math as math" in text and "SCALE = {'full': 1.0}" in text and "def halved" in text
    again: Callable[[str, str], float] = executed(text)["graded"]
    assert [again(reply, "7") for reply in ("7", " 8", "x")] == [1.0, 0.5, 0.0]
    assert executed(source_with_uses(Echo))["Echo"]().problem("train", 0) == Problem("a", "a")


def test_what_cannot_be_written_is_named() -> None:
    bound = 3

    def inner(reply: str, answer: str) -> float:
        return float(bound)

    with pytest.raises(ValueError, match="inner uses bound of the function around it"):
        source_with_uses(inner)
    with pytest.raises(ValueError, match="is not a plain function or class"):
        source_with_uses(lambda reply, answer: 1.0)


def test_the_run_file_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []

    def stop_here(local: Any, *_: object) -> int:
        started.append(local)
        raise KeyboardInterrupt

    monkeypatch.setattr(python_run, "run_local", stop_here)
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    settings = {"trainer.learning_rate": 1e-3, "sampling.max_new_tokens": 4, "trainer.row_tokens": 64}
    with pytest.raises(KeyboardInterrupt):
        run(
            model="tiny",
            task=graded,
            data=rows,
            options={"template": "{question}", "style": "bare"},
            steps=3,
            name="mine",
            settings=settings,
        )
    table = tomllib.loads((tmp_path / "out" / "mine.inputs" / "run.toml").read_text())
    assert table["run"] == {"name": "mine", "model": "tiny", "last_version": 3}
    assert table["trainer"] == {"learning_rate": 1e-3, "row_tokens": 64}
    assert table["task"]["name"] == "qa" and table["task"]["options"]["grader"].endswith("task.py:graded")
    assert started[0].folder == Path("out/mine") and started[0].fresh
    assert (tmp_path / "out" / "mine.inputs").stat().st_mode & 0o777 == 0o700
    assert "stopped; continue with the same call and resume=True" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--device gpu: torch knows no such device"):
        run(model="tiny", task="sort", name="mine", device="gpu")
    assert len(started) == 1, "nothing was started, so nothing was deleted"
    with pytest.raises(ValueError, match="`data` must have the questions"):
        run(model="tiny", task=graded)


def test_rows_of_other_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(python_run, "try_run", lambda *_, **__: pytest.fail("the rows are written before"))
    with pytest.raises(ValueError, match=r"row 0 of data is 'question', expected an object .*to_dict"):
        run(model="tiny", task=graded, data=["question", "answer"])  # type: ignore[list-item]
    rows = [{"question": f"{n}?", "answer": numpy.int64(n)} for n in range(3)]
    path = python_run._data_file(rows, tmp_path)
    assert [json.loads(line)["answer"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_the_best_version_of_a_result() -> None:
    result = RunResult(Path("out/a"), Path("out/a/model"), True, {}, {0: 0.1, 10: 0.5, 20: 0.5, 30: 0.4})
    assert result.best_version == 20
    assert RunResult(Path("out/a"), Path("out/a/model"), False).best_version is None


def test_an_export_that_fails_leaves_nothing_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restore(run: RunFolder, version: int, out: Path) -> None:
        out.mkdir(exist_ok=True)
        (out / "config.json").write_text("{}")

    monkeypatch.setattr(RunFolder, "__init__", lambda *_: None)
    monkeypatch.setattr(RunFolder, "__exit__", lambda *_: None)
    monkeypatch.setattr(RunFolder, "restore", restore)
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        RunResult(run_folder, run_folder / "model", True).export(tmp_path / "file" / "out", 3)
    assert list(run_folder.iterdir()) == []


def test_importing_shoal_is_light() -> None:
    program = (
        "import sys, shoal\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'sqlalchemy', 'httpx2', 'shoal.cli'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert callable(shoal.run) and shoal.RunResult.__name__ == 'RunResult'\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'run' in dir(shoal)\n"
        "try:\n    shoal.walk\nexcept AttributeError as error:\n    assert 'walk' in str(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
