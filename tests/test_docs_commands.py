"""Every command on every page is run by a test, or says that it is not."""

import re
import shlex

import pytest

from docs_commands import (
    ELSEWHERE,
    LIVE,
    ROOT,
    check_words,
    commands_in_blocks,
    commands_in_lines,
    shoal_parser,
)
from shoal.cli.ui.examples import EXAMPLES, commands_of

COMMANDS = list(commands_in_blocks())


def test_every_command_in_a_block_is_run_or_marked() -> None:
    """After a failure, name the command in tests/docs_commands.py or write '# not tested: why' behind it."""
    covered = [command.is_marked or command.runs_live or command.runs_elsewhere for command in COMMANDS]
    assert [
        command.where for command, is_covered in zip(COMMANDS, covered, strict=True) if not is_covered
    ] == []


def test_every_command_in_a_block_exists() -> None:
    wrong = []
    for command in COMMANDS:
        try:
            check_words([word for word in command.words if not re.match(r"[A-Z_]+=", word)])
        except ValueError as error:
            wrong.append(f"{command.where}: {error}")
    assert wrong == []


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_tests_that_run_commands_exist(test: str) -> None:
    assert (ROOT / test).exists()
    for start in (start for start, named in ELSEWHERE.items() if named == test and test == ".ci/run"):
        assert start in (ROOT / test).read_text(), f"{test} does not call {start}"


def test_commands_inside_sentences_exist() -> None:
    wrong = []
    for page, text in commands_in_lines():
        plain = re.sub(r"[\[\]]|\.\.\.", " ", text)
        try:
            words = shlex.split(plain)
            if words[1:2] and not re.fullmatch(r"[A-Z]+|[a-z]+\|[a-z|]+", words[1]):
                check_words(words)
        except ValueError as error:
            wrong.append(f"{page.relative_to(ROOT)}: `{text}`: {error}")
    assert wrong == []


def test_every_live_command_is_in_the_docs() -> None:
    texts = [command.text for command in COMMANDS if not command.is_marked]
    assert [start for start in LIVE if not any(text.startswith(start) for text in texts)] == []


def test_every_command_shows_an_example_in_its_help() -> None:
    """After a failure, add the new command to src/shoal/cli/ui/examples.py."""
    commands = dict(commands_of(shoal_parser()))
    assert sorted(set(commands) ^ set(EXAMPLES)) == []
    for name, parser in commands.items():
        assert f"example:\n  {EXAMPLES[name]}" in parser.format_help(), name


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_accepted_as_it_stands(name: str) -> None:
    words = shlex.split(EXAMPLES[name].partition(" > ")[0])
    assert " ".join(words).startswith(f"shoal {name}")
    shoal_parser().parse_args([word.replace("HOST", "host.example") for word in words[1:]])
