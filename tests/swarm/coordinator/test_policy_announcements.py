"""Policy versions: announced in order, signed by the run key, with weights that never change."""

import json
from pathlib import Path

import httpx2
from small_swarm import SmallSwarm, manifest, refusal, report

from shoal.wire.keys import Key
from shoal.wire.ledger import Rederived
from shoal.wire.manifest import Manifest
from shoal.wire.messages import Announce, Info, Origin, ProblemDetails, Recorded
from shoal.wire.proof_noise import LaterNoise, Noise
from shoal.wire.record import Sealed, seal

CALIBRATION = Path(__file__).parents[3] / "runs" / "calibration" / "smollm2-135m-bf16-on-cpu.json"
NOISE = Noise.parse(CALIBRATION.read_bytes()).model_copy(update={"compute_dtype": "float32"})


def test_a_version_is_announced_and_served(swarm: SmallSwarm) -> None:
    assert problem(swarm.public.get("/v1/policies/latest")) == "request.not_found"
    assert problem(swarm.public.get("/v1/origin")) == "request.too_early"
    recorded = swarm.announce(0)
    assert swarm.ledger()[recorded.seq - 1].type == "policy.published"
    swarm.announce(1)
    for path, version in (("latest", 1), ("0", 0), ("1", 1)):
        sealed = Sealed[Manifest].parse(swarm.public.get(f"/v1/policies/{path}").content)
        assert sealed.open(swarm.run_key.public).version == version
    assert problem(swarm.public.get("/v1/policies/2")) == "request.not_found"
    assert problem(swarm.public.get("/v1/policies/-1")) == "request.not_found"
    assert Origin.parse(swarm.public.get("/v1/origin").content).url == "http://127.0.0.1:9998"
    assert Info.parse(swarm.public.get("/v1/info").content).newest_version == 1
    assert swarm.stats().bytes_published == 2000
    assert [step.version for step in swarm.history().steps] == [1]


def test_announcing_again_is_harmless_and_other_weights_are_refused(swarm: SmallSwarm) -> None:
    first = swarm.announce(0)
    swarm.announce(1)
    assert swarm.announce(0) == first
    assert refusal(swarm.announce, 0, weights="f" * 64).code == "request.conflict"
    swarm.reopen()
    assert swarm.announce(0) == first
    assert len(swarm.events("policy.published")) == 2


def test_a_version_made_again_with_other_bits_is_in_the_ledger(swarm: SmallSwarm) -> None:
    swarm.announce(0)
    for differing in (0, 7):
        again = Rederived(checkpoint_version=0, differing_words=differing)
        body = announcement(seal(manifest(0), swarm.run_key)).model_copy(update={"rederived": again})
        swarm.trainer.call("POST", "/v1/policies", body, Recorded)
    (event,) = swarm.events("policy.rederived")
    assert event.body == {"version": 0, "checkpoint_version": 0, "differing_words": 7}


def test_a_calibration_that_was_repeated_is_in_the_ledger_and_judges_from_its_version_on(
    swarm: SmallSwarm,
) -> None:
    swarm.announce(0)
    later = LaterNoise(from_version=1, moved=0.25, noise=NOISE)
    first = announcement(seal(manifest(1), swarm.run_key))
    for wrong in (
        later.model_copy(update={"from_version": 0}),
        later.model_copy(update={"measured": 2}),
        later.model_copy(update={"noise": NOISE.model_copy(update={"temperature": 0.6})}),
        later.model_copy(update={"noise": NOISE.model_copy(update={"compute_dtype": "bfloat16"})}),
    ):
        body = first.model_copy(update={"noise": wrong})
        assert refusal(swarm.trainer.call, "POST", "/v1/policies", body, Recorded).code == "request.malformed"
    for _ in range(2):  # a trainer that was restarted announces it again
        swarm.trainer.call("POST", "/v1/policies", first.model_copy(update={"noise": later}), Recorded)
    swarm.announce(2)
    (event,) = swarm.events("run.calibrated")
    assert (event.body.pop("rises"), event.body.pop("risen")) == ({}, []), "there was no calibration before"
    assert LaterNoise.parse(json.dumps(event.body)) == later
    swarm.reopen()
    spec = Info.parse(swarm.public.get("/v1/info").content).spec
    assert spec.noise_of(0) is None and spec.noise_of(1) == spec.noise_of(2) == NOISE


def test_versions_come_in_order_and_end_with_the_last(swarm: SmallSwarm) -> None:
    assert "0 is next" in refusal(swarm.announce, 1).problem.detail
    for version in range(5):
        swarm.announce(version)
    assert refusal(swarm.announce, 6).code == "request.conflict"
    assert "4 is the last" in refusal(swarm.announce, 5).problem.detail


def test_a_trainer_may_serve_from_a_new_address(swarm: SmallSwarm) -> None:
    swarm.announce(0)
    body = announcement(seal(manifest(0), swarm.run_key), origin="http://10.0.0.7:1234")
    swarm.trainer.call("POST", "/v1/policies", body, Recorded)
    assert Origin.parse(swarm.public.get("/v1/origin").content).url == "http://10.0.0.7:1234"


def test_manifests_of_other_runs_and_keys_are_refused(swarm: SmallSwarm) -> None:
    forged = announcement(seal(manifest(0), Key.generate()))
    other_run = announcement(seal(manifest(0, run="other"), swarm.run_key))
    good = seal(manifest(0), swarm.run_key)
    changed = announcement(good.model_copy(update={"body": manifest(0, weights="e" * 64)}))
    no_weights = announcement(
        seal(Manifest(run="small", version=0, files=(), created_at_s=0.0), swarm.run_key)
    )
    wrong_report = Announce(manifest=good, origin_url="http://127.0.0.1:1", report=report(3))
    for body, code in (
        (forged, "request.bad_signature"),
        (changed, "request.bad_signature"),
        (other_run, "request.conflict"),
        (no_weights, "request.malformed"),
        (wrong_report, "request.malformed"),
    ):
        assert refusal(swarm.trainer.call, "POST", "/v1/policies", body, Recorded).code == code
    assert swarm.stats().newest_version is None


def test_leases_allow_the_versions_that_are_fresh_enough(swarm: SmallSwarm) -> None:
    swarm.start()
    swarm.announce(1)
    swarm.announce(2)
    lease = swarm.node().lease()
    assert [policy.version for policy in lease.policies] == [1, 2]
    assert [policy.weights_digest for policy in lease.policies] == [f"{1:064x}", f"{2:064x}"]


def announcement(sealed: Sealed[Manifest], origin: str = "http://127.0.0.1:9998") -> Announce:
    return Announce(manifest=sealed, origin_url=origin, report=None)


def problem(response: httpx2.Response) -> str:
    return ProblemDetails.parse(response.content).code
