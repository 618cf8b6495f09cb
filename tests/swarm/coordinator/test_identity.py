"""Identity is bound to keys and leases: nobody is framed by a copy, and no seed becomes public while somebody owes its work."""

import hashlib
from pathlib import Path

import pytest
from small_swarm import CONFIG, Node, SmallSwarm

from shoal.swarm.coordinator.housekeeping import tidy
from shoal.swarm.coordinator.leases.epochs import DEBT_S
from shoal.swarm.coordinator.ledger_replay import replay
from shoal.wire.codes import Rejected
from shoal.wire.lease import Lease
from shoal.wire.messages import Abandon, LeaseStatus
from shoal.wire.rollouts import RolloutTable


def abandon(node: Node, lease: Lease) -> None:
    ask = Abandon(epoch=node.epoch, reason="stopped")
    node.client.call("POST", f"/v1/leases/{lease.lease_id}/abandon", ask, LeaseStatus)


def table_for(lease_id: str, version: int = 0) -> RolloutTable:
    return RolloutTable(lease_id=lease_id, policy_version=version, rows=())


# -- copies -----------------------------------------------------------------------------------------------


def test_only_accepted_submissions_are_originals(swarm: SmallSwarm) -> None:
    """A stranger that submits the bytes of an honest node first does not make that node a copier."""
    swarm.start()
    thief, victim = swarm.node(), swarm.node()
    data = b"the bytes that the victim is going to submit"
    stolen = thief.deliver(data=data)
    honest = victim.deliver(data=data)
    assert swarm.claim().lease == stolen
    claim = swarm.claim()
    assert (claim.lease, claim.copy_of) == (honest, None)
    swarm.verdict(stolen, "reject.wrong_lease")
    swarm.verdict(honest)
    copier = swarm.node()
    copier.deliver(data=data)
    assert swarm.claim().copy_of == victim.id


def test_a_file_that_names_this_lease_is_never_a_copy(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    node.deliver()
    claim = swarm.claim().model_copy(update={"copy_of": "ab" * 32})
    pytest.importorskip("torch", reason="the validator needs it")
    from shoal.swarm.validator.format_checks import check_binding

    check_binding(table_for(claim.lease.lease_id), claim)
    for copy_of, code in (
        ("ab" * 32, "reject.copied"),
        (node.id, "reject.replayed"),
        (None, "reject.wrong_lease"),
    ):
        with pytest.raises(Rejected) as refused:
            check_binding(table_for("cd" * 16), claim.model_copy(update={"copy_of": copy_of}))
        assert refused.value.code == code


# -- secrets ----------------------------------------------------------------------------------------------


@pytest.fixture
def short_epochs(tmp_path: Path) -> SmallSwarm:
    swarm = SmallSwarm(tmp_path / "run", CONFIG.model_copy(update={"leases_per_epoch": 1}))
    swarm.start()
    return swarm


def revealed(swarm: SmallSwarm) -> set[int]:
    return {event.body["epoch"] for event in swarm.events("epoch.revealed")}


def test_a_secret_stays_secret_while_a_node_owes_its_work(short_epochs: SmallSwarm) -> None:
    swarm, node = short_epochs, short_epochs.node()
    lease = node.lease()
    abandon(node, lease)
    assert revealed(swarm) == set()
    again = swarm.work(node)
    assert (again.seed, again.epoch) == (lease.seed, lease.epoch)
    assert revealed(swarm) == {lease.epoch}
    [event] = swarm.events("epoch.revealed")
    committed = next(e.body for e in swarm.events("epoch.committed") if e.body["epoch"] == lease.epoch)
    assert hashlib.sha256(bytes.fromhex(event.body["secret"])).hexdigest() == committed["commitment"]
    replay(swarm.ledger())
    swarm.close()


def test_a_node_that_never_returns_does_not_keep_a_secret_for_ever(short_epochs: SmallSwarm) -> None:
    swarm, node = short_epochs, short_epochs.node()
    lease = node.lease()
    abandon(node, lease)
    swarm.clock.ahead_s += DEBT_S - 60
    tidy(swarm.coordinator)
    assert revealed(swarm) == set()
    swarm.clock.ahead_s += 120
    tidy(swarm.coordinator)
    assert revealed(swarm) == {lease.epoch}
    swarm.close()


def test_an_ejected_node_owes_nothing(short_epochs: SmallSwarm) -> None:
    swarm, node = short_epochs, short_epochs.node()
    swarm.work(node, "reject.forged_proof")
    lease = node.lease()
    abandon(node, lease)
    again = node.lease()
    assert again.unit == lease.lease_id and again.epoch not in revealed(swarm)
    node.deliver(again)
    swarm.claim()
    swarm.verdict(again, "reject.forged_proof")
    assert again.epoch in revealed(swarm)
    swarm.close()


@pytest.mark.parametrize("code", ["void.uncertain", "void.infra"])
def test_a_void_verdict_does_not_buy_another_seed(swarm: SmallSwarm, code: str) -> None:
    swarm.start()
    node = swarm.node()
    lease = swarm.work(node, code)
    again = node.lease()
    assert (again.unit, again.seed, again.prompts) == (lease.lease_id, lease.seed, lease.prompts)


def test_submitting_stale_work_does_not_buy_another_seed(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    for version in (1, 2):
        swarm.announce(version)
    node.deliver(lease)
    assert node.status(lease).code == "void.stale"
    again = node.lease()
    assert (again.unit, again.seed) == (lease.lease_id, lease.seed)


def test_the_operator_may_end_a_debt(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = swarm.work(node, "void.operator")
    assert node.lease().seed != lease.seed
