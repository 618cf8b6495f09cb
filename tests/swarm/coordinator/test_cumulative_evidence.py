"""Evidence over a node's life: the false-alarm rate of the tests as calculated and as measured, and convictions by a real coordinator."""

import json
import math
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from small_swarm import CONFIG, SPEC, Node, SmallSwarm, manifest

from shoal.swarm.coordinator.ledger_replay import replay
from shoal.swarm.coordinator.membership.accounts import ACCOUNTS
from shoal.swarm.coordinator.rules.cumulative_evidence import (
    LIFE,
    MOST_WAIT_S,
    NEW_NODE,
    NEW_NODES,
    PATIENCE_S,
    RATE,
    SCORE_TEST,
    TESTS,
    THRESHOLDS,
    UNCERTAIN_TEST,
    CumulativeTest,
    NoiseWatch,
    Sums,
    convicting,
    next_baseline,
    next_sums,
    scores_of,
)
from shoal.wire.codes import ACCEPTED, CODES, RECALIBRATING, UNCERTAIN, CorruptData
from shoal.wire.delegation import delegate
from shoal.wire.keys import Key
from shoal.wire.messages import Announce, Enrol, Enrolled, NodeView, OpenSession, Recorded, Session
from shoal.wire.proof_noise import LaterNoise, Noise
from shoal.wire.record import seal
from shoal.wire.run_spec import PROTOCOL

ACCUMULATED = "reject.accumulated_evidence"
Floats = npt.NDArray[np.float64]


# -- the false-alarm rate ---------------------------------------------------------------------------------


@pytest.mark.parametrize("test", [SCORE_TEST, UNCERTAIN_TEST])
def test_threshold_gives_the_stated_rate(test: CumulativeTest) -> None:
    t = test.exponent()
    assert test.excess(t) == pytest.approx(0, abs=1e-9)
    threshold = next(THRESHOLDS[name] for name, one in TESTS.items() if one is test)
    assert LIFE * len(TESTS) * math.exp(-t * threshold) == pytest.approx(RATE)


@pytest.mark.parametrize("name", ["normal", "two values", "skewed", "heavy tails"])
def test_no_honest_distribution_exceeds_the_bound(name: str) -> None:
    """E exp(t (X - drift)) is at most 1 for distributions with the largest allowed mean and variance."""
    scores = np.minimum(honest_scores(name, (400_000,), seed=1), SCORE_TEST.clip)
    assert np.exp(SCORE_TEST.exponent() * (scores - SCORE_TEST.drift)).mean() <= 1.01


@pytest.mark.parametrize("name", ["normal", "two values", "skewed", "heavy tails"])
def test_false_alarms_of_simulated_lives(name: str) -> None:
    """Of 2,000 honest lives of 1,000 submissions none is convicted. At lower thresholds, where alarms can be counted, they are rarer
    than calculated."""
    lives, length = 2000, 1000
    largest = largest_sums(honest_scores(name, (length, lives), seed=2))
    assert largest.max() < THRESHOLDS["draws"]
    for rate in (0.5, 0.05):
        threshold = math.log(length / rate) / SCORE_TEST.exponent()
        assert (largest > threshold).mean() <= rate


def honest_scores(name: str, shape: tuple[int, ...], seed: int) -> Floats:
    """Returns scores with mean 0.5 and variance 1.5, the most that the threshold allows honest work."""
    draw = np.random.default_rng(seed)
    if name == "normal":
        centred = draw.standard_normal(shape)
    elif name == "two values":
        b = SCORE_TEST.clip - SCORE_TEST.mean
        low = SCORE_TEST.variance / b
        return SCORE_TEST.mean + np.where(draw.random(shape) < low / (low + b), b, -low)
    elif name == "skewed":
        centred = draw.standard_exponential(shape) - 1
    else:
        centred = draw.standard_t(4, shape) / math.sqrt(2)
    return SCORE_TEST.mean + math.sqrt(SCORE_TEST.variance) * centred


def largest_sums(scores: Floats) -> Floats:
    """Returns the largest sum of each life; `scores` has submissions in rows and lives in columns."""
    sums = largest = np.zeros(scores.shape[1])
    for row in np.minimum(scores, SCORE_TEST.clip) - SCORE_TEST.drift:
        sums = np.maximum(0, sums + row)
        largest = np.maximum(largest, sums)
    return largest


def test_the_simulation_adds_as_the_rule_does() -> None:
    scores = honest_scores("heavy tails", (500, 1), seed=3) + 0.5
    sums: Sums = {}
    largest = 0.0
    for score in scores[:, 0]:
        sums = next_sums(sums, {"draws": float(score)}, {})
        largest = max(largest, sums.get("draws", 0.0))
    assert largest == pytest.approx(float(largest_sums(scores)[0]))


@pytest.mark.parametrize(("mean", "within"), [(1.4, 200), (2.0, 80), (3.0, 36), (8.0, 18)])
def test_lies_that_no_single_submission_shows_are_convicted(mean: float, within: int) -> None:
    draw = np.random.default_rng(4)
    lives = mean + draw.standard_normal((within, 500))
    convicted = (largest_sums(lives) > THRESHOLDS["draws"]).mean()
    assert convicted > (0.9 if mean < 2 else 0.99)


def test_a_node_whose_every_replay_differs_is_convicted_though_few_are_replayed() -> None:
    """With `--replay 0.1`, nine of ten submissions with old weights are accepted."""
    sums: Sums = {}
    for number in range(1, 71):
        replayed = number % 10 == 0
        evidence = {"surprise_z": 0.0, "replay": "differs" if replayed else "not drawn"}
        sums = next_sums(sums, scores_of(UNCERTAIN if replayed else ACCEPTED, evidence), {})
    assert convicting(sums) == "replays"
    honest = next_sums({"replays": 0.5}, scores_of(ACCEPTED, {"surprise_z": 0.0, "replay": "equal"}), {})
    assert honest == {"replays": pytest.approx(0.4)}


def test_uncertain_work_convicts_after_seven_in_a_row() -> None:
    sums: Sums = {}
    for _ in range(7):
        assert convicting(sums) is None
        sums = next_sums(sums, scores_of("void.uncertain", {"surprise_z": 0.0}), {})
    assert convicting(sums) == "uncertain"


def test_noise_that_all_nodes_share_convicts_nobody() -> None:
    """Training raises everybody's scores slowly to 3; a node 2 above the others is convicted all the same."""
    draw = np.random.default_rng(5)
    baseline: Sums = {}
    honest: Sums = {}
    liar: Sums = {}
    caught = False
    for number in range(6000):
        level = min(3.0, number / 1500)
        score = {"draws": level + float(draw.standard_normal())}
        honest = next_sums(honest, score, baseline)
        assert convicting(honest) is None
        if number % 20 == 0:
            lie = {"draws": level + 2 + float(draw.standard_normal())}
            liar = next_sums(liar, lie, baseline)
            caught = caught or convicting(liar) is not None
        baseline = next_baseline(baseline, score)
    assert caught
    assert baseline["draws"] == pytest.approx(3.0, abs=0.5)


def test_work_that_is_too_exact_does_not_make_others_look_false() -> None:
    assert next_baseline({}, {"draws": -5.0}) == {}


@pytest.mark.parametrize(
    ("code", "evidence"),
    [
        ("accepted", {}),
        ("reject.copied", {"surprise_z": 9.0}),
        ("accepted", {"surprise_z": math.nan}),
        ("accepted", {"surprise_z": "9"}),
    ],
)
def test_verdicts_without_scores_change_nothing(code: str, evidence: dict[str, float]) -> None:
    assert scores_of(code, evidence) == {}


# -- a real coordinator -----------------------------------------------------------------------------------

ROOMY = CONFIG.model_copy(update={"groups_per_step": 400})
STEERED = {"surprise_z": 0.3, "z_draws": 5.0}
HONEST = {"surprise_z": 0.3, "z_draws": 0.4}


@pytest.fixture
def swarm(tmp_path: Path) -> SmallSwarm:
    swarm = SmallSwarm(tmp_path, ROOMY, SPEC)
    swarm.start()
    return swarm


def deliver(swarm: SmallSwarm, node: Node, evidence: dict[str, float], code: str = "accepted") -> str:
    """Takes one lease to its verdict and returns the code that the coordinator gives it."""
    lease = node.deliver()
    swarm.claim()
    found = swarm.verdict(lease, code, evidence=evidence)
    assert swarm.verdict(lease, code, evidence=evidence) == found  # a validator may send its verdict again
    return found.code or ""


def deliver_until_convicted(swarm: SmallSwarm, nodes: list[Node], evidence: dict[str, float]) -> int:
    for number in range(1, 100):
        if deliver(swarm, nodes[number % len(nodes)], evidence) == ACCUMULATED:
            return number
    raise AssertionError("100 submissions were accepted")


def test_steering_within_the_tolerance_is_convicted(swarm: SmallSwarm) -> None:
    steering, honest = swarm.node(), swarm.node()
    for _ in range(5):  # with these it is no new node when it is convicted
        deliver(swarm, honest, HONEST)
        deliver(swarm, steering, HONEST)
    swarm.reopen()  # the evidence is in the database
    swarm.relay_up()
    assert deliver_until_convicted(swarm, [steering], STEERED) == 18
    view = NodeView.parse(swarm.public.get(f"/v1/nodes/{steering.id}").content)
    assert (view.trust, view.accepted, view.rejected) == ("quarantined", 22, 1)
    assert view.last_code == ACCUMULATED and ACCUMULATED in CODES
    assert deliver(swarm, honest, HONEST) == "accepted"
    # The sums began at 0 again: the second conviction needs as much evidence as the first, and ejects the node.
    assert deliver_until_convicted(swarm, [steering], STEERED) == 18
    assert NodeView.parse(swarm.public.get(f"/v1/nodes/{steering.id}").content).trust == "banned"
    event = swarm.events("verdict.given")[-1]
    assert event.body["code"] == ACCUMULATED and event.body["evidence"]["verdict"] == "accepted"
    assert "draws: the scores of node" in event.body["detail"]
    assert event.body["rewards"] == [] and event.body["credit"] == 0
    replayed = replay(swarm.ledger())
    assert replayed.nodes[steering.id].standing.trust == "banned"
    assert_ledger_has_the_sums(swarm, [steering.id, honest.id])
    swarm.close()


def test_keys_that_are_thrown_away_before_they_are_convicted_share_their_evidence(swarm: SmallSwarm) -> None:
    """Each key delivers less than convicts it. Soon the work of new nodes that is as far off is uncertain, and nobody is blamed."""
    codes = []
    for _ in range(8):
        node = swarm.node()
        codes += [deliver(swarm, node, STEERED) for _ in range(5)]
    assert codes[:18] == ["accepted"] * 18 and set(codes[18:]) == {"void.uncertain"}
    newcomer = swarm.node()
    assert deliver(swarm, newcomer, HONEST) == "accepted"
    doubtful = swarm.events("verdict.given")[-2]
    assert doubtful.body["evidence"]["verdict"] == "accepted" and doubtful.body["rewards"] == []
    assert "draws: the scores of all new nodes add up" in doubtful.body["detail"]
    events = swarm.ledger()
    replayed = replay(events)
    assert replayed.evidence.baseline == {}, "new nodes do not move the baseline"
    spared = [
        event.model_copy(update={"body": event.body | {"code": "accepted"}})
        if event.seq == doubtful.seq
        else event
        for event in events
    ]
    with pytest.raises(CorruptData, match=r"is accepted, but the evidence gives void\.uncertain"):
        replay(spared)
    assert deliver(swarm, swarm.node(), HONEST | {"z_draws": 2.5}) == "void.uncertain"
    for _ in range(10):  # honest work of new nodes ends the doubt
        node = swarm.node()
        assert {deliver(swarm, node, HONEST) for _ in range(10)} == {"accepted"}
    assert deliver(swarm, swarm.node(), HONEST | {"z_draws": 2.5}) == "accepted"
    replay(swarm.ledger())
    swarm.close()


def test_keys_that_are_used_until_they_are_convicted_share_their_evidence(swarm: SmallSwarm) -> None:
    """A key is free: without this, each new one would have seventeen more submissions of steered draws accepted."""
    first = swarm.node()
    assert deliver_until_convicted(swarm, [first], STEERED) == 18
    for _ in range(3):
        node = swarm.node()
        assert [deliver(swarm, node, STEERED) for _ in range(3)] == ["void.uncertain"] * 3
    for _ in range(3):  # honest work of new nodes ends the doubt
        node = swarm.node()
        assert {deliver(swarm, node, HONEST) for _ in range(10)} == {"accepted"}
    assert deliver(swarm, swarm.node(), HONEST | {"z_draws": 2.5}) == "accepted"
    replay(swarm.ledger())
    swarm.close()


def test_replay_detects_a_conviction_without_evidence_and_evidence_without_conviction(
    swarm: SmallSwarm,
) -> None:
    node = swarm.node()
    deliver_until_convicted(swarm, [node], STEERED)
    events = swarm.ledger()
    last = max(event.seq for event in events if event.type == "verdict.given")
    spared = [
        event.model_copy(update={"body": event.body | {"code": "accepted"}}) if event.seq == last else event
        for event in events
    ]
    with pytest.raises(
        CorruptData, match=r"is accepted, but the evidence gives reject\.accumulated_evidence"
    ):
        replay(spared)
    framed = [
        event.model_copy(update={"body": event.body | {"evidence": HONEST}})
        if event.type == "verdict.given" and event.seq < last
        else event
        for event in events
    ]
    with pytest.raises(
        CorruptData, match=r"is reject\.accumulated_evidence, but the evidence gives accepted"
    ):
        replay(framed)
    swarm.close()


def test_uncertain_work_again_and_again_is_convicted(swarm: SmallSwarm) -> None:
    owner = Key.generate()
    nodes = [owned_node(swarm, owner) for _ in range(7)]
    codes = [deliver(swarm, node, HONEST, "void.uncertain") for node in nodes]
    assert codes == ["void.uncertain"] * 6 + [ACCUMULATED]
    replay(swarm.ledger())
    swarm.close()


def test_the_same_uncertain_work_counts_once_for_each_version(swarm: SmallSwarm) -> None:
    """An honest node gets uncertain work again, because it owes it, and makes the same bits from it while the version is the same."""
    node = swarm.node()
    codes = [deliver(swarm, node, HONEST | {"z_draws": 3.9}, "void.uncertain") for _ in range(7)]
    assert codes == ["void.uncertain"] * 7
    assert len({event.body["unit"] for event in swarm.events("lease.issued")}) == 1
    assert replay(swarm.ledger()).evidence.sums[f"node {node.id}"]["uncertain"] == pytest.approx(0.9)
    assert_ledger_has_the_sums(swarm, [node.id])
    swarm.announce(1)
    assert deliver(swarm, node, HONEST, "void.uncertain") == "void.uncertain"
    assert replay(swarm.ledger()).evidence.sums[f"node {node.id}"]["uncertain"] == pytest.approx(1.8)
    assert_ledger_has_the_sums(swarm, [node.id])
    swarm.close()


def test_other_work_in_place_of_uncertain_work_is_new_evidence(swarm: SmallSwarm) -> None:
    """A node sends doubtful work with low scores first, and steers when it gets the same prompts again."""
    node = swarm.node()
    for count in range(1, 4):
        assert deliver(swarm, node, HONEST | {"z_draws": 1.0}, "void.uncertain") == "void.uncertain"
        assert deliver(swarm, node, STEERED) == "accepted"
        assert replay(swarm.ledger()).evidence.sums[f"node {node.id}"]["draws"] == pytest.approx(3 * count)
    assert_ledger_has_the_sums(swarm, [node.id])
    swarm.close()


def test_evidence_of_an_owners_nodes_adds_up(swarm: SmallSwarm) -> None:
    owner = Key.generate()
    nodes = [owned_node(swarm, owner) for _ in range(5)]
    assert deliver_until_convicted(swarm, nodes, STEERED) == 18
    assert "owner" in swarm.events("verdict.given")[-1].body["detail"]
    replay(swarm.ledger())
    assert_ledger_has_the_sums(swarm, [node.id for node in nodes])
    swarm.close()


def owned_node(swarm: SmallSwarm, owner: Key) -> Node:
    node = swarm.stranger(Key.generate())
    ask = Enrol(protocol=PROTOCOL, software="test", delegation=delegate(owner, node.id, now_s=time.time()))
    node.client.call("POST", "/v1/enrol", ask, Enrolled)
    node.epoch = node.client.call("POST", "/v1/session", OpenSession(software="test"), Session).epoch
    return node


def assert_ledger_has_the_sums(swarm: SmallSwarm, nodes: list[str]) -> None:
    """Compares the sums in the database with those of the ledger, bit by bit."""
    replayed = replay(swarm.ledger())
    with swarm.coordinator.transaction() as tx:
        for node in nodes:
            row = ACCOUNTS.find(tx.db, f"node {node}")
            assert row is not None
            assert json.loads(row.evidence or "{}") == replayed.evidence.sums[f"node {node}"]


# -- the noise of the model rises ---------------------------------------------------------------------------

CALIBRATION = Path(__file__).parents[3] / "runs" / "calibration" / "smollm2-135m-bf16-on-cpu.json"
NOISE = Noise.parse(CALIBRATION.read_bytes()).model_copy(update={"compute_dtype": "float32"})
CALIBRATED_SPEC = SPEC.model_copy(update={"noise": NOISE, "last_version": 40})


def noisier(factor: float) -> Noise:
    """Returns the calibration of a model whose proofs have so many times the noise."""
    found = {}
    for name in ("mismatches", "mantissas"):
        statistic = getattr(NOISE, name)
        by_size = tuple(one.model_copy(update={"mean": factor * one.mean}) for one in statistic.by_size)
        found[name] = statistic.model_copy(update={"by_size": by_size})
    return NOISE.model_copy(update=found)


def seen(ratio: float, **more: float) -> dict[str, float]:
    """Returns the evidence on proofs with so many times the noise of the calibration."""
    of_proofs = {"mean_mismatches": 2.4 * ratio, "honest_mismatches": 2.4, "z_mismatches": 20 * (ratio - 1.2)}
    return {"surprise_z": 0.3, "pair_measured": 1} | of_proofs | more


def recalibrate(swarm: SmallSwarm, version: int, noise: Noise, measured: int | None = None) -> None:
    later = LaterNoise(from_version=version, measured=measured, moved=0.0, noise=noise)
    sealed = seal(manifest(version), swarm.run_key)
    body = Announce(manifest=sealed, origin_url="http://127.0.0.1:9998", report=None, noise=later)
    swarm.trainer.call("POST", "/v1/policies", body, Recorded)


@pytest.fixture
def calibrated(tmp_path: Path) -> SmallSwarm:
    swarm = SmallSwarm(tmp_path, ROOMY, CALIBRATED_SPEC)
    swarm.start()
    return swarm


@pytest.mark.parametrize(("rise", "code"), [(1.3, UNCERTAIN), (1.6, "reject.wrong_computation")])
def test_a_run_whose_noise_rises_goes_on_and_lies_about_weights_are_still_refused(
    calibrated: SmallSwarm, rise: float, code: str
) -> None:
    swarm = calibrated
    honest = swarm.node()
    assert {deliver(swarm, honest, seen(1.0)) for _ in range(NEW_NODE)} == {ACCEPTED}
    assert swarm.info().noise_doubt is None
    swarm.announce(1)
    assert deliver(swarm, swarm.node(), seen(2.4), "reject.wrong_computation") == "reject.wrong_computation"
    # More than an account allows to lose, and more than convict.
    assert {deliver(swarm, honest, seen(rise), code) for _ in range(30)} == {RECALIBRATING}
    doubt = swarm.info().noise_doubt
    assert doubt is not None and (doubt.version, doubt.submissions) == (1, 30)
    assert doubt.ratio == pytest.approx(rise)
    assert "30 submissions of up to version 1 in doubt" in swarm.stats().waiting_for
    recalibrate(swarm, 1, noisier(rise))
    assert swarm.info().noise_doubt is None
    assert swarm.info().spec.noise_of(1) == noisier(rise) and swarm.info().spec.noise_of(0) == NOISE
    assert {deliver(swarm, honest, seen(1.0)) for _ in range(5)} == {ACCEPTED}
    assert deliver(swarm, swarm.node(), seen(2.4), "reject.wrong_computation") == "reject.wrong_computation"
    view = NodeView.parse(swarm.public.get(f"/v1/nodes/{honest.id}").content)
    assert (view.trust, view.rejected, view.void) == ("trusted", 0, 30)
    replay(swarm.ledger())
    swarm.close()


def test_evidence_that_a_rise_explains_is_taken_back(calibrated: SmallSwarm) -> None:
    swarm = calibrated
    first, second = swarm.node(), swarm.node()
    for node in (first, second):
        assert {deliver(swarm, node, seen(1.1, z_mismatches=3.0, z_draws=3.0)) for _ in range(4)} == {
            ACCEPTED
        }
    swarm.announce(1)
    recalibrate(swarm, 1, noisier(1.05))
    assert "mismatches" in replay(swarm.ledger()).evidence.sums[f"node {first.id}"]
    swarm.announce(2)
    recalibrate(swarm, 2, noisier(1.3))
    assert swarm.events("run.calibrated")[-1].body["risen"] == ["mismatches", "mantissas"]
    after = replay(swarm.ledger()).evidence.sums
    assert "mismatches" not in after[f"node {first.id}"] and after[f"node {first.id}"]["draws"] > 4
    assert_ledger_has_the_sums(swarm, [first.id, second.id])
    events = swarm.ledger()
    kind = next(event for event in events if event.type == "run.calibrated")
    kinder = kind.model_copy(update={"body": kind.body | {"risen": ["mismatches"]}})
    with pytest.raises(CorruptData, match="takes back"):
        replay([kinder if event.seq == kind.seq else event for event in events])
    swarm.close()


def test_a_calibration_that_shows_no_rise_ends_the_excuses(calibrated: SmallSwarm) -> None:
    """A proven node begins to lie by a little: its doubtful work is void, and nothing is gained, until the noise is known."""
    swarm = calibrated
    liar = swarm.node()
    assert {deliver(swarm, liar, seen(1.0)) for _ in range(NEW_NODE)} == {ACCEPTED}
    swarm.announce(1)
    assert deliver(swarm, liar, seen(1.5), "reject.wrong_computation") == RECALIBRATING
    recalibrate(swarm, 1, NOISE)
    assert deliver(swarm, liar, seen(1.5), "reject.wrong_computation") == "reject.wrong_computation"
    swarm.announce(2)  # not measured yet, but another calibration was asked for in vain a moment ago
    assert deliver(swarm, liar, seen(1.5), UNCERTAIN) == UNCERTAIN
    assert swarm.info().noise_doubt is None
    replay(swarm.ledger())
    swarm.close()


@pytest.mark.parametrize("code", [UNCERTAIN, "reject.wrong_computation"])
def test_a_check_by_a_calibration_that_was_replaced_meanwhile_is_repeated(
    calibrated: SmallSwarm, code: str
) -> None:
    """A validator may have claimed the work before the calibration came. By the new one it is correct."""
    swarm = calibrated
    honest = swarm.node()
    assert {deliver(swarm, honest, seen(1.0)) for _ in range(NEW_NODE)} == {ACCEPTED}
    swarm.announce(1)
    lease = honest.deliver()
    swarm.claim()
    recalibrate(swarm, 1, noisier(1.6))
    found = swarm.verdict(lease, code, evidence=seen(1.6, calibrated_at=-1))
    assert (found.state, found.code) == ("submitted", None)
    again = swarm.claim()
    assert again.lease == lease and again.calibrations == 1
    assert swarm.verdict(lease, evidence=seen(1.0, calibrated_at=1)).code == ACCEPTED
    assert deliver(swarm, honest, seen(1.6, calibrated_at=1), code) == code
    replay(swarm.ledger())
    swarm.close()


def test_a_version_is_calibrated_again_if_its_calibration_was_measured_with_an_earlier_one(
    calibrated: SmallSwarm,
) -> None:
    """The run waits for rollouts of this version, which are all void or refused, so no later version would bring a calibration."""
    swarm = calibrated
    honest = swarm.node()
    assert {deliver(swarm, honest, seen(1.0)) for _ in range(NEW_NODE)} == {ACCEPTED}
    swarm.announce(1)
    recalibrate(swarm, 1, noisier(1.1), measured=0)
    recalibrate(swarm, 1, noisier(1.1), measured=0)  # a repeated request changes nothing
    assert deliver(swarm, honest, seen(1.6), "reject.wrong_computation") == RECALIBRATING
    recalibrate(swarm, 1, noisier(1.6), measured=1)
    assert swarm.info().spec.noise_of(1) == noisier(1.6)
    assert [event.body["measured"] for event in swarm.events("run.calibrated")] == [0, 1]
    honest.deliver()
    assert swarm.claim().calibrations == 2
    swarm.announce(2)
    recalibrate(swarm, 1, noisier(2.0), measured=1)
    assert swarm.info().spec.noise_of(2) == noisier(1.6), "only the newest version is calibrated again"
    replay(swarm.ledger())
    swarm.close()


def test_strangers_who_ask_in_vain_do_not_delay_the_excuses_of_proven_nodes(calibrated: SmallSwarm) -> None:
    """Keys are free: strangers could otherwise keep the run from measuring again when the noise rises, and it would stand still."""
    swarm = calibrated
    honest = swarm.node()
    assert {deliver(swarm, honest, seen(1.0)) for _ in range(NEW_NODE)} == {ACCEPTED}
    swarm.announce(1)
    assert deliver(swarm, swarm.node(), seen(1.3), UNCERTAIN) == RECALIBRATING
    recalibrate(swarm, 1, NOISE)
    swarm.announce(2)
    assert deliver(swarm, swarm.node(), seen(1.3), UNCERTAIN) == UNCERTAIN
    assert swarm.info().noise_doubt is None
    assert deliver(swarm, honest, seen(1.6), "reject.wrong_computation") == RECALIBRATING
    assert swarm.info().noise_doubt is not None
    replay(swarm.ledger())
    swarm.close()


@pytest.mark.parametrize(
    "evidence",
    [
        seen(1.3) | {"pair_measured": 0},
        seen(1.1, z_draws=9.0),
        seen(1.2, z_mismatches=0.5, z_draws=9.0),
        seen(1.3, replay="differs"),  # type: ignore[arg-type]
    ],
)
def test_only_noisy_proofs_of_a_measured_pair_excuse_doubtful_work(evidence: dict[str, float]) -> None:
    watch = NoiseWatch()
    assert not watch.add(UNCERTAIN, evidence, 1, 1000.0, "node a")
    assert watch.add(UNCERTAIN, seen(1.3), 1, 1000.0, NEW_NODES)
    assert not watch.add("reject.wrong_computation", seen(1.3), 1, 1000.0, NEW_NODES)
    assert not watch.add("reject.forged_proof", seen(1.3), 1, 1000.0, "node a")
    assert watch.add(UNCERTAIN, seen(1.3), 1, 1000.0 + PATIENCE_S, NEW_NODES)
    assert not watch.add(UNCERTAIN, seen(1.3), 1, 1001.0 + PATIENCE_S, NEW_NODES)
    assert watch.add(UNCERTAIN, seen(1.3), 1, 1001.0 + PATIENCE_S, "node a"), "it has not doubted before"


def test_doubtful_work_all_the_time_asks_for_few_calibrations() -> None:
    """A stranger sends doubtful work with every version, every second for a day; each calibration comes at once and shows no rise."""
    watch, asked_s, excused = NoiseWatch(), list[float](), 0
    for second in range(86_400):
        now_s, version = 1e9 + second, second // 5
        excused += watch.add(UNCERTAIN, seen(1.3), version, now_s, NEW_NODES)
        if watch.asks(now_s):
            asked_s.append(now_s)
            watch.calibrated(version, now_s, risen=False)
    assert len(asked_s) < 35 and excused == len(asked_s)
    pauses = np.diff(asked_s)
    assert pauses[0] >= 60 and pauses[-1] >= MOST_WAIT_S


def test_drift_below_the_margin_asks_for_a_calibration_before_work_is_void() -> None:
    watch = NoiseWatch()
    for number in range(100):
        watch.add(ACCEPTED, seen(1 + number / 500), 1, 1000.0, "node a")
        if watch.asks(1000.0):
            break
    assert 1 + number / 500 < 1.2 and not watch.doubts
    watch.calibrated(1, 1000.0, risen=True)
    for _ in range(20):
        watch.add(ACCEPTED, seen(1.2), 2, 1001.0, NEW_NODES)
    assert not watch.asks(2000.0), "new nodes do not move the mean"


def test_a_calibration_of_an_earlier_version_says_nothing_of_the_doubt() -> None:
    """Measuring takes as long as some versions do, so a calibration may come that had begun before the noise rose."""
    watch = NoiseWatch()
    assert watch.add(UNCERTAIN, seen(1.3), 5, 1000.0, "node a")
    watch.calibrated(4, 1010.0, risen=False)
    assert watch.asks(1011.0) and (watch.doubts, watch.version) == (1, 5)
    assert watch.add(UNCERTAIN, seen(1.3), 9, 1011.0, "node a")
    watch.calibrated(5, 1020.0, risen=False)
    assert not watch.asks(1021.0) and watch.doubts == 0
    assert not watch.add(UNCERTAIN, seen(1.3), 9, 1021.0, "node a"), (
        "the version of its first doubt was measured"
    )


def test_accepted_work_that_is_always_noisy_asks_for_few_calibrations() -> None:
    """A node stays just within the margin, submits every second for a day, and each calibration comes at once and shows no rise."""
    watch, asked_s = NoiseWatch(), list[float]()
    for second in range(86_400):
        now_s, version = 1e9 + second, second // 5
        watch.add(ACCEPTED, seen(1.2), version, now_s, "node a")
        if watch.asks(now_s):
            asked_s.append(now_s)
            watch.calibrated(version, now_s, risen=False)
    assert len(asked_s) < 35
    assert watch.add(UNCERTAIN, seen(1.3), version + 1, 1e9 + 86_400, "node b"), (
        "another node may still doubt"
    )


def test_the_wait_of_a_node_that_asked_in_vain_grows_and_then_shrinks() -> None:
    watch, now_s, waits = NoiseWatch(), 1000.0, []
    for version in range(1, 12):
        if version < 4:
            assert watch.add(UNCERTAIN, seen(1.3), version, now_s, "node a")
        watch.calibrated(version, now_s, risen=False)
        waits.append(watch.waits.get("node a", 0.0))
        now_s += 4000.0
    assert waits == [60, 120, 240, 120, 60, 0, 0, 0, 0, 0, 0]
    assert watch.waits == {}


def test_a_rise_is_measured_against_the_earlier_calibration() -> None:
    assert noisier(1.3).rise_since(NOISE)["mismatches"] == pytest.approx(1.3)
    assert NOISE.rise_since(NOISE) == dict.fromkeys(
        ("mismatches", "mantissas", "logprobs", "draws"), pytest.approx(1.0)
    )
