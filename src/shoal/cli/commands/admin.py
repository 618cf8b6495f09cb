"""`shoal admin`: the operator's actions, each signed by admin.key and recorded in the ledger with its reason."""

import argparse
import secrets
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.run.supervise import EXIT_OK
from shoal.cli.ui.values import Commands, url

if TYPE_CHECKING:
    from shoal.wire.keys import Key
    from shoal.wire.messages import AdminOrder

ACTIONS = {
    "quarantine": "node: check every submission of it",
    "ban": "node: eject it",
    "restore": "node: forget its rejections, back to probation",
    "pause": "issue no leases",
    "resume": "issue leases again",
    "void": "lease: end it without counting it against the node",
    "uphold": "lease: the appeal against its rejection is right",
    "dismiss": "lease: the appeal against its rejection is wrong",
    "invite": "make an invitation; --amount says for how many nodes",
    "allow": "key: let this node, or all nodes of this owner, enrol",
    "disallow": "key: take that permission back",
    "stake": "key: add --amount to its balance",
}


def add_admin(commands: Commands) -> None:
    parser = commands.add_parser(
        "admin",
        help="actions of the operator: ban, pause, invite, ...",
        epilog="\n".join(f"  {name:<11} {words}" for name, words in ACTIONS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("order", choices=tuple(ACTIONS), metavar="ACTION")
    parser.add_argument("subject", nargs="?", default="", help="a node, an owner's key or a lease")
    parser.add_argument("--reason", required=True, help="recorded in the ledger")
    parser.add_argument("--amount", type=int, default=0, help="for invite and stake")
    parser.add_argument("--coordinator", type=url, required=True, metavar="URL")
    parser.add_argument("--key", type=Path, required=True, help="admin.key, from the coordinator")
    parser.set_defaults(action=admin)


def admin(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.swarm.coordinator.membership.admission import invite_digest
    from shoal.wire.keys import Key
    from shoal.wire.messages import AdminOrder

    subject, code = options.subject, ""
    if options.order == "invite":
        code = secrets.token_hex(16)  # no code may begin with a dash: it is typed after --invite
        subject = invite_digest(code)
    needed, sign, _ = ACTIONS[options.order].partition(": ")
    if sign and not subject:
        raise ValueError(
            f"`shoal admin {options.order}` needs a {needed}: write its id after {options.order!r}"
        )
    if len(options.reason) < 3:
        raise ValueError(f"--reason {options.reason!r} is too short; say why, the ledger keeps it")
    order = AdminOrder(reason=options.reason[:300], subject=subject, amount=options.amount)
    seq = send_order(options.coordinator, Key.load(options.key), options.order, order, stop)
    print(f"{options.order}: done, ledger event {seq}")
    if code:
        print(
            f"invitation: {code}\nA contributor joins with: shoal join {options.coordinator} --invite {code}"
        )
    return EXIT_OK


def send_order(url: str, key: "Key", action: str, order: "AdminOrder", stop: threading.Event) -> int:
    """Sends an action of the operator and returns the number of its event in the ledger."""
    from shoal.net.http_client import SignedClient
    from shoal.telemetry import Log
    from shoal.wire.messages import Recorded

    with closing(SignedClient(url, key, log=Log("admin"), stop=stop)) as client:
        return client.call("POST", f"/v1/admin/{action}", order, Recorded).seq
