"""Log lines: their format, and text from untrusted nodes in them."""

import logging
import re

import pytest

import shoal.telemetry
from shoal.telemetry import Log, printable, start_logging


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("shoal 0.1 (Zürich)", "shoal 0.1 (Zürich)"),
        ("one\ntwo\r\n", "one\\ntwo\\r\\n"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("\x85\u2028\u202eevil", "\\x85\\u2028\\u202eevil"),
        ("\x00", "\\x00"),
        ("\ud800", "\\ud800"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_untrusted_text_cannot_start_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Log("test").info("node enrolled", software="x\n12:00:00 I coordinator  all is well\x1b[1A")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].isprintable()


def test_the_documented_example_is_what_the_logger_writes(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging()
    Log("worker").info("lease done", rows=64, tokens_per_s=812.0)
    line = capsys.readouterr().err.rstrip("\n")
    assert re.match(r"\d\d:\d\d:\d\d I worker ", line)
    assert line[8:] in (shoal.telemetry.__doc__ or "")
