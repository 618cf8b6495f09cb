"""A validator that dies in the middle of a check: its submission goes back into the queue, unless time has passed it by.

A stale submission cannot be checked: relays no longer keep the version that made it, and a validator would wait for it.
"""

from pathlib import Path

from small_swarm import CONFIG, SPEC, SmallSwarm, refusal


def publish(swarm: SmallSwarm, *versions: int) -> None:
    for version in versions:
        swarm.announce(version)


def test_it_is_given_to_the_next_validator(swarm: SmallSwarm) -> None:
    swarm.start()
    lease = swarm.node().deliver()
    swarm.claim()
    swarm.clock.ahead_s = CONFIG.claim_s + 1
    swarm.tick()
    assert swarm.claim().lease == lease


def test_it_is_void_if_its_version_has_gone_stale(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.deliver()
    swarm.claim()
    publish(swarm, *range(1, SPEC.max_lag + 2))
    assert node.status(lease).state == "checking", "the validator that has claimed it may finish"
    swarm.clock.ahead_s = CONFIG.claim_s + 1
    assert refusal(swarm.claim).code == "request.too_early"
    swarm.tick()
    assert node.status(lease).code == "void.stale"
    assert [event.body["code"] for event in swarm.events("lease.void")] == ["void.stale"]


def test_held_out_work_is_void_once_its_version_is_no_longer_kept(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"eval_prompts": 2, "eval_every": 100})
    swarm = SmallSwarm(tmp_path / "run", config, SPEC.model_copy(update={"keep_versions": 3}))
    try:
        swarm.start()
        node = swarm.node()
        lease = node.deliver()
        assert lease.purpose == "eval"
        publish(swarm, 1, 2)
        assert swarm.claim().lease == lease, "far behind, but it is not training work: it cannot go stale"
        publish(swarm, 3)
        swarm.clock.ahead_s = CONFIG.claim_s + 1
        swarm.tick()
        assert node.status(lease).code == "void.stale"
        assert "version 0" in (node.status(lease).detail or "")
        assert refusal(swarm.claim).code == "request.too_early"
    finally:
        swarm.close()
