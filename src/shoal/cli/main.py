"""`shoal`: reads the command line and starts one thing. Rooms are imported only when their command is called."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from shoal import __version__
from shoal.cli.supervise import EXIT_DEADLINE, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from shoal.net.client import Refused, Unreachable
from shoal.net.deadline import DeadlinePassed, Stopped
from shoal.telemetry import start_logging
from shoal.wire.codes import CODES, Rejected

FIRST_THINGS = """first things to do:
  shoal run runs/demo.toml          a whole swarm on this machine, learning, with a liar in it
  shoal run FILE.toml --dry-run     check a run file and see the numbers it implies
  shoal worker --coordinator URL    give this machine's time to somebody's run
  shoal ledger verify URL           check that a run's ledger was not rewritten
  shoal explain CODE                what a refusal means and what to do about it
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    start_logging()
    stop = threading.Event()
    _stop_on_signals(stop)
    if getattr(options, "stop_with_stdin", False):
        _stop_on_end_of_input(stop)
    try:
        return int(options.action(options, stop))
    except (ValueError, OSError, Rejected, RuntimeError) as error:
        return _fail(error, EXIT_USAGE)
    except (DeadlinePassed, Unreachable, Refused) as error:
        return _fail(error, EXIT_DEADLINE)
    except (Stopped, KeyboardInterrupt):
        return EXIT_INTERRUPTED


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="shoal",
        description="Reinforcement learning of reasoning models across computers that nobody has to trust.",
        epilog=FIRST_THINGS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run(commands)
    _add_coordinator(commands)
    _add_trainer(commands)
    _add_relay(commands)
    _add_worker(commands)
    _add_validator(commands)
    _add_ledger(commands)
    _add_explain(commands)
    return parser.parse_args(arguments)


Commands = argparse._SubParsersAction  # the only name argparse gives it


def _add_run(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("run", help="every role of a run file on this machine")
    parser.add_argument("file", type=Path, metavar="FILE.toml")
    parser.add_argument("--dir", type=Path, help="where the run's files go (default: out/NAME)")
    parser.add_argument(
        "--device", default="cpu", help="where trainer, workers and validator compute: cpu, or cuda"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check the file and print the numbers it implies"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="continue a run that was stopped or killed")
    how.add_argument("--fresh", action="store_true", help="delete an earlier run in that folder first")
    parser.set_defaults(action=_run)


def _add_coordinator(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("coordinator", help="leases, submissions, verdicts, ledger")
    parser.add_argument("file", type=Path, metavar="FILE.toml")
    _add_role_options(parser, port=8700)
    parser.set_defaults(action=_coordinator)


def _add_trainer(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("trainer", help="train on accepted groups, publish new versions")
    parser.add_argument("file", type=Path, metavar="FILE.toml")
    parser.add_argument(
        "--keys", type=Path, required=True, help="folder with run.key and trainer.key, from the coordinator"
    )
    parser.add_argument("--url", help="how relays reach this origin (default: http://HOST:PORT)")
    _add_torch_options(parser)
    _add_client_options(parser)
    _add_role_options(parser, port=8701)
    parser.set_defaults(action=_trainer)


def _add_relay(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("relay", help="mirror new versions and serve them")
    parser.add_argument("--key", type=Path, required=True, help="relay.key, from the coordinator")
    parser.add_argument(
        "--upstream",
        action="append",
        default=[],
        help="origin or relay to mirror (default: the origin the coordinator names)",
    )
    parser.add_argument("--url", help="how workers reach this relay (default: http://HOST:PORT)")
    _add_client_options(parser)
    _add_role_options(parser, port=8702)
    parser.set_defaults(action=_relay)


def _add_worker(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("worker", help="generate rollouts for a run")
    parser.add_argument("--max-rows", type=int, default=64, help="rows decoded at once")
    _add_torch_options(parser)
    parser.add_argument(
        "--lie",
        metavar="KIND",
        help="cheat in a named way, to see it caught; only against a coordinator on this machine",
    )
    _add_client_options(parser)
    _add_role_options(parser, port=None)
    parser.set_defaults(action=_worker)


def _add_validator(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("validator", help="check submissions and give verdicts")
    parser.add_argument("--key", type=Path, required=True, help="validator.key, from the coordinator")
    _add_torch_options(parser)
    _add_client_options(parser)
    _add_role_options(parser, port=None)
    parser.set_defaults(action=_validator)


def _add_ledger(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("ledger", help="audit a run's ledger")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    verify = actions.add_parser("verify", help="recompute every hash and the signed head")
    verify.add_argument("url", help="the coordinator's URL")
    verify.set_defaults(action=_verify_ledger)


def _add_explain(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("explain", help="what a refusal code means")
    parser.add_argument("code", nargs="?", help="such as reject.early_stop; none lists them all")
    parser.set_defaults(action=_explain)


def _add_role_options(parser: argparse.ArgumentParser, *, port: int | None) -> None:
    parser.add_argument("--dir", type=Path, required=True, help="this role's folder")
    parser.add_argument("--stop-with-stdin", action="store_true", help="stop when standard input ends")
    if port is not None:
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=int, default=port)


def _add_torch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=0, help="torch threads (default: torch's own choice)")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")


def _add_client_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--coordinator", required=True, metavar="URL")
    parser.add_argument(
        "--deadline-s", type=float, default=900.0, help="how long to wait for another role before giving up"
    )


# -- what the commands do ---------------------------------------------------------------------------------


def _run(options: argparse.Namespace, stop: threading.Event) -> int:
    from rich.console import Console

    from shoal.cli.local import LocalRun, run_local
    from shoal.cli.runfile import derived_numbers, load_run_file

    file = load_run_file(options.file)
    if options.dry_run:
        print(f"{options.file}: good")
        for name, value in derived_numbers(file).items():
            print(f"  {name:<38} {value}")
        return EXIT_OK
    folder = options.dir or Path("out") / file.run.name
    run = LocalRun(
        file=file,
        source=options.file,
        folder=folder,
        resume=options.resume,
        fresh=options.fresh,
        device=options.device,
    )
    return run_local(run, stop, Console(highlight=False))


def _coordinator(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.roles import coordinator

    return coordinator(options, stop)


def _trainer(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.roles import trainer

    return trainer(options, stop)


def _relay(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.roles import relay

    return relay(options, stop)


def _worker(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.roles import worker

    return worker(options, stop)


def _validator(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.roles import validator

    return validator(options, stop)


def _verify_ledger(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.ledger import verify_ledger

    return verify_ledger(options.url)


def _explain(options: argparse.Namespace, stop: threading.Event) -> int:
    if options.code is None:
        for code, meaning in CODES.items():
            print(f"{code:<26} {meaning.meaning}")
        return EXIT_OK
    if options.code not in CODES:
        raise ValueError(f"no refusal code {options.code!r}; `shoal explain` lists them all")
    meaning = CODES[options.code]
    print(f"{options.code}: {meaning.meaning}\nwhat to do: {meaning.remedy}")
    return EXIT_OK


# -- how it stops -----------------------------------------------------------------------------------------


def _stop_on_signals(stop: threading.Event) -> None:
    def handle(number: int, frame: object) -> None:
        stop.set()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)


def _stop_on_end_of_input(stop: threading.Event) -> None:
    def follow() -> None:
        # The bare descriptor: a thread inside Python's buffered reader would abort the interpreter when it exits.
        while os.read(0, 1024):
            pass
        stop.set()

    threading.Thread(target=follow, name="stdin", daemon=True).start()


def _fail(error: Exception, code: int) -> int:
    print(f"shoal: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
