"""Held-out evaluations: their versions, their chunks, their results, and the end of the run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from small_swarm import CONFIG, SPEC, Node, SmallSwarm, refusal

from shoal.swarm.coordinator.leases.evaluations import cut, is_due
from shoal.swarm.coordinator.ledger_replay import replay
from shoal.swarm.coordinator.membership.nodes import NODES
from shoal.tasks import make_task
from shoal.wire.lease import Lease
from shoal.wire.messages import Abandon, AskLease, LeaseStatus
from shoal.wire.record import Sealed
from shoal.wire.seeded_draw import problem_seeds

EVALUATED = CONFIG.model_copy(update={"eval_prompts": 5, "eval_samples": 3, "eval_every": 2})


@pytest.fixture
def evaluated(tmp_path: Path) -> Iterator[SmallSwarm]:
    swarm = SmallSwarm(tmp_path / "run", EVALUATED)
    yield swarm
    swarm.close()


def evaluate(swarm: SmallSwarm, version: int, reward: float = 1.0) -> None:
    node = swarm.proven_node()
    for _ in range(3):
        lease = node.deliver()
        assert (lease.purpose, lease.policies[0].version) == ("eval", version)
        swarm.claim()
        swarm.verdict(lease, rewards=(reward,) * lease.num_rows)


@pytest.mark.parametrize(
    ("version", "due"), [(0, True), (1, False), (5, True), (10, True), (11, False), (12, True)]
)
def test_versions_that_are_evaluated(version: int, due: bool) -> None:
    assert is_due(version, eval_every=5, last_version=12) is due


def test_an_evaluation_is_cut_into_leases() -> None:
    assert cut(5, 2) == [2, 2, 1]
    assert cut(4, 2) == [2, 2]
    assert cut(0, 2) == []


def test_a_chunk_has_as_many_rows_as_a_train_lease(tmp_path: Path) -> None:
    """512 prompts with one sample each were 32 leases of 16 rows, and training stood still for ten seconds on an H200."""
    swarm = SmallSwarm(
        tmp_path / "run",
        CONFIG.model_copy(update={"prompts_per_lease": 4, "eval_prompts": 20, "eval_samples": 1}),
    )
    swarm.start()
    train_rows = 4 * SPEC.sampling.samples_per_prompt
    assert [swarm.proven_node().lease().num_rows for _ in range(3)] == [
        train_rows,
        train_rows,
        20 - 2 * train_rows,
    ]
    swarm.close()


def test_eval_leases_come_first_and_pose_the_held_out_set(evaluated: SmallSwarm) -> None:
    evaluated.start()
    nodes = [evaluated.proven_node() for _ in range(4)]
    leases = [node.lease() for node in nodes]
    assert [lease.purpose for lease in leases] == ["eval", "eval", "eval", "train"]
    assert [(lease.chunk, len(lease.prompts)) for lease in leases[:3]] == [(0, 2), (1, 2), (2, 1)]
    assert {lease.sampling.samples_per_prompt for lease in leases[:3]} == {3}
    task = make_task(SPEC.task)
    for lease in leases[:3]:
        seeds = problem_seeds(
            lease.seed, run="small", purpose="eval", chunk=lease.chunk, num_prompts=len(lease.prompts)
        )
        assert lease.prompts == tuple(task.problem("eval", seed).prompt for seed in seeds)
    assert len({lease.seed for lease in leases}) == 4


def test_the_held_out_set_is_the_same_for_every_version_and_node(evaluated: SmallSwarm) -> None:
    evaluated.start()
    first = evaluated.proven_node().lease()
    evaluated.announce(1)
    evaluated.announce(2)
    second: Lease | None = None
    while second is None or second.policies[0].version != 2 or second.chunk != first.chunk:
        second = evaluated.proven_node().lease()
    assert (second.prompts, second.seed == first.seed) == (first.prompts, False)


def test_a_chunk_is_leased_until_one_is_accepted(evaluated: SmallSwarm) -> None:
    evaluated.start()
    liar, idler, honest = (evaluated.proven_node() for _ in range(3))
    assert evaluated.work(liar, "reject.copied").chunk == 0
    assert evaluated.work(honest, "void.infra").chunk == 0
    assert idler.lease().chunk == 0
    evaluated.clock.ahead_s += evaluated.config.lease_s + 1
    evaluated.tick()
    evaluated.relay_up()
    lease = honest.deliver()
    assert lease.chunk == 0
    evaluated.claim()
    evaluated.verdict(lease, rewards=(1.0,) * lease.num_rows)
    assert honest.lease().chunk == 1
    assert [(view.version, view.rollouts, view.complete) for view in evaluated.stats().evaluations] == [
        (0, 6, False)
    ]


def test_a_node_in_quarantine_gets_no_held_out_work(evaluated: SmallSwarm) -> None:
    evaluated.start()
    liar = evaluated.proven_node()
    evaluated.work(liar, "reject.copied")
    assert liar.lease().purpose == "train"


def test_the_mean_is_over_rollouts(evaluated: SmallSwarm) -> None:
    evaluated.start()
    node = evaluated.proven_node()
    for reward in (1.0, 0.0, 1.0):
        lease = node.deliver()
        evaluated.claim()
        evaluated.verdict(lease, rewards=(reward,) * lease.num_rows)
    (view,) = evaluated.stats().evaluations
    assert (view.reward_mean, view.rollouts, view.complete) == (9 / 15, 15, True)
    (event,) = evaluated.events("evaluation.completed")
    assert event.body["task"] == "sort"
    assert (event.body["version"], event.body["reward_mean"], event.body["rollouts"]) == (0, 9 / 15, 15)
    # It changes only the held-out curve.
    assert evaluated.stats().ready_groups == 0
    assert evaluated.stats().nodes[0].credit > 0


def test_validators_check_held_out_work_first(evaluated: SmallSwarm) -> None:
    evaluated.start()
    for _ in range(3):
        evaluated.proven_node().lease()
    train = evaluated.proven_node().deliver()
    assert train.purpose == "train"
    evaluated.clock.ahead_s += evaluated.config.lease_s + 1
    evaluated.tick()
    evaluated.relay_up()
    late = evaluated.proven_node().deliver()
    assert [evaluated.claim().lease for _ in range(2)] == [late, train]


def test_the_run_ends_with_the_evaluation_of_its_last_version(evaluated: SmallSwarm) -> None:
    evaluated.start()
    evaluate(evaluated, 0, reward=0.25)
    for version in range(1, 5):
        evaluated.announce(version)
    evaluate(evaluated, 2)
    assert not evaluated.stats().finished
    assert evaluated.stats().waiting_for == (
        "the evaluation of version 4: 0 of 3 parts accepted, 0 leases open on 2 live workers"
    )
    evaluate(evaluated, 4, reward=0.75)
    stats = evaluated.stats()
    assert stats.finished
    assert stats.waiting_for == "nothing: the run is finished"
    assert [(view.version, view.reward_mean) for view in stats.evaluations] == [
        (0, 0.25),
        (2, 1.0),
        (4, 0.75),
    ]
    assert evaluated.history().evaluations == stats.evaluations
    node = evaluated.node()
    assert node.beat().finished
    assert "finished" in refusal(node.lease).problem.detail
    assert [event.body["version"] for event in evaluated.events("run.finished")] == [4]
    # Every secret is revealed, so every lease can be audited.
    committed = {event.body["epoch"] for event in evaluated.events("epoch.committed")}
    assert {event.body["epoch"] for event in evaluated.events("epoch.revealed")} == committed


def test_a_version_that_relays_no_longer_keep_is_not_evaluated(tmp_path: Path) -> None:
    swarm = SmallSwarm(tmp_path, EVALUATED, SPEC.model_copy(update={"keep_versions": 2}))
    swarm.start()
    swarm.announce(1)
    swarm.announce(2)
    assert swarm.proven_node().lease().policies[0].version == 2
    swarm.close()


def test_a_run_resumed_with_more_versions_is_not_over(tmp_path: Path) -> None:
    swarm = SmallSwarm(tmp_path)
    for version in range(5):
        swarm.announce(version)
    assert swarm.stats().finished
    swarm.spec = SPEC.model_copy(update={"last_version": 6})
    swarm.reopen()
    assert not swarm.stats().finished
    swarm.relay_up()
    swarm.fill(swarm.node())
    assert swarm.batch(4).version == 4
    swarm.announce(5)
    assert [event.body["spec"]["last_version"] for event in swarm.events("run.opened")] == [4, 6]
    swarm.close()


def test_a_lowered_last_version_is_handled_at_the_start(tmp_path: Path) -> None:
    swarm = SmallSwarm(tmp_path, EVALUATED)
    swarm.start()
    swarm.announce(1)  # not to be evaluated, as things stand
    swarm.spec = SPEC.model_copy(update={"last_version": 1})
    swarm.reopen()
    evaluate(swarm, 0)
    evaluate(swarm, 1)
    assert swarm.stats().finished
    swarm.close()


# -- attacks ----------------------------------------------------------------------------------------------


def give_back(node: Node, lease: Lease) -> None:
    ask = Abandon(epoch=node.epoch, reason="no")
    node.client.call("POST", f"/v1/leases/{lease.lease_id}/abandon", ask, LeaseStatus)


def test_keys_that_never_delivered_get_no_held_out_work(evaluated: SmallSwarm) -> None:
    evaluated.start()
    assert [evaluated.node().lease().purpose for _ in range(4)] == ["train"] * 4


def test_they_get_it_when_no_training_work_is_left_and_keep_nothing_from_others(
    evaluated: SmallSwarm,
) -> None:
    for version in range(5):
        evaluated.announce(version)
    evaluated.relay_up()
    assert [evaluated.node().lease().chunk for _ in range(3)] == [0, 1, 2]
    assert evaluated.proven_node().lease().chunk == 0


def test_a_chunk_is_leased_to_a_second_node_and_the_first_accepted_counts(evaluated: SmallSwarm) -> None:
    evaluated.start()
    keepers = [evaluated.proven_node() for _ in range(3)]
    kept = [node.lease() for node in keepers]
    worker = evaluated.proven_node()
    assert worker.client.call("POST", "/v1/leases", AskLease(epoch=1), Sealed[Lease]).body.purpose == "train"
    evaluated.clock.ahead_s += evaluated.config.lease_s / 4 + 1
    second = evaluated.proven_node()
    lease = second.deliver()
    assert (lease.purpose, lease.chunk) == ("eval", 0)
    evaluated.claim()
    evaluated.verdict(lease, rewards=(1.0,) * lease.num_rows)
    # The first node delivers too: its work is accepted and paid, and changes nothing.
    keepers[0].deliver(kept[0])
    evaluated.claim()
    assert evaluated.verdict(kept[0], rewards=(0.0,) * lease.num_rows).state == "accepted"
    assert [(view.rollouts, view.reward_mean) for view in evaluated.stats().evaluations] == [(6, 1.0)]


def test_keys_with_little_work_behind_them_keep_no_chunk_from_who_does_the_work(
    evaluated: SmallSwarm,
) -> None:
    """One accepted submission costs little: many such keys could otherwise take a chunk in turn, and the run would not end."""
    evaluated.start()
    worker, equal = evaluated.proven_node(), evaluated.proven_node()
    with evaluated.coordinator.transaction() as tx:
        tx.update(NODES, worker.id, accepted=8)
    assert [evaluated.proven_node().lease().chunk for _ in range(3)] == [0, 1, 2]
    assert equal.lease().purpose == "train"
    assert [worker.lease().chunk, evaluated.stats().evaluations] == [0, ()]


def test_a_node_that_gave_held_out_work_back_waits_for_others(evaluated: SmallSwarm) -> None:
    evaluated.start()
    node = evaluated.proven_node()
    give_back(node, node.lease())
    assert node.lease().purpose == "train"
    other = evaluated.proven_node()
    assert other.lease().chunk == 0


def test_an_evaluation_that_every_node_let_go_is_finished(tmp_path: Path) -> None:
    """On a bad network, every node of a small run may lose the answer with its lease."""
    evaluated = SmallSwarm(tmp_path / "run", EVALUATED.model_copy(update={"lease_s": 20.0}))
    for version in range(5):
        evaluated.announce(version)
    evaluated.relay_up()
    node = evaluated.proven_node()
    seeds: dict[tuple[int, int], str] = {}
    for times in (1, 2):
        for _ in range(3):  # versions 0, 2 and 4
            lease = node.lease()
            key = (lease.policies[0].version, lease.chunk)
            assert (lease.purpose, seeds.setdefault(key, lease.seed)) == ("eval", lease.seed)
            give_back(node, lease)
        assert "held-out evaluation is not finished" in refusal(node.lease).problem.detail
        evaluated.clock.ahead_s += evaluated.config.lease_s * (1 + times) + 1
        evaluated.relay_up()
    assert len(seeds) == 3 and node.lease().seed in seeds.values()
    evaluated.close()


def test_a_node_gets_the_same_seed_again_after_a_void_verdict(evaluated: SmallSwarm) -> None:
    """It could otherwise choose among seeds: submit what is uncertain until it likes the answers."""
    evaluated.start()
    node, other = evaluated.proven_node(), evaluated.proven_node()
    first = evaluated.work(node, "void.uncertain")
    for code in ("void.infra", "void.uncertain", "accepted"):
        again = evaluated.work(node, code)
        assert (again.purpose, again.chunk, again.prompts) == ("eval", first.chunk, first.prompts)
        assert (again.seed, again.epoch, again.unit) == (first.seed, first.epoch, first.lease_id)
    assert other.lease().chunk == node.lease().chunk - 1 == 1
    replay(evaluated.ledger())
