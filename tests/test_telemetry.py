"""Log lines: one event a line, whatever words a stranger puts into it."""

import logging

import pytest

from shoal.telemetry import Log, plain


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("shoal 0.1 (Zürich)", "shoal 0.1 (Zürich)"),
        ("one\ntwo\r\n", "one\\ntwo\\r\\n"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("\x85\u2028\u202eevil", "\\x85\\u2028\\u202eevil"),
        ("\x00", "\\x00"),
        ("\ud800", "\\ud800"),
    ],
)
def test_words_are_shown_and_never_obeyed(words: str, shown: str) -> None:
    assert plain(words) == shown


def test_a_strangers_words_stay_on_their_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Log("test").info("node enrolled", software="x\n12:00:00 I coordinator  all is well\x1b[1A")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].isprintable()
