"""Tensors of the running rows, one slot each: position, drawn tokens, states, keys and values.

S slots, R some of them, N new tokens, H hidden size. Other letters: model/decoder.py.
"""

from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.model.decoder import KVCache
from shoal.model.fused import FusedWeights
from shoal.model.packed_prefill import upload
from shoal.rollout.engine.scheduler import Admission, CacheSize
from shoal.wire.seeded_draw import uniforms


class SlotField(IntEnum):
    """Lines of `KVSlots.fields_6S`. The CUDA kernels read them by these numbers."""

    POSITION = 0
    """Position of the newest token."""
    NUM_DRAWN = 1
    """Tokens drawn so far."""
    MAX_DRAWN = 2
    """Tokens that the row may draw at most."""
    ENDED = 3
    """0 while the row runs, the number of tokens drawn once it has ended."""
    PROMPT_PLACE = 4
    """Where the keys and values of the row's prompt are stored."""
    PROMPT_LENGTH = 5


class RowOutputs(NamedTuple):
    """Copies of what rows produced, taken before their slots are used again: [rows, longest of them]."""

    tokens_RN: Tensor
    logprobs_RN: Tensor
    states_RNH: Tensor


class KVSlots:
    """The tensors of `size.rows` slots on the device of `weights`."""

    def __init__(self, weights: FusedWeights, size: CacheSize) -> None:
        shape, dtype, device = weights.shape, weights.embed_VH.dtype, weights.embed_VH.device
        self.size, self.device = size, device
        rows, new_tokens = size.rows, size.new_tokens
        self.cache = KVCache(
            shape,
            num_slots=rows,
            max_context=size.row_positions,
            dtype=cache_dtype(dtype, device),
            device=device,
            heads_apart=device.type == "cpu",
        )
        self.index_S = torch.arange(rows, device=device)
        self.index_C = torch.arange(size.row_positions, device=device)
        self.fields_6S = torch.zeros(len(SlotField), rows, dtype=torch.int64, device=device)
        self.positions_S = self.fields_6S[SlotField.POSITION]
        self.num_drawn_S = self.fields_6S[SlotField.NUM_DRAWN]
        self.max_drawn_S = self.fields_6S[SlotField.MAX_DRAWN]
        self.ended_S = self.fields_6S[SlotField.ENDED]
        self.prompt_places_S = self.fields_6S[SlotField.PROMPT_PLACE]
        self.prompt_lengths_S = self.fields_6S[SlotField.PROMPT_LENGTH]
        self.ended_S.fill_(1)
        self.newest_S = torch.zeros(rows, dtype=torch.int64, device=device)
        # One tensor behind both: the draw kernel reads them with one stride, and a new row's values are one write.
        self._sampling_SE = torch.ones(rows, 1 + new_tokens, dtype=torch.float64, device=device)
        self.temperatures_S = self._sampling_SE[:, 0]
        self.uniforms_SN = self._sampling_SE[:, 1:]
        self.tokens_SN = torch.zeros(rows, new_tokens, dtype=torch.int64, device=device)
        self.logprobs_SN = torch.zeros(rows, new_tokens, device=device)
        # Proofs are of bfloat16 states whatever the compute dtype; storing them as bfloat16 halves their memory.
        self.states_SNH = torch.zeros(
            rows, new_tokens, shape.hidden_size, dtype=torch.bfloat16, device=device
        )

    def start_rows(self, admitted: Sequence[Admission]) -> None:
        """Sets rows to the end of their prompts and writes the uniforms of all their draws."""
        num_fields = len(SlotField)
        num_new = max(row.request.max_new_tokens for row in admitted)
        seeds = np.array([row.request.sample_seed for row in admitted], dtype=np.uint64)
        # Slot, fields, temperature and uniforms in one array: on a GPU each copy costs more than the bytes in it.
        host_RX = np.empty((len(admitted), 1 + num_fields + 1 + num_new), dtype=np.int64)
        host_RX[:, 0] = [row.slot for row in admitted]
        host_RX[:, 1 : 1 + num_fields] = [_first_fields(row) for row in admitted]
        sampling_RE = host_RX[:, 1 + num_fields :].view(np.float64)
        sampling_RE[:, 0] = [row.request.temperature for row in admitted]
        sampling_RE[:, 1:] = uniforms(seeds[:, None], np.arange(num_new, dtype=np.uint64)[None])
        device_RX = upload(host_RX, self.device)
        slots_R = device_RX[:, 0]
        self.fields_6S[:, slots_R] = device_RX[:, 1 : 1 + num_fields].T
        self._sampling_SE[slots_R, : 1 + num_new] = device_RX[:, 1 + num_fields :].view(torch.float64)

    def read_rows(self, slots: Sequence[int], num_tokens: int) -> RowOutputs:
        """Returns copies of what these rows produced, at most `num_tokens` tokens of each."""
        slots_R = upload(np.array(slots), self.device)
        return RowOutputs(
            self.tokens_SN[slots_R, :num_tokens],
            self.logprobs_SN[slots_R, :num_tokens],
            self.states_SNH[slots_R, : max(num_tokens - 1, 0)],
        )

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies rows from slot to slot."""
        sources, targets = (upload(np.array(side), self.device) for side in zip(*moves, strict=True))
        context = int(self.num_drawn_S[sources].max())
        for tensor in self._per_row():
            tensor[targets] = tensor[sources]
        self.fields_6S[:, targets] = self.fields_6S[:, sources]
        self.cache.copy_from(self.cache, source_slots=sources, slots=targets, context=context)

    def copy_from(self, old: "KVSlots") -> None:
        """Copies all rows of smaller slots into these."""
        rows = old.size.rows
        self.fields_6S[:, :rows] = old.fields_6S
        for mine, theirs in zip(self._per_row(), old._per_row(), strict=True):
            if mine.dim() == 1:
                mine[:rows] = theirs
            else:
                mine[:rows, : theirs.shape[1]] = theirs
        self.cache.copy_from(
            old.cache, source_slots=old.index_S, slots=old.index_S, context=old.cache.max_context
        )

    def _per_row(self) -> tuple[Tensor, ...]:
        return (self.newest_S, self._sampling_SE, self.tokens_SN, self.logprobs_SN, self.states_SNH)


def _first_fields(row: Admission) -> list[int]:
    num_prompt = len(row.request.prompt_tokens)
    fields = {
        SlotField.POSITION: num_prompt - 1,
        SlotField.NUM_DRAWN: 0,
        SlotField.MAX_DRAWN: row.request.max_new_tokens,
        SlotField.ENDED: 0,
        SlotField.PROMPT_PLACE: row.prompt_place,
        SlotField.PROMPT_LENGTH: num_prompt,
    }
    return [fields[field] for field in SlotField]


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype of cached keys and values: float32 on CPUs, whose short products are faster in it."""
    return torch.float32 if device.type == "cpu" else dtype


class _EndedCopy(NamedTuple):
    step: int
    ended_S: Tensor
    """On the host; complete once `copied` has happened."""
    copied: torch.cuda.Event | None


class EndedRowsReader:
    """Learns which rows have ended without making the device wait.

    After each step a copy of `ended_S` to the host is started. It is read after `lookahead` more steps were launched.
    """

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._copies: deque[_EndedCopy] = deque()
        self._spare: list[_EndedCopy] = []
        """Copies already read. Their pinned memory and event are reused: allocating both is slower than the copy."""

    def start_copy(self, step: int, ended_S: Tensor) -> None:
        if ended_S.device.type == "cpu":
            self._copies.append(_EndedCopy(step, ended_S.clone(), None))
            return
        host_S, copied = self._pinned(ended_S)
        host_S.copy_(ended_S, non_blocking=True)
        copied.record()
        self._copies.append(_EndedCopy(step, host_S, copied))

    def read(self) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """Returns (step, ended_S) of every step that is old enough."""
        found: list[tuple[int, npt.NDArray[np.int64]]] = []
        while len(self._copies) > self._lookahead:
            copy = self._copies.popleft()
            if copy.copied is None:
                found.append((copy.step, copy.ended_S.numpy()))
                continue
            copy.copied.synchronize()
            found.append((copy.step, copy.ended_S.numpy().copy()))
            self._spare.append(copy)
        return found

    def _pinned(self, ended_S: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        while self._spare:
            _, host_S, copied = self._spare.pop()
            if host_S.shape == ended_S.shape and copied is not None:
                return host_S, copied
        host_S = torch.empty(ended_S.shape, dtype=ended_S.dtype, pin_memory=True)
        return host_S, torch.cuda.Event()
