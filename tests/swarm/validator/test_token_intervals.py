"""Where tokens lie in their distributions: the device's kernel says what the plain lines say.

Needs a GPU, or Triton's interpreter on a CPU: TRITON_INTERPRET=1 pytest -m gpu tests/swarm/validator/test_token_intervals.py
"""

import pytest
import torch

from shoal.swarm.validator.recompute import _distribution

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocab_size", [500, 4096, 9001])
@pytest.mark.parametrize("sharpness", [2.0, 8.0])
def test_kernel_equals_the_plain_lines(vocab_size: int, sharpness: float, kernel_device: str) -> None:
    from shoal.model.kernels.logits import token_intervals  # needs Triton

    torch.manual_seed(vocab_size)
    logits_NV = sharpness * torch.randn(7, vocab_size)
    logits_NV[2] = logits_NV[2].sort().values  # the largest so far changes all the time
    tokens_N = torch.tensor([0, vocab_size - 1, *torch.randint(0, vocab_size, (5,)).tolist()])
    with torch.inference_mode():
        expected_5N = _distribution(logits_NV, tokens_N, 0.7)
        found_5N = token_intervals(logits_NV.to(kernel_device), tokens_N.to(kernel_device), 0.7)
    torch.testing.assert_close(found_5N.cpu().double(), expected_5N, rtol=1e-4, atol=2e-4)
