"""A private relay serves only clients with a ticket of the run, without asking the coordinator."""

import re
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest

from shoal.net.waiting import DeadlinePassed
from shoal.shardcast import Mirror, RelayApp, RelayChoice, VersionStore, fetch_manifest
from shoal.shardcast.relay.relay_app import MAX_CACHED_TICKETS, TicketChecker
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.record import seal
from shoal.wire.ticket import CLOCK_SKEW_S, TICKET_S, Ticket, check_ticket, to_header

PAGE = Path(__file__).parents[2] / "docs" / "wire" / "ticket.md"


def test_the_vector() -> None:
    body, signature, header = re.findall(
        r"```(?:json)?\n(.*?)\n```", PAGE.read_text().split("## Golden vector")[1], re.DOTALL
    )
    key, holder = Key.from_seed(bytes(range(32))), Key.from_seed(bytes(32))
    sealed = seal(Ticket(run="golden", holder=holder.public, expires_at_s=1735690500.5), key)
    assert (sealed.body.canonical().decode(), sealed.signature, to_header(sealed)) == (
        body,
        signature,
        header,
    )
    assert check_ticket(header, run="golden", run_key=key.public, now_s=1735690500.0) == sealed.body


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda header: "", "request.unsigned"),
        (lambda header: "Bearer " + header.split()[1], "request.unsigned"),
        (lambda header: header + "!", "request.malformed"),
        (lambda header: "Shoal-Ticket e30=", "request.malformed"),
        (lambda header: header[:40] + ("A" if header[40] != "A" else "B") + header[41:], None),
    ],
)
def test_a_damaged_ticket_is_refused(key: Key, kit: Any, change: Any, code: str | None) -> None:
    checker = TicketChecker(run=kit.RUN, run_key=key.public)
    with pytest.raises(Rejected) as caught:
        checker.check({"authorization": change(kit.ticket(key))})
    assert code is None or caught.value.code == code


def test_another_run_another_key_and_an_old_ticket_are_refused(key: Key, kit: Any) -> None:
    checker = TicketChecker(run=kit.RUN, run_key=key.public)
    for header, code in (
        (kit.ticket(key, run="other"), "request.bad_signature"),
        (kit.ticket(Key.generate()), "request.bad_signature"),
        (kit.ticket(key, expires_in_s=-CLOCK_SKEW_S - 1), "request.expired"),
    ):
        with pytest.raises(Rejected) as caught:
            checker.check({"authorization": header})
        assert caught.value.code == code


def test_a_valid_ticket_is_cached_until_it_expires(key: Key, kit: Any) -> None:
    now_s = [1000.0]
    checker = TicketChecker(run=kit.RUN, run_key=key.public, clock=lambda: now_s[0])
    sealed = seal(Ticket(run=kit.RUN, holder=key.public, expires_at_s=1000.0 + TICKET_S), key)
    for _ in range(2):
        checker.check({"authorization": to_header(sealed)})
    assert list(checker._valid_until_s) == [to_header(sealed)]
    now_s[0] += TICKET_S + CLOCK_SKEW_S + 1
    with pytest.raises(Rejected, match="expired"):
        checker.check({"authorization": to_header(sealed)})


def test_the_cache_of_tickets_is_bounded(key: Key, kit: Any) -> None:
    checker = TicketChecker(run=kit.RUN, run_key=key.public)
    checker._valid_until_s = {str(index): 0.0 for index in range(MAX_CACHED_TICKETS)}
    checker.check({"authorization": kit.ticket(key)})  # expired ones are removed
    assert len(checker._valid_until_s) == 1
    checker._valid_until_s = {str(index): float("inf") for index in range(MAX_CACHED_TICKETS)}
    checker.check({"authorization": kit.ticket(key)})  # verified each time
    assert len(checker._valid_until_s) == MAX_CACHED_TICKETS


def test_without_a_ticket_only_the_health_is_served(
    origin: Any, kit: Any, serve: Any, http: httpx2.Client
) -> None:
    origin.publish(7, kit.random_files())
    url = serve(RelayApp(origin.store, private=True))
    for path in ("/manifests/7", "/manifests/latest", "/versions/7/config.json", "/versions/8/x", "/nothing"):
        answer = http.get(url + path)
        assert (answer.status_code, answer.json()["code"]) == (401, "request.unsigned"), path
    assert http.get(f"{url}/healthz").status_code == 200
    assert http.get(f"{url}/ticket", headers={"Authorization": kit.ticket(origin.key)}).status_code == 204


def test_a_ticket_is_needed_and_the_error_says_so(
    origin: Any, kit: Any, serve: Any, fetch: Any, key: Key, log: Log, stop: threading.Event
) -> None:
    sealed = origin.publish(7, kit.random_files())
    url = serve(RelayApp(origin.store, private=True))
    with pytest.raises(DeadlinePassed, match="send a ticket"):
        fetch(sealed, [url], deadline_s=0.5)
    choice = RelayChoice([url], ticket=lambda: kit.ticket(key))
    terms: dict[str, Any] = {"run_key": key.public, "log": log, "stop": stop, "deadline_s": 30}
    assert fetch_manifest(None, choice, **terms) == sealed
    assert kit.file_bytes(fetch(sealed, choice)) == kit.random_files()


def test_relays_show_tickets_to_each_other(
    origin: Any, kit: Any, serve: Any, key: Key, log: Log, stop: threading.Event, tmp_path: Path
) -> None:
    origin.publish(7, kit.random_files())
    url = serve(RelayApp(origin.store, private=True))
    store = VersionStore(tmp_path / "relay", run=kit.RUN, run_key=key.public)
    mirror = Mirror(store, [lambda: url], log=log, stop=stop, ticket=lambda: kit.ticket(key))
    mirror.start()
    kit.eventually(lambda: store.complete() == (7,), "the version")
    stop.set()
    mirror.close()
