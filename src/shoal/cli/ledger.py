"""`shoal ledger verify`: recompute a run's whole ledger and compare with the head its key signed."""

import json
import threading
from collections.abc import Iterator

import httpx
from pydantic import ValidationError

from shoal.cli.supervise import EXIT_FAILED, EXIT_OK
from shoal.net.client import Unreachable
from shoal.net.deadline import Stopped
from shoal.wire.codes import Rejected
from shoal.wire.ledger import LedgerEvent, LedgerHead, verify_ledger
from shoal.wire.messages import Info
from shoal.wire.record import Sealed

PAGE = 500
TIMEOUT_S = 20.0


def audit_ledger(url: str, stop: threading.Event) -> int:
    """Prints what was found; the exit code."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
        try:
            run_key = _run_key(http)
            head = Sealed[LedgerHead].parse(_get(http, "/v1/ledger/head"))
            count = verify_ledger(_events(http, head.body.seq, stop), head, run_key)
        except httpx.HTTPStatusError as error:
            raise Unreachable(_not_a_coordinator(http, f"HTTP {error.response.status_code}")) from None
        except httpx.HTTPError as error:
            raise Unreachable(
                f"{url}: {type(error).__name__}: {error}; check the URL, and that the coordinator runs there"
            ) from None
        except Rejected as rejected:
            print(f"NOT GOOD: {rejected.detail}")
            return EXIT_FAILED
    print(f"good: {count} events, head {head.body.hash[:16]}, signed by run key {run_key[:16]}")
    return EXIT_OK


def _run_key(http: httpx.Client) -> str:
    try:
        return Info.parse(_get(http, "/v1/info")).run_key
    except Rejected as rejected:
        raise Unreachable(_not_a_coordinator(http, rejected.detail)) from None


def _not_a_coordinator(http: httpx.Client, answer: str) -> str:
    return f"{http.base_url} does not answer as a coordinator does ({answer}); check the URL"


def _events(http: httpx.Client, last_seq: int, stop: threading.Event) -> Iterator[LedgerEvent]:
    seq = 1
    while seq <= last_seq:
        if stop.is_set():
            raise Stopped(f"stopped at event {seq} of {last_seq}")
        events = _page(_get(http, f"/v1/ledger?from_seq={seq}&limit={PAGE}"), seq)
        if not events:
            raise Rejected(
                "request.conflict", f"the ledger ends before event {seq}; its head says {last_seq}"
            )
        yield from events[: last_seq - seq + 1]
        seq += len(events)


def _page(data: bytes, seq: int) -> list[LedgerEvent]:
    try:
        return [LedgerEvent.model_validate(event) for event in json.loads(data)]
    except (ValidationError, ValueError, TypeError):
        raise Rejected(
            "request.malformed", f"what stands at event {seq} or soon after is no ledger event"
        ) from None


def _get(http: httpx.Client, path: str) -> bytes:
    return http.get(path).raise_for_status().content
