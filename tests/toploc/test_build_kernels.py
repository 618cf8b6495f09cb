"""The kernel that builds proofs on a device gives the bytes of the host.

Needs a GPU, or Triton's interpreter on a CPU: TRITON_INTERPRET=1 pytest -m gpu tests/toploc/test_build_kernels.py
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal import toploc
from shoal.toploc import build
from shoal.toploc.field import PRIME
from shoal.toploc.proof import injective_moduli, proofs_of_points
from shoal.toploc.segments import padded_batches, top_points

pytestmark = pytest.mark.gpu

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden.json").read_text())


def by_kernel(indices_SK: np.ndarray, bits_SK: np.ndarray, device: str) -> list[bytes]:
    from shoal.toploc.proof_kernels import NO_MODULUS, proof_lines  # needs Triton

    bits = torch.from_numpy(bits_SK.view(np.int16))
    lines = proof_lines(torch.from_numpy(indices_SK).to(device), bits.to(device)).cpu().numpy()
    assert (lines[:, 0] != NO_MODULUS).all()
    return [line[1:].tobytes() for line in lines]


def random_points(size: int, topk: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    indices_SK = np.stack([rng.choice(size, topk, replace=False) for _ in range(3)])
    bits_SK = rng.integers(1, 0x7F80, (3, topk)) | rng.integers(0, 2, (3, topk)) << 15
    return indices_SK, bits_SK.astype(np.uint16)


@pytest.mark.parametrize("entry", GOLDEN["points"], ids=lambda entry: entry["name"])
def test_points_give_the_published_proof(entry: dict[str, Any], kernel_device: str) -> None:
    (proof,) = by_kernel(np.array([entry["x"]]), np.array([entry["y"]], dtype=np.uint16), kernel_device)
    assert proof.hex() == entry["hex"]


@pytest.mark.parametrize(
    ("size", "topk"), [(32 * 576, 128), (32 * 5120, 128), (40, 1), (64, 3), (3 * PRIME, 100)]
)
def test_points_give_the_proofs_of_the_host(size: int, topk: int, kernel_device: str) -> None:
    indices_SK, bits_SK = random_points(size, topk, seed=size)
    assert by_kernel(indices_SK, bits_SK, kernel_device) == proofs_of_points(indices_SK, bits_SK)


def test_the_kernel_finds_the_modulus_of_the_host(kernel_device: str) -> None:
    """The rows need the largest modulus, the second or the third."""
    indices_SK = np.array(
        [[0, 5, 9, 70000], [0, PRIME, 3, 7], [0, PRIME, PRIME - 1 + 4, 4], [1, 2, 3, PRIME]]
    )
    bits_SK = np.arange(1, 17, dtype=np.uint16).reshape(4, 4)
    assert injective_moduli(indices_SK).tolist() == [PRIME, PRIME - 1, PRIME - 2, PRIME]
    assert by_kernel(indices_SK, bits_SK, kernel_device) == proofs_of_points(indices_SK, bits_SK)


def states(lengths: list[int], hidden: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(hidden)
    rows = [torch.randn(length, hidden, generator=generator) for length in lengths]
    return [row.to(torch.bfloat16).to(device) for row in rows]


def by_host(rows: list[torch.Tensor], topk: int) -> list[bytes]:
    """Builds proofs on the host from the points that the device chooses."""
    proofs = [b""] * len(rows)
    for batch in padded_batches(rows, segment_tokens=32):
        for (row, _), proof in zip(batch.places, proofs_of_points(*top_points(batch, topk)), strict=True):
            proofs[row] += proof
    return proofs


def test_rows_of_all_lengths(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "has_kernels", lambda _: True)
    rows = states([32, 70, 1, 5, 0, 33, 64], 48, kernel_device)
    assert toploc.build_proofs(rows, topk=16) == by_host(rows, 16)
    assert toploc.build_proofs(rows[4:5], topk=16) == [b""]
    floats = [row.float() for row in rows]
    assert toploc.build_proofs(floats, topk=16) == by_host(rows, 16)


@pytest.mark.parametrize(("hidden", "topk"), [(576, 128), (2560, 128), (5120, 128), (64, 500)])
def test_many_rows(hidden: int, topk: int, kernel_device: str) -> None:
    """Builds more proofs than fit in one batch."""
    if kernel_device == "cpu":
        pytest.skip("too much for the interpreter")
    rows = states(
        [*range(8, 200, 8), *([64] * 450)], hidden, kernel_device
    )  # at least 8 tokens, so that every segment has 500 values
    assert toploc.build_proofs(rows, topk=topk) == by_host(rows, topk)


@pytest.mark.parametrize(
    ("value", "word"),
    [(float("nan"), "NaN or infinity"), (float("-inf"), "NaN or infinity"), (0.0, "all zero")],
)
def test_states_that_cannot_be_proven(
    value: float, word: str, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "has_kernels", lambda _: True)
    rows = states([32, 40], 8, kernel_device)
    rows[1][32:] = value
    with pytest.raises(toploc.ProofError, match=f"segment 1 .*{word}") as refused:
        toploc.build_proofs(rows, topk=8)
    assert refused.value.row == 1


def test_states_too_few_for_a_proof(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "has_kernels", lambda _: True)
    with pytest.raises(toploc.ProofError, match="segment 1 has 8 values, fewer than topk=9") as refused:
        toploc.build_proofs(states([32, 33], 8, kernel_device), topk=9)
    assert refused.value.row == 1


def test_points_that_no_modulus_separates(kernel_device: str) -> None:
    from shoal.toploc.proof_kernels import NO_MODULUS, proof_lines

    if kernel_device == "cpu":
        pytest.skip("32,729 moduli are too many for the interpreter")
    indices_SK = torch.tensor([[70000, 70000, 1, 2]], device=kernel_device)
    lines = proof_lines(indices_SK, torch.ones(1, 4, dtype=torch.int16, device=kernel_device)).cpu()
    assert int(lines[0, 0]) == NO_MODULUS
