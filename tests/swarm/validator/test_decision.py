"""Verdicts over a whole submission: calibrated noise, and how surprising the tokens are."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from honest_work import generate, make_claim, make_lease, make_policy, make_spec, make_table, sharpen

from shoal import toploc
from shoal.swarm.validator.fact_checks import (
    RowFacts,
    check_facts,
    check_surprise,
    few_token_exponent,
    surprise_z,
    units_of,
)
from shoal.swarm.validator.judge import judge
from shoal.swarm.validator.prefill import LoadedPolicy
from shoal.swarm.validator.recompute import recompute
from shoal.swarm.validator.table_reader import TableReader
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.proof_noise import Noise, Statistic
from shoal.wire.rollouts import Finish, Rollout, encode
from shoal.wire.run_spec import Sampling, Tolerances, default_tolerances

SAMPLING = Sampling(max_new_tokens=36, samples_per_prompt=8)
SPEC = make_spec(sampling=SAMPLING)
LOOSE = Tolerances(
    exponent_mismatches=128, mantissa_mean=128, mantissa_median=128, logprob=10, draw=0.999, draw_misses=0.99
)
"""Nothing is far off for these: what is refused is refused by the test over the submission."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    return sharpen(make_policy(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def noise(policy: LoadedPolicy) -> Noise:
    rows = []
    for number in range(100, 107):
        lease = make_lease(SPEC, number=number)
        table = make_table(lease, policy)
        facts = recompute(table.rows, lease, policy, control_seed=number)
        rows += [units_of(row, fact) for row, fact in zip(table.rows, facts, strict=True)]
    return toploc.measure_noise({"this machine": rows}, model="tiny", compute_dtype="float32")


def stale(policy: LoadedPolicy, size: float) -> LoadedPolicy:
    """Returns the policy with every weight moved by one step of Adam."""
    decoder = copy.deepcopy(policy.decoder)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).sign(), alpha=size)
    return LoadedPolicy(policy.version, decoder, policy.tokenizer)


def test_honest_work_is_accepted_and_a_step_of_1e_5_is_seen(policy: LoadedPolicy, noise: Noise) -> None:
    """Segment by segment the tolerances pass it: it is the sum over the submission that tells."""
    lease = make_lease(SPEC, number=1)
    honest = make_table(lease, policy)
    check_facts(honest.rows, recompute(honest.rows, lease, policy, control_seed=1), LOOSE, noise)
    old = make_table(lease, stale(policy, 1e-5))
    facts = recompute(old.rows, lease, policy, control_seed=1)
    check_facts(old.rows, facts, LOOSE)
    with pytest.raises(Rejected, match="standard deviations too many") as refused:
        check_facts(old.rows, facts, LOOSE, noise)
    assert refused.value.code == "reject.wrong_computation"


def test_suspicious_but_not_certain_is_void(policy: LoadedPolicy, noise: Noise) -> None:
    lease = make_lease(SPEC, number=2)
    rows = make_table(lease, policy).rows
    facts = recompute(rows, lease, policy, control_seed=1)
    scores = toploc.noise_scores([fact.segments for fact in facts], noise)
    over = next(score for score in scores if (score.statistic, score.where) == ("mantissas", "over all rows"))
    num_segments = sum(len(fact.segments) for fact in facts)
    # Just past suspicious, spread evenly over the segments.
    spread = max(noise.mantissas.by_size[-1].variance, 0.01**2) ** 0.5
    excess = (over.suspicious * 1.15 - over.z) * spread * noise.mantissas.inflation**0.5 / num_segments**0.5
    shifted = [
        replace(
            fact,
            segments=tuple(s._replace(mantissa_bounded=s.mantissa_bounded + excess) for s in fact.segments),
        )
        for fact in facts
    ]
    with pytest.raises(Rejected) as refused:
        check_facts(rows, shifted, LOOSE, noise)
    assert refused.value.code == "void.uncertain", refused.value.detail


def test_log_probs_and_draws_use_the_calibration(policy: LoadedPolicy, noise: Noise) -> None:
    """Tolerances that pass anything, and yet: what is known of honest work judges, each lie under its own code."""
    lease = make_lease(SPEC, number=12)
    table = make_table(lease, policy)
    facts = recompute(table.rows, lease, policy, control_seed=1)
    check_facts(table.rows, facts, LOOSE, noise)
    shifted = [replace(row, logprobs=tuple(one - 0.02 for one in row.logprobs)) for row in table.rows]
    check_facts(shifted, facts, LOOSE)
    with pytest.raises(Rejected) as refused:
        check_facts(shifted, facts, LOOSE, noise)
    assert refused.value.code == "reject.wrong_logprobs"
    away = [replace(fact, draw_distance_T=fact.draw_distance_T + 0.01) for fact in facts]
    check_facts(table.rows, away, LOOSE)
    with pytest.raises(Rejected) as refused:
        check_facts(table.rows, away, LOOSE, noise)
    assert refused.value.code == "reject.wrong_sampling"


def test_tolerances_judge_sizes_that_the_calibration_does_not_know(
    policy: LoadedPolicy, noise: Noise
) -> None:
    lease = make_lease(SPEC, number=13)
    table = make_table(lease, policy)
    facts = recompute(table.rows, lease, policy, control_seed=1)
    full = [place for place, row in enumerate(table.rows) if len(row.output_tokens) == 36]
    rows, facts = [table.rows[place] for place in full], [facts[place] for place in full]
    tight = LOOSE.model_copy(update={"logprob": 1e-9, "exponent_mismatches": 0, "mantissa_mean": 0.0})
    check_facts(rows, facts, tight, noise)
    unknown = noise.model_copy(update={"token_sizes": (), "logprobs": None, "draws": None})
    with pytest.raises(Rejected) as refused:
        check_facts(rows, facts, tight, unknown)
    assert refused.value.code == "reject.wrong_logprobs"


def test_the_verdict_uses_the_calibration_of_the_run(policy: LoadedPolicy, noise: Noise) -> None:
    lease = make_lease(SPEC, number=3)
    data = encode(make_table(lease, stale(policy, 1e-5)))
    claim = make_claim(lease, data)
    with TableReader() as reader:
        without, with_noise = (
            judge(data, claim, spec, policy, reader=reader, control_seed=1)
            for spec in (
                SPEC.model_copy(update={"tolerances": LOOSE}),
                SPEC.model_copy(update={"tolerances": LOOSE, "noise": noise}),
            )
        )
    assert without.code == ACCEPTED, without.detail
    assert with_noise.code == "reject.wrong_computation"


def test_surprise_equals_the_entropy_difference(policy: LoadedPolicy) -> None:
    lease = make_lease(SPEC, number=4)
    table = make_table(lease, policy)
    fact = recompute(table.rows, lease, policy, control_seed=1)[0]
    row = table.rows[0]
    tokens = torch.tensor([row.prompt_tokens + row.output_tokens[:-1]])
    hidden = policy.decoder(tokens, torch.arange(tokens.shape[1])[None])[0, len(row.prompt_tokens) - 1 :]
    logprobs = torch.log_softmax(policy.decoder.logits(hidden).double(), dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    variance = (logprobs.exp() * logprobs.square()).sum(-1) - entropy.square()
    chosen = logprobs.gather(1, torch.tensor(row.output_tokens)[:, None])[:, 0]
    np.testing.assert_allclose(fact.surprise_T, (-chosen - entropy).detach().numpy(), atol=1e-4)
    np.testing.assert_allclose(fact.surprise_variance_T, variance.detach().numpy(), atol=1e-3)


@pytest.mark.parametrize(("temperature", "word"), [(1.6, "less"), (0.5, "more")])
def test_another_sampler_is_seen_without_any_seed(
    policy: LoadedPolicy, temperature: float, word: str
) -> None:
    lease = make_lease(SPEC, number=5, prompts=8)
    table = make_table(lease, policy, generate(lease, policy, temperature=temperature))
    facts = recompute(table.rows, lease, policy, control_seed=1)
    with pytest.raises(Rejected, match=f"standard deviations {word} likely") as refused:
        check_surprise(facts)
    assert refused.value.code == "reject.wrong_sampling"


def test_honest_tokens_are_no_surprise(policy: LoadedPolicy) -> None:
    for number in range(6, 12):
        lease = make_lease(SPEC, number=number)
        facts = recompute(make_table(lease, policy).rows, lease, policy, control_seed=1)
        assert abs(surprise_z(facts)) < 5
        check_surprise(facts)


def test_surprise_of_a_deterministic_model_is_zero() -> None:
    still = np.zeros(8)
    sure = RowFacts((), still, still, still + 0.1, still)
    check_surprise([sure])


def sure_model(num_tails: int, *, num_tokens: int = 250) -> RowFacts:
    """Returns draws of a model that gives one token 1 - 4.5e-5 and divides the rest evenly among 150,000 others."""
    tail = 4.5e-5
    costs = np.array([-math.log1p(-tail), -math.log(tail / 150_000)])
    chances = np.array([1 - tail, tail])
    entropy = float(chances @ costs)
    logprobs = np.full(num_tokens, -costs[0])
    logprobs[:num_tails] = -costs[1]
    variance = np.full(num_tokens, float(chances @ (costs - entropy) ** 2))
    return RowFacts((), logprobs, np.zeros(num_tokens), -logprobs - entropy, variance)


def test_one_honest_token_from_the_tail_of_a_sure_model_is_no_lie() -> None:
    """One of 90 such submissions has a token of the tail; five in one have a probability of 1e-12."""
    assert surprise_z([sure_model(1)]) > 8
    for num_tails in (0, 1, 2):
        check_surprise([sure_model(num_tails)])
    with pytest.raises(Rejected, match="standard deviations less likely"):
        check_surprise([sure_model(8)])
    tails = [few_token_exponent([sure_model(num)]) for num in range(1, 9)]
    assert tails == sorted(tails) and tails[0] < math.log(1e4)


# -- with a calibration of a real model in bfloat16 ---------------------------------------------------------

CALIBRATION = Path(__file__).parents[3] / "runs" / "calibration"


@pytest.fixture(scope="module", params=sorted(CALIBRATION.glob("*.json")), ids=lambda path: path.stem)
def measured(request: pytest.FixtureRequest) -> Noise:
    return Noise.parse(request.param.read_bytes())


def made_up(noise: Noise, shift: float, *, seed: int, num_rows: int = 64) -> list[RowFacts]:
    """Rows of one full segment, as honest as the calibration has them, each moved by `shift` of its standard deviations."""
    rng = np.random.default_rng(seed)
    wrong, error = noise.mismatches.by_size[-1], noise.mantissas.by_size[-1]
    facts = []
    for _ in range(num_rows):
        mantissa = max(0.0, rng.normal(error.mean + shift * error.variance**0.5, error.variance**0.5))
        segment = toploc.SegmentCheck(
            num_values=noise.sizes[-1],
            num_points=128,
            exponent_mismatches=int(rng.poisson(wrong.mean + shift * wrong.variance**0.5)),
            mantissa_mean=mantissa,
            mantissa_median=float(int(mantissa)),
            mantissa_bounded=min(mantissa, 8.0),
            sign_mismatches=0,
            control_hits=2,
            num_controls=128,
            constant=False,
        )
        nothing = np.zeros(32)
        facts.append(RowFacts((segment,), nothing - 0.1, nothing, nothing, nothing + 1))
    return facts


COLUMNS = ("logprobs_T", "draw_distance_T", "surprise_T", "surprise_variance_T")


def verdict_on(
    facts: list[RowFacts],
    noise: Noise | None,
    finish: Finish = Finish.LENGTH,
    *,
    facts_of: list[RowFacts] | None = None,
) -> str:
    """Returns the code for rows that claim what `facts` say, unless `facts_of` gives other claims."""
    rows = [
        Rollout(
            prompt_index=index // 4,
            sample_index=index % 4,
            prompt_tokens=(1, 2),
            output_tokens=(3,) * len(facts[index].logprobs_T),
            logprobs=tuple(facts[index].logprobs_T.tolist()),
            finish=finish,
            proof=b"",
        )
        for index in range(len(facts))
    ]
    try:
        check_facts(rows, facts_of or facts, default_tolerances("bfloat16"), noise)
    except Rejected as rejected:
        return rejected.code
    return ACCEPTED


def test_only_certain_lies_are_rejected(measured: Noise) -> None:
    """Growing distance leads from accepted to void to rejected. Work that could be honest is never rejected."""
    honest = [verdict_on(made_up(measured, 0.0, seed=seed), measured) for seed in range(100)]
    assert honest.count(ACCEPTED) >= 97 and not any(code.startswith("reject.") for code in honest)
    found = [verdict_on(made_up(measured, step / 50, seed=step), measured) for step in range(150)]
    first_void, first_reject = found.index("void.uncertain"), found.index("reject.wrong_computation")
    assert first_void < first_reject, "suspicion comes before certainty"
    assert set(found[first_reject + 25 :]) == {"reject.wrong_computation"}


@pytest.mark.parametrize("num_rows", [64, 2048])
def test_no_calibration_is_wider_than_the_published_rule(measured: Noise, num_rows: int) -> None:
    """The more segments, the wider the bound of each; but not so wide that proofs of nothing pass among honest ones."""
    honest = made_up(measured, 0.0, seed=1, num_rows=num_rows)

    def with_one(mismatches: int) -> str:
        segment = honest[5].segments[0]._replace(exponent_mismatches=mismatches)
        return verdict_on([*honest[:5], replace(honest[5], segments=(segment,)), *honest[6:]], measured)

    assert verdict_on(honest, measured) == with_one(15) == ACCEPTED
    assert with_one(42) == "void.uncertain"
    assert with_one(80) == with_one(126) == "reject.wrong_computation"


def with_draws(facts: list[RowFacts], distances: dict[int, float], logprob: float = -0.1) -> list[RowFacts]:
    """One token of each of these rows, off its draw by that much; its last."""
    moved = list(facts)
    for row, distance in distances.items():
        distance_T, logprob_T = facts[row].draw_distance_T.copy(), facts[row].logprobs_T.copy()
        distance_T[-1], logprob_T[-1] = distance, logprob
        moved[row] = replace(facts[row], draw_distance_T=distance_T, logprobs_T=logprob_T)
    return moved


@pytest.mark.parametrize("calibrated", [True, False])
def test_a_few_chosen_tokens_are_seen(measured: Noise, calibrated: bool) -> None:
    """Too few to move a mean, but nowhere near their draws. One may be a machine's bad day."""
    honest, noise = made_up(measured, 0.0, seed=2), measured if calibrated else None
    for count, code in (
        (1, ACCEPTED),
        (2, "void.uncertain"),
        (3, "void.uncertain"),
        (4, "reject.wrong_sampling"),
    ):
        far = with_draws(honest, dict.fromkeys(range(0, 7 * count, 7), 0.5))
        assert verdict_on(far, noise) == code, count
    near = with_draws(honest, dict.fromkeys(range(0, 28, 7), 0.15))
    assert verdict_on(near, noise) == ACCEPTED
    # Nearer, but of tokens that no noise would draw.
    impossible = with_draws(honest, dict.fromkeys(range(0, 28, 7), 0.15), logprob=-20.0)
    assert verdict_on(impossible, noise) == "reject.wrong_sampling"


def test_chosen_tokens_do_not_hide_early_ends(measured: Noise) -> None:
    """Enough of them that "all other tokens are draws" is false, and not enough to show by themselves."""
    honest = made_up(measured, 0.0, seed=3)
    others = []
    for fact in honest:
        distance_T = fact.draw_distance_T.copy()
        distance_T[3] = 0.09
        others.append(replace(fact, draw_distance_T=distance_T))
    assert verdict_on(others, measured, Finish.EOS) == ACCEPTED
    cut = with_draws(others, dict.fromkeys(range(6), 0.1), logprob=-5.0)
    assert verdict_on(cut, measured, Finish.EOS) == "reject.early_stop"
    assert verdict_on(with_draws(honest, {0: 0.1}, logprob=-5.0), measured, Finish.EOS) == ACCEPTED
    # One end is enough where it is out of the question.
    assert (
        verdict_on(with_draws(honest, {0: 0.1}, logprob=-20.0), measured, Finish.EOS) == "reject.early_stop"
    )


def without_small_blocks(noise: Noise) -> Noise:
    """Returns the calibration without the sizes of partial blocks."""

    def few(statistic: Statistic) -> Statistic:
        *small, full = statistic.by_size
        return statistic.model_copy(
            update={"by_size": (*(moments.model_copy(update={"segments": 3}) for moments in small), full)}
        )

    assert noise.logprobs is not None and noise.draws is not None
    return noise.model_copy(update={"logprobs": few(noise.logprobs), "draws": few(noise.draws)})


def four_more(column: Any) -> Any:
    """Returns the column with its last value four times more."""
    return np.append(column, [column[-1]] * 4)


def test_the_last_tokens_of_a_row_are_judged_where_no_calibration_knows_their_block(measured: Noise) -> None:
    noise = without_small_blocks(measured)
    longer = [
        replace(fact, **{name: four_more(getattr(fact, name)) for name in COLUMNS})
        for fact in made_up(measured, 0.0, seed=4)
    ]
    assert verdict_on(longer, noise) == ACCEPTED
    off = [replace(fact, draw_distance_T=np.append(fact.draw_distance_T[:-4], [0.2] * 4)) for fact in longer]
    assert verdict_on(off, noise) == "reject.wrong_sampling"
    claimed = [replace(longer[0], logprobs_T=np.append(longer[0].logprobs_T[:-4], [-0.8] * 4)), *longer[1:]]
    assert verdict_on(longer, noise, facts_of=claimed) == "reject.wrong_logprobs"


def test_a_wide_tail_does_not_let_the_log_probs_of_most_rows_be_wrong(
    policy: LoadedPolicy, noise: Noise
) -> None:
    """A calibration with one honest row that is far off, as routing to experts gives, has such tails."""
    assert noise.logprobs is not None and noise.logprobs.alone is not None
    wide = {"one_in_100": 1e3, "one_in_1000": 1e4}
    tails = tuple(tail.model_copy(update=wide) for tail in noise.logprobs.tails)
    alone = noise.logprobs.alone.model_copy(update=wide)
    heavy = noise.model_copy(
        update={"logprobs": noise.logprobs.model_copy(update={"tails": tails, "alone": alone})}
    )
    lease, tolerances = make_lease(SPEC), default_tolerances("bfloat16")
    rows = make_table(lease, policy).rows
    facts = recompute(rows, lease, policy, control_seed=1)

    def with_wrong(count: int) -> list[Rollout]:
        wrong = [replace(row, logprobs=tuple(one - 0.7 for one in row.logprobs)) for row in rows[:count]]
        return [*wrong, *rows[count:]]

    half = len(rows) // 2
    check_facts(with_wrong(half), facts, tolerances, heavy)
    with pytest.raises(Rejected, match=rf"wrong_logprobs: {half + 1} of {len(rows)} rows"):
        check_facts(with_wrong(half + 1), facts, tolerances, heavy)
    few = slice(0, 4)
    check_facts(with_wrong(4)[few], facts[few], tolerances, heavy)
