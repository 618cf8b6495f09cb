"""Proofs from states."""

from collections.abc import Sequence

from torch import Tensor

from shoal.toploc.proof import ProofError, num_segments, proofs_of_points
from shoal.toploc.segments import batches, top_points


def build_proofs(states_list: Sequence[Tensor], *, topk: int = 128, segment_tokens: int = 32) -> list[bytes]:
    """One bytes per row: the proofs of its segments, end to end; empty for a row without states.

    `states_list` holds [tokens, hidden] floats per row, in any float dtype; they are proven as bfloat16. All segments of
    all rows are worked on together, so hand over many rows at once. ProofError if a row cannot be proven.
    """
    proofs = [[b""] * num_segments(len(states), segment_tokens) for states in states_list]
    for batch in batches(states_list, segment_tokens=segment_tokens):
        indices_SK, bits_SK = top_points(batch, topk)
        try:
            made = proofs_of_points(indices_SK, bits_SK)
        except ValueError as error:
            raise ProofError(str(error), batch.places[0][0]) from None
        for (row, segment), proof in zip(batch.places, made, strict=True):
            proofs[row][segment] = proof
    return [b"".join(row) for row in proofs]
