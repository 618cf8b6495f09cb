"""Hostile bytes give a ProofError with a reason, never another exception."""

import random

import pytest
import torch

from shoal import toploc
from shoal.toploc.field import PRIME
from shoal.toploc.proof import MODULUS_FLOOR

STATES = [torch.randn(length, 128, generator=torch.Generator().manual_seed(length)) for length in (40, 3)]
PROOFS = toploc.build_proofs(STATES)
WIDE = torch.randn(32, 5120, generator=torch.Generator().manual_seed(0))
(WIDE_PROOF,) = toploc.build_proofs([WIDE])


def with_word(proof: bytes, index: int, value: int) -> bytes:
    return proof[: 2 * index] + value.to_bytes(2, "big") + proof[2 * index + 2 :]


@pytest.mark.parametrize(
    ("proof", "reason"),
    [
        (b"", "0 bytes of proof for 40 states, expected 516"),
        (b"\xff\xd9", "2 bytes"),
        (PROOFS[0] + PROOFS[0][:258], "774 bytes"),
        (PROOFS[0][:-1], "515 bytes"),
        (with_word(PROOFS[0], 0, 0), "modulus 0"),
        (with_word(PROOFS[0], 0, PRIME - 1), f"modulus {PRIME - 1}, must be {PRIME}"),
        (with_word(PROOFS[0], 129, PRIME + 1), "segment 1 has modulus"),
        (with_word(PROOFS[0], 5, PRIME), f"coefficient is {PRIME}"),
        (with_word(PROOFS[0], 257, 0xFFFF), "coefficient is 65535"),
    ],
)
def test_malformed_proofs_are_refused_with_the_row(proof: bytes, reason: str) -> None:
    with pytest.raises(toploc.ProofError, match=reason) as refused:
        toploc.verify_proofs([PROOFS[1], proof], [STATES[1], STATES[0]], control_seed=1)
    assert refused.value.row == 1


@pytest.mark.parametrize("modulus", [0, 1, 5120, 12 * 5120, MODULUS_FLOOR - 1, PRIME + 1])
def test_wide_segments_accept_only_moduli_near_the_prime(modulus: int) -> None:
    with pytest.raises(toploc.ProofError, match="modulus"):
        toploc.verify_proofs([with_word(WIDE_PROOF, 0, modulus)], [WIDE], control_seed=1)


def test_a_modulus_that_merges_the_verifiers_indices_is_refused() -> None:
    modulus = PRIME - 200
    states = torch.full((32, 5120), 0.01)
    states.view(-1)[:64] = 1.0 + torch.arange(64) / 64
    states.view(-1)[modulus : modulus + 64] = 1.0 + torch.arange(64) / 64
    (proof,) = toploc.build_proofs([states])
    with pytest.raises(toploc.ProofError, match="merges 64 of 128 indices"):
        toploc.verify_proofs([with_word(proof, 0, modulus)], [states], control_seed=1)


def test_the_number_of_rows_must_match() -> None:
    with pytest.raises(ValueError, match="2 rows of proofs for 1 rows of states"):
        toploc.verify_proofs(PROOFS, STATES[:1], control_seed=1)


@pytest.mark.parametrize(
    "count", [3_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_mutated_proofs_give_a_proof_error_or_statistics(count: int) -> None:
    rng = random.Random(count)
    refused = numbered = 0
    for _ in range(count):
        mutated = mutate(PROOFS[0], rng)
        try:
            (checks,) = toploc.verify_proofs([mutated], [STATES[0]], control_seed=rng.getrandbits(32))
        except toploc.ProofError:
            refused += 1
            continue
        numbered += 1
        assert all(0 <= c.exponent_mismatches <= 128 and c.control_hits <= c.num_controls for c in checks)
    assert refused > count // 6 and numbered > count // 6, "mutations should give both outcomes"


def mutate(proof: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(6)
    at = rng.randrange(len(proof))
    if kind == 0:
        return proof[:at]
    if kind == 1:
        return proof + rng.randbytes(rng.randrange(1, 600))
    if kind == 2:
        return proof[:at] + rng.randbytes(1) + proof[at + 1 :]
    if kind == 3:
        return with_word(
            proof, rng.choice([0, 1, 128, 129, 257]), rng.choice([0, 1, 32768, 65496, 65497, 65535])
        )
    if kind == 4:
        return rng.randbytes(len(proof))
    tail = b"".join(rng.randrange(PRIME).to_bytes(2, "big") for _ in range(128))
    return proof[:260] + tail
