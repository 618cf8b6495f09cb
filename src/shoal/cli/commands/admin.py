"""`shoal admin`: the operator's actions, each signed by admin.key and recorded in the ledger with its reason."""

import argparse
import secrets
import threading
from contextlib import closing

from shoal.cli.run.supervise import EXIT_OK
from shoal.cli.ui.values import ADMIN_ACTIONS
from shoal.net.http_client import SignedClient
from shoal.swarm.coordinator.membership.admission import invite_digest
from shoal.telemetry import Log
from shoal.wire.keys import Key
from shoal.wire.messages import AdminOrder, Recorded


def admin(options: argparse.Namespace, stop: threading.Event) -> int:
    subject, code = options.subject, ""
    if options.order == "invite":
        code = secrets.token_hex(16)  # no code may begin with a dash: it is typed after --invite
        subject = invite_digest(code)
    needed, sign, _ = ADMIN_ACTIONS[options.order].partition(": ")
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


def send_order(url: str, key: Key, action: str, order: AdminOrder, stop: threading.Event) -> int:
    """Sends an action of the operator and returns the number of its event in the ledger."""
    with closing(SignedClient(url, key, log=Log("admin"), stop=stop)) as client:
        return client.call("POST", f"/v1/admin/{action}", order, Recorded).seq
