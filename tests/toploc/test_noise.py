"""Calibration and decision: honest submissions pass at the stated rate, and small lies in many rows become certain."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from pydantic import ValidationError

from shoal import toploc
from shoal.toploc.decision import (
    CERTAIN,
    MARGIN,
    NARROWEST,
    NORMAL_TAIL,
    bound,
    bound_for,
    outlier_bound,
    size_class,
    standard_score,
)
from shoal.toploc.segments import NO_MATCH, SegmentCheck
from shoal.wire.proof_noise import RISEN, Noise, Tail

Row = list[SegmentCheck]
MORE = 1 + MARGIN
"""The largest mean of honest noise, relative to the calibrated one."""
FULL, SHORT = 18_432, 1_152


def test_a_rise_is_half_of_the_margin_of_sums() -> None:
    assert 1 + MARGIN / 2 == RISEN


def segment(mismatches: float, mantissa: float, *, size: int = FULL, signs: int = 0) -> SegmentCheck:
    return SegmentCheck(
        num_values=size,
        num_points=128,
        exponent_mismatches=int(mismatches),
        mantissa_mean=mantissa,
        mantissa_median=math.floor(mantissa),
        mantissa_bounded=min(mantissa, 8.0),
        sign_mismatches=signs,
        control_hits=2,
        num_controls=128,
        constant=False,
    )


def draw_rows(
    rng: np.random.Generator, count: int, *, mismatches: float = 2.5, mantissa: float = 1.45
) -> list[Row]:
    """Returns rows like SmolLM2-135M's in bfloat16: three full segments and a short one, with noise shared by each row."""
    rows = []
    for _ in range(count):
        shift = rng.normal(0, 0.05)
        full = [segment(rng.poisson(mismatches), max(0, rng.normal(mantissa + shift, 0.2))) for _ in range(3)]
        short = segment(rng.poisson(mismatches / 2), max(0, rng.normal(mantissa + shift, 0.6)), size=SHORT)
        rows.append([*full, short])
    return rows


@pytest.fixture(scope="module")
def noise() -> Noise:
    rows = draw_rows(np.random.default_rng(0), 600)
    return toploc.measure_noise({"here to there": rows}, model="made up", compute_dtype="bfloat16")


def worst(rows: Sequence[Row], noise: Noise) -> tuple[bool, bool]:
    scores = toploc.noise_scores(rows, noise)
    return any(score.is_certain for score in scores), any(score.is_suspicious for score in scores)


def test_measured_noise_matches_the_rows(noise: Noise) -> None:
    assert noise.sizes == (SHORT, FULL)
    short, full = noise.mismatches.by_size
    assert (short.segments, full.segments) == (600, 1800)
    assert full.mean == pytest.approx(2.5, abs=0.15) and full.variance == pytest.approx(2.5, abs=0.3)
    assert short.mean == pytest.approx(1.25, abs=0.15)
    assert noise.mantissas.by_size[1].mean == pytest.approx(1.45, abs=0.02)
    assert noise.mantissas.inflation > 1.05, "the segments of a row share its shift"
    assert noise.measured == ("here to there: 600 rows",)
    assert Noise.parse(noise.model_dump_json()) == noise


def test_honest_submissions_are_never_certain_and_seldom_suspicious(noise: Noise) -> None:
    rng = np.random.default_rng(1)
    found = [worst(draw_rows(rng, size), noise) for size in (1, 8, 64) for _ in range(200)]
    assert sum(certain for certain, _ in found) == 0
    assert sum(suspicious for _, suspicious in found) <= 12, "six tests at 3 in 10,000 each, 600 times"


@pytest.mark.parametrize(
    ("mismatches", "mantissa"),
    [(3.6, 2.2), (5.0, 3.0), (4.5, 2.9), (7.3, 4.8)],
    ids=["q8", "int8", "token", "system"],
)
def test_small_lies_in_every_row_are_certain(noise: Noise, mismatches: float, mantissa: float) -> None:
    """The figures are those measured on SmolLM2-135M; the published thresholds accept all of them."""
    rng = np.random.default_rng(2)
    found = [worst(draw_rows(rng, 64, mismatches=mismatches, mantissa=mantissa), noise) for _ in range(50)]
    assert all(certain for certain, _ in found)


def test_one_false_row_among_honest_ones_is_certain(noise: Noise) -> None:
    rows = draw_rows(np.random.default_rng(3), 64)
    rows[17] = draw_rows(np.random.default_rng(4), 1, mismatches=60, mantissa=10)[0]
    certain = [score for score in toploc.noise_scores(rows, noise) if score.is_certain]
    assert any((score.statistic, score.where) == ("mismatches", "of row 17") for score in certain)
    assert "standard deviations" in str(certain[0])


def test_scores_between_honest_and_certain_are_suspicious(noise: Noise) -> None:
    rng = np.random.default_rng(5)
    found = [
        worst(draw_rows(rng, 64, mantissa=1.45 * MORE + 0.1, mismatches=2.5 * MORE + 0.2), noise)
        for _ in range(40)
    ]
    assert any(suspicious and not certain for certain, suspicious in found)


def test_noise_that_moves_while_a_policy_learns_is_honest_and_eight_bits_are_not(noise: Noise) -> None:
    rng = np.random.default_rng(12)
    moved = [worst(draw_rows(rng, 256, mismatches=2.5 * 1.2, mantissa=1.45 * 1.2), noise) for _ in range(20)]
    assert not any(certain or suspicious for certain, suspicious in moved)
    for _ in range(20):
        scores = toploc.noise_scores(draw_rows(rng, 256, mismatches=2.5 * 1.2, mantissa=1.45 * 1.2), noise)
        assert all(score.standard < 0 for score in scores if score.standard is not None), "it would add up"
    assert all(worst(draw_rows(rng, 64, mismatches=3.6, mantissa=2.2), noise)[0] for _ in range(20))


def test_flipped_signs_and_segments_without_any_match_count(noise: Noise) -> None:
    flipped = [[segment(2, 1.45, signs=30)] * 3 for _ in range(4)]
    assert worst(flipped, noise)[0]
    unmatched = [[segment(128, NO_MATCH)] * 3 for _ in range(4)]
    assert worst(unmatched, noise)[0]


def test_rows_without_proofs_have_no_scores(noise: Noise) -> None:
    assert toploc.noise_scores([[], []], noise) == []
    assert len(toploc.noise_scores([[], *draw_rows(np.random.default_rng(0), 1)], noise)) == 6


def test_a_noisier_pair_of_machines_widens_the_bounds() -> None:
    rng = np.random.default_rng(6)
    near, far = draw_rows(rng, 400), draw_rows(rng, 400, mantissa=1.60)
    both = toploc.measure_noise({"near": near, "far": far}, model="m", compute_dtype="bfloat16")
    certain = [worst(draw_rows(rng, 64, mantissa=1.60), both)[0] for _ in range(50)]
    assert not any(certain), "honest work of the noisier pair"


def test_a_bound_is_at_least_that_of_a_normal_tail() -> None:
    flat = Tail(rows=64, one_in_100=0.0, one_in_1000=0.0)
    assert bound(flat, 1e-3) == pytest.approx(NORMAL_TAIL[1])
    assert bound(flat, CERTAIN) > 4.75, "1 in a million of a normal distribution exceed 4.75"
    wide = Tail(rows=1, one_in_100=3.0, one_in_1000=5.0)
    assert bound(wide, 1e-4) == pytest.approx(7.0)
    one_row = Tail(rows=1, one_in_100=0.0, one_in_1000=0.0)
    assert bound(one_row, CERTAIN) > bound(flat, CERTAIN), "a single row is skewed"


def test_single_rows_have_a_longer_tail() -> None:
    tail = Tail(rows=1, one_in_100=3.0, one_in_1000=4.5)
    assert outlier_bound(tail, 1e-2) == 3.0
    assert outlier_bound(tail, 1e-4) == pytest.approx(3.0 * 1.6**2), "at least a factor of 1.6"
    assert outlier_bound(tail, 1e-4, num_rows=4) == pytest.approx(3.0 * 1.6 ** (2 + math.log10(4)) / 2)
    assert outlier_bound(tail, 1e-6, num_rows=256) < 5, "one row hardly changes a sum of many"


def test_bounds_between_and_beyond_the_measured_numbers_of_rows() -> None:
    tails = [
        Tail(rows=rows, one_in_100=first, one_in_1000=first + 1) for rows, first in ((1, 3), (4, 2), (64, 5))
    ]
    assert bound_for(tails, 4, 1e-3) == bound(tails[1], 1e-3)
    assert bound_for(tails, 30, 1e-3) == bound(tails[2], 1e-3), "the wider one"
    assert bound_for(tails, 256, 1e-3) == pytest.approx(2 * bound(tails[2], 1e-3)), "a pair's shift adds up"


def with_prompts(
    rng: np.random.Generator, num_prompts: int, samples: int, *, mantissa: float = 1.45
) -> tuple[list[Row], list[int]]:
    """Returns rows whose noise depends on the prompt."""
    rows, prompts = [], []
    for prompt in range(num_prompts):
        rows += draw_rows(rng, samples, mantissa=mantissa + rng.normal(0, 0.1))
        prompts += [prompt] * samples
    return rows, prompts


def test_samples_of_one_prompt_count_less_than_separate_prompts() -> None:
    """A calibration with 4 samples per prompt does not suspect honest submissions with 32 samples per prompt."""
    rng = np.random.default_rng(8)
    rows, prompts = with_prompts(rng, 150, 4)
    shared = toploc.measure_noise({"a": rows}, model="m", compute_dtype="bfloat16", prompts={"a": prompts})
    assert shared.mantissas.prompt_variance == pytest.approx(0.01, rel=0.5)
    assert shared.mismatches.prompt_variance < 0.05
    blind = toploc.measure_noise({"a": rows}, model="m", compute_dtype="bfloat16")
    assert blind.mantissas.prompt_variance == 0
    of_shared = of_blind = 0
    for _ in range(100):
        rows, prompts = with_prompts(rng, 2, 32, mantissa=1.45 * MORE)
        scores = toploc.noise_scores(rows, shared, prompts)
        assert not any(score.is_certain for score in scores)
        of_shared += any(score.is_suspicious for score in scores)
        of_blind += any(score.is_suspicious for score in toploc.noise_scores(rows, blind))
    assert of_shared <= 3 < of_blind


def test_sizes_that_were_hardly_measured_are_not_tested(noise: Noise) -> None:
    rng = np.random.default_rng(9)
    rows = draw_rows(rng, 300)
    rows[0] = [segment(20, 6.0, size=576)]
    rare = toploc.measure_noise({"a": rows}, model="m", compute_dtype="bfloat16")
    assert rare.sizes == (576, SHORT, FULL) and rare.mismatches.by_size[0].segments == 1
    assert toploc.noise_scores([[segment(30, 8.0, size=576)]], rare) == []
    assert toploc.noise_scores([[segment(30, 8.0, size=100)], [segment(30, 8.0, size=4 * FULL)]], rare) == []


def block(gap: float, root: float, *, tokens: int = 32) -> toploc.TokenBlock:
    return toploc.TokenBlock(num_tokens=tokens, logprob_gap=gap, draw_root=root)


def with_tokens(
    rng: np.random.Generator, count: int, *, gap: float = 0.037, root: float = 0.011
) -> list[list[SegmentCheck | toploc.TokenBlock]]:
    """Returns rows with two blocks of tokens each, like SmolLM2-135M's; the short block is noisier."""
    return [
        [
            *row,
            block(max(0, rng.normal(gap, 0.011)), max(0, rng.normal(root, 0.008))),
            block(max(0, rng.normal(gap, 0.035)), max(0, rng.normal(root, 0.024)), tokens=2),
        ]
        for row in draw_rows(rng, count)
    ]


@pytest.fixture(scope="module")
def of_tokens() -> Noise:
    rows = with_tokens(np.random.default_rng(10), 600)
    return toploc.measure_noise({"here to there": rows}, model="made up", compute_dtype="bfloat16")


def certain_of(rows: Sequence[Sequence[SegmentCheck | toploc.TokenBlock]], noise: Noise) -> set[str]:
    return {score.statistic for score in toploc.noise_scores(rows, noise) if score.is_certain}


def test_log_probs_and_draws_are_calibrated_like_proofs(of_tokens: Noise) -> None:
    assert of_tokens.token_sizes == (2, 32)
    assert of_tokens.logprobs is not None and of_tokens.logprobs.by_size[1].mean == pytest.approx(
        0.037, abs=0.002
    )
    rng = np.random.default_rng(11)
    assert not any(certain_of(with_tokens(rng, size), of_tokens) for size in (1, 8, 64) for _ in range(100))
    assert certain_of(with_tokens(rng, 64, gap=0.07), of_tokens) == {"logprobs"}
    assert certain_of(with_tokens(rng, 64, root=0.04), of_tokens) == {"draws"}
    assert Noise.parse(of_tokens.model_dump_json()) == of_tokens


def test_one_false_block_among_honest_ones_is_certain(of_tokens: Noise) -> None:
    rows = with_tokens(np.random.default_rng(12), 64)
    rows[5][-2] = block(0.8, 0.01)
    (score,) = [
        score for score in toploc.noise_scores(rows, of_tokens) if score.is_certain and "part" in score.where
    ]
    assert (score.statistic, score.where) == ("logprobs", "of row 5, part 0")


def test_judges_alone_needs_a_measured_statistic_and_size(noise: Noise, of_tokens: Noise) -> None:
    """A calibration may lack token statistics or single units, and sizes that were not measured are not judged."""
    assert toploc.judges_alone(of_tokens, "logprobs", 32) and not toploc.judges_alone(
        of_tokens, "logprobs", 1
    )
    assert not toploc.judges_alone(noise, "logprobs", 32) and toploc.judges_alone(noise, "mismatches", FULL)
    older = noise.model_copy(update={"mismatches": noise.mismatches.model_copy(update={"alone": None})})
    assert not toploc.judges_alone(older, "mismatches", FULL) and not toploc.judges_alone(
        None, "mismatches", FULL
    )
    assert certain_of(with_tokens(np.random.default_rng(13), 64, gap=0.5), noise) == set()


def test_zero_noise_in_float32_still_allows_a_small_difference() -> None:
    """Float32 noise on one machine is zero: z must stay finite, and a tiny difference must not be certain."""
    rows = [[segment(0, 0.0)] * 3 for _ in range(300)]
    still = toploc.measure_noise({"one machine": rows}, model="m", compute_dtype="float32")
    assert not worst([[segment(0, 0.002)] * 3 for _ in range(64)], still)[0]
    assert worst([[segment(0, 0.09)] * 3 for _ in range(64)], still)[0], (
        "one step of Adam at 1e-6, as measured"
    )


def test_size_classes() -> None:
    assert [size_class((10, 20), values) for values in (1, 10, 11, 20, 99)] == [0, 0, 1, 1, 1]


def test_too_few_rows_are_refused() -> None:
    rows = draw_rows(np.random.default_rng(0), 100)
    with pytest.raises(ValueError, match="near: 100 rows have a proof, need 200 or more"):
        toploc.measure_noise({"near": rows}, model="m", compute_dtype="float32")


def test_a_calibration_with_contradicting_parts_is_refused(noise: Noise) -> None:
    with pytest.raises(ValidationError, match="2 moments for 1 sizes"):
        Noise(**(noise.model_dump() | {"sizes": (FULL,)}))
    with pytest.raises(ValidationError, match="must increase"):
        Noise(**(noise.model_dump() | {"sizes": (FULL, SHORT)}))


# -- standard scores --------------------------------------------------------------------------------------


def test_standard_scores_of_honest_work_have_no_mean_that_adds_up() -> None:
    """One pair of machines is a little noisier in every row. Its z grows with the number of rows; its standard score does not."""
    rng = np.random.default_rng(8)
    quiet, loud = draw_rows(rng, 400), draw_rows(rng, 400, mismatches=2.7, mantissa=1.5)
    both = toploc.measure_noise({"quiet": quiet, "loud": loud}, model="made up", compute_dtype="bfloat16")
    raw, standard = [], []
    for _ in range(40):
        rows = draw_rows(rng, 256, mismatches=2.7 * MORE, mantissa=1.5 * MORE)
        scores = toploc.noise_scores(rows, both)
        over_all = [score for score in scores if score.standard is not None]
        assert [score.where for score in over_all] == ["over all rows"] * 2
        raw.append([score.z for score in over_all])
        standard.append([score.standard or 0.0 for score in over_all])
    assert np.mean(raw, axis=0).max() > 2
    assert np.mean(standard, axis=0).max() < 0.5
    assert np.var(standard, axis=0).max() < 1.5


@pytest.mark.parametrize("num_rows", [1, 16, 40, 64, 500])
def test_standard_score_of_a_normal_tail_is_z(num_rows: int) -> None:
    tails = [Tail(rows=rows, one_in_100=NORMAL_TAIL[0], one_in_1000=NORMAL_TAIL[1]) for rows in (1, 16, 64)]
    shrunk = math.sqrt(max(1.0, num_rows / 64))
    assert standard_score(tails, num_rows, 2.0) == pytest.approx(2.0 / shrunk)


def test_standard_score_of_a_narrow_tail_is_more_than_z() -> None:
    """Where honest z hardly varies, a small excess adds up; but it counts at most NARROWEST times."""
    narrow = [Tail(rows=1, one_in_100=1.163, one_in_1000=1.545)]
    assert standard_score(narrow, 1, 1.0) == pytest.approx(2.0, abs=0.01)
    none = [Tail(rows=1, one_in_100=0.0, one_in_1000=0.0)]
    assert standard_score(none, 1, 1.0) == pytest.approx(NARROWEST)


def test_standard_score_of_a_wide_tail_is_less_than_z() -> None:
    wide = [Tail(rows=1, one_in_100=5.0, one_in_1000=9.0)]
    assert standard_score(wide, 1, 5.0) == pytest.approx(NORMAL_TAIL[0])
    assert standard_score(wide, 1, 0.0) == 0.0
