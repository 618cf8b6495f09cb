"""Attackers as real clients against a real swarm: throw-away keys, framing, dropped seeds, kept held-out work, leases given back, junk,
event streams. Nothing of theirs is trained on, nobody honest is blamed, and the run goes on.

One swarm for the whole file: coordinator, trainer, relay, validator and an honest worker, all processes of their own. Attackers come from
other addresses of the loopback network, as strangers do.
"""

import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
import torch
from liar_client import Liar, Made, sha256_of
from swarm_processes import Swarm

from relay_reports import delegated_report
from shoal.net.http_client import Refused, SignedClient
from shoal.rollout.adversary.lies import fabricate
from shoal.telemetry import Log
from shoal.wire.codes import ACCEPTED
from shoal.wire.keys import Key
from shoal.wire.lease import Lease
from shoal.wire.ledger import verify_chain
from shoal.wire.messages import Abandon, HeartbeatReply, LeaseStatus, Leave, OpenSession, Recorded, Session
from shoal.wire.rollouts import encode

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

Enter = Callable[[], Liar]
STREAMS = 16
"""Event streams that one address may have."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    torch.set_num_threads(1)
    swarm = Swarm(
        tmp_path_factory.mktemp("attackers"),
        last_version=100_000,  # ends with the tests
        relays=1,
        workers=1,
        deadline_s=300.0,
        settings={"heartbeat_s": 5.0, "claim_s": 30.0},
    )
    with swarm:
        swarm.wait_for_version(1, deadline_s=240.0)
        yield swarm


NETWORKS = (f"127.{number}.0.1" for number in itertools.count(2))


@pytest.fixture
def enter(swarm: Swarm, tmp_path: Path) -> Iterator[Enter]:
    """Returns a function that enrols a new node from a network of its own at each call."""
    liars: list[Liar] = []

    def enter() -> Liar:
        liars.append(Liar(swarm.url, tmp_path / f"node-{len(liars)}", address=next(NETWORKS)))
        return liars[-1]

    yield enter
    for liar in liars:
        liar.close()


def fabricated_file(node: Liar, lease: Lease) -> Made:
    version = lease.policies[-1].version
    return Made(encode(fabricate(lease, version, node.tokenizer(lease))), version)


def give_back(node: Liar, lease: Lease) -> None:
    body = Abandon(epoch=node.epoch, reason="no")
    node.client.call("POST", f"/v1/leases/{lease.lease_id}/abandon", body, LeaseStatus)


def ask_lease(node: Liar) -> Lease:
    """Returns a lease. Asks again while the run has no work; raises Refused if the node's account is the reason."""
    give_up_s = time.monotonic() + 120.0
    while True:
        try:
            return node.ask_lease_once()
        except Refused as refused:
            if "without valid work" in refused.problem.detail or time.monotonic() > give_up_s:
                raise
        time.sleep(0.2)


def test_throwaway_keys_train_nothing(swarm: Swarm, enter: Enter) -> None:
    """Three honest submissions, then files made without a model, then the next key, which lies at once."""
    lies: list[str] = []

    def lie(node: Liar, lease: Lease) -> Made:
        lies.append(lease.lease_id)
        return fabricated_file(node, lease)

    patient = enter()
    for _ in range(3):
        assert patient.deliver(patient.made).code == ACCEPTED
    for node in (patient, enter(), enter()):
        status = node.deliver(lambda lease, node=node: lie(node, lease))  # type: ignore[misc]
        assert status.code == "reject.wrong_computation"
    swarm.wait_for_versions(3)
    assert swarm.trained_leases().isdisjoint(lies)


def test_an_honest_node_is_not_framed(enter: Enter) -> None:
    """An attacker submits the victim's own bytes before the victim does."""
    victim, attacker = enter(), enter()
    for _ in range(4):
        lease = victim.session.ask_lease()
        made = victim.made(lease)
        status = attacker.deliver(lambda its, made=made: Made(made.data, its.policies[-1].version))  # type: ignore[misc]
        assert status.code == "reject.wrong_lease"
        victim.session.deliver(lease, made.data, policy_version=made.version)
        found = victim.verdict_on(lease)
        if found.code != "void.stale":
            break
        attacker = enter()
    assert found.code == ACCEPTED


def test_no_way_of_letting_a_lease_go_buys_another_seed(swarm: Swarm, enter: Enter) -> None:
    node = enter()
    lease = node.session.ask_lease()
    seeds = {lease.seed}
    give_back(node, lease)
    lease = node.session.ask_lease()
    seeds.add(lease.seed)
    swarm.wait_for_version(lease.policies[0].version + 4, deadline_s=240.0)
    junk = b"stale by choice"
    with contextlib.suppress(
        Refused
    ):  # a stale version is refused while a newer one of the lease is not stale
        path = node.ask_upload(lease.lease_id, len(junk), sha256_of(junk)).path
        node.client.put_bytes(path, junk)
        node.submit(lease.lease_id, junk, lease.policies[0].version)
    give_up_s = time.monotonic() + 120
    while time.monotonic() < give_up_s:
        with contextlib.suppress(Refused):  # it has to wait for its next lease
            after = node.ask_lease_once()
            if after.lease_id != lease.lease_id:
                break
        time.sleep(0.5)
    assert after.lease_id != lease.lease_id
    assert {*seeds, after.seed} == {lease.seed}
    stored = swarm.folder / "coordinator" / "objects" / sha256_of(junk)[:2] / sha256_of(junk)
    swarm.wait_for("the junk to be deleted", lambda: not stored.exists())


def test_keys_that_never_delivered_keep_no_held_out_work(swarm: Swarm, enter: Enter) -> None:
    """They take and keep what they are given over the evaluation of a version, which is finished all the same."""
    keys = [enter() for _ in range(4)]
    seen = swarm.stats()
    assert seen is not None and seen.newest_version is not None
    evaluated = 10 * (seen.newest_version // 10 + 1)
    purposes = set()

    def finished() -> bool:
        for key in keys:
            with contextlib.suppress(Refused):
                purposes.add(key.ask_lease_once().purpose)
        stats = swarm.stats()
        return stats is not None and any(
            one.version >= evaluated and one.complete for one in stats.evaluations
        )

    swarm.wait_for(f"the evaluation of version {evaluated}", finished, deadline_s=240.0, pause_s=1.0)
    assert purposes == {"train"}


def test_a_key_cannot_take_leases_and_give_them_back_for_ever(enter: Enter) -> None:
    node, taken = enter(), 0
    with pytest.raises(Refused) as refused:
        for _ in range(100):
            lease = ask_lease(node)
            taken += 1
            give_back(node, lease)
    assert "without valid work" in refused.value.problem.detail
    assert 1 <= taken <= 16


def test_neither_a_restart_nor_leaving_buys_another_seed(enter: Enter) -> None:
    node = enter()
    lease = ask_lease(node)
    node.epoch = node.client.call("POST", "/v1/session", OpenSession(software="test"), Session).epoch
    assert ask_lease(node).lease_id == lease.lease_id
    node.client.call("POST", "/v1/leave", Leave(epoch=node.epoch), Recorded)
    give_back(node, lease)
    node.epoch = node.client.call("POST", "/v1/session", OpenSession(software="test"), Session).epoch
    again = ask_lease(node)
    assert again.lease_id != lease.lease_id and again.seed == lease.seed


def test_junk_of_the_largest_size_is_refused(enter: Enter) -> None:
    node = enter()
    lease = node.session.ask_lease()
    junk = secrets.token_bytes(lease.max_bytes)
    with pytest.raises(Refused) as refused:
        node.ask_upload(lease.lease_id, len(junk) + 1, sha256_of(junk))
    assert refused.value.code == "request.too_large"
    node.session.deliver(lease, junk, policy_version=lease.policies[-1].version)
    assert node.verdict_on(lease).code in ("reject.malformed_file", "void.stale")


def test_a_void_copy_does_not_delete_an_accepted_file(swarm: Swarm, enter: Enter) -> None:
    """A node uploads its own accepted file again under another lease and gives that lease back."""
    node = enter()
    files: list[bytes] = []

    def keep(lease: Lease) -> Made:
        made = node.made(lease)
        files.append(made.data)
        return made

    assert node.deliver(keep).code == ACCEPTED
    lease, data = node.session.ask_lease(), files[-1]
    node.client.put_upload(node.ask_upload(lease.lease_id, len(data), sha256_of(data)), data)
    give_back(node, lease)
    swarm.wait_for_versions(3)
    assert (swarm.folder / "coordinator" / "objects" / sha256_of(data)[:2] / sha256_of(data)).exists()


def test_a_key_cannot_begin_sessions_without_end(enter: Enter) -> None:
    node = enter()
    with pytest.raises(Refused) as refused:
        for _ in range(1000):
            node.client.call("POST", "/v1/session", OpenSession(software="test"), Session)
    assert refused.value.code == "request.too_many"


def test_one_address_does_not_take_all_event_streams(swarm: Swarm) -> None:
    def client(address: str) -> httpx2.Client:
        transport = httpx2.HTTPTransport(verify=False, local_address=address)
        return httpx2.Client(base_url=swarm.url, transport=transport, timeout=30.0)

    with client("127.200.0.1") as greedy, client("127.201.0.1") as viewer, contextlib.ExitStack() as streams:
        codes = []
        for _ in range(STREAMS + 4):
            codes.append(streams.enter_context(greedy.stream("GET", "/v1/events")).status_code)
        assert codes.count(200) <= STREAMS and codes[-1] == 429
        assert streams.enter_context(viewer.stream("GET", "/v1/events")).status_code == 200


def test_a_relay_speaks_only_for_itself_and_is_never_the_only_source(swarm: Swarm, enter: Enter) -> None:
    """A relay with a key of its own says that another relay has nothing, and that it has every version itself."""
    operator, liar = Key.load(swarm.folder / "coordinator" / "keys" / "relay.key"), Key.generate()
    lease = enter().session.ask_lease()
    versions = range(lease.policies[-1].version + 3)
    own = delegated_report(operator, "http://127.0.0.1:9", versions, relay=liar.public)
    with contextlib.closing(SignedClient(swarm.url, liar, log=Log("liar"))) as client:
        for url in lease.relays:
            with pytest.raises(Refused) as refused:
                client.call(
                    "POST", "/v1/relays", own.model_copy(update={"url": url, "versions": ()}), HeartbeatReply
                )
            assert refused.value.code == "request.not_allowed"
        for _ in range(5):
            client.call("POST", "/v1/relays", own, HeartbeatReply)
            under_attack = enter().session.ask_lease()
            assert set(lease.relays) <= set(under_attack.relays) and under_attack.origin == lease.origin
    swarm.wait_for_versions(3)


def test_nobody_honest_was_blamed_and_the_run_goes_on(swarm: Swarm) -> None:
    swarm.wait_for_versions(3)
    events = swarm.ledger()
    assert verify_chain(events)[0] == len(events), "evidence against lies has large numbers"
    swarm.assert_only_accepted_work_is_trained_on()
