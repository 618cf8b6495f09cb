"""One decode step on a CPU: one token for every row, a few large operations, nothing per row in Python.

Rows are shared out among lanes (lanes.py), which step them side by side.

cpu_layers.py has what a lane computes.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.decoder import Decoder
from shoal.model.fused import FusedWeights, linear
from shoal.rollout.engine.api import Request
from shoal.rollout.engine.cpu_layers import Glance, Heads, Prompts, norm, without_python
from shoal.rollout.engine.cpu_threads import Lanes
from shoal.rollout.engine.kv_slots import Slots
from shoal.rollout.engine.places import Places
from shoal.rollout.engine.prompt_cache import Batch, Computed, prefill
from shoal.rollout.engine.rows import Prompt, length_batches
from shoal.rollout.engine.sampling import draw_tokens

MIN_ROWS = 4
"""A lane has at least as many, or there are fewer lanes."""
MIN_PROMPT_TOKENS = 64
"""Prompts of fewer tokens together stay in one batch."""


class _Kept(NamedTuple):
    """A prompt's keys and values."""

    keys_LKCD: Tensor
    values_LKCD: Tensor


class _Share(NamedTuple):
    """The rows of one lane, slots `start` to `stop`; made anew when rows come or go."""

    start: int
    stop: int
    prompts: Prompts


class CpuStep:
    """Steps the rows in slots 0 .. num_rows-1, all of which must be running."""

    gapless = True
    """Every slot up to the last costs a step's time, so gaps are closed."""
    lookahead = 0
    """What a step has done is known when it returns."""

    def __init__(
        self, decoder: Decoder, weights: FusedWeights, slots: Slots, is_end_V: Tensor, lanes: Lanes
    ) -> None:
        """`weights` are the decoder's own, packed or not."""
        self._decoder, self._weights, self._slots, self._is_end_V = decoder, weights, slots, is_end_V
        self._lanes = lanes
        self._step_layers = (
            without_python()
        )  # here, not in a lane: torch's compiler is for one thread at a time
        self._places = Places(slots.room.prompts)
        self._kept: dict[int, _Kept] = {}
        self._shares: list[_Share] = []

    def decode(self, num_rows: int) -> None:
        if not self._shares:
            self._shares = [self._share(rows) for rows in share_rows(num_rows, self._lanes.num)]
        self._lanes.run([partial(self._decode, share) for share in self._shares])

    def _decode(self, share: _Share) -> None:
        weights, slots = self._weights, self._slots
        shape, rows = weights.shape, slice(share.start, share.stop)
        heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.norm_eps)
        x_BH = F.embedding(slots.newest_S[rows], weights.embed_VH)
        x_BH = self._step_layers(x_BH, list(weights.layers), heads, share.prompts, self._glance(share))
        hidden_BH = norm(x_BH, weights.norm_H, shape.norm_eps)
        slots.states_SNH[slots.index_S[rows], slots.counts_S[rows] - 1] = hidden_BH.to(torch.bfloat16)
        self._draw(linear(hidden_BH, weights.head_VH), slots.index_S[rows])

    def take_over(self, old: "CpuStep") -> None:
        """Go on with the prompts of a step whose slots were too small."""
        self._places, self._kept = old._places, old._kept
        self._places.grow(self._slots.room.prompts)

    def compute(self, prompts: Sequence[Prompt], *, keep: Container[Prompt] = ()) -> Computed:
        """Prompts for rows to start from, in batches of about one length: a CPU pays for every token of padding."""
        places = self._places.seat(prompts, keep=keep)
        self._kept = {place: kept for place, kept in self._kept.items() if self._places.holds(place)}
        groups = share_prompts(length_batches(prompts, 1.25), self._lanes.num)
        batches = self._lanes.run([partial(prefill, self._decoder, group) for group in groups])
        for batch in batches:
            assert batch.cache is not None
            for at, prompt in enumerate(batch.prompts):
                if prompt in places:
                    sides = (batch.cache.keys_LSCKD, batch.cache.values_LSCKD)
                    kept = [side[:, at, : len(prompt)].transpose(1, 2) for side in sides]
                    self._kept[places[prompt]] = _Kept(
                        *(side.to(torch.float32, memory_format=torch.contiguous_format) for side in kept)
                    )
        return Computed(prompts, [batch._replace(cache=None) for batch in batches])

    def enter(self, admitted: Mapping[int, Request]) -> None:
        prompts = [request.prompt_tokens for request in admitted.values()]
        self._places.enter(prompts)
        self._slots.enter(admitted, [self._places[prompt] for prompt in prompts])
        self._shares = []

    def start(self, batch: Batch, places_R: Tensor, slots_R: Tensor) -> None:
        """Rows in `slots_R` begin after the batch's prompts at `places_R`: their first tokens are drawn."""
        self._draw(batch.logits_PV[places_R], slots_R)

    def leave(self, slots: Sequence[int], requests: Iterable[Request]) -> None:
        """Rows have ended, and others will move into their slots."""
        self._places.leave(request.prompt_tokens for request in requests)
        self._shares = []

    def _glance(self, share: _Share) -> Glance:
        slots, shape, rows = self._slots, self._weights.shape, slice(share.start, share.stop)
        positions_B = slots.positions_S[rows]
        own_B = positions_B - slots.prompt_lens_S[rows]
        num_own = int(own_B.max()) + 1
        rope_B1E = self._weights.rope_PE[positions_B][:, None]
        queries = len(own_B) * (shape.num_heads // shape.num_kv_heads)
        columns = share.prompts.longest + num_own
        return Glance(
            cos_B1D=rope_B1E[..., : shape.head_dim],
            signed_sin_B1D=rope_B1E[..., shape.head_dim :],
            index_B=slots.index_S[: len(own_B)],
            own_B=own_B,
            num_own=num_own,
            beyond_BN=slots.index_C[:num_own] > own_B[:, None],
            scores_KRC=torch.full((shape.num_kv_heads, queries, columns), float("-inf")),
            keys_LBCKD=slots.cache.keys_LSCKD[:, rows],
            values_LBCKD=slots.cache.values_LSCKD[:, rows],
        )

    def _share(self, rows: range) -> _Share:
        places_B = self._slots.places_S[rows.start : rows.stop]
        order_B = places_B.argsort(stable=True)
        places, counts = places_B[order_B].unique_consecutive(return_counts=True)
        group = self._weights.shape.num_heads // self._weights.shape.num_kv_heads
        kept = [self._kept[place] for place in places.tolist()]
        stops_F = counts.cumsum(0) * group
        prompts = Prompts(
            starts=(stops_F - counts * group).tolist(),
            stops=stops_F.tolist(),
            keys_LKCD=[prompt.keys_LKCD for prompt in kept],
            values_LKCD=[prompt.values_LKCD for prompt in kept],
            longest=max(prompt.keys_LKCD.shape[2] for prompt in kept),
            order_B=order_B,
            ranks_B=order_B.argsort(),
        )
        return _Share(rows.start, rows.stop, prompts)

    def _draw(self, logits_RV: Tensor, slots_R: Tensor) -> None:
        slots = self._slots
        counts_R = slots.counts_S[slots_R]
        tokens_R, logprobs_R = draw_tokens(
            logits_RV, slots.temperatures_S[slots_R].float(), slots.uniforms_SN[slots_R, counts_R]
        )
        slots.tokens_SN[slots_R, counts_R] = tokens_R
        slots.logprobs_SN[slots_R, counts_R] = logprobs_R
        slots.newest_S[slots_R] = tokens_R
        counts_R = counts_R + 1
        slots.counts_S[slots_R] = counts_R
        slots.positions_S[slots_R] += 1
        ends_R = self._is_end_V[tokens_R] | (counts_R >= slots.caps_S[slots_R])
        slots.ended_S[slots_R] = torch.where(ends_R, counts_R, 0)


def share_rows(num_rows: int, num_lanes: int) -> list[range]:
    """Slots 0 .. num_rows-1, about as many to each lane; to fewer lanes where they would have too few."""
    num = max(1, min(num_lanes, num_rows // MIN_ROWS))
    bounds = [num_rows * at // num for at in range(num + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def share_prompts(batches: Sequence[Sequence[Prompt]], num_lanes: int) -> list[list[Prompt]]:
    """The batches, those divided that have more than a lane's share of the tokens; the largest first."""
    if num_lanes > 1:
        total = sum(len(prompt) for batch in batches for prompt in batch)
        most = max(MIN_PROMPT_TOKENS, -(-total // num_lanes))
        batches = [part for batch in batches for part in _divided(batch, most)]
    return sorted(map(list, batches), key=lambda batch: -sum(map(len, batch)))


def _divided(batch: Sequence[Prompt], most: int) -> list[list[Prompt]]:
    parts: list[list[Prompt]] = []
    room = 0
    for prompt in batch:
        if not parts or len(prompt) > room:
            parts.append([])
            room = most
        parts[-1].append(prompt)
        room -= len(prompt)
    return parts
