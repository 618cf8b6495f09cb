"""The proof's bytes, as toploc 0.1.6 writes them: one proof per segment, 2 + 2 K bytes, big-endian uint16.

    modulus M, then coefficients c_0 .. c_(K-1) of a polynomial over the integers mod 65497
    with  p(index mod M) = bfloat16 bit pattern  for the K largest-magnitude entries of the segment

docs/wire/proof.md is the standard. A row's proofs stand one after another, without a header: their number follows
from the number of states.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shoal.toploc.field import PRIME, Residues, interpolate

SEARCH_FLOOR = 1 << 15
"""The published search for a modulus gives up here."""
MODULUS_FLOOR = PRIME - 512
"""No honest segment needs a smaller one: each candidate fails with a chance of about an eighth at K = 128, of 7 in 8 at K = 512. A free choice
of modulus is what a forger would like, since a multiple of the hidden size turns indices into channels."""
FLOOR_TOPK = 512
"""With more points than that hardly any candidate separates them (1 in 3,000 at K = 1,024), and the search goes as far as it can."""


class ProofError(ValueError):
    """States that cannot be proven, or bytes that are no proof of them. `row` counts from 0 in the caller's list."""

    def __init__(self, reason: str, row: int) -> None:
        super().__init__(f"row {row}: {reason}")
        self.reason = reason
        self.row = row


def check_terms(topk: int, segment_tokens: int) -> None:
    if topk < 1 or segment_tokens < 1:
        raise ValueError(f"topk={topk} and segment_tokens={segment_tokens} must be at least 1")


def proof_bytes(topk: int) -> int:
    """Bytes of one segment's proof."""
    return 2 + 2 * topk


def num_segments(num_states: int, segment_tokens: int) -> int:
    return -(-num_states // segment_tokens)


def expected_bytes(num_states: int, *, topk: int, segment_tokens: int) -> int:
    """Bytes of a row's proofs, end to end."""
    return num_segments(num_states, segment_tokens) * proof_bytes(topk)


def modulus_floor(topk: int) -> int:
    """The smallest modulus that an honest proof may have."""
    return MODULUS_FLOOR if topk <= FLOOR_TOPK else SEARCH_FLOOR + 1


def check_format(
    proofs: Sequence[bytes], num_states: Sequence[int], *, hidden_size: int, topk: int, segment_tokens: int
) -> None:
    """All that can be said about proofs without the states: ProofError for the first row that cannot be right."""
    check_terms(topk, segment_tokens)
    if len(proofs) != len(num_states):
        raise ValueError(f"{len(proofs)} rows of proofs for {len(num_states)} rows of states")
    for row, (proof, count) in enumerate(zip(proofs, num_states, strict=True)):
        _check_row(proof, count, row=row, hidden_size=hidden_size, topk=topk, segment_tokens=segment_tokens)


def unpack(proof: bytes, topk: int) -> npt.NDArray[np.uint16]:
    """One line per segment: modulus, c_0, ..., c_(K-1). The length must fit."""
    return np.frombuffer(proof, dtype=">u2").reshape(-1, 1 + topk).astype(np.uint16)


def proofs_of_points(indices_SK: npt.NDArray[np.int64], bits_SK: npt.NDArray[np.uint16]) -> list[bytes]:
    """Proofs from points: flat indices and bit patterns, one line per segment. ValueError if no modulus separates them."""
    moduli_S = injective_moduli(indices_SK)
    x_SK = (indices_SK % moduli_S[:, None]).astype(np.uint32)
    coefficients_SK = interpolate(x_SK, bits_SK.astype(np.uint32))
    lines = np.concatenate([moduli_S[:, None].astype(np.uint32), coefficients_SK], axis=1).astype(">u2")
    return [line.tobytes() for line in lines]


def injective_moduli(indices_SK: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each segment the largest M <= 65497 under which its indices differ."""
    moduli_S = np.full(len(indices_SK), PRIME, dtype=np.int64)
    if indices_SK.size and indices_SK.max() >= PRIME:
        for segment in np.flatnonzero(collisions(indices_SK, moduli_S)):
            moduli_S[segment] = _search_modulus(indices_SK[segment])
    return moduli_S


def collisions(indices_SK: npt.NDArray[np.int64], moduli_S: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many indices of each segment coincide with another one under the segment's modulus."""
    sorted_SK = np.sort(indices_SK % moduli_S[:, None], axis=1)
    count_S: npt.NDArray[np.int64] = (sorted_SK[:, 1:] == sorted_SK[:, :-1]).sum(axis=1)
    return count_S


def _search_modulus(indices_K: npt.NDArray[np.int64]) -> int:
    for modulus in range(PRIME, SEARCH_FLOOR, -1):
        if len(np.unique(indices_K % modulus)) == len(indices_K):
            return modulus
    raise ValueError(no_modulus(len(indices_K)))


def no_modulus(topk: int) -> str:
    """Why no proof can be made."""
    return f"no modulus above {SEARCH_FLOOR} separates these {topk} indices"


def _check_row(
    proof: bytes, num_states: int, *, row: int, hidden_size: int, topk: int, segment_tokens: int
) -> None:
    wanted = expected_bytes(num_states, topk=topk, segment_tokens=segment_tokens)
    if len(proof) != wanted:
        raise ProofError(f"{len(proof)} bytes of proof for {num_states} states, expected {wanted}", row)
    if not proof:
        return
    table = unpack(proof, topk)
    if (table[:, 1:] >= PRIME).any():
        raise ProofError(f"a coefficient is {int(table[:, 1:].max())}, must be below {PRIME}", row)
    lengths = np.full(len(table), segment_tokens)
    lengths[-1] = num_states - segment_tokens * (len(table) - 1)
    # An index below 65497 is its own residue, so a segment that small has one possible modulus.
    lowest = np.where(lengths * hidden_size <= PRIME, PRIME, modulus_floor(topk))
    bad = np.flatnonzero((table[:, 0] > PRIME) | (table[:, 0] < lowest))
    if len(bad):
        segment = int(bad[0])
        raise ProofError(
            f"segment {segment} has modulus {int(table[segment, 0])}, must be {int(lowest[segment])} to {PRIME}",
            row,
        )


__all__ = [
    "MODULUS_FLOOR",
    "PRIME",
    "ProofError",
    "Residues",
    "check_format",
    "check_terms",
    "collisions",
    "expected_bytes",
    "injective_moduli",
    "modulus_floor",
    "no_modulus",
    "num_segments",
    "proof_bytes",
    "proofs_of_points",
    "unpack",
]
