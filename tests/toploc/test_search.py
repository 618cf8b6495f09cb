"""The search for the largest magnitudes makes torch.topk's choice, ties included, and finds all candidates."""

import numpy as np
import pytest
import torch

from shoal import toploc
from shoal.toploc.proof import proofs_of_points
from shoal.toploc.search import CHUNK, WIDE, TopSearch


def tie_heavy(kind: str, num_segments: int, width: int, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(num_segments, width, generator=generator)
    if kind == "few values":
        levels = int(torch.randint(1, 60, (1,), generator=generator))
        values = torch.randint(0, levels + 1, values.shape, generator=generator) * values.sign()
    elif kind == "rising":
        values = values.abs().sort(dim=1).values
    elif kind == "falling":
        values = values.abs().sort(dim=1, descending=True).values
    elif kind == "a few channels":
        values *= 100 * torch.rand(1, width, generator=generator) ** 8
    elif kind == "sparse":
        values = torch.zeros_like(values)
        values[:, :: int(torch.randint(1, 2000, (1,), generator=generator))] = 1.0
    return values.bfloat16()


KINDS = ("gaussian", "few values", "rising", "falling", "a few channels", "sparse")


@pytest.mark.parametrize("kind", KINDS)
def test_indices_are_those_of_torch_topk_with_many_ties(kind: str) -> None:
    generator = torch.Generator().manual_seed(len(kind))
    for _ in range(100):
        topk = int(torch.randint(1, 24, (1,), generator=generator))
        width = CHUNK * int(torch.randint(WIDE * topk // CHUNK, WIDE * topk, (1,), generator=generator))
        values = tie_heavy(kind, 5, width, generator)
        wanted = torch.topk(values.abs(), topk, dim=1, sorted=False).indices
        assert torch.equal(TopSearch(topk).indices(values), wanted)


@pytest.mark.parametrize("hidden", [1024, 1025, 2048, 5120])
@pytest.mark.parametrize("kind", KINDS[:5])
def test_wide_proofs_are_those_of_plain_topk(kind: str, hidden: int) -> None:
    generator = torch.Generator().manual_seed(hidden)
    flat = tie_heavy(kind, 3, 32 * hidden, generator)
    flat[:, 0] = 200.0  # never all zero
    indices = torch.topk(flat.abs(), 128, dim=1, sorted=False).indices
    bits = torch.gather(flat, 1, indices).view(torch.int16).numpy().view(np.uint16)
    assert toploc.build_proofs([flat.view(-1, hidden)])[0] == b"".join(
        proofs_of_points(indices.numpy(), bits)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_all_values_that_reach_the_last_place(kind: str) -> None:
    generator = torch.Generator().manual_seed(7)
    for width in (40, 512, 2047, 2048, 5000, 40_000):
        topk = 32
        values = tie_heavy(kind, 4, width, generator)
        found = TopSearch(topk).candidates(values)
        magnitudes = values.abs().float().numpy()
        for line, magnitude in enumerate(magnitudes):
            wanted = np.flatnonzero(magnitude >= np.sort(magnitude)[-topk])
            mine = found.indices_SW[line, : found.num_S[line]]
            if found.num_S.max() == topk < len(wanted):  # too many ties to compare all of them
                assert set(mine) <= set(wanted)
            else:
                assert sorted(mine) == wanted.tolist()


def test_a_proof_with_other_ties_still_matches() -> None:
    """Another device's top-k chooses other ones of several equal values."""
    values = torch.randint(1, 40, (1, 32 * 128), generator=torch.Generator().manual_seed(0)).bfloat16()
    magnitudes = values[0].float().numpy()
    order = np.lexsort((-np.arange(values.shape[1]), -magnitudes))[:128]  # the last of equal ones
    bits = values[0, torch.from_numpy(order.copy())].view(torch.int16).numpy().view(np.uint16)
    proof = proofs_of_points(order[None], bits[None])
    states = [values.view(32, 128)]
    assert toploc.build_proofs(states) != proof, "the choice differs"
    ((check,),) = toploc.verify_proofs(proof, states, control_seed=1)
    assert (check.exponent_mismatches, check.mantissa_mean) == (0, 0.0)
