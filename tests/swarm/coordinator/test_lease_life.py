"""The life of a lease over a real socket: issue, upload, receipt, claim, verdict; and every way it ends."""

import hashlib
import time
from pathlib import Path

import pytest
from small_swarm import CONFIG, SPEC, SmallSwarm, refusal

from shoal.swarm.coordinator.ledger_replay import replay
from shoal.swarm.coordinator.rules.lease_states import TERMINAL, LeaseEvent, LeaseState, next_state
from shoal.tasks import make_task
from shoal.wire.codes import CorruptData, Rejected
from shoal.wire.lease import Lease
from shoal.wire.ledger import verify_chain
from shoal.wire.messages import Abandon, AskLease, LeaseStatus
from shoal.wire.record import Sealed
from shoal.wire.run_spec import AdmittedWeights
from shoal.wire.seeded_draw import problem_seeds


def test_the_whole_life(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    sealed = node.sealed_lease()
    lease = sealed.open(swarm.run_key.public)
    assert (lease.run, lease.node, lease.purpose) == ("small", node.id, "train")
    assert [policy.version for policy in lease.policies] == [0]
    assert lease.relays == ("http://127.0.0.1:9999",)
    assert lease.deadline_s - lease.issued_at_s == pytest.approx(swarm.config.lease_s)
    assert node.status(lease).state == "issued"

    data = b"rollouts"
    node.upload(lease, data)
    assert node.status(lease).state == "uploading"
    receipt = node.submit(lease, data).open(swarm.run_key.public)
    assert (receipt.node, receipt.sha256) == (node.id, hashlib.sha256(data).hexdigest())
    assert swarm.ledger()[receipt.seq - 1].type == "submission.received"
    assert node.status(lease).state == "submitted"

    claim = swarm.claim()
    assert (claim.lease, claim.sha256, claim.copy_of) == (lease, receipt.sha256, None)
    assert swarm.validator.fetch_object(claim.sha256) == data
    assert node.status(lease).state == "checking"
    assert swarm.verdict(lease).state == "accepted"

    status = node.status(lease)
    assert (status.state, status.code, status.credit) == ("accepted", "accepted", 3 * lease.num_rows)
    assert swarm.stats().nodes[0].credit == 3 * lease.num_rows
    verify_chain(swarm.ledger())


def test_rounded_weights_earn_the_share_that_the_terms_set(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"admitted_weights": AdmittedWeights(int8=0.25)})
    swarm = SmallSwarm(tmp_path, CONFIG.model_copy(update={"credit_factor": 2.0}), spec)
    swarm.start()
    node = swarm.node()
    lease = node.deliver()
    swarm.claim()
    refused = refusal(swarm.verdict, lease, evidence={"weights": "fp8"})
    assert refused.code == "request.malformed" and "'fp8' were accepted" in str(refused)
    assert swarm.verdict(lease, evidence={"weights": "int8"}).credit == int(3 * lease.num_rows * 0.5)
    exact = node.deliver()
    swarm.claim()
    assert swarm.verdict(exact).credit == 6 * exact.num_rows
    events = swarm.ledger()
    assert replay(events).nodes[node.id].credit == swarm.stats().nodes[0].credit
    # An auditor finds credit that the share does not explain.
    [given] = [event for event in events if event.body.get("evidence", {}).get("weights")]
    events[given.seq - 1] = given.model_copy(update={"body": given.body | {"evidence": {}}})
    with pytest.raises(CorruptData, match="its tokens give"):
        replay(events)
    swarm.close()


def test_prompts_follow_from_the_seed(swarm: SmallSwarm) -> None:
    swarm.start()
    lease = swarm.node().lease()
    seeds = problem_seeds(lease.seed, run="small", purpose="train", chunk=0, num_prompts=2)
    assert lease.prompts == tuple(make_task(swarm.spec.task).problem("train", seed).prompt for seed in seeds)


def test_a_lease_whose_answer_was_lost_is_given_again(tmp_path: Path) -> None:
    """It would otherwise expire, which counts against an honest node."""
    swarm = SmallSwarm(tmp_path / "run", CONFIG.model_copy(update={"trusted_after": 1}))
    swarm.start()
    node = swarm.node()
    swarm.work(node)

    def ask(*holds: Lease) -> str:
        asked = AskLease(epoch=node.epoch, holds=tuple(lease.lease_id for lease in holds))
        return node.client.call("POST", "/v1/leases", asked, Sealed[Lease]).body.lease_id

    first, lost = node.lease(), node.lease()
    assert first.lease_id != lost.lease_id
    assert [ask(), ask(lost), ask(first)] == [first.lease_id, first.lease_id, lost.lease_id]
    assert ask(first, lost) == first.lease_id  # it holds as many as it may
    node.deliver(first)
    assert ask(lost) not in (first.lease_id, lost.lease_id)
    swarm.close()


def test_submitting_again_gives_the_same_receipt(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    node.upload(lease, b"rollouts")
    first = node.submit(lease, b"rollouts")
    assert node.submit(lease, b"rollouts") == first
    swarm.claim()
    swarm.verdict(lease)
    swarm.reopen()
    node.client.close()
    again = swarm.stranger(node.client.key)
    again.epoch = node.epoch
    assert again.submit(lease, b"rollouts") == first
    assert refusal(again.submit, lease, b"other bytes").code == "request.conflict"
    assert len(swarm.events("submission.received")) == 1


def test_nothing_is_submitted_that_was_not_uploaded_on_this_lease(swarm: SmallSwarm) -> None:
    swarm.start()
    first, second = swarm.node(), swarm.node()
    first.deliver(data=b"mine")
    lease = second.lease()
    # The bytes are in the store, and the second node knows their digest, but it has never sent them.
    assert refusal(second.submit, lease, b"mine").code == "request.conflict"
    second.ask_upload(lease, b"mine")
    assert "not complete" in str(refusal(second.submit, lease, b"mine"))


def test_only_a_leased_version_may_be_submitted(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    node.upload(lease, b"rollouts")
    assert refusal(node.submit, lease, b"rollouts", version=3).code == "request.conflict"


def test_an_expired_lease_is_void_and_its_work_goes_to_another(swarm: SmallSwarm) -> None:
    swarm.start()
    slow, other = swarm.node(), swarm.node()
    lease = slow.lease()
    slow.upload(lease, b"too late")
    swarm.clock.ahead_s += swarm.config.lease_s + 1
    assert refusal(slow.submit, lease, b"too late").code == "request.lease_closed"
    assert refusal(slow.ask_upload, lease, b"too late").code == "request.lease_closed"
    swarm.relay_up()
    swarm.tick()
    status = slow.status(lease)
    assert (status.state, status.code) == ("void", "void.expired")
    assert refusal(slow.submit, lease, b"too late").code == "request.lease_closed"
    assert other.lease().lease_id != lease.lease_id
    # The node is not blamed and may continue.
    assert slow.lease().lease_id != lease.lease_id
    assert swarm.stats().nodes[0].trust == "probation"


def test_a_node_gets_back_the_lease_it_lost_sight_of(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    first = node.sealed_lease()
    # After a lost answer or a crash the node gets the same lease again instead of waiting for its deadline.
    assert node.sealed_lease() == first
    node.join()
    assert node.sealed_lease() == first
    node.deliver(first.body)


def test_open_leases_are_capped_by_trust(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    for _ in range(swarm.config.trusted_after):
        swarm.work(node)
    assert swarm.stats().nodes[0].trust == "trusted"
    swarm.batch(0)
    first, second = node.lease(), node.lease()
    assert first != second
    assert node.lease() == first


def test_an_abandoned_lease_is_void_without_blame(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()

    def abandon() -> LeaseStatus:
        ask = Abandon(epoch=node.epoch, reason="going home")
        return node.client.call("POST", f"/v1/leases/{lease.lease_id}/abandon", ask, LeaseStatus)

    assert (abandon().code, abandon().code) == ("void.abandoned", "void.abandoned")
    assert len(swarm.events("lease.void")) == 1
    done = node.deliver()
    lease = done
    assert refusal(abandon).code == "request.conflict"


def test_another_nodes_lease_is_out_of_reach(swarm: SmallSwarm) -> None:
    swarm.start()
    owner, thief = swarm.node(), swarm.node()
    lease = owner.lease()
    owner.upload(lease, b"rollouts")
    for call in (thief.status, lambda lease: thief.submit(lease, b"rollouts"), thief.deliver):
        assert refusal(call, lease).code == "request.not_yours"
    assert owner.status(lease).state == "uploading"


def test_a_lease_that_never_was(swarm: SmallSwarm) -> None:
    node = swarm.node()
    for lease_id in ("0" * 32, "nonsense", "..%2f..%2fetc", "A" * 32):
        refused = refusal(node.client.call, "GET", f"/v1/leases/{lease_id}", None, LeaseStatus)
        assert refused.code == "request.not_found"


def test_a_second_session_fences_off_the_first(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    clone = swarm.stranger(node.client.key).join()
    assert refusal(node.beat).code == "request.stale_epoch"
    assert refusal(node.lease).code == "request.stale_epoch"
    assert refusal(node.deliver, lease).code == "request.stale_epoch"
    clone.deliver(lease)


# -- checking ---------------------------------------------------------------------------------------------


def test_a_claim_is_for_one_validator_until_it_runs_out(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.deliver()
    assert swarm.claim().lease == lease
    assert refusal(swarm.claim).code == "request.too_early"
    swarm.clock.ahead_s += swarm.config.claim_s + 1
    swarm.tick()
    assert node.status(lease).state == "submitted"
    # The first validator was only slow, so its verdict counts.
    assert swarm.verdict(lease).state == "accepted"
    assert refusal(swarm.claim).code == "request.too_early"


def test_a_verdict_is_given_once(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = swarm.work(node)
    assert swarm.verdict(lease).state == "accepted"
    refused = refusal(swarm.verdict, lease, "reject.early_stop")
    assert refused.code == "request.conflict"
    assert len(swarm.events("verdict.given")) == 1
    assert swarm.stats().nodes[0].credit == 3 * lease.num_rows
    assert swarm.stats().ready_groups == 2


def test_a_verdict_needs_a_claim_and_a_meaning(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    assert refusal(swarm.verdict, lease).code == "request.conflict"
    node.deliver(lease)
    assert refusal(swarm.verdict, lease).code == "request.conflict"
    swarm.claim()
    assert refusal(swarm.verdict, lease, "reject.because").code == "request.malformed"
    assert refusal(swarm.verdict, lease, "request.banned").code == "request.malformed"
    assert refusal(swarm.verdict, lease, "accepted", (1.0,)).code == "request.malformed"
    assert node.status(lease).state == "checking"


def test_copies_of_accepted_files_are_pointed_out_in_the_order_of_receipt(swarm: SmallSwarm) -> None:
    swarm.start()
    first, second = swarm.node(), swarm.node()
    for node in (first, second, first):
        node.deliver(data=b"the same")
    original = swarm.claim()
    assert original.copy_of is None
    swarm.verdict(original.lease)
    assert [swarm.claim().copy_of for _ in range(2)] == [first.id, first.id]


def test_a_void_verdict_blames_no_node(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    for _ in range(3):
        swarm.work(node, "void.infra")
    view = swarm.stats().nodes[0]
    assert (view.trust, view.void, view.credit, view.last_code) == ("probation", 3, 0, "void.infra")


# -- the machine ------------------------------------------------------------------------------------------

N, U, S, C, A, R, V, K = LeaseState
ALLOWED = {
    (N, LeaseEvent.UPLOAD): U,
    (U, LeaseEvent.UPLOAD): U,
    (U, LeaseEvent.SUBMIT): S,
    (S, LeaseEvent.CLAIM): C,
    (C, LeaseEvent.RELEASE): S,
    (S, LeaseEvent.ACCEPT): A,
    (C, LeaseEvent.ACCEPT): A,
    (S, LeaseEvent.REJECT): R,
    (C, LeaseEvent.REJECT): R,
    (N, LeaseEvent.VOID): V,
    (U, LeaseEvent.VOID): V,
    (S, LeaseEvent.VOID): V,
    (C, LeaseEvent.VOID): V,
    (A, LeaseEvent.REVOKE): K,
}


@pytest.mark.parametrize("state", list(LeaseState))
@pytest.mark.parametrize("event", list(LeaseEvent))
def test_the_table_of_states(state: LeaseState, event: LeaseEvent) -> None:
    if (state, event) in ALLOWED:
        assert next_state(state, event) is ALLOWED[state, event]
        return
    with pytest.raises(Rejected) as refused:
        next_state(state, event)
    assert refused.value.code == ("request.lease_closed" if state in TERMINAL else "request.conflict")


def test_lease_times_are_the_servers(swarm: SmallSwarm) -> None:
    swarm.clock.ahead_s = 50
    swarm.start()
    lease: Lease = swarm.node().lease()
    assert lease.issued_at_s - time.time() == pytest.approx(50, abs=5)
