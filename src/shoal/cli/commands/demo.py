"""The first commands of a visitor: `shoal demo` runs a swarm from the installed package, `shoal completion` prints a shell script."""

import argparse
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import threading
from importlib.resources import as_file, files
from pathlib import Path

import shtab

from shoal.cli.arguments import add_run
from shoal.cli.run.supervise import EXIT_FAILED, EXIT_OK
from shoal.cli.ui.questions import agrees
from shoal.cli.ui.values import url_or_folder

PACKAGE = "shoal-rl"


def demo(options: argparse.Namespace, stop: threading.Event) -> int:
    """Runs the demo's run file, which is a part of the package, in `--dir`."""
    if importlib.util.find_spec("torch") is None and not _install_torch(stop, yes=options.yes):
        return EXIT_FAILED
    with as_file(files("shoal.cli.run") / "demo.toml") as file:
        words = ["run", str(file), "--dir", str(options.dir), "--device", options.device]
        words += ["--resume"] if options.resume else ["--fresh"]
        words += [] if options.port is None else ["--port", str(options.port)]
        parser = argparse.ArgumentParser()
        add_run(parser.add_subparsers())
        run = parser.parse_args(words)
        return int(run.action(run, stop))


def completion(options: argparse.Namespace, stop: threading.Event) -> int:
    """Prints the completion script of one shell."""
    _complete_file_names(options.whole_parser)
    print(shtab.complete(options.whole_parser, shell=options.shell))
    return EXIT_OK


def _complete_file_names(parser: argparse.ArgumentParser) -> None:
    """Marks the arguments that take files. Without a mark the shells complete no file names for them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_file_names(command)
        elif action.type in (Path, url_or_folder) or action.dest in ("model", "data"):
            action.complete = shtab.DIRECTORY if action.dest == "dir" else shtab.FILE  # type: ignore[attr-defined]


def requirements_of(extra: str) -> list[str]:
    """Returns what an extra of the installed package asks for, as pip takes it."""
    found = importlib.metadata.requires(PACKAGE) or []
    marker = re.compile(rf"""\s*;\s*extra\s*==\s*["']{re.escape(extra)}["']\s*$""")
    return [marker.sub("", text) for text in found if marker.search(text)]


def _install_torch(stop: threading.Event, *, yes: bool) -> bool:
    """Installs the packages of the extra `torch` into this environment, after asking. Returns whether they are there now."""
    wanted = requirements_of("torch")
    command = [sys.executable, "-m", "pip", "install", *wanted]
    print(
        f"The demo trains a model, which needs torch; only the coordinator and relays run without it.\n  {PACKAGE}[torch] is: {', '.join(wanted)}"
    )
    if not yes and not agrees(
        f"Install these into {sys.prefix} now? [Y/n] ",
        stop,
        otherwise=f"torch is not installed; pip install '{PACKAGE}[torch]', or start the demo with --yes",
        default=True,
    ):
        print(f"Nothing was installed. Later: pip install '{PACKAGE}[torch]'")
        return False
    done = subprocess.run(command, check=False)
    importlib.invalidate_caches()
    if done.returncode or importlib.util.find_spec("torch") is None:
        print(
            f"pip ended with exit code {done.returncode} and torch is not here; install it by hand: pip install '{PACKAGE}[torch]'",
            file=sys.stderr,
        )
        return False
    return True
