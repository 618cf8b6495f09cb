"""One decode step on a CUDA device, as a graph: launched with one call, and nothing is read back.

    embed ─▶ layers: norm, qkv, attend, o, norm, gate_up, silu, down ─▶ norm, state stored ─▶ head ─▶ draw, row advanced

A graph is captured per bucket of rows. It holds addresses, not values: weights are swapped in place and rows change
slots under it. Every row attends exactly as far as it is long, so there is no bucket of contexts. Keys and values are in blocks of
one pool. A prompt's blocks are shared by all its rows: neighbouring rows read the same keys, most of them from the L2 cache.

Prompts are computed laid end to end, with the kernels of a decode step: no padding, one pass for all.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.fused import FusedWeights
from shoal.model.kernels import decode_attention, elementwise, logits
from shoal.model.packed_prefill import TokenRun, fused_layers, upload
from shoal.model.shape import Shape
from shoal.rollout.engine.attention_plan import AttentionPlan, TileSize, split_table
from shoal.rollout.engine.block_pool import BLOCK, PlacedPrompts, Prompt, PromptPlaces
from shoal.rollout.engine.kv_slots import BlockCache, Draws, KVSlots, SlotField
from shoal.rollout.engine.prompt_cache import PromptBatch
from shoal.rollout.engine.scheduler import Admission

BUCKETS = (8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Rows of one graph. Between two buckets the time of a step hardly changes."""
VIRTUAL_TOKENS = 2
"""Tokens of a row of the virtual step: the fed one counts as its first, and it draws the second."""


def tile_size(shape: Shape) -> TileSize:
    """Returns the rows and positions of one item of the attention kernel."""
    positions = decode_attention.PROMPT_SPLIT
    assert positions == BLOCK and BLOCK % decode_attention.OWN_BLOCK == 0, "an item is one block of a prompt"
    return TileSize(decode_attention.rows_per_item(shape), positions)


class CudaStep:
    """Steps the rows in slots 0 .. num_slots-1; slots without a running row are allowed."""

    gapless = False
    """A few slots without a running row cost next to nothing."""
    lookahead = 2
    """Steps launched before the result of an earlier one is read. One would be enough if admitting rows never took
    longer than a step, but it takes about as long."""

    def __init__(
        self,
        weights: FusedWeights,
        slots: KVSlots,
        is_end_V: Tensor,
        *,
        graphs: bool = True,
        shared_blocks: bool = False,
    ) -> None:
        """`shared_blocks`: rows may have the same blocks and attend to one another's new tokens."""
        self._weights, self.slots, self._is_end_V = weights, slots, is_end_V
        size, device = slots.size, slots.device
        assert slots.blocks is not None, "CudaStep reads keys and values from a pool of blocks"
        self._cache = slots.blocks
        self._plan = AttentionPlan(size.rows, size.prompt_positions, tile_size(weights.shape))
        self._plan_table = torch.zeros(self._plan.table_size, dtype=torch.int64, device=device)
        self._tables = row_tables(slots.fields_6S, self._plan_table, slots.blocks_SB)
        # Prompts are computed beside the decoding, whose small kernels leave much of the chip idle.
        self._prefill_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._with_graphs, self._shared_blocks = graphs, shared_blocks
        self._virtual: CudaStep | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def copy_from(self, old: "CudaStep") -> None:
        """Takes over the rows and prompts of a step with smaller slots."""
        self.slots.copy_from(old.slots)
        torch.cuda.synchronize(self.slots.device)  # graphs of the old step may still be running
        self._plan.copy_from(old._plan)

    def prefill(
        self, prompts: Sequence[Prompt], placed: PlacedPrompts, places: PromptPlaces
    ) -> "CudaPrefill":
        """Begins to compute prompts; their keys and values go to where the rows read them."""
        blocks = [places.blocks(prompt) if prompt in placed.added else None for prompt in prompts]
        layers = prefill_by_layer(self._weights, prompts, blocks, self._cache)
        if self._prefill_stream is not None:
            # Steps under way may still read what was in these blocks.
            self._prefill_stream.wait_stream(torch.cuda.current_stream())
        return CudaPrefill(prompts, layers, self._prefill_stream)

    def forget_prompts(self, places: Sequence[int]) -> None:
        """Does nothing: the blocks of evicted prompts are in the pool already."""

    def start_rows(self, admitted: Sequence[Admission]) -> None:
        self.slots.start_rows(admitted)
        self._plan.add_rows(
            [row.slot for row in admitted],
            [row.prompt_place for row in admitted],
            [len(row.request.prompt_tokens) for row in admitted],
            [row.prompt_blocks for row in admitted],
        )

    def draw_first_tokens(self, batch: PromptBatch, lines_R: Tensor, slots_R: Tensor) -> None:
        """Draws the first tokens of the rows in `slots_R`, from lines `lines_R` of the batch's logits."""
        self._draw(batch.logits_PV, lines_R, slots_R)

    def remove_rows(self, slots: Sequence[int]) -> None:
        self._plan.remove_rows(slots)

    def preempt_row(self, slot: int) -> None:
        self.slots.stop_rows([slot])
        self._plan.remove_rows([slot])

    def wants_compact(self, num_running: int, end: int) -> bool:
        """Returns whether a graph of fewer rows would do if the rows in slots below `end` had no gaps."""
        return self._bucket(num_running) < self._bucket(end)

    def move_rows(self, moves: Sequence[tuple[int, int]]) -> None:
        self.slots.move(moves)
        self._plan.move_rows(moves)

    def _bucket(self, num_slots: int) -> int:
        """Returns the rows of the graph that steps slots 0 .. num_slots-1."""
        rows = self.slots.size.rows
        return next((size for size in BUCKETS if num_slots <= size < rows), rows)

    def decode(self, num_slots: int) -> None:
        """Feeds every running row in slots 0 .. num_slots-1 its newest token and draws the next."""
        rows = self.slots.size.rows
        if (table := self._plan.table_if_changed()) is not None:
            self._plan_table.copy_(upload(table, self.slots.device))
        bucket = self._bucket(num_slots)
        if bucket in self._graphs:
            self._graphs[bucket].replay()
            return
        self._step(bucket)  # the first step runs without a graph, which also compiles the kernels
        if self._with_graphs:
            with _no_garbage_collection():
                for size in [rows, *(size for size in BUCKETS if size < rows)]:
                    self._capture(size)

    def verify(self, slots: Sequence[int], drafts_RT: npt.NDArray[np.int64]) -> None:
        """Feeds rows their newest token and a draft, and keeps the draws up to the first that differs from the draft.

        `drafts_RT` has a line for each of `slots`; -1 where a draft has no more tokens. Each fed token is a row of its own in a
        second step, the virtual step: the tokens of one row share its blocks and have adjacent positions.
        """
        mine, num_rows, num_fed = self.slots, len(slots), 1 + drafts_RT.shape[1]
        num_virtual = num_rows * num_fed
        virtual = self._virtual_step(num_virtual)
        theirs = virtual.slots
        slots_R = upload(np.array(slots), mine.device)
        fed_RT = torch.cat((mine.newest_S[slots_R, None], upload(drafts_RT, mine.device)), dim=1)
        runs_RT = (fed_RT >= 0) & (mine.ended_S[slots_R, None] == 0)
        positions_RT = mine.positions_S[slots_R, None] + torch.arange(num_fed, device=mine.device)
        fields_6V = theirs.fields_6S[:, :num_virtual]
        fields_6V[SlotField.POSITION] = torch.where(runs_RT, positions_RT, 0).flatten()
        fields_6V[SlotField.NUM_DRAWN] = 1
        fields_6V[SlotField.MAX_DRAWN] = VIRTUAL_TOKENS + 1
        fields_6V[SlotField.ENDED] = torch.where(runs_RT, 0, 1).flatten()
        fields_6V[SlotField.PROMPT_LENGTH] = mine.prompt_lengths_S[slots_R].repeat_interleave(num_fed)
        theirs.fields_6S[SlotField.ENDED, num_virtual:] = 1
        theirs.fields_6S[SlotField.POSITION, num_virtual:] = 0
        theirs.newest_S[:num_virtual] = fed_RT.flatten().clamp(min=0)
        theirs.blocks_SB[:num_virtual] = mine.blocks_SB[slots_R].repeat_interleave(num_fed, 0)
        theirs.temperatures_S[:num_virtual] = mine.temperatures_S[slots_R].repeat_interleave(num_fed)
        theirs.uniforms_SN[:num_virtual, 1] = mine.next_uniforms(slots_R, num_fed).flatten()
        virtual._plan.set_rows(self._plan, slots, num_fed)
        virtual.decode(num_virtual)
        by_row = (num_rows, num_fed)
        draws = Draws(
            theirs.tokens_SN[:num_virtual, 1].view(by_row),
            theirs.logprobs_SN[:num_virtual, 1].view(by_row),
            theirs.states_SAH[:num_virtual, 0].view(*by_row, -1),
        )
        mine.keep_draws(slots_R, fed_RT, draws, self._is_end_V)

    def _virtual_step(self, num_rows: int) -> "CudaStep":
        """Returns a step with the same blocks whose rows draw one token each and keep one state."""
        if self._virtual is None or self._virtual.slots.size.rows < num_rows:
            rows = next((size for size in BUCKETS if size >= num_rows), num_rows)
            size = self.slots.size._replace(rows=rows, new_tokens=VIRTUAL_TOKENS)
            slots = KVSlots(self._weights, size, state_tokens=1, paged=False, blocks=self._cache)
            self._virtual = CudaStep(
                self._weights, slots, self._is_end_V, graphs=self._with_graphs, shared_blocks=True
            )
        return self._virtual

    def _capture(self, bucket: int) -> None:
        torch.cuda.current_stream().synchronize()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        # thread_local: the prover may be working in its own thread, on its own stream.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._step(bucket)
        self._graphs[bucket] = graph

    def _step(self, num_rows: int) -> None:
        weights, slots = self._weights, self.slots
        shape, eps = weights.shape, weights.shape.norm_eps
        x_BH = F.embedding(slots.newest_S[:num_rows], weights.embed_VH)
        delta_BH: Tensor | None = None
        for number, layer in enumerate(weights.layers):
            normed_BH = elementwise.add_norm(x_BH, delta_BH, layer.input_norm_H, eps)
            mixed_BQ = decode_attention.attend(
                F.linear(normed_BH, layer.qkv_QH, layer.qkv_bias_Q),
                layer,
                shape=shape,
                rope_PE=weights.rope_PE,
                rows=self._tables,
                cache=(self._cache.keys_LMCKD[number], self._cache.values_LMCKD[number]),
                prompt_positions=slots.size.prompt_positions,
                store_first=self._shared_blocks,
            )
            normed_BH = elementwise.add_norm(x_BH, F.linear(mixed_BQ, layer.o_HQ), layer.post_norm_H, eps)
            delta_BH = F.linear(elementwise.silu_mul(F.linear(normed_BH, layer.gate_up_FH)), layer.down_HF)
        keep = (slots.states_SAH, slots.num_drawn_S, slots.ended_S)
        hidden_BH = elementwise.add_norm(x_BH, delta_BH, weights.norm_H, eps, keep=keep)
        self._draw(F.linear(hidden_BH, weights.head_VH), slots.index_S[:num_rows], slots.index_S[:num_rows])

    def _draw(self, logits_BV: Tensor, sources_R: Tensor, slots_R: Tensor) -> None:
        slots = self.slots
        logits.draw(
            logits_BV,
            sources_R=sources_R,
            slots_R=slots_R,
            temperatures_S=slots.temperatures_S,
            uniforms_SN=slots.uniforms_SN,
            table_6S=slots.fields_6S,
            newest_S=slots.newest_S,
            tokens_SN=slots.tokens_SN,
            logprobs_SN=slots.logprobs_SN,
            is_end_V=self._is_end_V,
        )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collects garbage once and then none: destroying the graph of an older step would end a capture with an error."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def row_tables(fields_6S: Tensor, plan_table: Tensor, blocks_SB: Tensor) -> decode_attention.RowTables:
    """Returns what the attention kernel reads about the rows; `plan_table` is an AttentionPlan's table."""
    plan = split_table(plan_table, fields_6S.shape[1])
    return decode_attention.RowTables(fields_6S, plan.order_S, plan.items_5W, plan.num_items_1, blocks_SB)


class CudaPrefill:
    """Prompts that are computed on a stream of their own, one layer's launches at a time (a PendingPrefill)."""

    def __init__(
        self, prompts: Sequence[Prompt], layers: Iterator[Tensor | None], stream: torch.cuda.Stream | None
    ) -> None:
        self.prompts, self._layers, self._stream = prompts, layers, stream
        self._logits_PV: Tensor | None = None

    def advance(self) -> None:
        if self._logits_PV is None:
            with torch.cuda.stream(self._stream):  # None: the current stream
                self._logits_PV = next(self._layers)

    def cancel(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def finish(self) -> list[PromptBatch]:
        while self._logits_PV is None:
            self.advance()
        if self._stream is not None:
            main = torch.cuda.current_stream()
            main.wait_stream(self._stream)
            self._logits_PV.record_stream(main)
        return [PromptBatch(list(self.prompts), None, self._logits_PV)]


def prefill_by_layer(
    weights: FusedWeights,
    prompts: Sequence[Prompt],
    blocks: Sequence[Sequence[int] | None],
    cache: BlockCache,
) -> Iterator[Tensor | None]:
    """Computes whole prompts, yielding None after each layer and at the end the logits after the last tokens, [P, V].

    Keys and values go to the prompts' `blocks` of `cache`. A prompt with None is stored already, and rows may be reading it. The
    pauses exist because launching all layers takes the host as long as ten decode steps.
    """
    device, lengths = weights.embed_VH.device, [len(prompt) for prompt in prompts]
    table_3T = upload(_token_table(prompts, blocks), device)
    by_layer = list(zip(cache.keys_LMCKD, cache.values_LMCKD, strict=True))
    for x_TH, delta_TH in fused_layers(weights, table_3T, [*map(TokenRun, lengths)], kept=by_layer):
        last = x_TH, delta_TH
        yield None
    last_P = upload(np.cumsum(lengths) - 1, device)
    x_PH, delta_PH = (each_TH[last_P] for each_TH in last)
    last_PH = elementwise.add_norm(x_PH, delta_PH, weights.norm_H, weights.shape.norm_eps)
    yield torch.mm(last_PH, weights.head_VH.t())


def _token_table(
    prompts: Sequence[Prompt], blocks: Sequence[Sequence[int] | None]
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Returns a column for each token: its id, its position, the line of the cache where it is stored or -1."""
    columns = []
    for prompt, stored in zip(prompts, blocks, strict=True):
        positions = np.arange(len(prompt))
        lines = np.full(len(prompt), -1)
        if stored is not None:
            lines = np.array(stored)[positions // BLOCK] * BLOCK + positions % BLOCK
        columns.append(np.stack((prompt, positions, lines)))
    return np.concatenate(columns, axis=1, dtype=np.int64)
