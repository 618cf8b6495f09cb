"""`shoal`: reads the command line and starts one thing.

Rooms are imported only when their command is called, and nothing slow before signals are in hand: Ctrl-C is clean from
the first moment.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from shoal import __version__
from shoal.cli.admin import add_admin
from shoal.cli.arguments import add_data, add_engine_choice, add_eval, add_toploc
from shoal.cli.diloco import add_diloco, add_peer_options
from shoal.cli.errors import Parser, complaint, parts
from shoal.cli.join import add_contributor, add_doctor
from shoal.cli.report import add_report
from shoal.cli.supervise import (
    EXIT_DEADLINE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    GRACE_S,
    RunFailed,
)
from shoal.cli.top import add_top
from shoal.cli.values import above_zero, at_least_one, count, port_number, seconds, url
from shoal.net.deadline import DeadlinePassed, Stopped
from shoal.telemetry import start_logging
from shoal.wire.codes import CODES, Rejected

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
    options = parse(arguments)
    if getattr(options, "stop_with_stdin", False):
        _stop_on_end_of_input(stop)
    return act(options, stop)


def act(options: argparse.Namespace, stop: threading.Event) -> int:
    """Do what was asked for; the exit code, with the reason on standard error if it is not 0. docs/cli.md lists them."""
    from shoal.net.client import Refused, Unreachable

    codes: dict[type[Exception], int] = {
        ValueError: EXIT_USAGE,
        OSError: EXIT_USAGE,
        Rejected: EXIT_USAGE,
        ModuleNotFoundError: EXIT_USAGE,
        DeadlinePassed: EXIT_DEADLINE,
        Unreachable: EXIT_DEADLINE,
        Refused: EXIT_FAILED,
        RunFailed: EXIT_FAILED,
    }
    start_logging()
    try:
        return int(options.action(options, stop))
    except Stopped:
        return EXIT_INTERRUPTED
    except tuple(codes) as error:
        code = next(code for kind, code in codes.items() if isinstance(error, kind))
        if isinstance(error, Refused) and refused_for_good(error.code):
            code = EXIT_USAGE
        print(in_lines(error, options), file=sys.stderr)
        return code


# By name: the client's own errors are not worth an import before a command begins.
WHAT = {
    "DeadlinePassed": "waited too long",
    "ModuleNotFoundError": "a package is missing",
    "OSError": "a file or an address is not as it should be",
    "Refused": "the coordinator refused",
    "Rejected": "not what was expected",
    "RunFailed": "the run failed",
    "Unreachable": "no answer",
    "ValueError": "cannot be done like this",
}


def in_lines(error: Exception, options: argparse.Namespace) -> str:
    """The message as a person reads it at a terminal, or as one sentence for a log."""
    words = in_words(error, waits="deadline_s" in options)
    if not sys.stderr.isatty():
        return f"shoal: {words}"
    what = next(WHAT[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in WHAT)
    value, remedy = parts(words)
    return complaint("shoal", what, value, remedy or "shoal COMMAND --help, or docs/cli.md")


def refused_for_good(code: str) -> bool:
    """Who one is, and which protocol one speaks, does not change by trying again."""
    return code in CODES and CODES[code].status in (401, 403, 426)


def in_words(error: Exception, *, waits: bool) -> str:
    """What went wrong and what to do, for a person. `waits`: it is a role, and has a deadline to set."""
    if isinstance(error, DeadlinePassed) and waits:
        return (
            f"{error}. See to that and start this role again: it goes on where it was. "
            "--deadline-s sets how long it waits"
        )
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").split(".")[0]
        extra = package if package in ("hivemind", "torchft") else "torch"
        return f"this needs the package {package}: pip install 'shoal[{extra}]'"
    # Our own come with a sentence; the system's have a file and a reason.
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror.lower()}; check the path and who may read and write it"
    return str(error)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser: argparse.ArgumentParser = Parser(
        prog="shoal",
        description=f"Reinforcement learning of reasoning models across computers that nobody has to trust.\n\n{FIRST_THINGS}",
        epilog="shoal COMMAND --help lists the options of each; docs/cli.md has the exit codes.",
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
    parser.add_argument("--json", action="store_true", help="with --dry-run: the numbers for a program")
    parser.add_argument(
        "--peer-join",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="with [trainer.diloco]: another site, or a rendezvous",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="continue a run that was stopped or killed")
    how.add_argument("--fresh", action="store_true", help="delete an earlier run in that folder first")
    parser.set_defaults(action=_run)


def _add_coordinator(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("coordinator", help="leases, submissions, verdicts, ledger")
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE.toml",
        help="several: a pool of runs, each in a folder of its name under --dir",
    )
    parser.add_argument(
        "--database",
        metavar="URL",
        help="postgresql://..., instead of the run file's; several coordinators may share it",
    )
    _add_role_options(parser, port=8700)
    parser.set_defaults(action=_coordinator)


def _add_trainer(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("trainer", help="train on accepted groups, publish new versions")
    parser.add_argument("file", type=Path, metavar="FILE.toml")
    parser.add_argument(
        "--keys", type=Path, required=True, help="folder with run.key and trainer.key, from the coordinator"
    )
    parser.add_argument("--url", type=url, help="how relays reach this origin (default: http://HOST:PORT)")
    add_peer_options(parser)
    _add_torch_options(parser)
    _add_client_options(parser)
    _add_role_options(parser, port=8701)
    parser.set_defaults(action=_trainer)


def _add_relay(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("relay", help="mirror new versions and serve them")
    parser.add_argument("--key", type=Path, required=True, help="relay.key, from the coordinator")
    parser.add_argument(
        "--upstream",
        type=url,
        action="append",
        default=[],
        help="origin or relay to mirror (default: the origin the coordinator names)",
    )
    parser.add_argument("--url", type=url, help="how workers reach this relay (default: http://HOST:PORT)")
    parser.add_argument(
        "--max-gb", type=above_zero, help="disk for versions; where more would be taken, fewer are held"
    )
    parser.add_argument(
        "--mb-per-s", type=above_zero, help="most that one address is sent (default: no limit)"
    )
    parser.add_argument(
        "--private", action="store_true", help="serve only members of the run, who show a ticket"
    )
    parser.add_argument("--max-connections", type=at_least_one, default=2048)
    parser.add_argument("--max-connections-per-address", type=at_least_one, default=512)
    _add_client_options(parser)
    _add_role_options(parser, port=8702)
    parser.set_defaults(action=_relay)


def _add_worker(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("worker", help="generate rollouts for a run")
    parser.add_argument("--max-rows", type=at_least_one, default=64, help="rows decoded at once")
    add_engine_choice(parser)
    _add_torch_options(parser)
    parser.add_argument(
        "--no-prefetch", action="store_true", help="one lease at a time, and nothing fetched ahead"
    )
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
    verify.add_argument("url", type=url, help="the coordinator's URL")
    verify.add_argument("--json", action="store_true", help="what was found, for a program")
    verify.set_defaults(action=_verify_ledger)


def _add_audit(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("audit", help="check accepted submissions of a run again")
    parser.add_argument("url", type=url, help="the coordinator's URL")
    parser.add_argument("--key", type=Path, required=True, help="validator.key, from the coordinator")
    parser.add_argument("--dir", type=Path, required=True, help="for the versions that are fetched")
    parser.add_argument("--sample", type=at_least_one, default=16, help="how many, at random")
    parser.add_argument("--seed", type=int, default=None, help="which: the same seed chooses the same")
    parser.add_argument("--json", action="store_true", help="what was found, for a program")
    parser.set_defaults(action=_audit)


def _add_explain(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("explain", help="what a refusal code means")
    parser.add_argument("code", nargs="?", help="such as reject.early_stop; none lists them all")
    parser.add_argument("--json", action="store_true", help="for a program")
    parser.set_defaults(action=_explain)


def _add_role_options(parser: argparse.ArgumentParser, *, port: int | None) -> None:
    parser.add_argument("--dir", type=Path, required=True, help="this role's folder")
    parser.add_argument("--stop-with-stdin", action="store_true", help="stop when standard input ends")
    if port is not None:
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=port_number, default=port, help="0 takes any free one")


def _add_torch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=count, default=0, help="torch threads (default: 0, torch's own choice)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")


def _add_client_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--coordinator", type=url, required=True, metavar="URL")
    parser.add_argument(
        "--deadline-s",
        type=seconds,
        default=900.0,
        help="how long to wait for another role before giving up",
    )


# -- what the commands do ---------------------------------------------------------------------------------


def _run(options: argparse.Namespace, stop: threading.Event) -> int:
    from rich.console import Console

    from shoal.cli.estimate import estimates
    from shoal.cli.local import LocalRun, default_folder, run_local
    from shoal.cli.progress import progress
    from shoal.cli.runfile import check_names, derived_numbers, load_run_file

    if options.json and not options.dry_run:
        raise ValueError(
            "--json is for --dry-run; a run writes metrics.jsonl, and `shoal top URL --json` shows it"
        )
    file = load_run_file(options.file)
    if options.dry_run:
        with progress("reading the model and the problems it names"):
            check_names(file, options.file)
        numbers = derived_numbers(file) | estimates(file)
        if options.json:
            print(json.dumps(numbers, default=str))
            return EXIT_OK
        print(f"{options.file}: good")
        for name, value in numbers.items():
            print(f"  {name:<38} {value}")
        return EXIT_OK
    folder = options.dir or default_folder(file)
    run = LocalRun(
        file=file,
        source=options.file,
        folder=folder,
        resume=options.resume,
        fresh=options.fresh,
        device=options.device,
        peer_join=tuple(options.peer_join),
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
    from shoal.cli.ledger import audit_ledger

    return audit_ledger(options.url, stop, as_json=options.json)


def _audit(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.audit import audit

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

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)


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
