"""One decode step on a CUDA device, as a graph: launched with one call, read back by nobody.

    embed ─▶ layers: norm, qkv, attend, o, norm, gate_up, silu, down ─▶ norm, state kept ─▶ head ─▶ draw, row taken on

A graph is captured per bucket of rows. It holds addresses, not values: weights are swapped in place and rows change
slots under it. Every row attends exactly as far as it is long, so there is no bucket of contexts. Prompts are kept apart,
once for all their rows: neighbours read the same keys, most of them out of the L2 cache.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.decoder import KVCache
from shoal.model.fused import FusedWeights
from shoal.model.kernels import decode_attention, elementwise, logits
from shoal.model.packed_prefill import upload
from shoal.rollout.engine.api import Request
from shoal.rollout.engine.attention_plan import Pieces, PieceSize
from shoal.rollout.engine.kv_slots import Slots
from shoal.rollout.engine.places import Places
from shoal.rollout.engine.prefill_cuda import prefill_by_layer
from shoal.rollout.engine.prompt_cache import Batch
from shoal.rollout.engine.rows import Prompt

BUCKETS = (8, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Rows of one graph. Between them a step's time hardly changes."""
PIECE = PieceSize(decode_attention.PIECE_ROWS, decode_attention.PROMPT_SPLIT)


class CudaStep:
    gapless = False
    """A slot without a running row costs next to nothing."""
    lookahead = 2
    """Steps launched before it is known what an earlier one has done. One would do if seating rows never took longer than
    a step, but it takes about as long."""

    def __init__(self, weights: FusedWeights, slots: Slots, is_end_V: Tensor, *, graphs: bool = True) -> None:
        self._weights, self._slots, self._is_end_V = weights, slots, is_end_V
        self._places = Places(slots.room.prompts)
        self._prompts = KVCache(
            weights.shape,
            num_slots=slots.room.prompts,
            max_context=slots.room.prompt_context,
            dtype=weights.embed_VH.dtype,
            device=slots.device,
        )
        self._pieces = Pieces(slots.room.rows, slots.room.prompt_context, PIECE)
        self._work = torch.zeros(self._pieces.width, dtype=torch.int64, device=slots.device)
        self._tables = row_tables(slots.table_6S, self._work, slots.index_S)
        # Prompts are computed beside the decoding, whose small kernels leave much of the chip idle.
        self._side = torch.cuda.Stream(slots.device) if slots.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._with_graphs = graphs
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def decode(self, num_slots: int) -> None:
        """One token for every running row in slots 0 .. num_slots-1."""
        rows = self._slots.room.rows
        if (table := self._pieces.changed()) is not None:
            self._work.copy_(upload(table, self._slots.device))
        bucket = next((size for size in BUCKETS if num_slots <= size < rows), rows)
        if bucket in self._graphs:
            self._graphs[bucket].replay()
            return
        self._step(bucket)  # the first time for real and without a graph, which also compiles the kernels
        if self._with_graphs:
            for size in [rows, *(size for size in BUCKETS if size < rows)]:
                self._capture(size)

    def take_over(self, old: "CudaStep") -> None:
        """Go on with the prompts of a step whose slots were too small."""
        torch.cuda.synchronize(self._slots.device)  # graphs of the old step may still be running
        self._places = old._places
        self._places.grow(self._slots.room.prompts)
        self._pieces.take_over(old._pieces)
        rows = torch.arange(old._prompts.num_slots, device=self._slots.device)
        self._prompts.copy_from(old._prompts, source_slots=rows, slots=rows, context=old._prompts.max_context)

    def compute(self, prompts: Sequence[Prompt], *, keep: Container[Prompt] = ()) -> "_Coming":
        """Prompts for rows to start from, kept where the rows can look at them. `keep`: those that rows may still start from."""
        places = self._places.seat(prompts, keep=keep)
        wanted = [places.get(prompt, -1) for prompt in prompts]
        layers = prefill_by_layer(self._weights, prompts, wanted, self._prompts)
        if self._side is not None:
            # Steps under way may look at what stood there before.
            self._side.wait_stream(torch.cuda.current_stream())
        return _Coming(prompts, layers, self._side)

    def enter(self, admitted: Mapping[int, Request]) -> None:
        prompts = [request.prompt_tokens for request in admitted.values()]
        self._places.enter(prompts)
        places = [self._places[prompt] for prompt in prompts]
        self._slots.enter(admitted, places)
        self._pieces.enter(admitted, places, [len(prompt) for prompt in prompts])

    def start(self, batch: Batch, places_R: Tensor, slots_R: Tensor) -> None:
        """Rows in `slots_R` begin after the batch's prompts at `places_R`: their first tokens are drawn."""
        self._draw(batch.logits_PV, places_R, slots_R)

    def leave(self, slots: Sequence[int], requests: Iterable[Request]) -> None:
        """Rows have ended."""
        self._pieces.leave(slots)
        self._places.leave(request.prompt_tokens for request in requests)

    def _capture(self, bucket: int) -> None:
        torch.cuda.current_stream().synchronize()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        # thread_local: the prover may be at work in its own thread, on its own stream.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._step(bucket)
        self._graphs[bucket] = graph

    def _step(self, num_rows: int) -> None:
        weights, slots = self._weights, self._slots
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
                own=(slots.cache.keys_LSCKD[number], slots.cache.values_LSCKD[number]),
                shared=(self._prompts.keys_LSCKD[number], self._prompts.values_LSCKD[number]),
            )
            normed_BH = elementwise.add_norm(x_BH, F.linear(mixed_BQ, layer.o_HQ), layer.post_norm_H, eps)
            delta_BH = F.linear(elementwise.silu_mul(F.linear(normed_BH, layer.gate_up_FH)), layer.down_HF)
        keep = (slots.states_SNH, slots.counts_S, slots.ended_S)
        hidden_BH = elementwise.add_norm(x_BH, delta_BH, weights.norm_H, eps, keep=keep)
        self._draw(F.linear(hidden_BH, weights.head_VH), slots.index_S[:num_rows], slots.index_S[:num_rows])

    def _draw(self, logits_BV: Tensor, sources_R: Tensor, slots_R: Tensor) -> None:
        slots = self._slots
        logits.draw(
            logits_BV,
            sources_R=sources_R,
            slots_R=slots_R,
            temperatures_S=slots.temperatures_S,
            uniforms_SN=slots.uniforms_SN,
            table_6S=slots.table_6S,
            newest_S=slots.newest_S,
            tokens_SN=slots.tokens_SN,
            logprobs_SN=slots.logprobs_SN,
            is_end_V=self._is_end_V,
        )


class _Coming:
    """Prompts on their way: computed on a stream of their own, a layer's launches at a time."""

    def __init__(
        self, prompts: Sequence[Prompt], layers: Iterator[Tensor | None], side: torch.cuda.Stream | None
    ) -> None:
        self.prompts, self._layers, self._side = prompts, layers, side
        self._logits_PV: Tensor | None = None

    def go_on(self) -> None:
        if self._logits_PV is None:
            with torch.cuda.stream(self._side):  # None: the current one
                self._logits_PV = next(self._layers)

    def finish(self) -> list[Batch]:
        while self._logits_PV is None:
            self.go_on()
        if self._side is not None:
            main = torch.cuda.current_stream()
            main.wait_stream(self._side)
            self._logits_PV.record_stream(main)
        return [Batch(list(self.prompts), None, self._logits_PV)]


def row_tables(table_6S: Tensor, work: Tensor, homes_S: Tensor) -> decode_attention.RowTables:
    """`work` as `Pieces.changed` lays it out."""
    num_slots = table_6S.shape[1]
    return decode_attention.RowTables(
        table_6S, work[1 : 1 + num_slots], work[1 + num_slots :].view(5, -1), work[:1], homes_S
    )
