"""`shoal top` and `shoal report` on a real coordinator, and on wrong URLs."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from running_coordinator import running_coordinator
from shoal.cli.main import parse, run_command
from shoal.cli.run.supervise import EXIT_DEADLINE, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from shoal.cli.ui.view import sparkline
from shoal.wire.page_data import Snapshot
from shoal.wire.run_spec import RunSpec, Sampling, TaskSpec

SPEC = RunSpec(
    run="watched",
    task=TaskSpec(name="sort"),
    compute_dtype="float32",
    sampling=Sampling(max_new_tokens=8, samples_per_prompt=2),
    last_version=4,
)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with running_coordinator(tmp_path / "run", SPEC) as url:
        yield url


class StopAfterOneLook(threading.Event):
    """Sets itself in the first wait, like Ctrl-C."""

    def wait(self, timeout: float | None = None) -> bool:
        self.set()
        return True


def shoal(*words: str, stop: threading.Event | None = None) -> int:
    return run_command(parse(words), stop or threading.Event())


def test_one_snapshot_for_a_program(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("top", url, "--json") == EXIT_OK
    assert Snapshot.parse(capsys.readouterr().out).terms.run == "watched"


def test_plain_lines_without_a_terminal(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("top", url, stop=StopAfterOneLook()) == EXIT_INTERRUPTED
    seen = capsys.readouterr().out
    assert "version -/4" in seen and "\x1b" not in seen


def test_a_report_from_a_url_and_from_the_folder(url: str, tmp_path: Path) -> None:
    for source in (url, str(tmp_path / "run")):
        out = tmp_path / "report.html"
        assert shoal("report", source, "--out", str(out)) == EXIT_OK
        data = out.read_text().split('id="data">')[1].split("</script>")[0]
        assert json.loads(data)["snapshot"]["terms"]["run"] == "watched"


def test_wrong_urls_and_folders_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nobody = "http://127.0.0.1:9"
    assert shoal("top", nobody) == EXIT_DEADLINE
    assert shoal("report", nobody, "--out", str(tmp_path / "x.html")) == EXIT_DEADLINE
    with pytest.raises(SystemExit) as exit:
        shoal("top", "nonsense")
    assert exit.value.code == EXIT_USAGE
    assert shoal("report", str(tmp_path), "--out", str(tmp_path / "x.html")) == EXIT_USAGE
    assert "check the URL" in capsys.readouterr().err


def test_a_sparkline() -> None:
    assert sparkline((0.0, 0.5, 1.0)) == "▁▅█"
    assert sparkline((1.0, 1.0)) == "▁▁" and sparkline(()) == ""
    assert len(sparkline(tuple(float(value) for value in range(1000)))) == 40
