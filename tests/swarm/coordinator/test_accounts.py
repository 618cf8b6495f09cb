"""Accounts of lost leases: the rules, and what a real coordinator makes of nodes, owners and networks that let leases go."""

import contextlib
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_swarm import CONFIG, SPEC, Node, SmallSwarm, refusal

from shoal.cli.run.notices import LogFollower
from shoal.net.http_client import Refused
from shoal.net.rate_limit import Buckets, network_prefix
from shoal.swarm.coordinator.housekeeping import tidy
from shoal.swarm.coordinator.http import router
from shoal.swarm.coordinator.http.router import MOST_ENROLMENTS, MOST_SESSIONS, network_of
from shoal.swarm.coordinator.leases.lease_rows import find_lease
from shoal.swarm.coordinator.leases.lifecycle import void
from shoal.swarm.coordinator.ledger_replay import replay
from shoal.swarm.coordinator.membership import accounts
from shoal.swarm.coordinator.membership.accounts import ACCOUNTS
from shoal.swarm.coordinator.rules.lease_account import (
    NETWORK,
    NODE,
    OWNER,
    AccountTerms,
    LeaseAccount,
    after_delivery,
    after_loss,
    decayed,
    delivers_more,
    most_open,
    wait_s,
    weight_of,
)
from shoal.wire.delegation import delegate
from shoal.wire.keys import Key
from shoal.wire.lease import Lease
from shoal.wire.messages import Abandon, Enrol, Enrolled, LeaseStatus, Leave, OpenSession, Recorded, Session
from shoal.wire.run_spec import PROTOCOL

HALF_LIFE_S = 100.0
NEVER = 1e-6
"""A rate at which no token comes back during a test."""


def abandon(node: Node, lease: Lease) -> LeaseStatus:
    ask = Abandon(epoch=node.epoch, reason="I do not like these")
    return node.client.call("POST", f"/v1/leases/{lease.lease_id}/abandon", ask, LeaseStatus)


def give_back_until_refused(node: Node, most: int = 60) -> tuple[int, Refused]:
    """Returns how many leases the node could let go in a row, and the refusal of the next."""
    for taken in range(most):
        try:
            lease = node.lease()
        except Refused as refused:
            return taken, refused
        abandon(node, lease)
    raise AssertionError(f"{most} leases were let go without a refusal")


# -- rules ------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lost_share=st.floats(0, 0.1),
    lease_s=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_an_honest_node_that_loses_a_tenth_is_never_delayed(
    seed: int, lost_share: float, lease_s: float
) -> None:
    draw, account, now_s = random.Random(seed), LeaseAccount(), 0.0
    for _ in range(1000):
        now_s += lease_s
        account = decayed(account, now_s, 1800.0)
        assert wait_s(account, NODE, 1800.0) == 0.0
        lost = draw.random() < lost_share
        account = after_loss(account, 1.0) if lost else after_delivery(account, NODE)


def test_one_loss_does_not_take_the_second_lease_of_a_node() -> None:
    assert most_open(after_loss(LeaseAccount(), 1.0), NODE, usual=2) == 2
    assert most_open(LeaseAccount(lost=4), NODE, usual=2) == 1
    assert most_open(LeaseAccount(lost=100), NODE, usual=2) == 1


@pytest.mark.parametrize(
    ("code", "leases"),
    [
        ("void.abandoned", 8),
        ("void.expired", 8),
        ("void.stale", 8),
        ("void.uncertain", 8),
        ("reject.malformed_file", 8),
        ("void.infra", 15),
    ],
)
def test_losses_by_code(code: str, leases: int) -> None:
    account, taken = LeaseAccount(), 0
    while wait_s(account, NODE, HALF_LIFE_S) == 0.0:
        account, taken = after_loss(account, weight_of(code)), taken + 1
    assert taken == leases


def test_accepted_work_and_orders_of_the_operator_are_no_losses() -> None:
    assert weight_of("accepted") == weight_of("void.operator") == 0.0


@given(lost=st.floats(8, 1e6))
def test_the_wait_is_over_when_it_was_said_to_be(lost: float) -> None:
    account = LeaseAccount(lost=lost)
    wait = wait_s(account, NODE, HALF_LIFE_S)
    assert wait > 0
    assert wait_s(decayed(account, wait + 0.01, HALF_LIFE_S), NODE, HALF_LIFE_S) == 0.0
    assert wait_s(decayed(account, 0.9 * wait, HALF_LIFE_S), NODE, HALF_LIFE_S) > 0.0


def test_a_key_that_only_lets_go_gets_few_leases_an_hour() -> None:
    account, taken = LeaseAccount(), 0
    for second in range(3600):
        account = decayed(account, float(second), 1800.0)
        if wait_s(account, NODE, 1800.0) == 0.0:
            account, taken = after_loss(account, 1.0), taken + 1
    assert taken <= 20


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(2, 300))
def test_a_university_of_new_nodes_is_not_locked_out(seed: int, nodes: int) -> None:
    """All nodes are new and in one network; each round takes a lease's time and loses a tenth of the leases."""
    draw, network, now_s = random.Random(seed), LeaseAccount(), 0.0
    own = [LeaseAccount()] * nodes
    accepted = [0] * nodes
    for _ in range(12):
        now_s += 30.0
        network = decayed(network, now_s, 1800.0)
        assert wait_s(network, NETWORK, 1800.0) == 0.0
        proven = [delivers_more(own[n], accepted[n]) for n in range(nodes)]
        new = [n for n in range(nodes) if not proven[n]][: most_open(network, NETWORK)]
        for n in [n for n in range(nodes) if proven[n]] + new:
            own[n] = decayed(own[n], now_s, 1800.0)
            assert wait_s(own[n], NODE, 1800.0) == 0.0
            if draw.random() < 0.1:
                own[n], network = after_loss(own[n], 1.0), after_loss(network, 1.0)
            else:
                own[n], network = after_delivery(own[n], NODE), after_delivery(network, NETWORK)
                accepted[n] += 1
    assert min(accepted) > 0


@pytest.mark.parametrize("terms", [OWNER, NETWORK])
def test_free_losses_grow_with_deliveries(terms: AccountTerms) -> None:
    account = LeaseAccount(lost=100.0)
    assert wait_s(account, terms, HALF_LIFE_S) > 0.0
    assert wait_s(LeaseAccount(lost=100.0, delivered=200.0), terms, HALF_LIFE_S) == 0.0
    assert most_open(LeaseAccount(delivered=200.0), terms) == 264


@pytest.mark.parametrize(
    ("address", "prefix"),
    [
        ("192.0.2.77", "192.0.2.0/24"),
        ("::ffff:192.0.2.77", "192.0.2.0/24"),
        ("2001:db8:1:2::3", "2001:db8:1::/48"),
        ("fe80::1%eth0", "fe80::/48"),
        ("testclient", "testclient"),
    ],
)
def test_network_prefix(address: str, prefix: str) -> None:
    assert network_prefix(address) == prefix


# -- a real coordinator -----------------------------------------------------------------------------------

ROOMY = CONFIG.model_copy(update={"groups_per_step": 400, "loss_half_life_s": HALF_LIFE_S})


@pytest.fixture
def roomy(tmp_path: Path) -> Any:
    """A run that wants more work than any test does."""
    swarm = SmallSwarm(tmp_path, ROOMY)
    swarm.start()
    yield swarm
    swarm.close()


def test_leases_given_back_are_limited_and_the_answer_says_why(roomy: SmallSwarm) -> None:
    walker, honest = roomy.node(), roomy.node()
    taken, refused = give_back_until_refused(walker)
    assert taken == 8
    assert refused.code == "request.too_early"
    assert "ended without valid work: 8.0 not made up for" in refused.problem.detail
    # 8 must decay to 7: 100 s * log2(8 / 7)
    assert refused.problem.retry_after_s == pytest.approx(19.3, abs=0.5)
    honest.lease()
    roomy.clock.ahead_s += 20
    roomy.work(walker)
    # One loss has decayed, another is made up for by the accepted work.
    assert give_back_until_refused(walker)[0] == 2


def test_the_operator_reads_that_uncertain_work_locks_a_node_out(
    roomy: SmallSwarm, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """In the coordinator's log, from there in a notice, and in what `shoal top` shows: the node cannot know the cause."""
    node = roomy.node()
    for _ in range(8):
        assert "gets no lease" not in caplog.text
        roomy.work(node, "void.uncertain")
    assert refusal(node.lease).code == "request.too_early"
    (line,) = (line for line in caplog.messages if "gets no lease for" in line)
    assert node.id[:16] in line and "calibration" in line and "shoal toploc prove" in line
    follower = LogFollower(tmp_path)
    (tmp_path / "coordinator.log").write_text(f"09:00:00 W {line}\n")
    assert "shoal toploc prove" in follower.new_warnings()[0]
    assert "the newest 8 verdicts are void.uncertain" in roomy.stats().waiting_for
    roomy.work(roomy.node())
    assert "void.uncertain" not in roomy.stats().waiting_for


def test_losses_survive_a_restart(roomy: SmallSwarm) -> None:
    walker = roomy.node()
    give_back_until_refused(walker)
    roomy.reopen()
    roomy.relay_up()
    assert refusal(walker.lease).code == "request.too_early"


def test_two_coordinators_on_one_database_share_the_accounts(tmp_path: Path, postgres: Any) -> None:
    config = ROOMY.model_copy(update={"database": postgres.fresh()})
    left, right = (SmallSwarm(tmp_path, config) for _ in range(2))
    left.start()
    here = left.node()
    there = Node(right.url, here.client.key, right.transport())
    there.epoch = here.epoch
    for turn in range(8):
        node = (here, there)[turn % 2]
        abandon(node, node.lease())
    for node in (here, there):
        # Eight, less what has decayed since: on a slow machine a tenth or two. Each has four of its own.
        assert re.search(r"\b[678]\.\d not made up for", refusal(node.lease).problem.detail)
    there.client.close()
    left.close()
    right.close()


def test_every_way_to_lose_a_lease_is_counted(roomy: SmallSwarm) -> None:
    node = roomy.node()
    expected = 0.0
    for code, weight in (("void.uncertain", 1.0), ("void.infra", 0.5), ("reject.malformed_file", 1.0)):
        roomy.work(node, code)
        expected += weight
        assert lost(roomy, f"node {node.id}") == pytest.approx(expected, rel=0.01)
    lease = node.lease()
    with roomy.coordinator.transaction() as tx:
        void(tx, roomy.coordinator, find_lease(tx.db, lease.lease_id), "void.expired", "no submission")
    assert lost(roomy, f"node {node.id}") == pytest.approx(expected + 1, rel=0.01)
    lease = node.lease()
    for version in (1, 2):
        roomy.announce(version)
    node.deliver(lease)
    assert node.status(lease).code == "void.stale"
    again = node.lease()
    assert (again.unit, again.seed) == (lease.unit, lease.seed)
    for name in (f"node {node.id}", "network 127.0.0.0/24"):
        assert lost(roomy, name) == pytest.approx(expected + 2, rel=0.01)


def lost(swarm: SmallSwarm, name: str) -> float:
    with swarm.coordinator.transaction() as tx:
        row = ACCOUNTS.find(tx.db, name)
    return 0.0 if row is None else float(row.lost)


def test_new_keys_of_one_network_share_its_losses(roomy: SmallSwarm) -> None:
    """32 leases, however many keys. Nodes that deliver and other networks do not notice."""
    neighbour = roomy.node("198.51.100.7")
    roomy.work(neighbour)
    taken = 0
    while True:
        key = roomy.node("198.51.100.9")
        more, refused = give_back_until_refused(key)
        taken += more
        if "network" in refused.problem.detail:
            break
    assert 32 <= taken <= 34
    assert "nodes in network 198.51.100.0/24" in refused.problem.detail
    assert refused.problem.retry_after_s
    roomy.work(neighbour)
    roomy.node("198.51.101.9").lease()
    roomy.node("2001:db8::1").lease()


def test_new_keys_of_one_network_hold_few_leases(roomy: SmallSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "NETWORK", replace(NETWORK, open=4))
    hoarders = [roomy.node("198.51.100.9") for _ in range(5)]
    leases = [node.lease() for node in hoarders[:4]]
    refused = refusal(hoarders[4].lease)
    assert "4 leases of new nodes in network 198.51.100.0/24 wait" in refused.problem.detail
    assert refused.problem.retry_after_s == roomy.config.lease_s / 20
    assert hoarders[0].lease() == leases[0]  # what it holds is given again
    roomy.node("198.51.101.9").lease()
    hoarders[0].deliver(leases[0])
    refused = refusal(hoarders[4].lease)  # the submission may be junk
    assert "4 leases of new nodes in network 198.51.100.0/24 wait" in refused.problem.detail
    roomy.claim()
    roomy.verdict(leases[0])
    hoarders[4].lease()


def test_a_proxy_hides_networks_so_they_have_no_account() -> None:
    header = [(b"x-forwarded-for", b"203.0.113.9")]
    assert network_of({"client": ("10.0.0.2", 1), "headers": header}) == ""
    assert network_of({"client": ("10.0.0.2", 1), "headers": []}) == "10.0.0.0/24"
    # A client on the open network cannot switch its account off, nor choose another.
    assert network_of({"client": ("8.8.8.8", 1), "headers": header}) == "8.8.8.0/24"


class Forwarding(httpx2.BaseTransport):
    """A reverse proxy: passes requests on with the client's address in a header."""

    def __init__(self, inner: httpx2.BaseTransport, address: str) -> None:
        self._inner, self._address = inner, address

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["X-Forwarded-For"] = self._address
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._inner.close()


def test_networks_behind_a_proxy_on_this_machine_have_their_own_accounts(roomy: SmallSwarm) -> None:
    """Otherwise all clients of the proxy are one network, and strangers that let leases go keep every new node out."""

    def behind_proxy(address: str) -> Node:
        return Node(roomy.url, Key.generate(), Forwarding(roomy.transport(), address)).join()

    refused = None
    while refused is None or "network" not in refused.problem.detail:
        _, refused = give_back_until_refused(behind_proxy("198.51.100.9"))
    assert "nodes in network 198.51.100.0/24" in refused.problem.detail
    behind_proxy("203.0.113.5").lease()


def owned_node(swarm: SmallSwarm, owner: Key, address: str) -> Node:
    key = Key.generate()
    node = Node(swarm.url, key, swarm.transport(address))
    swarm._nodes.append(node)
    ask = Enrol(protocol=PROTOCOL, software="test", delegation=delegate(owner, key.public, now_s=time.time()))
    node.client.call("POST", "/v1/enrol", ask, Enrolled)
    node.epoch = node.client.call("POST", "/v1/session", OpenSession(software="test"), Session).epoch
    return node


def test_nodes_of_one_owner_share_its_losses_wherever_they_are(roomy: SmallSwarm) -> None:
    owner, taken = Key.generate(), 0
    for number in range(3):
        node = owned_node(roomy, owner, f"198.51.{number}.1")
        more, refused = give_back_until_refused(node)
        taken += more
    assert taken == 16
    assert f"the nodes of owner {owner.public[:16]}" in refused.problem.detail
    roomy.node("198.51.0.1").lease()


def test_accounts_of_quiet_networks_are_deleted(roomy: SmallSwarm) -> None:
    node = roomy.node()
    abandon(node, node.lease())
    assert lost(roomy, "network 127.0.0.0/24") > 0
    roomy.clock.ahead_s += 21 * HALF_LIFE_S
    tidy(roomy.coordinator)
    assert lost(roomy, "network 127.0.0.0/24") == 0
    assert lost(roomy, f"node {node.id}") > 0


# -- stale versions ---------------------------------------------------------------------------------------


def test_a_stale_version_is_refused_while_a_newer_leased_one_is_not(tmp_path: Path) -> None:
    """Otherwise a node lets go of its seed by submitting junk in the name of its oldest version."""
    swarm = SmallSwarm(tmp_path, ROOMY.model_copy(update={"stale": "drop"}), SPEC)
    swarm.start()
    swarm.announce(1)
    node = swarm.node()
    lease = node.lease()
    assert [policy.version for policy in lease.policies] == [0, 1]
    swarm.announce(2)
    node.upload(lease, b"junk")
    refused = refusal(lambda: node.submit(lease, b"junk", version=0))
    assert refused.code == "request.conflict"
    assert "version 0 is stale, 2 behind 2" in refused.problem.detail
    assert "with version 1 and submit" in refused.problem.detail
    assert node.status(lease).code is None
    assert lost(swarm, f"node {node.id}") == 0.0
    node.upload(lease, b"work")
    node.submit(lease, b"work", version=1)
    swarm.claim()
    assert swarm.verdict(lease).state == "accepted"
    replay(swarm.ledger())
    swarm.close()


# -- the ledger is never cut ------------------------------------------------------------------------------


def test_a_key_cannot_fill_the_ledger_with_sessions(swarm: SmallSwarm) -> None:
    """Each new session, and each time a node leaves, is an event of the ledger."""
    node = swarm.node()
    refused = None
    for _ in range(100):
        try:
            node.epoch = node.client.call("POST", "/v1/session", OpenSession(software="test"), Session).epoch
            node.client.call("POST", "/v1/leave", Leave(epoch=node.epoch), Recorded)
        except Refused as error:
            refused = error
            break
    assert refused is not None and refused.code == "request.too_many"
    assert len(swarm.events("session.opened")) <= MOST_SESSIONS
    swarm.clock.ahead_s += 31  # one more is allowed then
    node.client.call("POST", "/v1/session", OpenSession(software="test"), Session)


def test_nodes_behind_a_proxy_cannot_fill_the_ledger_with_keys(
    swarm: SmallSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client on this machine can pretend to be a proxy, which hides its network."""
    monkeypatch.setattr(router, "network_of", lambda scope: "")
    monkeypatch.setattr(swarm.app._router, "_proxied", Buckets(rate=NEVER, burst=5.0))
    with pytest.raises(Refused) as refused:
        for _ in range(20):
            swarm.node()
    assert refused.value.code == "request.too_many"
    assert "behind a proxy" in str(refused.value)


def test_a_long_name_of_the_software_is_refused(swarm: SmallSwarm) -> None:
    """The ledger keeps it for every key that enrols."""
    long = Enrol.model_construct(protocol=PROTOCOL, software="x" * 65)
    refused = refusal(swarm.stranger().client.call, "POST", "/v1/enrol", long, Enrolled)
    assert refused.code == "request.malformed"
    assert swarm.events("node.enrolled") == []


def test_clients_that_name_many_networks_cannot_fill_the_ledger_with_keys(
    swarm: SmallSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client on this machine can pretend to be a proxy for any address."""
    monkeypatch.setattr(swarm.app._router, "_proxied", Buckets(rate=NEVER, burst=5.0))
    with pytest.raises(Refused) as refused:
        for number in range(20):
            Node(swarm.url, Key.generate(), Forwarding(swarm.transport(), f"203.0.{number}.1")).join()
    assert refused.value.code == "request.too_many"
    assert "behind a proxy" in str(refused.value)


def test_a_network_cannot_fill_the_ledger_with_keys(
    swarm: SmallSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm.app._router, "_enrolments", Buckets(rate=NEVER, burst=5.0))
    with pytest.raises(Refused) as refused:
        for _ in range(20):
            swarm.node("198.51.100.7")
    assert refused.value.code == "request.too_many"
    assert len(swarm.events("node.enrolled")) == 5
    swarm.node("203.0.113.7")


def test_many_keys_of_one_network_cannot_fill_the_ledger_with_sessions(
    swarm: SmallSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm.app._router, "_network_sessions", Buckets(rate=NEVER, burst=MOST_ENROLMENTS))
    keys = [swarm.node("8.8.8.8") for _ in range(8)]
    for node in keys:
        with contextlib.suppress(Refused):
            for _ in range(int(MOST_SESSIONS)):
                node.client.call("POST", "/v1/session", OpenSession(software="test"), Session)
    assert len(swarm.events("session.opened")) <= MOST_ENROLMENTS < len(keys) * MOST_SESSIONS
    swarm.node("9.9.9.9")
