"""The bytes of a proof, as toploc 0.1.6 writes them: one proof per segment, 2 + 2 K bytes, big-endian uint16.

    modulus M, then coefficients c_0 .. c_(K-1) of a polynomial over the integers mod 65497
    with  p(index mod M) = bfloat16 bit pattern  for the K largest-magnitude entries of the segment

docs/wire/proof.md is the standard. A row's proofs are concatenated without a header: the number of states gives their
number.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shoal.toploc.field import PRIME, interpolate

SEARCH_FLOOR = 1 << 15
"""The published search for a modulus ends here."""
MODULUS_FLOOR = PRIME - 512
"""No honest segment needs a smaller modulus: each one fails with probability 1/8 at K = 128 and 7/8 at K = 512. A free
choice would help a forger, because a modulus that is a multiple of the hidden size maps indices to channels."""
FLOOR_TOPK = 512
"""With more points hardly any modulus separates them (1 in 3,000 at K = 1,024), and the search goes to SEARCH_FLOOR."""


class ProofError(ValueError):
    """States cannot be proven, or bytes cannot be their proof. `row` is the index in the caller's list."""

    def __init__(self, reason: str, row: int) -> None:
        super().__init__(f"row {row}: {reason}")
        self.reason = reason
        self.row = row


def check_parameters(topk: int, segment_tokens: int) -> None:
    """Raises ValueError if a parameter is below 1."""
    if topk < 1 or segment_tokens < 1:
        raise ValueError(f"topk={topk} and segment_tokens={segment_tokens} must be at least 1")


def proof_bytes(topk: int) -> int:
    """Returns the number of bytes of one segment's proof."""
    return 2 + 2 * topk


def num_segments(num_states: int, segment_tokens: int) -> int:
    """Returns the number of segments of a row."""
    return -(-num_states // segment_tokens)


def expected_bytes(num_states: int, *, topk: int, segment_tokens: int) -> int:
    """Returns the number of bytes of a row's proofs."""
    return num_segments(num_states, segment_tokens) * proof_bytes(topk)


def modulus_floor(topk: int) -> int:
    """Returns the smallest modulus that an honest proof may have."""
    return MODULUS_FLOOR if topk <= FLOOR_TOPK else SEARCH_FLOOR + 1


def check_format(
    proofs: Sequence[bytes], num_states: Sequence[int], *, hidden_size: int, topk: int, segment_tokens: int
) -> None:
    """Raises ProofError for the first row whose proofs have a wrong length, coefficient or modulus. Needs no states."""
    check_parameters(topk, segment_tokens)
    if len(proofs) != len(num_states):
        raise ValueError(f"{len(proofs)} rows of proofs for {len(num_states)} rows of states")
    for row, (proof, count) in enumerate(zip(proofs, num_states, strict=True)):
        wanted = expected_bytes(count, topk=topk, segment_tokens=segment_tokens)
        if len(proof) != wanted:
            raise ProofError(f"{len(proof)} bytes of proof for {count} states, expected {wanted}", row)
        if not proof:
            continue
        table = unpack(proof, topk)
        if (table[:, 1:] >= PRIME).any():
            raise ProofError(f"a coefficient is {int(table[:, 1:].max())}, must be below {PRIME}", row)
        lengths = np.full(len(table), segment_tokens)
        lengths[-1] = count - segment_tokens * (len(table) - 1)
        # An index below 65497 is its own residue, so a segment that small has one possible modulus.
        lowest = np.where(lengths * hidden_size <= PRIME, PRIME, modulus_floor(topk))
        for segment in np.flatnonzero((table[:, 0] > PRIME) | (table[:, 0] < lowest)):
            raise ProofError(
                f"segment {segment} has modulus {table[segment, 0]}, must be {lowest[segment]} to {PRIME}",
                row,
            )


def unpack(proof: bytes, topk: int) -> npt.NDArray[np.uint16]:
    """Returns one row per segment: modulus, c_0, ..., c_(K-1). The length must have been checked."""
    return np.frombuffer(proof, dtype=">u2").reshape(-1, 1 + topk).astype(np.uint16)


def proofs_of_points(indices_SK: npt.NDArray[np.int64], bits_SK: npt.NDArray[np.uint16]) -> list[bytes]:
    """Returns the proofs of points, given as flat indices and bit patterns, one row per segment.

    Raises ValueError if no modulus separates the indices of a segment.
    """
    moduli_S = injective_moduli(indices_SK)
    x_SK = (indices_SK % moduli_S[:, None]).astype(np.uint32)
    coefficients_SK = interpolate(x_SK, bits_SK.astype(np.uint32))
    lines = np.concatenate([moduli_S[:, None].astype(np.uint32), coefficients_SK], axis=1).astype(">u2")
    return [line.tobytes() for line in lines]


def injective_moduli(indices_SK: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns for each segment the largest M <= 65497 under which its indices are distinct."""
    moduli_S = np.full(len(indices_SK), PRIME, dtype=np.int64)
    if indices_SK.size and indices_SK.max() >= PRIME:
        for segment in np.flatnonzero(collisions(indices_SK, moduli_S)):
            moduli_S[segment] = _search_modulus(indices_SK[segment])
    return moduli_S


def collisions(indices_SK: npt.NDArray[np.int64], moduli_S: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns how many indices of each segment coincide with another one under the segment's modulus."""
    sorted_SK = np.sort(indices_SK % moduli_S[:, None], axis=1)
    count_S: npt.NDArray[np.int64] = (sorted_SK[:, 1:] == sorted_SK[:, :-1]).sum(axis=1)
    return count_S


def _search_modulus(indices_K: npt.NDArray[np.int64]) -> int:
    for modulus in range(PRIME, SEARCH_FLOOR, -1):
        if len(np.unique(indices_K % modulus)) == len(indices_K):
            return modulus
    raise ValueError(no_modulus(len(indices_K)))


def no_modulus(topk: int) -> str:
    """Returns the error message for indices that no modulus separates."""
    return f"no modulus above {SEARCH_FLOOR} separates these {topk} indices"
