"""`shoal`: reads the command line and runs one command.

The parts of Shoal are imported only when their command is called. Nothing slow is imported before the signal handlers are
installed, so that Ctrl-C ends every command without a traceback.
"""

import argparse
import atexit
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence

from shoal import __version__
from shoal.cli.arguments import (
    add_analysis_commands,
    add_contributor_commands,
    add_demo,
    add_help_commands,
    add_run,
)
from shoal.cli.commands.diloco import add_diloco
from shoal.cli.result_arguments import add_answer_commands, add_init, add_result_commands, add_view_commands
from shoal.cli.run.roles import add_roles
from shoal.cli.run.supervise import EXIT_INTERRUPTED, EXIT_USAGE, GRACE_S
from shoal.cli.ui.errors import Parser, describe_error, expected_errors, is_permanent_refusal
from shoal.cli.ui.examples import add_examples
from shoal.net.waiting import Stopped
from shoal.telemetry import start_logging

EXIT_BROKEN_PIPE = 141
"""What a shell reports for a program that SIGPIPE ended: its reader, such as `head`, has exited."""
FIRST_COMMANDS = """five commands to start with:
  shoal demo                        a whole swarm on this machine, learning, with one lying worker
  shoal run FILE.toml --dry-run     check a run file and print the numbers that follow from it
  shoal join URL                    work for somebody's run with this machine
  shoal top URL                     watch somebody's run in the terminal
  shoal ledger verify URL           check that a run's ledger was not rewritten
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; docs/cli.md lists them."""
    stop = threading.Event()
    _stop_on_signals(stop)
    _reopen_closed_streams()
    options = parse(arguments)
    if getattr(options, "stop_with_stdin", False):
        _stop_on_end_of_input(stop)
    return run_command(options, stop)


def run_command(options: argparse.Namespace, stop: threading.Event) -> int:
    """Calls the command's function. Turns an expected error into a message on standard error and an exit code."""
    from shoal.net.http_client import Refused

    known = expected_errors()
    start_logging()
    try:
        code = int(options.action(options, stop))
        sys.stdout.flush()  # a full disk or a closed pipe must be reported here, not during interpreter exit
        return code
    except Stopped:
        return EXIT_INTERRUPTED
    except tuple(known) as error:
        if isinstance(error, BrokenPipeError) and _stdout_has_no_reader():
            # `shoal ... | head`: the rest of the buffer must not be written again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return EXIT_BROKEN_PIPE
        code = next(code for kind, (code, _) in known.items() if isinstance(error, kind))
        if isinstance(error, Refused) and is_permanent_refusal(error.code):
            code = EXIT_USAGE
        print(describe_error(error, options), file=sys.stderr)
        return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of one command, with its function as `action`. Exits with code 2 on a usage error."""
    return make_parser().parse_args(arguments)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser: argparse.ArgumentParser = Parser(
        prog="shoal",
        description=f"Reinforcement learning of reasoning models across computers that nobody has to trust.\n\n{FIRST_COMMANDS}",
        epilog="shoal COMMAND --help lists the options of a command; `shoal docs cli` has the exit codes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_demo(commands)
    add_init(commands)
    add_run(commands)
    add_roles(commands)
    add_contributor_commands(commands)
    add_analysis_commands(commands)
    add_answer_commands(commands)
    add_diloco(commands)
    add_result_commands(commands)
    add_view_commands(commands)
    add_help_commands(commands, parser)
    add_examples(parser)
    return parser


def _stop_on_signals(stop: threading.Event) -> None:
    def handle(number: int, frame: object) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
        # During exit Python restores the default handler, which would end the process with another exit code if Ctrl-C is
        # pressed once more.
        atexit.register(signal.signal, number, signal.SIG_IGN)


def _stdout_has_no_reader() -> bool:
    output = select.poll()
    output.register(1, 0)
    return any(events & select.POLLERR for _, events in output.poll(0))


def _reopen_closed_streams() -> None:
    """Opens /dev/null for every standard stream that is closed.

    Otherwise the next opened file would get its descriptor, and would receive what is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, which is this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - stays open until the process ends
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _stop_on_end_of_input(stop: threading.Event) -> None:
    def follow() -> None:
        # The bare descriptor: a thread inside Python's buffered reader would abort the interpreter when it exits.
        while os.read(0, 1024):
            pass
        stop.set()
        # The supervisor is gone and cannot kill this process if it hangs. Every role survives being ended like this.
        time.sleep(GRACE_S)
        os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=follow, name="stdin", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
