"""The sentence that says what the run waits for: as a table, and from a running coordinator."""

import dataclasses
from typing import Any

import pytest
from small_swarm import SmallSwarm, refusal

from shoal.swarm.coordinator.views.stats import Situation, waiting_for
from shoal.wire.messages import Stats

GOING = Situation(
    newest_version=3,
    last_version=9,
    finished=False,
    known_relays=2,
    live_relays=2,
    enrolled=3,
    live_workers=2,
    eval_workers=2,
    queued_checks=0,
    queue_untouched_s=0.0,
    ready_groups=5,
    groups_needed=16,
    open_leases=3,
    batch_formed=False,
    eval_chunks=None,
)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "rollouts: 5 of 16 groups ready, 3 leases open on 2 live workers"),
        (
            {"dropped_groups": 90},
            "rollouts: 5 of 16 groups ready, 3 leases open on 2 live workers; 90 groups dropped, all rewards equal",
        ),
        (
            {"open_leases": 1, "live_workers": 1},
            "rollouts: 5 of 16 groups ready, 1 lease open on 1 live worker",
        ),
        ({"finished": True}, "nothing: the run is finished"),
        ({"newest_version": None}, "a policy: the trainer has not published version 0"),
        ({"live_relays": 0}, "relays: none live (0 of 2 known)"),
        ({"live_workers": 0}, "workers: none live (0 of 3 enrolled)"),
        (
            {"queued_checks": 4, "queue_untouched_s": 12.3},
            "a validator: 4 submissions queued, none claimed for 12 s",
        ),
        (
            {"queued_checks": 4, "queue_untouched_s": 2.0},
            "rollouts: 5 of 16 groups ready, 3 leases open on 2 live workers; 4 submissions at the validator",
        ),
        ({"ready_groups": 17}, "the trainer: 16 groups are ready for version 3, not collected yet"),
        (
            {"batch_formed": True, "live_workers": 0},
            "the trainer: it is training version 4",
        ),
        (
            {"newest_version": 9, "eval_chunks": (3, 4)},
            "the evaluation of version 9: 3 of 4 parts accepted, 3 leases open on 2 live workers",
        ),
        (
            {"newest_version": 9, "eval_workers": 0},
            "workers: 2 live, all in quarantine, and an evaluation needs one that is not",
        ),
        ({"newest_version": 9, "live_workers": 0}, "workers: none live (0 of 3 enrolled)"),
    ],
)
def test_the_sentence(changes: dict[str, Any], sentence: str) -> None:
    assert waiting_for(dataclasses.replace(GOING, **changes)) == sentence


def test_a_run_from_nothing_to_a_batch(swarm: SmallSwarm) -> None:
    node = swarm.node()
    assert swarm.stats().waiting_for == "a policy: the trainer has not published version 0"
    assert "no policy yet" in refusal(node.lease).problem.detail
    swarm.announce(0)
    assert swarm.stats().waiting_for == "relays: none live (0 of 0 known)"
    assert "no relay is live" in refusal(node.lease).problem.detail
    swarm.relay_up()
    assert swarm.stats().waiting_for == "rollouts: 0 of 4 groups ready, 0 leases open on 1 live worker"
    lease = node.lease()
    assert swarm.stats().waiting_for == "rollouts: 0 of 4 groups ready, 1 lease open on 1 live worker"
    node.deliver(lease)
    swarm.clock.ahead_s += 12
    assert swarm.stats().waiting_for.startswith("a validator: 1 submission queued, none claimed for 1")
    swarm.claim()
    assert swarm.stats().waiting_for.startswith("rollouts")
    swarm.verdict(lease)
    swarm.work(node)
    assert swarm.stats().waiting_for.startswith("the trainer: 4 groups are ready for version 0")
    swarm.batch(0)
    assert swarm.stats().waiting_for.startswith("the trainer: it is training version 1")
    swarm.announce(1)
    swarm.clock.ahead_s += 60
    assert swarm.stats().waiting_for == "workers: none live (0 of 1 enrolled)"
    swarm.clock.ahead_s += 100
    assert swarm.stats().waiting_for == "relays: none live (0 of 1 known)"


def test_the_run_does_not_wait_for_an_ejected_node(swarm: SmallSwarm) -> None:
    swarm.start()
    liar = swarm.node()
    swarm.work(liar, "reject.copied")
    swarm.work(liar, "reject.copied")
    assert swarm.stats().waiting_for == "workers: none live (0 of 0 enrolled)"


def test_stats(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    node.beat(policy_version=0, tokens_per_s=123.0)
    swarm.work(node)
    node.lease()
    swarm.fill(swarm.node())
    swarm.batch(0)
    swarm.announce(1)
    swarm.clock.ahead_s += 30
    stats: Stats = swarm.stats()
    assert (stats.run, stats.newest_version, stats.last_version) == ("small", 1, 4)
    assert (stats.ready_groups, stats.open_leases, stats.queued_checks) == (2, 1, 0)
    assert (stats.batches, stats.trained_groups, stats.submissions) == (1, 4, {"accepted": 3})
    # Verified tokens over the time since version 0; the speed that a node claims is shown but not summed.
    assert 36 / 40 < stats.generation_tokens_per_s < 36 / 30
    assert stats.latest is not None and stats.latest.version == 1
    assert (stats.nodes[0].tokens_per_s, stats.nodes[0].phase) == (123.0, "testing")
    assert (stats.relays[0].bytes_sent, stats.relays[0].versions) == (7, (0, 1))
    assert stats.ledger_seq == len(swarm.ledger())
