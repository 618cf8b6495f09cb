"""Tensors of the running rows, one slot each: where each row stands, what it has drawn, and its keys and values."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.model.decoder import KVCache
from shoal.model.fused import FusedWeights
from shoal.model.packed_prefill import upload
from shoal.rollout.engine.api import Request
from shoal.rollout.engine.scheduler import Room
from shoal.wire.seeded_draw import uniforms


class Taken(NamedTuple):
    """What is left of rows once their slots are free: [rows, longest of them]."""

    tokens_RN: Tensor
    logprobs_RN: Tensor
    states_RNH: Tensor


class Slots:
    def __init__(self, weights: FusedWeights, room: Room) -> None:
        shape, dtype, device = weights.shape, weights.embed_VH.dtype, weights.embed_VH.device
        rows, context, new_tokens, *_ = self.room = room
        self.device = device
        self.cache = KVCache(
            shape,
            num_slots=rows,
            max_context=context,
            dtype=cache_dtype(dtype, device),
            device=device,
            heads_apart=device.type == "cpu",
        )
        self.index_S = torch.arange(rows, device=device)
        self.index_C = torch.arange(context, device=device)
        self.table_6S = torch.zeros(6, rows, dtype=torch.int64, device=device)
        # Position of the newest token; tokens drawn; the most it may draw; 0 while it runs, tokens drawn once it ended;
        # where its prompt stands and how long it is.
        self.positions_S, self.counts_S, self.caps_S, self.ended_S, *_ = self.table_6S
        self.places_S, self.prompt_lens_S = self.table_6S[4:]
        self.ended_S.fill_(1)
        self.newest_S = torch.zeros(rows, dtype=torch.int64, device=device)
        # A row's temperature, then its uniforms: one tensor, so that they arrive in one copy.
        self.terms_SE = torch.ones(rows, 1 + new_tokens, dtype=torch.float64, device=device)
        self.temperatures_S, self.uniforms_SN = self.terms_SE[:, 0], self.terms_SE[:, 1:]
        self.tokens_SN = torch.zeros(rows, new_tokens, dtype=torch.int64, device=device)
        self.logprobs_SN = torch.zeros(rows, new_tokens, device=device)
        # Proofs are of bfloat16 states whatever the compute dtype; kept so from the start, they take half the memory.
        self.states_SNH = torch.zeros(
            rows, new_tokens, shape.hidden_size, dtype=torch.bfloat16, device=device
        )

    def enter(self, admitted: Mapping[int, Request], places: Sequence[int]) -> None:
        """Put rows at the end of their prompts, with all their uniforms. `places`: where their prompts are kept."""
        requests = list(admitted.values())
        starts = [
            (
                slot,
                len(request.prompt_tokens) - 1,
                0,
                request.max_new_tokens,
                0,
                place,
                len(request.prompt_tokens),
            )
            for (slot, request), place in zip(admitted.items(), places, strict=True)
        ]
        num_new = max(request.max_new_tokens for request in requests)
        seeds = np.array([request.sample_seed for request in requests], dtype=np.uint64)
        # All in one copy, integers and floats side by side: on a GPU each copy costs more than what is in it.
        sent_RX = np.empty((len(requests), 7 + 1 + num_new), dtype=np.int64)
        sent_RX[:, :7] = starts
        terms_RE = sent_RX[:, 7:].view(np.float64)
        terms_RE[:, 0] = [request.temperature for request in requests]
        terms_RE[:, 1:] = uniforms(seeds[:, None], np.arange(num_new, dtype=np.uint64)[None])
        here_RX = upload(sent_RX, self.device)
        slots_R = here_RX[:, 0]
        self.table_6S[:, slots_R] = here_RX[:, 1:7].T
        self.terms_SE[slots_R, : 1 + num_new] = here_RX[:, 7:].view(torch.float64)

    def take(self, slots: Sequence[int], num_tokens: int) -> Taken:
        """Copies of what these rows made; at most `num_tokens` of each."""
        slots_R = upload(np.array(slots), self.device)
        return Taken(
            self.tokens_SN[slots_R, :num_tokens],
            self.logprobs_SN[slots_R, :num_tokens],
            self.states_SNH[slots_R, : max(num_tokens - 1, 0)],
        )

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        sources, targets = (upload(np.array(side), self.device) for side in zip(*moves, strict=True))
        context = int(self.counts_S[sources].max())
        for tensor in self._per_row():
            tensor[targets] = tensor[sources]
        self.table_6S[:, targets] = self.table_6S[:, sources]
        self.cache.copy_from(self.cache, source_slots=sources, slots=targets, context=context)

    def take_over(self, old: "Slots") -> None:
        """Copy all rows of smaller slots."""
        rows = old.room.rows
        self.table_6S[:, :rows] = old.table_6S
        for mine, theirs in zip(self._per_row(), old._per_row(), strict=True):
            if mine.dim() == 1:
                mine[:rows] = theirs
            else:
                mine[:rows, : theirs.shape[1]] = theirs
        self.cache.copy_from(
            old.cache, source_slots=old.index_S, slots=old.index_S, context=old.cache.max_context
        )

    def _per_row(self) -> tuple[Tensor, ...]:
        return (
            self.newest_S,
            self.terms_SE,
            self.tokens_SN,
            self.logprobs_SN,
            self.states_SNH,
        )


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What keys and values are kept in. A CPU's short products are float32's."""
    return torch.float32 if device.type == "cpu" else dtype
