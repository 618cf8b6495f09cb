"""The claims in docs/figures.md: all 60, each with a command that exists and a figure or a reason."""

import re
import shlex

from docs_commands import ROOT, check_words

NUM_CLAIMS = 60
STATES = {"shown", "in part", "scaled", "otherwise", "not"}
PAGE = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| \d+ \|", line)
]


def test_every_claim_has_its_row() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, NUM_CLAIMS + 1))


def test_a_row_has_five_cells_and_none_is_empty() -> None:
    for row in ROWS:
        assert len(row) == 5 and all(row), row
        assert row[4] in STATES, row


def test_every_row_names_a_command_that_exists() -> None:
    for row in ROWS:
        commands = re.findall(r"`([^`]+)`", row[2])
        assert commands, f"claim {row[0]} has no command"
        for command in commands:
            check_words(shlex.split(command))


def test_a_figure_of_a_bench_names_where_it_was_measured() -> None:
    for row in ROWS:
        if "python" in row[2] and row[4] in ("shown", "scaled") and re.search(r"\d", row[3]):
            named = "](" in row[3] or "bench/log/" in row[3] or "same entry" in row[3]
            assert named, f"claim {row[0]} names no file of bench/log"
