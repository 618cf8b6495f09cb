"""How a command says that it could not: three lines for a person (what, which value, what next), one for a log."""

import argparse
import sys
from typing import NoReturn

EXIT_USAGE = 2


class Parser(argparse.ArgumentParser):
    """Says what was wrong with the words it was given, not the whole grammar."""

    def error(self, message: str) -> NoReturn:
        self.exit(
            EXIT_USAGE,
            f"{complaint(self.prog, 'not understood', message, f'{self.prog} --help lists what it takes')}\n",
        )


def complaint(command: str, what: str, words: str, remedy: str) -> str:
    """At a terminal three lines; anywhere else one, so that a log has a line for each thing that happened."""
    if sys.stderr.isatty():
        return f"{command}: {what}\n  {words}\n  what to do: {remedy}"
    return f"{command}: {words}; {remedy}"


def parts(message: str) -> tuple[str, str | None]:
    """A message of ours is "which value: what is wrong; what to do"."""
    words, separator, remedy = message.rpartition("; ")
    if not separator or "\n" in remedy:
        return message, None
    return words, remedy
