"""What proofs say about states, segment by segment, in numbers. Deciding what the numbers mean is the caller's.

top-k points    the polynomial at the verifier's own top-k indices against the verifier's own values
control points  the polynomial at random indices with small values, which no honest prover commits to: there an
                honest polynomial is noise, and one that was made up to fit everywhere gives itself away

S segments, K top-k.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from shoal.toploc import device, host
from shoal.toploc.proof import check_format, num_segments, unpack
from shoal.toploc.segment_check import SegmentCheck
from shoal.toploc.segments import Place, batches, check_states, padded_batches


def verify_proofs(
    proofs: Sequence[bytes],
    states_list: Sequence[Tensor],
    *,
    topk: int = 128,
    segment_tokens: int = 32,
    control_seed: int,
) -> list[list[SegmentCheck]]:
    """For each row the check of each segment. ProofError names the first row whose bytes cannot be a proof of its states.

    `control_seed` picks the control points; a prover must not know it.
    """
    return start_verifying(
        proofs, states_list, topk=topk, segment_tokens=segment_tokens, control_seed=control_seed
    ).checks()


def start_verifying(
    proofs: Sequence[bytes],
    states_list: Sequence[Tensor],
    *,
    topk: int = 128,
    segment_tokens: int = 32,
    control_seed: int,
) -> "Verification":
    """The same in two steps: on a device everything is queued, and `checks()` waits for it. On a CPU `checks()` does all."""
    for row, states in enumerate(states_list):
        check_states(states, row)
    hidden_sizes = {states.shape[-1] for states in states_list}
    if len(hidden_sizes) > 1:
        raise ValueError(f"rows have different hidden sizes {sorted(hidden_sizes)}; verify them apart")
    check_format(
        proofs,
        [len(states) for states in states_list],
        hidden_size=hidden_sizes.pop() if hidden_sizes else 0,
        topk=topk,
        segment_tokens=segment_tokens,
    )
    counts = [num_segments(len(states), segment_tokens) for states in states_list]
    firsts = np.cumsum([0, *counts])
    lines_SK = np.concatenate(
        [np.empty((0, 1 + topk), np.uint16), *(unpack(proof, topk) for proof in proofs)]
    )
    on_device = bool(states_list) and states_list[0].device.type != "cpu"
    cut = padded_batches if on_device else batches
    chosen = (
        (batch, lines_SK[[firsts[row] + segment for row, segment in batch.places]])
        for batch in cut(states_list, segment_tokens=segment_tokens)
    )
    rng = np.random.default_rng(control_seed)
    find = device.start(chosen, topk, rng) if on_device else partial(host.find, chosen, topk, rng)
    return Verification(counts, find)


class Verification:
    """One that was begun."""

    def __init__(self, counts: Sequence[int], find: Callable[[], dict[Place, SegmentCheck]]) -> None:
        self._counts, self._find = counts, find

    def checks(self) -> list[list[SegmentCheck]]:
        """As verify_proofs gives and raises them."""
        found = self._find()
        return [[found[row, segment] for segment in range(count)] for row, count in enumerate(self._counts)]
