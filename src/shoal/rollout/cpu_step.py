"""One decode step on a CPU: one token for every row, a few large operations, nothing per row in Python.

Rows are shared out among lanes (lanes.py), which step them side by side.

Attention has two parts with one softmax over both. Prompts are kept apart, once for all their rows, whose queries meet
them in one product; the rows' new tokens stand in their slots. Keys and values are float32 whatever the model's dtype:
short products of float32 are the faster ones, and scores keep their precision.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.decoder import Decoder
from shoal.model.fused import FusedLayer, FusedWeights
from shoal.model.packed import linear
from shoal.rollout.engine import Request
from shoal.rollout.lanes import Lanes
from shoal.rollout.places import Places
from shoal.rollout.rows import Prompt, length_batches
from shoal.rollout.sampling import draw_tokens
from shoal.rollout.shelf import Batch, prefill
from shoal.rollout.slots import Slots


MIN_ROWS = 4
"""A lane has at least as many, or there are fewer lanes."""
MIN_PROMPT_TOKENS = 64
"""Prompts of fewer tokens together stay in one batch."""


class _Kept(NamedTuple):
    """A prompt's keys and values."""

    keys_LKCD: Tensor
    values_LKCD: Tensor


class _Family(NamedTuple):
    """Running rows that have one prompt: `start` to `stop` in the order of prompts, counted in queries of one kv head."""

    start: int
    stop: int
    prompt: _Kept


class _Share(NamedTuple):
    """The rows of one lane, slots `start` to `stop`, by prompt; made anew when rows come or go."""

    start: int
    stop: int
    order_B: Tensor
    """The rows in this order, counted from `start`."""
    ranks_B: Tensor
    """Place of each row in this share."""
    families: list[_Family]
    longest: int
    """Of the prompts."""


class _Glance(NamedTuple):
    """What is the same for all layers of a step."""

    share: _Share
    rope_B1D: tuple[Tensor, Tensor]
    slots_B: Tensor
    own_B: Tensor
    """Where among a row's new tokens this one stands."""
    num_own: int
    beyond_BN: Tensor
    """New tokens of other rows' length, which a row has not."""
    scores_KRC: Tensor
    """To be filled: scores of all queries of a kv head over the prompt and, from `share.longest` on, the new tokens."""


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
        self._places = Places(slots.room.prompts)
        self._kept: dict[int, _Kept] = {}
        self._shares: list[_Share] = []

    def decode(self, num_rows: int) -> None:
        if not self._shares:
            self._shares = [self._share(rows) for rows in share_rows(num_rows, self._lanes.num)]
        self._lanes.run([partial(self._decode, share) for share in self._shares])

    def _decode(self, share: _Share) -> None:
        weights, slots = self._weights, self._slots
        eps = weights.shape.norm_eps
        glance = self._glance(share)
        x_BH = F.embedding(slots.newest_S[share.start : share.stop], weights.embed_VH)
        for number, layer in enumerate(weights.layers):
            qkv_BQD = self._project(_norm(x_BH, layer.input_norm_H, eps), layer, glance.rope_B1D)
            mixed_BQ = self._attend(qkv_BQD, number, glance).to(x_BH.dtype)
            x_BH = x_BH + linear(mixed_BQ, layer.o_HQ)
            gate_up_BF = linear(_norm(x_BH, layer.post_norm_H, eps), layer.gate_up_FH)
            gate_BF, up_BF = gate_up_BF.chunk(2, -1)
            x_BH = x_BH + linear(F.silu(gate_BF).mul_(up_BF), layer.down_HF)
        hidden_BH = _norm(x_BH, weights.norm_H, eps)
        fed_B = slots.counts_S[share.start : share.stop] - 1
        slots.states_SNH[glance.slots_B, fed_B] = hidden_BH.to(torch.bfloat16)
        self._draw(linear(hidden_BH, weights.head_VH), glance.slots_B)

    def take_over(self, old: "CpuStep") -> None:
        """Go on with the prompts of a step whose slots were too small."""
        self._places, self._kept = old._places, old._kept
        self._places.grow(self._slots.room.prompts)

    def compute(self, prompts: Sequence[Prompt]) -> list[Batch]:
        """Prompts for rows to start from, in batches of about one length: a CPU pays for every token of padding."""
        places = self._places.seat(prompts)
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
        return [batch._replace(cache=None) for batch in batches]

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

    def _glance(self, share: _Share) -> _Glance:
        slots, shape = self._slots, self._weights.shape
        positions_B = slots.positions_S[share.start : share.stop]
        own_B = positions_B - slots.prompt_lens_S[share.start : share.stop]
        num_own = int(own_B.max()) + 1
        rope_B1E = self._weights.rope_PE[positions_B][:, None]
        queries = len(own_B) * (shape.num_heads // shape.num_kv_heads)
        return _Glance(
            share=share,
            rope_B1D=(rope_B1E[..., : shape.head_dim], rope_B1E[..., shape.head_dim :]),
            slots_B=slots.index_S[share.start : share.stop],
            own_B=own_B,
            num_own=num_own,
            beyond_BN=slots.index_C[:num_own] > own_B[:, None],
            scores_KRC=torch.full((shape.num_kv_heads, queries, share.longest + num_own), float("-inf")),
        )

    def _share(self, rows: range) -> _Share:
        places_B = self._slots.places_S[rows.start : rows.stop]
        order_B = places_B.argsort(stable=True)
        places, counts = places_B[order_B].unique_consecutive(return_counts=True)
        group = self._weights.shape.num_heads // self._weights.shape.num_kv_heads
        families, start = [], 0
        for place, count in zip(places.tolist(), counts.tolist(), strict=True):
            families.append(_Family(start, start + count * group, self._kept[place]))
            start += count * group
        longest = max(family.prompt.keys_LKCD.shape[2] for family in families)
        return _Share(rows.start, rows.stop, order_B, order_B.argsort(), families, longest)

    def _project(self, normed_BH: Tensor, layer: FusedLayer, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Queries, keys and values, rotated, float32, [B, heads + 2 kv heads, D]."""
        shape = self._weights.shape
        qkv_BQD = linear(normed_BH, layer.qkv_QH, layer.qkv_bias_Q).view(len(normed_BH), -1, shape.head_dim)
        first_v = shape.num_heads + shape.num_kv_heads
        qk_BMD = qkv_BQD[:, :first_v]
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            q_BND = _norm(qk_BMD[:, : shape.num_heads], layer.q_norm_D, shape.norm_eps)
            k_BKD = _norm(qk_BMD[:, shape.num_heads :], layer.k_norm_D, shape.norm_eps)
            qk_BMD = torch.cat((q_BND, k_BKD), dim=1)
        cos, signed_sin = rope
        turned_BMD = torch.addcmul(qk_BMD * cos, qk_BMD.roll(shape.head_dim // 2, -1), signed_sin)
        qkv_BQD[:, :first_v] = turned_BMD
        return qkv_BQD.float()

    def _attend(self, qkv_BQD: Tensor, number: int, glance: _Glance) -> Tensor:
        """Attention of the new tokens, which are kept. float32, [B, heads * D]."""
        shape, share, num_own = self._weights.shape, glance.share, glance.num_own
        num_rows, heads, kv_heads, head_dim = (
            len(qkv_BQD),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
        )
        cache = self._slots.cache
        keys_SCKD, values_SCKD = cache.keys_LSCKD[number], cache.values_LSCKD[number]
        keys_SCKD[glance.slots_B, glance.own_B] = qkv_BQD[:, heads : heads + kv_heads]
        values_SCKD[glance.slots_B, glance.own_B] = qkv_BQD[:, heads + kv_heads :]
        # Heads that share keys stand in for query positions, so no key is copied.
        q_BKGD = (qkv_BQD[:, :heads] * head_dim**-0.5).view(num_rows, kv_heads, -1, head_dim)
        q_KRD = q_BKGD[share.order_B].transpose(0, 1).reshape(kv_heads, -1, head_dim)
        scores_KRC = glance.scores_KRC
        for start, stop, prompt in share.families:
            keys_KCD = prompt.keys_LKCD[number]
            torch.bmm(
                q_KRD[:, start:stop],
                keys_KCD.transpose(1, 2),
                out=scores_KRC[:, start:stop, : keys_KCD.shape[1]],
            )
        own_keys = keys_SCKD[share.start : share.stop, :num_own].transpose(1, 2).flatten(0, 1)
        own_values = values_SCKD[share.start : share.stop, :num_own].transpose(1, 2).flatten(0, 1)
        own_BKGN = torch.bmm(q_BKGD.flatten(0, 1), own_keys.transpose(1, 2)).view(
            num_rows, kv_heads, -1, num_own
        )
        own_BKGN.masked_fill_(glance.beyond_BN[:, None, None], float("-inf"))
        by_row = (kv_heads, num_rows, heads // kv_heads, -1)
        scores_KRC.view(by_row)[..., share.longest :] = own_BKGN[share.order_B].transpose(0, 1)
        weights_KRC = scores_KRC.softmax(-1)
        mixed_KRD = torch.empty_like(q_KRD)
        for start, stop, prompt in share.families:
            values_KCD = prompt.values_LKCD[number]
            torch.bmm(
                weights_KRC[:, start:stop, : values_KCD.shape[1]], values_KCD, out=mixed_KRD[:, start:stop]
            )
        own_weights = weights_KRC.view(by_row)[..., share.longest :].transpose(0, 1)[share.ranks_B]
        from_prompts = mixed_KRD.view(by_row).transpose(0, 1)[share.ranks_B]
        own = torch.bmm(own_weights.flatten(0, 1), own_values)
        return own.view(num_rows, -1) + from_prompts.reshape(num_rows, -1)

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


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype is torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()  # rounded where the decoder rounds
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
