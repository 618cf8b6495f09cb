"""How a command says that it could not: three lines for a person (what, which value, what next), one for a log."""

import argparse
import errno
import sys
from pathlib import Path
from typing import NoReturn

from shoal.net.waiting import DeadlinePassed
from shoal.wire.codes import CODES

EXIT_USAGE = 2

# By name: the client's own errors are not worth an import before a command begins.
WHAT = {
    "CorruptData": "data does not verify",
    "DeadlinePassed": "waited too long",
    "ModuleNotFoundError": "a package is missing",
    "OSError": "a file or an address is not as it should be",
    "Refused": "the coordinator refused",
    "Rejected": "not what was expected",
    "RunFailed": "the run failed",
    "Unreachable": "no answer",
    "ValueError": "cannot be done like this",
}


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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


def in_lines(error: Exception, options: argparse.Namespace) -> str:
    """The message as a person reads it at a terminal, or as one sentence for a log."""
    words = in_words(error, waits="deadline_s" in options, dir=getattr(options, "dir", None))
    if not sys.stderr.isatty():
        return f"shoal: {words}"
    what = next(WHAT[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in WHAT)
    value, remedy = parts(words)
    return complaint("shoal", what, value, remedy or "shoal COMMAND --help, or docs/cli.md")


def refused_for_good(code: str) -> bool:
    """Who one is, and which protocol one speaks, does not change by trying again."""
    return code in CODES and CODES[code].status in (401, 403, 426)


def in_words(error: Exception, *, waits: bool, dir: Path | None = None) -> str:
    """What went wrong and what to do, for a person. `waits`: it is a role, and has a deadline to set. `dir`: its folder."""
    if isinstance(error, DeadlinePassed) and waits:
        return (
            f"{error}. See to that and start this role again: it goes on where it was. "
            "--deadline-s sets how long it waits"
        )
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").split(".")[0]
        extra = package if package in ("hivemind", "torchft") else "torch"
        return f"this needs the package {package}: pip install 'shoal-rl[{extra}]'"
    if isinstance(error, OSError) and error.errno in _FULL:
        place = error.filename or dir  # a write to an open file does not say which
        where = f"{place}: " if place is not None else ""
        return (
            f"{where}{(error.strerror or '').lower()}; make room where the files go and start again "
            "(a run with --resume): what was complete is kept"
        )
    # Our own come with a sentence; the system's have a file and a reason.
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror.lower()}; check the path and who may read and write it"
    # By name, as above.
    if type(error).__name__ == "Unreachable" and "check " not in str(error):
        return f"{error}; check the URL, and that the coordinator runs there"
    return str(error)
