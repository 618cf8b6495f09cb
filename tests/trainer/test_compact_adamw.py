"""One-byte moments: how far codes are from values, that means are kept, and that the tiny model learns as with float32 moments."""

import threading
from pathlib import Path

import pytest
import torch
from tiny_learner import CONFIG, make_batch, make_learner, save

from shoal.telemetry import Log
from shoal.trainer.config import DilocoConfig, TrainerConfig
from shoal.trainer.io.checkpoint import Checkpoints
from shoal.trainer.io.load_checkpoint import load_checkpoint
from shoal.trainer.optim.compact_adamw import (
    BLOCK,
    CompactAdamW,
    decode_mean,
    decode_root,
    encode_mean,
    encode_root,
)
from shoal.trainer.optim.learner import Learner

INT8 = TrainerConfig(**(CONFIG.model_dump() | {"optimizer_states": "int8"}))


def blocks(seed: int, num: int = 64) -> torch.Tensor:
    """Returns values over several decades, as moments have."""
    draws = torch.Generator().manual_seed(seed)
    values = torch.randn(num, BLOCK, generator=draws)
    return values * (torch.randn(num, BLOCK, generator=draws) * 2).exp() * 1e-6


def test_codes_keep_small_and_large_values_of_a_block() -> None:
    values = blocks(0)
    large = values.abs() > 1e-4 * values.abs().amax(1, keepdim=True)
    mean = decode_mean(*encode_mean(values, None))
    assert ((mean - values).abs() / values.abs())[large].max() < 0.05
    root = decode_root(*encode_root(values.abs(), None))
    assert ((root - values.abs()) / values.abs())[large].abs().max() < 0.03
    assert torch.equal(mean.abs().amax(1), values.abs().amax(1))


def test_a_root_above_zero_never_becomes_zero() -> None:
    values = torch.full((1, BLOCK), 1e-30)
    values[0, 0], values[0, 1] = 1.0, 0.0
    root = decode_root(*encode_root(values, torch.Generator().manual_seed(1)))
    assert root[0, 1] == 0
    assert (root[0, 2:] > 0).all()


def test_values_that_were_decoded_give_the_same_codes_again() -> None:
    for encode, decode, values in (
        (encode_mean, decode_mean, blocks(1)),
        (encode_root, decode_root, blocks(2).abs()),
    ):
        codes, scales = encode(values, torch.Generator().manual_seed(3))
        again, scales_again = encode(decode(codes, scales), None)
        # The largest value of a block may have been rounded down by one step; its scale then is that value.
        assert torch.equal(decode(again, scales_again), decode(codes, scales)) or torch.allclose(
            decode(again, scales_again), decode(codes, scales), rtol=1e-5
        )


def test_random_rounding_keeps_the_expected_value() -> None:
    values, draws = blocks(4, num=2), torch.Generator().manual_seed(5)
    mean = torch.stack([decode_mean(*encode_mean(values, draws)) for _ in range(2000)]).mean(0)
    square = torch.stack([decode_root(*encode_root(values.abs(), draws)).square() for _ in range(2000)]).mean(
        0
    )
    large = values.abs() > 1e-3 * values.abs().amax(1, keepdim=True)
    assert ((mean - values).abs() / values.abs())[large].max() < 0.01
    assert ((square - values.square()).abs() / values.square())[large].max() < 0.01


def losses(learner: Learner, num_steps: int) -> list[float]:
    """Trains on the log-probs of fixed samples, and returns the mean log-prob loss of each step."""
    found = []
    samples = make_batch(0).samples
    for _ in range(num_steps):
        learner.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for micro in learner.micro_batches(samples):
            loss = -learner.policy.scores(micro).logprobs_N.mean()
            loss.backward()
            total += float(loss.detach())
        learner.optimizer.step()
        found.append(total)
    return found


def test_the_tiny_model_learns_as_with_float32_moments(model: Path) -> None:
    exact, compact = losses(make_learner(model), 60), losses(make_learner(model, INT8), 60)
    assert exact[-1] < 0.35 * exact[0]
    for step in (5, 20, 59):
        assert compact[step] == pytest.approx(exact[step], rel=0.05)


def test_moments_take_a_quarter_of_the_bytes(model: Path) -> None:
    learner = make_learner(model, INT8)
    learner.step(make_batch(0), threading.Event())
    assert isinstance(learner.optimizer, CompactAdamW)
    num_bytes = sum(tensor.nbytes for state in learner.optimizer.state.values() for tensor in state.values())
    num_parameters = sum(one.numel() for one in learner.decoder.parameters())
    assert num_bytes < 2.1 * num_parameters


def step_twice(learner: Learner) -> list[torch.Tensor]:
    for _ in range(2):
        learner.step(make_batch(learner.version), threading.Event())
    return [one.detach().clone() for one in learner.decoder.parameters()]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, model: Path) -> None:
    straight = make_learner(model, INT8)
    step_twice(straight)
    kept = Checkpoints(tmp_path, keep=2, log=Log("trainer"))
    save(kept, straight, None)
    again = make_learner(model, INT8)
    checkpoint = kept.newest()
    assert checkpoint is not None
    load_checkpoint(again, checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(step_twice(straight), step_twice(again), strict=True))


@pytest.mark.parametrize(("stored", "resumed"), [(CONFIG, INT8), (INT8, CONFIG)])
def test_a_run_continues_with_moments_in_the_other_format(
    tmp_path: Path, model: Path, stored: TrainerConfig, resumed: TrainerConfig
) -> None:
    first = make_learner(model, stored)
    step_twice(first)
    kept = Checkpoints(tmp_path, keep=2, log=Log("trainer"))
    save(kept, first, None)
    again = make_learner(model, resumed)
    checkpoint = kept.newest()
    assert checkpoint is not None
    load_checkpoint(again, checkpoint)
    for one, other in zip(step_twice(first), step_twice(again), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=4e-4)  # a step changes a weight by at most 1e-3


def test_sites_are_refused() -> None:
    with pytest.raises(ValueError, match="a site keeps its moments in float32"):
        TrainerConfig(optimizer_states="int8", diloco=DilocoConfig())
