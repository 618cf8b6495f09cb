"""examples/one_process.py computes the trainer's loss and advantages, and runs."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shoal.trainer.data.batch import group_advantages
from shoal.trainer.optim.loss import grpo_loss


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "one_process.py"
    spec = importlib.util.spec_from_file_location("one_process", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["one_process"] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", range(5))
def test_loss_is_the_trainers(example: ModuleType, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    behaviour_BT = -torch.rand(6, 9, generator=generator, dtype=torch.float64) * 5
    # The ratios are on every side of both clips.
    logprobs_BT = behaviour_BT + torch.randn(6, 9, generator=generator, dtype=torch.float64)
    advantage_B = torch.randn(6, generator=generator, dtype=torch.float64)
    mask_BT = torch.rand(6, 9, generator=generator) < 0.6
    ours_BT, theirs_BT = logprobs_BT.clone().requires_grad_(), logprobs_BT.clone().requires_grad_()
    example_loss = example.grpo_loss(theirs_BT, behaviour_BT, advantage_B[:, None], mask_BT.double())
    result = grpo_loss(
        ours_BT[mask_BT],
        behaviour_BT[mask_BT],
        advantage_B[:, None].expand(6, 9)[mask_BT],
        eps=example.EPS,
        eps_high=example.EPS,
        delta=example.DELTA,
    )
    loss = result.loss_N.mean()
    example_loss.backward()
    loss.backward()
    assert result.clipped_N.any()
    torch.testing.assert_close(example_loss, loss, atol=1e-12, rtol=0)
    torch.testing.assert_close(theirs_BT.grad, ours_BT.grad, atol=1e-12, rtol=0)


def test_advantages_are_the_trainers(example: ModuleType) -> None:
    rewards_G = [(index * 7 % 16) / 16 for index in range(example.NUM_SAMPLES)]
    expected = group_advantages(rewards_G, "std")
    assert example.advantages(rewards_G).tolist() == pytest.approx(expected, abs=1e-5)


def test_it_runs_and_catches_the_liar(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = example.main(num_steps=2, lag=1, seed=0)
    printed = capsys.readouterr().out
    assert 0 < first < 1
    assert 0 < last < 1
    assert printed.count("accepted  reject.wrong_computation") == 2
