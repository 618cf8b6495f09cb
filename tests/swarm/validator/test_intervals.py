"""Where tokens lie in their distributions: the device's kernel says what the plain lines say.

Needs a GPU, or Triton's interpreter on a CPU: TRITON_INTERPRET=1 pytest -m gpu tests/swarm/validator/test_intervals.py
"""

import pytest
import torch

from shoal.model.decoder import Decoder
from shoal.model.shape import Shape
from shoal.swarm.validator.recompute import _distribution

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocab_size", [500, 4096, 9001])
@pytest.mark.parametrize("sharpness", [0.5, 30.0])
def test_kernel_equals_the_plain_lines(vocab_size: int, sharpness: float, kernel_device: str) -> None:
    from shoal.model.interval_kernels import token_intervals  # needs Triton

    shape = Shape(
        vocab_size=vocab_size,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        ffn_size=32,
        rope_theta=1e4,
        norm_eps=1e-5,
        tied_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        max_positions=64,
        eos_token_ids=(2,),
    )
    torch.manual_seed(vocab_size)
    decoder = Decoder(shape)
    hidden_NH = sharpness * torch.randn(7, 32)
    tokens_N = torch.tensor([0, vocab_size - 1, *torch.randint(0, vocab_size, (5,)).tolist()])
    with torch.inference_mode():
        logits_NV = decoder.logits(hidden_NH)
        logits_NV[2] = logits_NV[2].sort().values  # the largest so far changes all the time
        decoder.logits = lambda _: logits_NV  # type: ignore[method-assign]
        expected_5N = _distribution(decoder, hidden_NH, tokens_N, 0.7)
        found_5N = token_intervals(logits_NV.to(kernel_device), tokens_N.to(kernel_device), 0.7)
    torch.testing.assert_close(found_5N.cpu().double(), expected_5N, rtol=1e-4, atol=2e-4)
