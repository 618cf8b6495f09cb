"""Progress and errors of commands at a real terminal and in a pipe."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]

SLOW = """
import time
from shoal.cli.ui import progress_bar
progress_bar.SHOW_AFTER_S = progress_bar.BAR_EVERY_S = progress_bar.LINE_EVERY_S = 0.05
with progress_bar.progress("things", 4) as advance:
    for _ in range(4):
        time.sleep(0.3)
        advance(1)
print("done")
"""


def at_terminal(*words: str) -> tuple[int, str]:
    """Runs Python with standard output and error on a pseudo-terminal; returns its exit code and output."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        said += piece
    os.close(ours)
    return process.wait(60), said.decode().replace("\r\n", "\n")


def in_pipe(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )


@pytest.mark.parametrize(
    ("words", "what", "value"),
    [
        (("run", "nothing.toml"), "cannot be done like this", "nothing.toml"),
        (("run",), "not understood", "FILE.toml"),
        (("join", "http://nowhere", "--max-rows", "x"), "not understood", "'x'"),
        (("explain", "reject.nothing"), "cannot be done like this", "reject.nothing"),
        (("ledger", "verify", "http://127.0.0.1:9"), "no answer", "http://127.0.0.1:9"),
        (("top", "http://127.0.0.1:9"), "no answer", "http://127.0.0.1:9"),
        (("status", "--dir", "no-such-node"), "cannot be done like this", "no-such-node"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_an_error_is_three_lines_at_a_terminal_and_one_in_a_log(
    words: tuple[str, ...], what: str, value: str
) -> None:
    code, said = at_terminal("-m", "shoal", *words)
    first, second, third = said.strip().split("\n")
    assert code in (2, 3)
    assert re.fullmatch(rf"shoal[ \w]*: {what}", first)
    assert value in second and third.startswith("  what to do: ")
    piped = in_pipe("-m", "shoal", *words)
    assert piped.returncode == code and piped.stdout == ""
    assert piped.stderr.count("\n") == 1 and value in piped.stderr and "\x1b" not in piped.stderr


def test_progress_is_a_bar_at_a_terminal() -> None:
    code, said = at_terminal("-c", SLOW)
    assert code == 0 and "\x1b[" in said and "/4" in said and said.rstrip().endswith("done")


def test_progress_is_lines_elsewhere() -> None:
    piped = in_pipe("-c", SLOW)
    lines = piped.stderr.splitlines()
    assert piped.stdout == "done\n" and len(lines) > 1 and "\x1b" not in piped.stderr
    assert all(re.fullmatch(r"things: \d of 4, \d+ s", line) for line in lines)


def test_quick_commands_show_no_progress() -> None:
    began_s = time.monotonic()
    piped = in_pipe("-c", SLOW.replace("0.05", "500.0").replace("0.3", "0.0"))
    assert piped.stderr == "" and time.monotonic() - began_s < 60


def test_json_output() -> None:
    dry = in_pipe("-m", "shoal", "run", str(ROOT / "runs" / "demo.toml"), "--dry-run", "--json")
    assert json.loads(dry.stdout) and dry.returncode == 0
    one = in_pipe("-m", "shoal", "explain", "reject.early_stop", "--json")
    assert set(json.loads(one.stdout)["reject.early_stop"]) == {"meaning", "remedy"}
    refused = in_pipe("-m", "shoal", "run", str(ROOT / "runs" / "demo.toml"), "--json")
    assert refused.returncode == 2 and "--dry-run" in refused.stderr


def explain(**streams: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "shoal", "explain", *streams.pop("more", [])], **streams)


def test_a_closed_pipe_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = explain(stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (141, b"")


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_streams(closed: tuple[int, ...]) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    assert explain(preexec_fn=close, stdout=subprocess.DEVNULL).wait(60) == 0
    wrong = explain(preexec_fn=close, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, more=["x"])
    assert wrong.wait(60) == 2
