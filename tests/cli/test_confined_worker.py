"""`shoal join` starts its worker under rules, says which ones the system enforces, and passes its options on."""

import argparse
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from shoal.cli.main import parse
from shoal.cli.run import confined_worker
from shoal.cli.run.confined_worker import LIMITS, MAX_RUN_PORTS, confinement, run_confined, worker_arguments
from shoal.landlock import Confinement
from shoal.wire.messages import Info, Stats


class Some:
    """Has the attributes that it is given."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


INFO = cast("Info", Some(entry_points=("https://second.example", "http://third.example:8800")))
STATS = cast(
    "Stats",
    Some(
        relays=(Some(url="http://relay.example:8702"), Some(url="http://old.example")),
        origin="http://trainer.example:8701",
    ),
)


def options(tmp_path: Path, *more: str) -> argparse.Namespace:
    return parse(["join", "http://127.0.0.1:8700", "--dir", str(tmp_path / "node"), *more])


def test_the_ports_are_those_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"http": "http://proxy.example:3128", "no": "x"})
    asked = options(tmp_path, "--allow-port", "9000").allow_port
    rules = confinement("http://a:8700", tmp_path, INFO, STATS, allow_ports=tuple(asked))
    assert rules.ports == (53, 80, 443, 3128, 8700, 8701, 8702, 8800, 9000)
    assert rules.writable == (tmp_path,)


def run_with_relays(*ports: int) -> Stats:
    relays = [Some(url=f"http://relay.example:{port}") for port in ports]
    return cast("Stats", Some(relays=relays, origin=""))


def test_a_run_does_not_choose_ports_of_the_machines_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urllib.request.getproxies", dict)
    info = cast("Info", Some(entry_points=()))
    stats = run_with_relays(22, 25, 80, 587, 8080)
    rules = confinement("https://run.example", tmp_path, info, stats)
    assert rules.ports == (53, 80, 443, 8080)
    words = str(rules.protections()[1])
    assert (
        "ports 53, 80, 443, 8080 (not to 22, 25, 587: a run may choose" in words and "--allow-port" in words
    )
    typed = confinement("http://run.example:587", tmp_path, info, stats, allow_ports=(25,))
    assert typed.ports == (25, 53, 80, 443, 587, 8080)
    assert "not to 22:" in typed.note


@pytest.mark.parametrize("url", ["http://[::1", "http://relay.example:port", "http://relay.example:99999"])
def test_a_relays_url_that_is_none_gives_no_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setattr("urllib.request.getproxies", dict)
    stats = cast("Stats", Some(relays=[Some(url=url)], origin=""))
    assert confinement("https://a", tmp_path, INFO, stats).ports == (53, 443, 8800)


def test_a_run_chooses_few_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.getproxies", dict)
    rules = confinement("https://a", tmp_path, INFO, run_with_relays(*range(2000, 60000)))
    assert rules.ports == (53, 443, *range(2000, 2000 + MAX_RUN_PORTS - 1), 8800)
    assert "(not to 2007, 2008, 2009, 2010, ...: " in rules.note


def test_vllm_needs_ports_of_its_own(tmp_path: Path) -> None:
    rules = confinement("http://a:8700", tmp_path, INFO, STATS, engine="vllm")
    assert rules.ports is None
    assert "not active: vLLM's processes connect to each other" in str(rules.protections()[1])


def test_the_options_of_join_reach_the_worker(tmp_path: Path) -> None:
    limits = [
        "--cores",
        "2",
        "--memory-gb",
        "4",
        "--disk-gb",
        "1.5",
        "--download-mbit",
        "50",
        "--upload-mbit",
        "5",
    ]
    asked = options(
        tmp_path,
        "--draft",
        "lookup",
        "--draft-rows",
        "5",
        "--max-rows",
        "3",
        "--threads",
        "2",
        "--deadline-s",
        "7.5",
        *limits,
    )
    worker = parse(worker_arguments(asked))
    assert parse(worker_arguments(options(tmp_path))).cores is None
    for name in (
        *LIMITS,
        "engine",
        "tensor_parallel",
        "draft",
        "draft_rows",
        "device",
        "threads",
        "max_rows",
        "deadline_s",
    ):
        assert getattr(worker, name) == getattr(asked, name), name
    assert (worker.coordinator, worker.dir) == (asked.url, asked.dir.resolve())
    assert worker.stop_with_stdin and not worker.lie and not worker.no_prefetch


def run_program(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: threading.Event | None = None
) -> int:
    """Runs a program in place of `shoal worker`."""
    asked = options(tmp_path)
    popen = subprocess.Popen

    def start(command: list[str], **more: Any) -> Any:
        index = command.index("-m", command.index("shoal.landlock"))
        return popen([*command[:index], "-c", program], **more)

    monkeypatch.setattr("subprocess.Popen", start)
    asked.dir.mkdir()
    rules = Confinement(writable=(asked.dir,), ports=())
    return run_confined(asked, rules, stop or threading.Event())


def test_the_exit_code_is_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_program("import sys; sys.exit(4)", tmp_path, monkeypatch) == 4


def test_a_worker_that_is_killed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = f"import os; os.kill(os.getpid(), {signal.SIGKILL:d})"
    assert run_program(program, tmp_path, monkeypatch) == 1
    assert "ended by signal 9" in capsys.readouterr().err


def test_temporary_files_and_caches_are_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_program("import tempfile; tempfile.mkdtemp()", tmp_path, monkeypatch) == 0
    assert list((tmp_path / "node" / "cache" / "tmp").iterdir())


def test_a_worker_is_told_to_stop_and_killed_if_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confined_worker, "STOP_S", 1.0)
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    began_s = time.monotonic()
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(200)"
    assert run_program(program, tmp_path, monkeypatch, stop) == 1
    assert time.monotonic() - began_s < 100
