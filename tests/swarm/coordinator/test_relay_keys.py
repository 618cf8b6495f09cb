"""Relays have their own keys: a report counts for its own URL, leases name two keys and the origin, and no URL before a trial."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_swarm import CONFIG, RELAY_URL, SmallSwarm, refusal, signed_client

from relay_reports import delegated_report
from shoal import shardcast
from shoal.net.http_client import SignedClient
from shoal.net.http_server import listen
from shoal.swarm.coordinator.membership import relay_trials, relays
from shoal.swarm.coordinator.membership.relay_trials import RelayTrials
from shoal.swarm.coordinator.rules.planning import serving
from shoal.wire.codes import Rejected
from shoal.wire.delegation import delegate_relay
from shoal.wire.keys import Key
from shoal.wire.messages import Announce, HeartbeatReply, Recorded, RelayReport, RelayView
from shoal.wire.record import Sealed
from shoal.wire.ticket import Ticket

HONEST, LIAR = "http://127.0.0.1:9801", "http://127.0.0.1:9802"


class OneRelay:
    """A relay with a key of its own, as honest as the test makes it."""

    def __init__(self, swarm: SmallSwarm, url: str) -> None:
        self.operator, self.url, self.key = swarm.relay.key, url, Key.generate()
        self.client: SignedClient = signed_client(swarm.url, self.key, swarm.transport())

    def report(self, *versions: int, url: str = "") -> HeartbeatReply:
        told = delegated_report(self.operator, self.url, versions, relay=self.key.public)
        told = told.model_copy(update={"url": url or self.url})
        return self.client.call("POST", "/v1/relays", told, HeartbeatReply)


def test_a_report_counts_for_the_relays_own_url_only(swarm: SmallSwarm) -> None:
    swarm.announce(0)
    honest, liar = OneRelay(swarm, HONEST), OneRelay(swarm, LIAR)
    honest.report(0)
    assert refusal(liar.report, url=HONEST).code == "request.not_allowed"
    no_delegation = RelayReport(url=HONEST, versions=())
    refused = refusal(liar.client.call, "POST", "/v1/relays", no_delegation, HeartbeatReply)
    assert refused.code == "request.not_allowed" and "shoal identity relay URL" in refused.problem.detail
    for signer in (liar.key, swarm.run_key):
        own = RelayReport(
            url=HONEST,
            versions=(),
            delegation=delegate_relay(signer, liar.key.public, HONEST, now_s=time.time()),
        )
        refused = refusal(liar.client.call, "POST", "/v1/relays", own, HeartbeatReply)
        assert refused.code == "request.bad_signature"
    assert [(relay.url, relay.versions) for relay in swarm.stats().relays] == [(HONEST, (0,))]


def test_a_node_is_no_relay_and_a_relay_no_node(swarm: SmallSwarm) -> None:
    node, relay = swarm.node(), OneRelay(swarm, HONEST)
    told = delegated_report(swarm.relay.key, LIAR, (0,), relay=node.id)
    refused = refusal(node.client.call, "POST", "/v1/relays", told, HeartbeatReply)
    assert refused.code == "request.not_allowed"
    relay.report()
    assert relay.client.call("POST", "/v1/tickets", None, Sealed[Ticket]).body.holder == relay.key.public
    assert (
        refusal(relay.client.call, "POST", "/v1/checks/claim", None, Recorded).code == "request.not_allowed"
    )


def test_a_newer_delegation_replaces_a_stolen_key(swarm: SmallSwarm) -> None:
    stolen, fresh = OneRelay(swarm, HONEST), OneRelay(swarm, HONEST)
    stolen.report()
    newer = RelayReport(
        url=HONEST,
        versions=(),
        delegation=delegate_relay(swarm.relay.key, fresh.key.public, HONEST, now_s=time.time()),
    )
    fresh.client.call("POST", "/v1/relays", newer, HeartbeatReply)
    assert refusal(stolen.report).code == "request.revoked"
    assert refusal(stolen.client.call, "POST", "/v1/tickets", None, Recorded).code == "request.unknown_key"
    given = [event.body["relay"] for event in swarm.events("relay.delegated")]
    assert given == [stolen.key.public, fresh.key.public]


def test_a_delegation_ends(swarm: SmallSwarm) -> None:
    relay = OneRelay(swarm, HONEST)
    relay.report()
    swarm.clock.ahead_s = 400 * 24 * 3600.0
    told = delegated_report(swarm.relay.key, HONEST, (), relay=relay.key.public)
    with (
        swarm.coordinator.transaction(relay.key.public) as tx,
        pytest.raises(Rejected, match="valid from"),
    ):
        relays.report(tx, swarm.coordinator, told)


def test_a_relay_gets_no_tickets_after_its_delegation_ended(swarm: SmallSwarm) -> None:
    relay = OneRelay(swarm, HONEST)

    def ask_ticket() -> str:
        return relay.client.call("POST", "/v1/tickets", None, Sealed[Ticket]).body.holder

    def report(*, days: float) -> HeartbeatReply:
        delegation = delegate_relay(relay.operator, relay.key.public, HONEST, now_s=swarm.clock(), days=days)
        told = RelayReport(url=HONEST, versions=(), delegation=delegation)
        return relay.client.call("POST", "/v1/relays", told, HeartbeatReply)

    report(days=10 / 86400)
    assert ask_ticket() == relay.key.public
    swarm.clock.ahead_s += 8 * swarm.config.heartbeat_s + 1
    refused = refusal(ask_ticket)
    assert refused.code == "request.revoked" and "valid delegation" in refused.problem.detail
    report(days=1)
    assert ask_ticket() == relay.key.public


def test_a_liar_is_never_the_only_source(swarm: SmallSwarm) -> None:
    swarm.announce(0)
    honest, liar = OneRelay(swarm, HONEST), OneRelay(swarm, LIAR)
    honest.report(0)
    liar.report(*range(100))
    swarm.announce(1)
    lease = swarm.node().lease()
    assert lease.relays == (LIAR, HONEST) and lease.origin == "http://127.0.0.1:9998"
    assert swarm.stats().origin == lease.origin
    claimed = {relay.url: relay.versions for relay in swarm.stats().relays}
    assert claimed == {HONEST: (0,), LIAR: (0, 1)}, "versions 2 to 99 are not announced"


def view(url: str, key: str, *versions: int) -> RelayView:
    return RelayView(url=url, liveness="live", versions=versions, bytes_sent=0, key=key)


def test_two_keys_are_named_where_there_are_two() -> None:
    assert serving((view("a", "k1", 0, 1), view("b", "k1", 0)), range(2)) == (("a",), (0, 1))
    assert serving((view("a", "k1", 1), view("b", "k1", 1), view("c", "k2")), range(2))[0] == ("a", "b", "c")
    assert serving((view("a", "k1", 1), view("c", "k2"), view("b", "k3", 0)), range(2))[0] == ("a", "b")
    assert serving((view("a", "k1", 1), view("b", "k2", 1), view("c", "k3", 0)), range(2))[0] == ("a", "b")
    assert serving((view("a", "k1", 7),), range(2)) == ((), ())


# -- trials -----------------------------------------------------------------------------------------------


@pytest.fixture
def trying(tmp_path: Path) -> Iterator[SmallSwarm]:
    swarm = SmallSwarm(tmp_path, CONFIG.model_copy(update={"try_relays": True}))
    yield swarm
    swarm.close()


def finish(trials: RelayTrials) -> int:
    threads = trials.poll()
    for thread in threads:
        thread.join(30)
    return len(threads)


@pytest.mark.parametrize("private", [False, True])
def test_no_lease_names_a_url_before_it_was_tried(trying: SmallSwarm, tmp_path: Path, private: bool) -> None:
    key, run = trying.run_key, trying.spec.run
    store = shardcast.VersionStore(tmp_path / "served", run=run, run_key=key.public)
    store.path(0).mkdir()
    (store.path(0) / "model.safetensors").write_bytes(bytes(5000))
    sealed = shardcast.publish(store.path(0), run=run, version=0, key=key)
    store.adopt(0)
    server = shardcast.RelayServer(store, listen("127.0.0.1", 0), private=private)
    server.start()
    try:
        body = Announce(manifest=sealed, origin_url="http://127.0.0.1:9998", report=None)
        trying.trainer.call("POST", "/v1/policies", body, Recorded)
        good, dead = (
            OneRelay(trying, f"http://127.0.0.1:{server.port}"),
            OneRelay(trying, "http://127.0.0.1:9"),
        )
        good.report(0)
        dead.report(0)
        node, trials = trying.node(), RelayTrials(trying.coordinator)
        assert "no relay is live" in refusal(node.lease).problem.detail
        assert "has not tried" in trying.stats().waiting_for
        assert finish(trials) == 2
        assert finish(trials) == 0, "no trial is due so soon"
        assert node.lease().relays == (good.url,)
        problems = {relay.url: relay.problem for relay in trying.stats().relays}
        assert problems[good.url] == "" and "cannot fetch version 0" in problems[dead.url]
        # A relay that stops answering is named until a second trial fails.
        store.close()
        server.close()
        for problem in ("", "cannot fetch"):
            trying.clock.ahead_s += relay_trials.TRY_EVERY_S
            good.report(0)
            finish(trials)
            found = {relay.url: relay.problem for relay in trying.stats().relays}[good.url]
            assert problem in found and bool(problem) == bool(found)
    finally:
        server.close()


def test_a_manifest_by_another_key_is_no_proof(trying: SmallSwarm, tmp_path: Path) -> None:
    other = Key.generate()
    store = shardcast.VersionStore(tmp_path / "served", run=trying.spec.run, run_key=other.public)
    store.path(0).mkdir()
    (store.path(0) / "model.safetensors").write_bytes(bytes(50))
    shardcast.publish(store.path(0), run=trying.spec.run, version=0, key=other)
    store.adopt(0)
    server = shardcast.RelayServer(store, listen("127.0.0.1", 0))
    server.start()
    try:
        trying.announce(0)
        liar = OneRelay(trying, f"http://127.0.0.1:{server.port}")
        liar.report(0)
        finish(RelayTrials(trying.coordinator))
        assert "is signed by" in trying.stats().relays[0].problem
    finally:
        store.close()
        server.close()


def test_a_new_key_at_the_same_url_is_tried_again(trying: SmallSwarm) -> None:
    trying.announce(0)
    first = OneRelay(trying, RELAY_URL)
    first.report(0)
    second = Key.generate()
    newer = delegate_relay(trying.relay.key, second.public, RELAY_URL, now_s=time.time())
    told = RelayReport(url=RELAY_URL, versions=(0,), delegation=newer)
    client = signed_client(trying.url, second, trying.transport())
    client.call("POST", "/v1/relays", told, HeartbeatReply)
    assert "has not tried" in trying.stats().relays[0].problem
