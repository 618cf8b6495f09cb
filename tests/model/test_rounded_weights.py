"""Weights rounded to 8 bits: the values are exact in every dtype and the same wherever they are computed."""

import hashlib
from pathlib import Path

import pytest
import torch

from shoal.model.builtin import create_model
from shoal.model.load_model import load_decoder
from shoal.model.rounded_weights import LARGEST, round_weights, rounded
from shoal.wire.requirements import WeightFormat

FORMATS: tuple[WeightFormat, ...] = ("int8", "fp8")


def weights() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    scales_N1 = torch.logspace(-20, 8, 64)[:, None]
    weight_NM = (torch.randn(64, 96, generator=generator) * scales_N1).bfloat16().float()
    weight_NM[5] = 0
    return weight_NM


@pytest.mark.parametrize("format", FORMATS)
def test_rounded_values_are_exact_in_bfloat16_and_rounding_again_changes_nothing(
    format: WeightFormat,
) -> None:
    once = rounded(weights(), format)
    assert torch.equal(once, once.bfloat16().float())
    assert torch.equal(once, rounded(once, format))
    assert not once[5].any()


@pytest.mark.parametrize("format", FORMATS)
def test_each_row_has_the_smallest_scale_that_is_a_power_of_two(format: WeightFormat) -> None:
    weight_NM = weights()
    once = rounded(weight_NM, format)
    for row_M, rounded_M in zip(weight_NM.double(), once.double(), strict=True):
        if not row_M.any():
            continue
        scale = 2.0 ** float(torch.ceil(torch.log2(row_M.abs().max() / LARGEST[format])))
        units_M = rounded_M / scale
        assert float(units_M.abs().max()) <= LARGEST[format]
        if format == "int8":
            assert torch.equal(units_M, units_M.round())
            assert float((row_M - rounded_M).abs().max()) <= scale / 2


def test_the_values_are_those_of_the_documents() -> None:
    row = torch.tensor([[0.5, -0.3, 0.01, 0.0]])
    # The largest value is 0.5: scales are 2^-7 for 127 steps, and 2^-9 for values up to 448.
    assert rounded(row, "int8").tolist() == [[0.5, -0.296875, 0.0078125, 0.0]]
    assert rounded(row, "fp8").tolist() == [[0.5, -0.3125, 0.009765625, 0.0]]


def test_only_matrices_of_layers_are_rounded(tmp_path: Path) -> None:
    create_model("tiny", tmp_path / "tiny", seed=1)
    before, after = load_decoder(tmp_path / "tiny"), load_decoder(tmp_path / "tiny")
    round_weights(after, "int8")
    changed = {
        name
        for (name, one), other in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(one, other)
    }
    matrices = {name for name, one in before.named_parameters() if "layers." in name and one.ndim == 2}
    assert changed == matrices
    coarse = load_decoder(tmp_path / "tiny", torch.bfloat16)
    round_weights(coarse, "int8")
    digests = [
        hashlib.sha256(
            torch.cat([p.detach().float().flatten() for p in model.parameters()]).numpy().tobytes()
        ).digest()
        for model in (after, coarse)
    ]
    assert digests[0] == digests[1]
