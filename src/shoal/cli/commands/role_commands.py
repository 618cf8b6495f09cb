"""The commands that start roles: all of a run file on this machine, or one of them. What the words become is in roles.py."""

import argparse
import json
import threading
from pathlib import Path

from shoal.cli.arguments import Commands, add_engine_choice
from shoal.cli.commands.diloco import add_peer_options, check_peer_join
from shoal.cli.run.supervise import EXIT_OK
from shoal.cli.ui.values import above_zero, at_least_one, count, port_number, seconds, url


def add_run(commands: Commands) -> None:
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


def add_roles(commands: Commands) -> None:
    _add_coordinator(commands)
    _add_trainer(commands)
    _add_relay(commands)
    _add_worker(commands)
    _add_validator(commands)


def _add_coordinator(commands: Commands) -> None:
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


def _add_trainer(commands: Commands) -> None:
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


def _add_relay(commands: Commands) -> None:
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


def _add_worker(commands: Commands) -> None:
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


def _add_validator(commands: Commands) -> None:
    parser = commands.add_parser("validator", help="check submissions and give verdicts")
    parser.add_argument("--key", type=Path, required=True, help="validator.key, from the coordinator")
    _add_torch_options(parser)
    _add_client_options(parser)
    _add_role_options(parser, port=None)
    parser.set_defaults(action=_validator)


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

    from shoal.cli.run.estimate import estimates
    from shoal.cli.run.local import LocalRun, default_folder, run_local
    from shoal.cli.run.roles import check_device
    from shoal.cli.run.runfile import check_names, derived_numbers, load_run_file
    from shoal.cli.ui.progress_bar import progress

    if options.json and not options.dry_run:
        raise ValueError(
            "--json is for --dry-run; a run writes metrics.jsonl, and `shoal top URL --json` shows it"
        )
    file = load_run_file(options.file)
    check_peer_join(options.peer_join, file.trainer.diloco)
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
    if options.fresh:  # before anything is deleted
        with progress("reading the model and the problems it names"):
            check_names(file, options.file)
    if options.device != "cpu":
        check_device(options.device)
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
    from shoal.cli.run.roles import coordinator

    return coordinator(options, stop)


def _trainer(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.run.roles import trainer

    return trainer(options, stop)


def _relay(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.run.roles import relay

    return relay(options, stop)


def _worker(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.run.roles import worker

    return worker(options, stop)


def _validator(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.run.roles import validator

    return validator(options, stop)
