"""Checks on a device give the same numbers as checks on a CPU, for all kinds of proofs and sizes."""

from itertools import chain

import numpy as np
import pytest
import torch

from shoal import toploc
from shoal.toploc import device, verify
from shoal.toploc.device import evaluate
from shoal.toploc.field import PRIME
from shoal.toploc.field import evaluate as evaluate_on_host
from shoal.toploc.segments import padded_batches


def states(lengths: list[int], hidden: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, hidden, generator=generator).to(torch.bfloat16) for length in lengths]


def on_device(
    proofs: list[bytes], rows: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> list[list[toploc.SegmentCheck]]:
    with monkeypatch.context() as patch:
        patch.setattr(verify, "batches", padded_batches)
        patch.setattr(verify, "_check_on_host", lambda *given: device.start(*given)())
        return toploc.verify_proofs(proofs, rows, control_seed=7)


@pytest.mark.parametrize("hidden", [192, 576, 2560])
def test_device_and_host_give_the_same_numbers(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = states([32, 70, 1, 5, 0, 33], hidden, seed=1)
    honest = toploc.build_proofs(rows)
    moved = [(row.float() * (1 + 0.01 * torch.randn(row.shape))).to(torch.bfloat16) for row in rows]
    constant = [
        (PRIME.to_bytes(2, "big") + b"\x40\x10" + bytes(254)) * (len(proof) // 258) for proof in honest
    ]
    others = toploc.build_proofs(states([len(row) for row in rows], hidden, seed=2))
    for proofs, given in ((honest, rows), (honest, moved), (constant, rows), (others, rows)):
        of_device = on_device(proofs, given, monkeypatch)
        of_host = toploc.verify_proofs(proofs, given, control_seed=7)
        same_numbers(of_device, of_host)


def same_numbers(
    of_device: list[list[toploc.SegmentCheck]], of_host: list[list[toploc.SegmentCheck]]
) -> None:
    for mine, theirs in zip(chain(*of_device), chain(*of_host), strict=True):
        for name in toploc.SegmentCheck._fields:
            if name not in ("control_hits", "num_controls"):  # other random points
                assert getattr(mine, name) == pytest.approx(getattr(theirs, name)), name
        assert type(mine.constant) is bool and type(mine.exponent_mismatches) is int
        assert mine.num_controls == pytest.approx(theirs.num_controls, abs=60)
        if mine.num_controls == theirs.num_controls == 128:
            assert mine.control_hits == pytest.approx(theirs.control_hits, abs=16)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [192, 576, 2560])
def test_proofs_made_and_checked_on_a_gpu(hidden: int) -> None:
    rows = states([32, 70, 1, 5, 0, 33], hidden, seed=1)
    on_gpu = [row.cuda() for row in rows]
    moved = [(row.float() * (1 + 0.01 * torch.randn(row.shape))).to(torch.bfloat16) for row in rows]
    honest = toploc.build_proofs(on_gpu)
    for given in (rows, moved):
        of_gpu = toploc.verify_proofs(honest, [row.cuda() for row in given], control_seed=7)
        same_numbers(of_gpu, toploc.verify_proofs(honest, given, control_seed=7))
    checks = toploc.verify_proofs(honest, rows, control_seed=7)
    assert {check.exponent_mismatches for row in checks for check in row} == {0}


def test_tensor_operations_evaluate_polynomials() -> None:
    rng = np.random.default_rng(0)
    coefficients = rng.integers(0, PRIME, size=(5, 128)).astype(np.uint16)
    x = rng.integers(0, PRIME, size=(5, 200))
    found = evaluate(torch.from_numpy(coefficients.astype(np.int64)), torch.from_numpy(x))
    assert np.array_equal(found.numpy(), evaluate_on_host(coefficients, x).astype(np.int32))


@pytest.mark.gpu
@pytest.mark.parametrize(("topk", "num_points"), [(128, 192), (8, 1), (128, 300)])
def test_the_kernel_evaluates_polynomials(topk: int, num_points: int, kernel_device: str) -> None:
    """Covers the largest residue, and coefficients above the prime. TRITON_INTERPRET=1 pytest -m gpu runs it without a GPU."""
    from shoal.toploc.proof_kernels import values  # needs Triton

    rng = np.random.default_rng(0)
    coefficients = rng.integers(0, 1 << 16, size=(3, topk)).astype(np.uint16)
    coefficients[0] = PRIME - 1
    x = rng.integers(0, PRIME, size=(3, num_points))
    x[0] = PRIME - 1
    lines = torch.from_numpy(coefficients.astype(np.int64)).to(kernel_device)
    found = values(lines, torch.from_numpy(x).to(kernel_device))
    assert np.array_equal(found.cpu().numpy(), evaluate_on_host(coefficients, x).astype(np.int32))


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN or infinity"), (0.0, "all zero")])
def test_states_that_cannot_be_proven(value: float, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = states([32, 40], 576, seed=3)
    proofs = toploc.build_proofs(rows)
    rows[1][32:] = value
    with pytest.raises(toploc.ProofError, match=word) as refused:
        on_device(proofs, rows, monkeypatch)
    assert refused.value.row == 1


def test_a_modulus_that_merges_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment at hidden size 2,560 has more values than the prime, so a forger may choose the modulus."""
    rows = states([32], 2560, seed=4)
    (proof,) = toploc.build_proofs(rows)
    rows[0].zero_()
    rows[0].view(-1)[: 2 * 65400 : 65400] = 3.0
    rows[0].view(-1)[:64] = 2.0
    rows[0].view(-1)[65400 : 65400 + 64] = 2.0
    forged = (65400).to_bytes(2, "big") + proof[2:]
    with pytest.raises(toploc.ProofError, match="modulus 65400 merges"):
        on_device([forged], rows, monkeypatch)
