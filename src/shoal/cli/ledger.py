"""`shoal ledger verify`: recompute a run's whole ledger and compare with the head its key signed."""

import json
from collections.abc import Iterator

import httpx

from shoal.cli.supervise import EXIT_FAILED, EXIT_OK
from shoal.net.client import Unreachable
from shoal.wire.codes import Rejected
from shoal.wire.ledger import LedgerEvent, LedgerHead, verify_chain
from shoal.wire.messages import Info
from shoal.wire.record import Sealed

PAGE = 500


def verify_ledger(url: str) -> int:
    with httpx.Client(base_url=url, timeout=30.0) as http:
        try:
            info = Info.parse(_get(http, "/v1/info"))
            head = Sealed[LedgerHead].parse(_get(http, "/v1/ledger/head")).open(info.run_key)
            count, last = verify_chain(_events(http, head.seq))
        except httpx.HTTPError as error:
            raise Unreachable(
                f"{url}: {type(error).__name__}: {error}; is the coordinator running there?"
            ) from None
        except Rejected as rejected:
            print(f"NOT GOOD: {rejected.detail}")
            return EXIT_FAILED
    if (count, last) != (head.seq, head.hash):
        print(
            f"NOT GOOD: {count} events end in {last[:16]}, the signed head says {head.seq} events and {head.hash[:16]}"
        )
        return EXIT_FAILED
    print(f"good: {count} events, head {last[:16]}, signed by run key {info.run_key[:16]}")
    return EXIT_OK


def _events(http: httpx.Client, last_seq: int) -> Iterator[LedgerEvent]:
    seq = 1
    while seq <= last_seq:
        page = json.loads(_get(http, f"/v1/ledger?from_seq={seq}&limit={PAGE}"))
        events = [LedgerEvent.model_validate(event) for event in page]
        if not events:
            raise Rejected(
                "request.conflict", f"the ledger ends before event {seq}; its head says {last_seq}"
            )
        yield from events[: last_seq - seq + 1]
        seq = events[-1].seq + 1


def _get(http: httpx.Client, path: str) -> bytes:
    return http.get(path).raise_for_status().content
