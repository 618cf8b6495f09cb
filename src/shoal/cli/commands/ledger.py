"""`shoal ledger verify`: recompute a run's whole ledger, compare with the head its key signed, add it up again, and compare
the sums with what the coordinator shows."""

import json
import threading
from collections.abc import Iterator

import httpx2
from pydantic import ValidationError

from shoal.cli.commands.connectivity import ask_info, reaching
from shoal.cli.run.supervise import EXIT_FAILED, EXIT_OK
from shoal.cli.ui.progress_bar import progress
from shoal.net.waiting import Stopped
from shoal.swarm.coordinator.ledger_replay import Books, replay
from shoal.wire.codes import CorruptData, Rejected
from shoal.wire.ledger import LedgerEvent, LedgerHead, verify_ledger
from shoal.wire.messages import Stats
from shoal.wire.record import Sealed

PAGE = 500
TIMEOUT_S = 20.0


def audit_ledger(url: str, stop: threading.Event, *, as_json: bool = False) -> int:
    """Prints what was found; the exit code."""
    with httpx2.Client(base_url=url, timeout=TIMEOUT_S) as http, reaching(url):
        try:
            run_key = ask_info(http).run_key
            # Before the head, so that the head covers all that the shown tables follow from.
            shown = Stats.parse(_get(http, "/v1/stats"))
            head = Sealed[LedgerHead].parse(_get(http, "/v1/ledger/head"))
            events = list(_events(http, head.body.seq, stop))
            with progress(f"verifying {len(events):,} events"):
                count = verify_ledger(events, head, run_key)
                books = replay(events[: shown.ledger_seq])
                compare(books, shown)
        except (CorruptData, Rejected) as error:
            print(
                json.dumps({"good": False, "reason": error.detail})
                if as_json
                else f"NOT GOOD: {error.detail}"
            )
            return EXIT_FAILED
    if as_json:
        found = {"events": count, "head": head.body.hash, "run_key": run_key, "nodes": len(books.nodes)}
        print(json.dumps({"good": True, **found, "leases": len(books.leases)}))
        return EXIT_OK
    print(f"good: {count} events, head {head.body.hash[:16]}, signed by run key {run_key[:16]}")
    print(
        f"added up: {len(books.nodes)} nodes and {len(books.leases)} leases; trust and credit are as shown for "
        f"{len(shown.nodes)} nodes"
    )
    return EXIT_OK


def fetch_ledger(http: httpx2.Client, run_key: str, stop: threading.Event) -> list[LedgerEvent]:
    """Returns every event up to the signed head, verified. Raises CorruptData if the ledger does not verify."""
    head = Sealed[LedgerHead].parse(_get(http, "/v1/ledger/head"))
    events = list(_events(http, head.body.seq, stop))
    verify_ledger(events, head, run_key)
    return events


def compare(books: Books, shown: Stats) -> None:
    """Compares the coordinator's tables with the ledger. Raises CorruptData at the first node that differs."""
    for view in shown.nodes:
        if view.node not in books.nodes:
            raise CorruptData(f"node {view.node[:16]} is shown, but never enrolled")
        node, balance = books.nodes[view.node], books.balance(view.node, shown.server_time_s)
        summed = {
            "trust": node.standing.trust.value,
            "accepted": node.accepted,
            "rejected": node.standing.rejected,
            "void": node.void,
            "credit": balance.final + balance.held,
            "credit_held": balance.held,
        }
        for name, expected in summed.items():
            if getattr(view, name) != expected:
                raise CorruptData(
                    f"node {view.node[:16]}: {name} is shown as {getattr(view, name)}, the ledger adds up to {expected}"
                )


def _events(http: httpx2.Client, last_seq: int, stop: threading.Event) -> Iterator[LedgerEvent]:
    seq = 1
    with progress("events fetched", last_seq) as advance:
        while seq <= last_seq:
            if stop.is_set():
                raise Stopped(f"stopped at event {seq} of {last_seq}")
            events = _page(_get(http, f"/v1/ledger?from_seq={seq}&limit={PAGE}"), seq)
            if not events:
                raise CorruptData(f"the ledger ends before event {seq}; its head says {last_seq}")
            yield from events[: last_seq - seq + 1]
            seq += len(events)
            advance(len(events))


def _page(data: bytes, seq: int) -> list[LedgerEvent]:
    try:
        return [LedgerEvent.model_validate(event) for event in json.loads(data)]
    except (ValidationError, ValueError, TypeError):
        raise CorruptData(
            f"the page of the ledger from event {seq} holds something else than events"
        ) from None


def _get(http: httpx2.Client, path: str) -> bytes:
    return http.get(path).raise_for_status().content
