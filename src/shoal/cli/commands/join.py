"""The commands of a contributor as they are typed: join, status, whoami, pause, leave, identity, check-local, doctor.

Only what argparse needs: what they do is imported when one is called.
"""

import argparse
import threading
from collections.abc import Callable
from pathlib import Path

from shoal.cli.arguments import Commands, add_engine_choice
from shoal.cli.ui.values import above_zero, at_least_one, count, seconds, url

FOLDER = Path("shoal-node")

Action = Callable[[argparse.Namespace, threading.Event], int]


def _later(name: str) -> Action:
    def act(options: argparse.Namespace, stop: threading.Event) -> int:
        from shoal.cli.commands import contributor

        action: Action = getattr(contributor, name)
        return action(options, stop)

    return act


def add_contributor(commands: Commands) -> None:
    join = commands.add_parser("join", help="give this machine's time to a run: checks, key, consent, work")
    join.add_argument("url", type=url, help="the coordinator's URL")
    join.add_argument(
        "--run", metavar="NAME", help="which of the coordinator's runs (default: the first that fits)"
    )
    join.add_argument("--yes", action="store_true", help="agree to the summary without being asked")
    join.add_argument("--invite", default="", metavar="CODE")
    join.add_argument("--device", default="cpu", help="cpu, or cuda")
    join.add_argument("--max-rows", type=at_least_one, default=64, help="rows decoded at once")
    add_engine_choice(join)
    join.add_argument("--threads", type=count, default=0, help="torch threads (default: torch's own choice)")
    join.add_argument("--deadline-s", type=seconds, default=900.0, help="of each wait for the coordinator")
    _with_folder(join, "join")
    for name, words in (
        ("status", "what this node earned, and why a submission was refused"),
        ("whoami", "this node's id, owner and run"),
    ):
        asked = commands.add_parser(name, help=words)
        asked.add_argument("--json", action="store_true", help="for programs")
        _with_folder(asked, name)
    pause = commands.add_parser(
        "pause", help="finish the lease at hand and wait; `shoal pause --off` goes on"
    )
    pause.add_argument("--off", action="store_true")
    _with_folder(pause, "pause")
    _with_folder(commands.add_parser("leave", help="finish the lease at hand and leave the run"), "leave")
    check = commands.add_parser(
        "check-local", help="a validator's own checks on the last file, before it is sent"
    )
    check.add_argument("file", type=Path, nargs="?", help="default: the last one this node made")
    check.add_argument("--lease", type=Path, help="its lease (default: beside the file)")
    check.add_argument("--json", action="store_true", help="the verdict, for programs")
    _with_folder(check, "check_local")
    _add_identity(commands)


def _with_folder(parser: argparse.ArgumentParser, action: str) -> None:
    parser.add_argument("--dir", type=Path, default=FOLDER, help=f"the node's folder (default: {FOLDER})")
    parser.set_defaults(action=_later(action))


def _add_identity(commands: Commands) -> None:
    parser = commands.add_parser("identity", help="back up, restore, and vouch for keys")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, words, action in (
        ("backup", "write this node's key to FILE", "backup"),
        ("restore", "put a key that was backed up into the folder", "restore"),
    ):
        one = actions.add_parser(name, help=words)
        one.add_argument("file", type=Path)
        _with_folder(one, action)
    delegate = actions.add_parser("delegate", help="an owner vouches for a node for up to 30 days")
    delegate.add_argument("node", help="the node's id: shoal whoami")
    delegate.add_argument(
        "--owner", type=Path, required=True, help="the owner's key; made if it is not there"
    )
    delegate.add_argument("--days", type=above_zero, default=30.0)
    delegate.add_argument("--out", type=Path, default=Path("delegation.json"))
    delegate.set_defaults(action=_later("delegate"))


def add_doctor(commands: Commands) -> None:
    parser = commands.add_parser("doctor", help="can this machine work for a run?")
    parser.add_argument("url", type=url, help="the coordinator's URL")
    parser.add_argument("--dir", type=Path, default=FOLDER)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(action=_doctor)


def _doctor(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.commands.doctor import doctor

    return doctor(options)
