"""What a person sees of a long download: a bar at a terminal, lines in a log, nothing of a short one."""

import fcntl
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import Any

import pytest

from shoal.shardcast.client import fetch_progress as progress_module
from shoal.shardcast.client.fetch_progress import Progress
from shoal.telemetry import Log

PROGRAM = """
from shoal.shardcast import progress
from shoal.telemetry import Log, start_logging
progress.SAY_AFTER_S = 0.0
progress.SAY_EVERY_S = 0.0
start_logging()
log = Log("worker")
with progress.Progress(7, num_bytes=4_000_000, had=0, log=log) as one:
    one.show(1_000_000, lambda: "")
    log.info("a line meanwhile")
    one.show(3_000_000, lambda: "")
    one._bar.refresh()
log.info("done")
"""


def test_a_bar_at_a_terminal_and_lines_above_it() -> None:
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    subprocess.run([sys.executable, "-c", PROGRAM], stderr=terminal, check=True, env=environment)
    os.close(terminal)
    seen = b""
    while True:
        try:
            seen += os.read(reader, 65536)
        except OSError:  # the other end is closed, and all was read
            break
    os.close(reader)
    text = seen.decode()
    assert "fetching version 7" in text
    assert "3.0/4.0 MB" in text
    for line in ("a line meanwhile", "done"):
        assert any(one.rstrip().endswith(line) for one in text.splitlines()), text


def test_lines_in_a_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "SAY_EVERY_S", 0.0)
    monkeypatch.setattr(progress_module, "SAY_AFTER_S", 0.0)
    with caplog.at_level(logging.INFO), Progress(7, num_bytes=4_000_000, had=0, log=Log("worker")) as one:
        one.show(3_000_000, lambda: "1 of 4 shards missing")
    assert "fetching version 7: [#######   ] 75 % of 4 MB" in caplog.text
    assert "1 of 4 shards missing" in caplog.text


def test_what_is_soon_over_is_not_worth_a_line(caplog: pytest.LogCaptureFixture, log: Any) -> None:
    with caplog.at_level(logging.INFO), Progress(7, num_bytes=4, had=0, log=log) as one:
        one.show(3, lambda: "")
    assert caplog.text == ""
