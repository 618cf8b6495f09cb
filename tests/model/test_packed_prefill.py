"""Rows laid end to end have the states that each has alone."""

from pathlib import Path

import pytest
import torch

from shoal.model.builtin import create_model
from shoal.model.decoder import Decoder
from shoal.model.load import load_decoder
from shoal.model.packed_prefill import packed_states

ROWS = [(5, 6, 7, 8, 9), (11,), tuple(range(1, 40)), (5, 6, 7)]


def alone(decoder: Decoder) -> torch.Tensor:
    device = decoder.model.norm.weight.device
    parts = [
        decoder(torch.tensor([row], device=device), torch.arange(len(row), device=device)[None])[0]
        for row in ROWS
    ]
    return torch.cat(parts)


@torch.inference_mode()
def test_states_of_packed_rows(tmp_path: Path) -> None:
    create_model("tiny", tmp_path / "tiny", 0)
    decoder = load_decoder(tmp_path / "tiny")
    torch.testing.assert_close(packed_states(decoder, ROWS), alone(decoder), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@torch.inference_mode()
def test_kernels_round_where_the_decoder_does(tmp_path: Path) -> None:
    """And follow other weights that are loaded into the decoder: its matrices were joined in place."""
    create_model("tiny", tmp_path / "tiny", 0)
    decoder = load_decoder(tmp_path / "tiny", torch.bfloat16, "cuda")
    for _ in range(2):
        torch.testing.assert_close(packed_states(decoder, ROWS), alone(decoder), atol=0.03, rtol=0.03)
        for parameter in decoder.parameters():
            parameter.mul_(0.9)
