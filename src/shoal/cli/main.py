"""`shoal`: reads the command line and starts one thing.

Rooms are imported only when their command is called, and nothing slow before signals are in hand: Ctrl-C is clean from
the first moment.
"""

import argparse
import atexit
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from shoal import __version__
from shoal.cli.arguments import Commands, add_data, add_eval, add_toploc
from shoal.cli.commands.admin import add_admin
from shoal.cli.commands.diloco import add_diloco
from shoal.cli.commands.join import add_contributor, add_doctor
from shoal.cli.commands.report import add_report
from shoal.cli.commands.role_commands import add_roles, add_run
from shoal.cli.commands.top import add_top
from shoal.cli.run.supervise import (
    EXIT_DEADLINE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    GRACE_S,
    RunFailed,
)
from shoal.cli.ui.errors import Parser, in_lines, refused_for_good
from shoal.cli.ui.values import at_least_one, url
from shoal.net.waiting import DeadlinePassed, Stopped
from shoal.telemetry import start_logging
from shoal.wire.codes import CODES, CorruptData, Rejected

EXIT_UNREAD = 141
"""As a shell has it of a program that nobody listens to any more."""
FIRST_THINGS = """five things people do first:
  shoal run runs/demo.toml          a whole swarm on this machine, learning, with a liar in it
  shoal run FILE.toml --dry-run     check a run file and see the numbers it implies
  shoal join URL                    give this machine's time to somebody's run
  shoal top URL                     watch somebody's run in the terminal
  shoal ledger verify URL           check that a run's ledger was not rewritten
"""


def main(arguments: Sequence[str] | None = None) -> int:
    stop = threading.Event()
    _stop_on_signals(stop)
    _open_what_is_closed()
    options = parse(arguments)
    if getattr(options, "stop_with_stdin", False):
        _stop_on_end_of_input(stop)
    return act(options, stop)


def act(options: argparse.Namespace, stop: threading.Event) -> int:
    """Do what was asked for; the exit code, with the reason on standard error if it is not 0. docs/cli.md lists them."""
    from shoal.net.http_client import Refused, Unreachable

    codes: dict[type[Exception], int] = {
        ValueError: EXIT_USAGE,
        OSError: EXIT_USAGE,
        Rejected: EXIT_USAGE,
        CorruptData: EXIT_FAILED,
        ModuleNotFoundError: EXIT_USAGE,
        DeadlinePassed: EXIT_DEADLINE,
        Unreachable: EXIT_DEADLINE,
        Refused: EXIT_FAILED,
        RunFailed: EXIT_FAILED,
    }
    start_logging()
    try:
        code = int(options.action(options, stop))
        sys.stdout.flush()  # here, where a full disk or a reader that has gone still finds words
        return code
    except Stopped:
        return EXIT_INTERRUPTED
    except tuple(codes) as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            # `shoal ... | head` has seen enough. What is left in the buffer must not be tried again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return EXIT_UNREAD
        code = next(code for kind, code in codes.items() if isinstance(error, kind))
        if isinstance(error, Refused) and refused_for_good(error.code):
            code = EXIT_USAGE
        print(in_lines(error, options), file=sys.stderr)
        return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser: argparse.ArgumentParser = Parser(
        prog="shoal",
        description=f"Reinforcement learning of reasoning models across computers that nobody has to trust.\n\n{FIRST_THINGS}",
        epilog="shoal COMMAND --help lists the options of each; docs/cli.md has the exit codes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_run(commands)
    add_roles(commands)
    _add_ledger(commands)
    _add_audit(commands)
    add_admin(commands)
    add_contributor(commands)
    add_doctor(commands)
    add_toploc(commands)
    _add_explain(commands)
    add_eval(commands)
    add_data(commands)
    add_diloco(commands)
    add_report(commands)
    add_top(commands)
    return parser.parse_args(arguments)


def _add_ledger(commands: Commands) -> None:
    parser = commands.add_parser("ledger", help="audit a run's ledger")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    verify = actions.add_parser("verify", help="recompute every hash and the signed head")
    verify.add_argument("url", type=url, help="the coordinator's URL")
    verify.add_argument("--json", action="store_true", help="what was found, for a program")
    verify.set_defaults(action=_verify_ledger)


def _add_audit(commands: Commands) -> None:
    parser = commands.add_parser(
        "audit", help="check a run's verdicts again, on accepted and on refused work"
    )
    parser.add_argument("url", type=url, help="the coordinator's URL")
    parser.add_argument("--key", type=Path, required=True, help="validator.key, from the coordinator")
    parser.add_argument("--dir", type=Path, required=True, help="for the versions that are fetched")
    parser.add_argument("--sample", type=at_least_one, default=16, help="how many, at random")
    parser.add_argument("--lease", metavar="ID", help="the verdict on this one instead, say of an appeal")
    parser.add_argument("--seed", type=int, default=None, help="which: the same seed chooses the same")
    parser.add_argument("--json", action="store_true", help="what was found, for a program")
    parser.set_defaults(action=_audit)


def _add_explain(commands: Commands) -> None:
    parser = commands.add_parser("explain", help="what a refusal code means")
    parser.add_argument("code", nargs="?", help="such as reject.early_stop; none lists them all")
    parser.add_argument("--json", action="store_true", help="for a program")
    parser.set_defaults(action=_explain)


# -- what the commands do ---------------------------------------------------------------------------------


def _verify_ledger(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.commands.ledger import audit_ledger

    return audit_ledger(options.url, stop, as_json=options.json)


def _audit(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.commands.audit import audit

    return audit(options, stop)


def _explain(options: argparse.Namespace, stop: threading.Event) -> int:
    if options.code is not None and options.code not in CODES:
        raise ValueError(f"no refusal code {options.code!r}; `shoal explain` lists them all")
    if options.json:
        chosen = [options.code] if options.code else list(CODES)
        print(
            json.dumps(
                {code: {"meaning": CODES[code].meaning, "remedy": CODES[code].remedy} for code in chosen}
            )
        )
        return EXIT_OK
    if options.code is None:
        for code, meaning in CODES.items():
            print(f"{code:<26} {meaning.meaning}")
        return EXIT_OK
    meaning = CODES[options.code]
    print(f"{options.code}: {meaning.meaning}\nwhat to do: {meaning.remedy}")
    return EXIT_OK


# -- how it stops -----------------------------------------------------------------------------------------


def _stop_on_signals(stop: threading.Event) -> None:
    def handle(number: int, frame: object) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
        # At exit Python puts back what ends a process at once, but not in the place of this: one key press more keeps the exit code.
        atexit.register(signal.signal, number, signal.SIG_IGN)


def _nobody_reads() -> bool:
    output = select.poll()
    output.register(1, 0)
    return any(events & select.POLLERR for _, events in output.poll(0))


def _open_what_is_closed() -> None:
    """A standard descriptor that was closed would be given to the next file that is opened, and hear what is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free: this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for the life of the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _stop_on_end_of_input(stop: threading.Event) -> None:
    def follow() -> None:
        # The bare descriptor: a thread inside Python's buffered reader would abort the interpreter when it exits.
        while os.read(0, 1024):
            pass
        stop.set()
        # Whoever held the other end is gone and cannot make us end. Every role survives an end like this one.
        time.sleep(GRACE_S)
        os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=follow, name="stdin", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
