"""Steps beyond the default recipe: several updates, recomputed behaviour log-probs, a reference, corrections."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_learner import CONFIG, make_batch, make_learner, output_logprobs

from shoal.model.load_model import load_decoder
from shoal.model.rounded_weights import round_weights
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.batch import TrainBatch
from shoal.trainer.data.pack import MicroBatch, pack
from shoal.trainer.optim.learner import Learner
from shoal.trainer.optim.reference import Reference, save_reference
from shoal.trainer.reporting.step_figures import StepFigures


def learner_with(model: Path, **settings: Any) -> Learner:
    config = TrainerConfig.model_validate(CONFIG.model_dump() | settings)
    return Learner(load_decoder(model), config, max_new_tokens=12)


def grouped(version: int = 0, num_groups: int = 4) -> TrainBatch:
    batch = make_batch(version)
    size = len(batch.samples) // num_groups
    samples = tuple(replace(sample, group=index // size) for index, sample in enumerate(batch.samples))
    return replace(batch, samples=samples, num_groups=num_groups)


def step(learner: Learner, batch: TrainBatch) -> StepFigures:
    return learner.step(batch, threading.Event())


def weights_of(learner: Learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.decoder.parameters()]


def gradient_of(learner: Learner) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in learner.decoder.parameters() if p.grad is not None])


def whole(batch: TrainBatch) -> MicroBatch:
    (micro,) = pack(batch.samples, row_tokens=500, rows_per_micro_batch=1)
    return micro


# -- several updates ------------------------------------------------------------------------------------------


def test_a_batch_is_split_between_groups() -> None:
    batch = grouped(num_groups=6)
    parts = batch.split(4)
    assert [[sample.group for sample in part][::2] for part in parts] == [[0, 4], [1, 5], [2], [3]]
    assert {sample for part in parts for sample in part} == set(batch.samples)
    with pytest.raises(ValueError, match="6 groups cannot be split into optimizer_steps=7 parts; lower it"):
        batch.split(7)


def test_two_updates_equal_two_steps_on_half_the_batch(model: Path) -> None:
    """Two updates from one batch give the same weights and learning rate as two steps on its halves."""
    batch = grouped()
    once = learner_with(model, optimizer_steps=2)
    figures = step(once, batch)
    assert (once.version, figures.optimizer_steps) == (1, 2)
    twice = learner_with(model)
    for version, part in enumerate(batch.split(2)):
        last = step(twice, replace(batch, version=version, samples=part))
    assert all(torch.equal(a, b) for a, b in zip(weights_of(once), weights_of(twice), strict=True))
    assert figures.learning_rate == last.learning_rate == pytest.approx(1e-3 * 2 / 3)


# -- tokens drawn with rounded weights ------------------------------------------------------------------------


def drawn_by_int8(model: Path) -> TrainBatch:
    """Returns samples whose log-probs are those of the weights rounded to int8, as a worker with int8 weights reports them."""
    rounded = learner_with(model)
    round_weights(rounded.decoder, "int8")
    samples = []
    for sample in make_batch(0).samples:
        micro = whole(replace(make_batch(0), samples=(sample,)))
        logprobs_N = output_logprobs(rounded.decoder, micro).detach()
        samples.append(replace(sample, logprobs=tuple(logprobs_N.tolist()), lag=0))
    return replace(make_batch(0), samples=tuple(samples))


def test_the_ratio_to_the_worker_corrects_for_rounded_weights(model: Path) -> None:
    """The first update weighs each token by published / rounded: by the ratio itself, or by the correction of `recompute`."""
    batch = drawn_by_int8(model)
    by_ratio = learner_with(model)
    figures = step(by_ratio, batch)
    assert figures.logprob_gap > 1e-3, "rounding has changed the probabilities"
    corrected = learner_with(model, behaviour="recompute", correction="truncate")
    step(corrected, batch)
    ignored = learner_with(model, behaviour="recompute")
    step(ignored, batch)
    expected, same, other = (gradient_of(one) for one in (by_ratio, corrected, ignored))
    assert float((same - expected).norm() / expected.norm()) < 1e-3
    assert float((other - expected).norm() / expected.norm()) > 1e-2


# -- behaviour log-probs --------------------------------------------------------------------------------------


def test_recomputed_ratio_is_one_at_the_first_update(model: Path) -> None:
    """Nothing is clipped, whatever the worker's log-probs are, and the gradient is that of REINFORCE."""
    batch = grouped()
    learner = learner_with(model, behaviour="recompute", clip_norm=1e9)
    figures = step(learner, batch)
    assert figures.clip_fraction == 0
    expected = learner_with(model)
    micro = whole(batch)
    logprobs_N = output_logprobs(expected.decoder, micro)
    (-(logprobs_N * micro.advantages_N).mean()).backward()
    torch.testing.assert_close(gradient_of(learner), gradient_of(expected), atol=2e-6, rtol=1e-4)


def test_recomputing_measures_the_same_gap_over_the_whole_batch(model: Path) -> None:
    batch = grouped()
    given = step(learner_with(model), batch)
    computed = step(learner_with(model, behaviour="recompute", optimizer_steps=4), batch)
    for name in ("logprob_gap", "logprob_gap_max", "logprob_gap_kl"):
        assert getattr(computed, name) == pytest.approx(getattr(given, name), rel=1e-5)


def test_later_updates_keep_the_log_probs_from_before_the_first(model: Path) -> None:
    figures = step(
        learner_with(model, behaviour="recompute", optimizer_steps=4, learning_rate=0.02, warmup_steps=0),
        grouped(),
    )
    assert figures.clip_fraction > 0, "after an update of that size some ratios are outside the clip"


def test_gap_figures(model: Path) -> None:
    batch = grouped()
    batch = replace(batch, samples=tuple(replace(sample, lag=0) for sample in batch.samples))
    learner = learner_with(model)
    micro = whole(batch)
    difference_N = (output_logprobs(learner.decoder, micro) - micro.behaviour_N).detach().double()
    figures = step(learner, batch)
    assert figures.logprob_gap == pytest.approx(float(difference_N.abs().mean()), rel=1e-4)
    assert figures.logprob_gap_max == pytest.approx(float(difference_N.abs().max()), rel=1e-4)
    assert figures.logprob_gap_kl == pytest.approx(
        float((difference_N.exp() - difference_N - 1).mean()), rel=1e-4
    )
    assert figures.entropy == pytest.approx(mean_entropy(make_learner(model), micro), rel=1e-4)


# -- the gap's correction -------------------------------------------------------------------------------------


def test_tokens_outside_the_band_are_left_out(model: Path) -> None:
    """An answer whose worker log-probs are far off is masked: the gradient is the same as without it."""
    batch = grouped()
    off = replace(batch.samples[0], logprobs=tuple(value - 20 for value in batch.samples[0].logprobs))
    moved = replace(batch, samples=(off, *batch.samples[1:]))
    # The made-up log-probs are within a few units of the model's: only the answer moved by 20 is outside the band.
    settings = {"behaviour": "recompute", "clip_norm": 1e9, "correction_band": (1e-4, 1e4)}
    masked = learner_with(model, correction="mask", **settings)
    figures = step(masked, moved)
    assert figures.corrected_fraction == pytest.approx(off.num_outputs / batch.num_outputs)
    silent = replace(batch, samples=(replace(off, advantage=0.0), *batch.samples[1:]))
    without = learner_with(model, **settings)
    step(without, silent)
    torch.testing.assert_close(gradient_of(masked), gradient_of(without), atol=2e-6, rtol=1e-4)


def test_truncated_weights_scale_the_gradient(model: Path) -> None:
    """If every weight is at the bound, the gradient is the uncorrected one times the bound."""
    batch = grouped()
    batch = replace(
        batch,
        samples=tuple(
            replace(sample, logprobs=tuple(value - 8 for value in sample.logprobs))
            for sample in batch.samples
        ),
    )
    plain = learner_with(model, behaviour="recompute", clip_norm=1e9)
    truncated = learner_with(model, behaviour="recompute", clip_norm=1e9, correction="truncate")
    step(plain, batch)
    figures = step(truncated, batch)
    assert figures.corrected_fraction == 1
    torch.testing.assert_close(gradient_of(truncated), 2 * gradient_of(plain), atol=2e-6, rtol=1e-4)


# -- reference and entropy ------------------------------------------------------------------------------------


def test_kl_is_zero_at_version_0_and_pulls_back_later(model: Path) -> None:
    batch = grouped()
    learner = learner_with(model, kl=0.5)
    learner.reference = Reference(learner.decoder)
    assert step(learner, batch).kl == pytest.approx(0, abs=1e-6)
    flat = replace(
        batch, version=1, samples=tuple(replace(sample, advantage=0.0) for sample in batch.samples)
    )
    # With no advantage only the KL term acts. Updates are small, so that it cannot overshoot.
    learner.config = learner.config.model_copy(update={"learning_rate": 1e-4})
    first = step(learner, flat).kl
    last = [step(learner, replace(flat, version=version)).kl for version in range(2, 8)][-1]
    assert 0 < last < first


def test_reference_weights_are_swapped_in_and_out(model: Path, tmp_path: Path) -> None:
    learner = make_learner(model)
    path = tmp_path / "reference.safetensors"
    start, micro = weights_of(learner), whole(make_batch(0))
    before_N = output_logprobs(learner.decoder, micro).detach()
    weights: dict[str, torch.Tensor] = dict(learner.decoder.named_parameters())
    save_reference(path, weights, 0)
    reference = Reference(learner.decoder)
    step(learner, make_batch(0))
    moved = weights_of(learner)
    again = load_file(path)
    assert all(torch.equal(again[name], value) for name, value in zip(weights, start, strict=True))
    with pytest.raises(ZeroDivisionError), reference.in_place_of(learner.decoder, learner.policy.reshard):
        assert torch.equal(output_logprobs(learner.decoder, micro).detach(), before_N)
        assert all(torch.equal(a, b) for a, b in zip(weights_of(learner), start, strict=True))
        raise ZeroDivisionError
    assert all(torch.equal(a, b) for a, b in zip(weights_of(learner), moved, strict=True))
    with reference.in_place_of(learner.decoder, learner.policy.reshard):
        assert all(torch.equal(a, b) for a, b in zip(weights_of(learner), start, strict=True))


def test_a_missing_reference_at_a_later_version_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"the KL term needs the weights of version 0.*at version 3; set kl = 0"
    ):
        save_reference(tmp_path / "reference.safetensors", {}, 3)


def test_entropy_bonus_raises_entropy(model: Path) -> None:
    """Only the bonus changes the weights, because the advantages are zero."""
    batch = grouped()
    flat = replace(batch, samples=tuple(replace(sample, advantage=0.0) for sample in batch.samples))
    entropies = []
    for bonus in (0.0, 0.05):
        learner = learner_with(model, entropy_bonus=bonus)
        for version in range(5):
            step(learner, replace(flat, version=version))
        entropies.append(mean_entropy(learner, whole(batch)))
    assert entropies[1] > entropies[0]


def mean_entropy(learner: Learner, micro: MicroBatch) -> float:
    with torch.no_grad():
        states_BTH = learner.decoder(micro.tokens_BT, micro.positions_BT, segments_BT=micro.segments_BT)
        logits_NV = learner.decoder.logits(states_BTH.flatten(0, 1)[micro.predictors_N]) / 0.8
    logp_NV = logits_NV.log_softmax(-1)
    return float(-(logp_NV.exp() * logp_NV).sum(-1).mean())


# -- packing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
@pytest.mark.parametrize("normalisation", ["token", "sequence", "constant"])
def test_no_loss_depends_on_packing(model: Path, loss: str, normalisation: str) -> None:
    batch = grouped()
    found = []
    for row_tokens, rows in ((20, 1), (64, 3)):
        learner = learner_with(
            model,
            loss=loss,
            normalisation=normalisation,
            row_tokens=row_tokens,
            rows_per_micro_batch=rows,
            clip_norm=1e9,
            entropy_bonus=0.01,
            # The random log-probs are far outside the clip of a whole answer; with a wide clip there is something to compare.
            eps=0.9,
            eps_high=3.0,
            delta=8.0,
        )
        found.append((step(learner, batch).loss, gradient_of(learner)))
    (loss_alone, alone), (loss_packed, packed) = found
    assert alone.norm() > 0
    assert loss_packed == pytest.approx(loss_alone, rel=1e-4, abs=1e-6)
    assert (packed - alone).norm() < 1e-5 * alone.norm()


def test_constant_normalisation_needs_its_constant(model: Path) -> None:
    with pytest.raises(ValueError, match="divides by max_new_tokens"):
        Learner(load_decoder(model), TrainerConfig(loss="dr_grpo"))
