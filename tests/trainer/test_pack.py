"""Packing puts every token in its place and does not change log-probs or gradients."""

import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_learner import CONFIG, VOCAB, make_batch, make_learner, make_sample, output_logprobs

from shoal.trainer.data.batch import TrainBatch, TrainSample
from shoal.trainer.data.pack import PAD_SEGMENT, fit_rows, pack
from shoal.trainer.optim.learner import Learner


def sample_of(num_tokens: int, prompt_len: int = 1, fill: int = 5) -> TrainSample:
    return TrainSample(
        tokens=tuple((fill + place) % VOCAB for place in range(num_tokens)),
        prompt_len=prompt_len,
        logprobs=tuple(-0.1 * place for place in range(num_tokens - prompt_len)),
        advantage=float(fill),
        lag=0,
    )


def test_first_fit_decreasing() -> None:
    # A width is one less than the length: the last token predicts nothing.
    rows = fit_rows([sample_of(length) for length in (4, 9, 6, 3, 8)], row_tokens=10)
    assert [[len(sample.tokens) for sample in row] for row in rows] == [[9, 3], [8, 4], [6]]


def test_every_token_in_its_place() -> None:
    (micro,) = pack(
        [sample_of(4, 2, fill=10), sample_of(5, 3, fill=20)], row_tokens=9, rows_per_micro_batch=4
    )
    assert micro.tokens_BT.tolist() == [[20, 21, 22, 23, 10, 11, 12]]
    assert micro.positions_BT.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert micro.segments_BT.tolist() == [[0, 0, 0, 0, 1, 1, 1]]
    assert micro.predictors_N.tolist() == [2, 3, 5, 6]
    assert micro.targets_N.tolist() == [23, 24, 12, 13]
    assert micro.advantages_N.tolist() == [20, 20, 10, 10]
    assert micro.behaviour_N.tolist() == pytest.approx([0, -0.1, 0, -0.1])


def test_rows_of_unequal_width_are_padded() -> None:
    (micro,) = pack([sample_of(6, 2), sample_of(4, 2)], row_tokens=5, rows_per_micro_batch=2)
    assert micro.segments_BT.tolist() == [[0] * 5, [0] * 3 + [PAD_SEGMENT] * 2]
    assert micro.predictors_N.tolist() == [1, 2, 3, 4, 6, 7]


def test_too_long_a_sample_is_named() -> None:
    with pytest.raises(
        ValueError, match="4 prompt \\+ 8 output tokens does not fit row_tokens=10; raise it to at least 11"
    ):
        fit_rows([sample_of(12, 4)], row_tokens=10)


def test_logprobs_are_those_of_the_own_temperature_and_do_not_depend_on_neighbours(model: Path) -> None:
    learner = make_learner(model)
    rng = random.Random(3)
    temperatures = (0.8, 1.3, 0.8, 0.5, 1.3, 0.8)
    samples = [replace(make_sample(rng), temperature=value) for value in temperatures]
    (packed,) = pack(samples, row_tokens=200, rows_per_micro_batch=8)
    assert [temperature for temperature, _ in packed.by_temperature] == [0.5, 0.8, 1.3]
    in_order = fit_rows(samples, 200)[0]
    with torch.no_grad():
        together_N = output_logprobs(learner.decoder, packed)
        alone_N = torch.cat([plain_logprobs(learner, sample) for sample in in_order])
    torch.testing.assert_close(together_N, alone_N, atol=2e-5, rtol=0)


def plain_logprobs(learner: Learner, sample: TrainSample) -> torch.Tensor:
    """Computes log-probs from the definition; shares only the decoder with the packed path."""
    tokens_1T = torch.tensor([sample.tokens])
    states_1TH = learner.decoder(tokens_1T, torch.arange(tokens_1T.shape[1])[None])
    logp_TV = (learner.decoder.logits(states_1TH[0]) / sample.temperature).log_softmax(-1)
    return torch.stack(
        [logp_TV[place - 1, sample.tokens[place]] for place in range(sample.prompt_len, len(sample.tokens))]
    )


def gradient(model: Path, batch: TrainBatch, *, row_tokens: int, rows_per_micro_batch: int) -> torch.Tensor:
    config = CONFIG.model_copy(
        # Disables clipping, so that the gradient is not scaled.
        update={"row_tokens": row_tokens, "rows_per_micro_batch": rows_per_micro_batch, "clip_norm": 1e9}
    )
    learner = make_learner(model, config)
    learner.step(batch, threading.Event())
    return torch.cat(
        [parameter.grad.flatten() for parameter in learner.decoder.parameters() if parameter.grad is not None]
    )


@pytest.mark.parametrize(
    ("row_tokens", "rows_per_micro_batch"), [(20, 1), (20, 5), (64, 1), (64, 3), (400, 1)]
)
def test_gradient_does_not_depend_on_packing(model: Path, row_tokens: int, rows_per_micro_batch: int) -> None:
    batch = make_batch(0)
    # One sample per row and one row at a time: no packing.
    alone = gradient(
        model,
        batch,
        row_tokens=max(len(sample.tokens) for sample in batch.samples) - 1,
        rows_per_micro_batch=1,
    )
    packed = gradient(model, batch, row_tokens=row_tokens, rows_per_micro_batch=rows_per_micro_batch)
    assert alone.norm() > 0.01
    assert (packed - alone).norm() < 1e-5 * alone.norm()
