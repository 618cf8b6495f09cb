"""Reports errors of commands: three lines at a terminal (what failed, the value, what to do), one line in a log."""

import argparse
import difflib
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from shoal.cli.run.supervise import EXIT_DEADLINE, EXIT_FAILED, EXIT_USAGE, RunFailed
from shoal.cli.ui.examples import commands_of
from shoal.files import DiskFull, is_disk_full
from shoal.net.waiting import DeadlinePassed
from shoal.telemetry import printable
from shoal.wire.codes import CODES, CorruptData, Rejected

TRANSIENT_REFUSALS = frozenset({"request.replayed", "request.wrong_digest"})
"""Refusals with status 401 that a new request can pass: a used nonce, and a body that was cut off on its way."""

_EXTRAS = {
    "hivemind": "hivemind",
    "torchft": "torchft",
    "boto3": "s3",
    "psycopg": "postgres",
    "matplotlib": "plot",
    "gguf": "smollm2",
    "vllm": "vllm",
    "huggingface_hub": "hub",
    **dict.fromkeys(("torch", "numpy", "safetensors", "tokenizers", "transformers", "pyarrow"), "torch"),
}
"""The extra of pyproject.toml that brings a package."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors name the wrong word instead of printing the whole usage."""

    words: tuple[str, ...] = ()
    """What was typed after the program's name."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.words = tuple(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        remedy = f"{self.prog} --help lists what it takes"
        wrong = re.match(
            r"argument (COMMAND|ACTION): invalid choice: '([^']*)' \(choose from (.*)\)", message
        )
        if wrong is not None:
            kind, given, choices = wrong.groups()
            message = f"{given!r} is not a {kind.lower() if kind == 'COMMAND' else 'known action'}"
            if close := difflib.get_close_matches(given, re.findall(r"[\w-]+", choices), n=1):
                remedy = f"did you mean `{self.prog} {close[0]}`? {remedy}"
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown is not None:
            command = self._command()
            message = f"{unknown[1]} is not an option of this command"
            remedy = f"{command.prog} --help lists what it takes"
            if close := difflib.get_close_matches(
                unknown[1], sorted(command._option_string_actions), n=1, cutoff=0.75
            ):
                remedy = f"did you mean {close[0]}? {remedy}"
        setting = re.match(r"unrecognized arguments: ([a-z_]+\.[a-z_.]+=\S+)", message)
        if setting is not None and "--set" in self._command()._option_string_actions:
            message, remedy = f"{setting[1]} is a key of the run file", f"write --set {setting[1]}"
        self.exit(EXIT_USAGE, f"{_report(self.prog, 'not understood', message, remedy)}\n")

    def _command(self) -> argparse.ArgumentParser:
        """Returns the parser of the command that was typed: argparse reports an unknown option by the outermost parser."""
        found: argparse.ArgumentParser = self
        for name, parser in commands_of(self):
            if tuple(name.split()) == self.words[: len(name.split())]:
                found = parser
        return found


def describe_error(error: Exception, options: argparse.Namespace) -> str:
    """Returns the report of an error: three lines if standard error is a terminal, else one."""
    message = error_message(error, has_deadline="deadline_s" in options, folder=getattr(options, "dir", None))
    message = printable(message, keep="\n\t")  # it may quote what a stranger sent
    trace = getattr(error, "trace", "")
    above = f"{trace.rstrip()}\n" if trace else ""
    if not sys.stderr.isatty():
        return f"{above}shoal: {message}"
    value, remedy = split_remedy(message)
    kind = next(words for kind, (_, words) in expected_errors().items() if isinstance(error, kind))
    return above + _report("shoal", kind, value, remedy or "shoal COMMAND --help, or shoal docs cli")


def error_message(error: Exception, *, has_deadline: bool, folder: Path | None = None) -> str:
    """Returns what went wrong and what to do.

    `has_deadline` says that the command has --deadline-s; `folder` is where it writes its files.
    """
    from shoal.net.http_client import Unreachable

    if isinstance(error, DeadlinePassed) and has_deadline:
        return (
            f"{error}. Correct that and start this role again; it continues where it stopped. "
            "--deadline-s sets how long it waits"
        )
    if isinstance(error, ModuleNotFoundError):
        return _missing_module(error)
    if isinstance(error, OSError) and is_disk_full(error) and not isinstance(error, DiskFull):
        place = error.filename or folder  # a write to an open file does not name it
        where = f"{place}: " if place is not None else ""
        return (
            f"{where}{(error.strerror or '').lower()}; free some disk space and start again "
            "(a run with --resume): files that were complete are kept"
        )
    # Shoal's own errors are whole sentences; the system's have a file name and a reason.
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror.lower()}; check the path and its permissions"
    if isinstance(error, Unreachable) and "check " not in str(error):
        return f"{error}; check the URL, and that the coordinator runs there"
    return str(error)


def _missing_module(error: ModuleNotFoundError) -> str:
    package = (error.name or "").split(".")[0]
    if package in _EXTRAS:
        return f"this needs the package {package}: pip install 'shoal-rl[{_EXTRAS[package]}]'"
    if not package:
        return str(error)
    return f"the module {error.name} is not installed in this environment ({sys.prefix}); install the package that has it"


def split_remedy(message: str) -> tuple[str, str | None]:
    """Splits "which value: what is wrong; what to do" at its last semicolon. The remedy is None if there is none."""
    words, separator, remedy = message.rpartition("; ")
    if not separator or "\n" in remedy:
        return message, None
    return words, remedy


def is_permanent_refusal(code: str) -> bool:
    """Returns whether a retry cannot help: the key or the protocol version is wrong, so the owner must act."""
    return code in CODES and CODES[code].status in (401, 403, 426) and code not in TRANSIENT_REFUSALS


def _report(command: str, kind: str, message: str, remedy: str) -> str:
    if sys.stderr.isatty():
        return f"{command}: {kind}\n  {message}\n  what to do: {remedy}"
    return f"{command}: {message}; {remedy}"


def expected_errors() -> dict[type[Exception], tuple[int, str]]:
    """Returns the errors that a command may end with, each with its exit code and its kind in a few words."""
    from shoal.net.http_client import Refused, Unreachable

    return {
        DeadlinePassed: (EXIT_DEADLINE, "waited too long"),
        Unreachable: (EXIT_DEADLINE, "no answer"),
        Refused: (EXIT_FAILED, "the coordinator refused"),
        RunFailed: (EXIT_FAILED, "the run failed"),
        ModuleNotFoundError: (EXIT_USAGE, "a package is missing"),
        Rejected: (EXIT_USAGE, "unexpected data"),
        CorruptData: (EXIT_FAILED, "data does not verify"),
        OSError: (EXIT_USAGE, "a file or an address cannot be used"),
        ValueError: (EXIT_USAGE, "cannot be done like this"),
    }
