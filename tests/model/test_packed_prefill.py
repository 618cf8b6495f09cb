"""Rows laid end to end with shared prompts have the states of separate rows.

Needs a GPU, or Triton's interpreter on a CPU: TRITON_INTERPRET=1 pytest -m gpu tests/model/test_packed_prefill.py
"""

from pathlib import Path

import pytest
import torch

from shoal.model import packed_prefill
from shoal.model.builtin import create_model
from shoal.model.decoder import Decoder
from shoal.model.load_model import load_decoder
from shoal.model.packed_prefill import packed_states

pytestmark = pytest.mark.gpu

SHARED = tuple(range(1, 80))
ROWS = [((5, 6, 7), (8, 9)), (SHARED, tuple(range(2, 72))), ((11,), ()), (SHARED, (9,)), (SHARED, ())]


def alone(decoder: Decoder) -> list[torch.Tensor]:
    device = decoder.model.norm.weight.device
    tokens = [(torch.tensor([[*prompt, *fed]], device=device), len(prompt)) for prompt, fed in ROWS]
    return [
        decoder(row_1T, torch.arange(row_1T.shape[1], device=device)[None])[0, first - 1 :]
        for row_1T, first in tokens
    ]


@torch.inference_mode()
def test_kernels_round_where_the_decoder_does(
    tmp_path: Path, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks it again after the decoder's weights changed: its matrices were fused in place."""
    create_model("tiny", tmp_path / "tiny", 0)
    on_cpu = kernel_device == "cpu"
    decoder = load_decoder(tmp_path / "tiny", torch.float16 if on_cpu else torch.bfloat16, kernel_device)
    if on_cpu:
        monkeypatch.setattr(packed_prefill, "supports_flash_attention", lambda *_: True)
    for _ in range(2):
        for found, expected in zip(packed_states(decoder, ROWS), alone(decoder), strict=True):
            torch.testing.assert_close(found, expected, atol=0.06, rtol=0.03)
        for parameter in decoder.parameters():
            parameter.mul_(0.9)
