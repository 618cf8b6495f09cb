"""TorchEngine: a small continuous-batching decoder for CPUs and CUDA devices.

    submit ──▶ waiting ──▶ prompts: each computed once ──▶ slots ──decode, a token a step──▶ prover ──▶ finished
                  ▲        └ first token of each row       │ └ state of each fed token       └ beside the decoding
                  └──────────── preempted: no free block ──┘

A row of N tokens is fed N-1 of them: the first is drawn from the prompt's last state, and the last is never fed.
The scheduler decides which rows run; CpuStep or CudaStep holds the tensors and computes a step.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.files import free_data_bytes, is_out_of_memory
from shoal.model.fused import fuse, pack, repack_jobs
from shoal.model.load_model import DTYPES, free_bytes, load_decoder
from shoal.model.packed_prefill import upload
from shoal.model.rounded_weights import round_weights
from shoal.model.shape import read_shape
from shoal.model.stop_strings import stops_now
from shoal.model.tokenizer import Tokenizer, load_tokenizer
from shoal.model.weights import WEIGHTS_FILE, load_weights
from shoal.rollout.engine.api import ComputeDtype, FinishedRow, GenerationRequest, check_idle, check_requests
from shoal.rollout.engine.cpu_threads import CoreThreads
from shoal.rollout.engine.draft_model import DraftModel, check_same_tokenizer
from shoal.rollout.engine.drafting import DRAFT_TOKENS, Drafting, DraftSettings, PromptLookup
from shoal.rollout.engine.kv_slots import BlockCache, EndedRowsReader, KVSlots, cache_dtype
from shoal.rollout.engine.prompt_cache import PREFILL_SIZES, PendingPrefill, PromptCache
from shoal.rollout.engine.proofs import Prover
from shoal.rollout.engine.scheduler import (
    GROW_STEPS,
    CacheSize,
    Scheduler,
    block_bytes,
    cache_size_for,
    fit_blocks,
)
from shoal.rollout.engine.step_cpu import CpuStep
from shoal.telemetry import Log
from shoal.wire.requirements import WeightFormat
from shoal.wire.run_spec import ProofSpec

if TYPE_CHECKING:
    from shoal.rollout.engine.step_cuda import CudaStep

_LOG = Log("worker")

MEMORY_SHARE = 0.7
"""Share of the free memory that the cache may use. Prefills, logits and other processes need the rest."""
LIBRARY_BYTES = 192 << 20
"""Memory that is left, under a limit of the process, for what libraries allocate when they meet new shapes. If that fails, torch may
raise any error, so running out of memory cannot be told from a bug."""
GROWTH = 1.25
"""A larger cache is allocated if it could have this many times the blocks."""
EXCHANGE_SHARE = 64
"""On a GPU rows are exchanged when one slot in this many has ended: one exchange needs as many launches as several."""


class TorchEngine:
    """The Engine (api.py) that computes with torch."""

    def __init__(
        self,
        *,
        compute_dtype: ComputeDtype,
        proof: ProofSpec | None,
        max_rows: int,
        device: str = "cpu",
        draft: DraftSettings | None = None,
        graphs: bool = True,
    ) -> None:
        """`proof=None` and `graphs=False` are for measuring what proofs and CUDA graphs cost and gain."""
        if compute_dtype not in DTYPES:
            raise ValueError(f"compute_dtype={compute_dtype!r} must be one of {sorted(DTYPES)}")
        self.policy_version: int | None = None
        self.weights: WeightFormat | None = None
        """The format that `load` rounds the layers' weights to; None: they are not rounded."""
        self._dtype = DTYPES[compute_dtype]
        self._proof = proof
        self._device = torch.device(device)
        self._graphs = graphs
        self._draft = draft
        self._drafting: Drafting | None = None
        self._verified = False
        """Whether the last step verified drafts."""
        self._scheduler = Scheduler(max_rows)
        self._prompts = PromptCache()
        self._model: LoadedModel | None = None
        self._cache_size: CacheSize | None = None
        """What the submitted rows need; lowered to what fits when a step is built."""
        self._max_blocks: int | None = None
        """Lowered when the device runs out of memory."""
        self._fewer_rows = False
        """Whether memory allows for fewer rows at once than were asked for."""
        self._step: CpuStep | CudaStep | None = None
        self._ended_rows = EndedRowsReader(lookahead=0)
        self._num_steps = 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded().tokenizer

    @property
    def has_work(self) -> bool:
        scheduler = self._scheduler
        return bool(
            scheduler.waiting or scheduler.num_running or (self._model and self._model.prover.has_work)
        )

    def load(self, folder: Path, version: int) -> None:
        check_idle(self, version)
        self.policy_version = None  # until the copy is complete the weights are neither version
        self._max_blocks = None
        self._prompts.clear()
        if self._model is None:
            model = LoadedModel(folder, self._dtype, self._device, self._proof, self.weights)
            self._drafting = None if self._draft is None else self._make_drafting(model, self._draft)
            self._model = model
        elif (shape := read_shape(folder)) != self._model.decoder.shape:
            raise ValueError(f"{folder}: {shape} is not what this engine was built for; start a new engine")
        else:
            self._model.swap(folder, self.weights)
        self.policy_version = version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        check_requests(requests, self.policy_version, self._loaded().decoder.shape)
        if not self.has_work:
            # Prompts that are computed together can differ in the last bit from the same prompts alone. A replay must not depend on
            # the rows before these.
            self._prompts.clear()
            self._max_blocks = None  # what another process took may be free again
            self._fewer_rows, self._scheduler.num_short = False, 0
        scheduler, prefill = self._scheduler, PREFILL_SIZES[self._device.type]
        if requests:
            running = (row.request for row in scheduler.running.values())
            rows = [*running, *scheduler.waiting, *requests]
            num_rows = min(scheduler.max_rows, len(rows))
            size = cache_size_for(rows, num_rows, computed_prompts=prefill.batches * prefill.prompts)
            size = size if self._cache_size is None else size.union(self._cache_size)
            self._fit(size, self._step)  # refuses a row that cannot fit before any row is queued
            self._cache_size = size
            scheduler.submit(requests)

    @torch.inference_mode()
    def step(self) -> list[FinishedRow]:
        if self.policy_version is None:
            raise ValueError("the engine holds no complete weights; load a version first")
        scheduler, prover = self._scheduler, self._loaded().prover
        if (failure := prover.take_failure()) is not None:
            # The rows whose proofs failed are computed again, before all others.
            scheduler.waiting.extendleft(reversed(failure.requests))
            self._halve_cache(failure.error)
        try:
            if scheduler.waiting:
                self._admit_rows()
            if scheduler.num_running:
                self._decode()
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            self._halve_cache(error)
        idle = not (scheduler.num_running or scheduler.waiting)
        return prover.collect(wait=idle)

    def _loaded(self) -> "LoadedModel":
        if self._model is None:
            raise ValueError("the engine holds no model; load a version first")
        return self._model

    def _admit_rows(self) -> None:
        """Starts waiting rows and draws their first tokens."""
        scheduler, step = self._scheduler, self._step_that_fits()
        if scheduler.num_free < min(self._exchange_rows(step), len(scheduler.waiting)):
            return
        if scheduler.waiting[0].prompt_tokens not in self._prompts:
            self._compute_next_prompts(step)
        admitted = scheduler.admit(self._prompts, step=self._num_steps)
        if not admitted:
            return
        step.start_rows(admitted)
        for batch, lines_and_slots in self._prompts.first_draws(admitted):
            lines_R, slots_R = upload(np.array(lines_and_slots), self._device)
            step.draw_first_tokens(batch, lines_R, slots_R)
        if PREFILL_SIZES[self._device.type].batches > 1 and self._prompts.pending is None:
            self._prompts.pending = self._start_prefill(step)
        if step.lookahead == 0:
            self._remove_ended_rows(step)

    def _compute_next_prompts(self, step: "CpuStep | CudaStep") -> None:
        """Replaces the cached prompts by those of the next rows."""
        pending = self._prompts.pending
        if pending is None or self._scheduler.waiting[0].prompt_tokens not in pending.prompts:
            self._prompts.clear()
            pending = self._start_prefill(step)
        if pending is not None:
            self._prompts.replace(pending.finish())

    def _start_prefill(self, step: "CpuStep | CudaStep") -> PendingPrefill | None:
        """Starts to compute the next prompts that are not cached; returns None if there are none or no blocks are free."""
        scheduler, size = self._scheduler, PREFILL_SIZES[self._device.type]
        cached = scheduler.startable_prompts(self._prompts)
        prompts = scheduler.next_prompts(max_tokens=size.tokens, max_prompts=size.prompts, exclude=cached)
        prompts, placed = scheduler.place_prompts(prompts, keep=cached)
        return step.prefill(prompts, placed, scheduler.places) if prompts else None

    def _decode(self) -> None:
        """Feeds every running row its newest token and draws the next."""
        step = self._step_that_fits()
        few = self._drafting is not None and self._scheduler.num_running <= self._drafting.max_rows
        # After drafts rows are further than one token a step, so they need blocks before the next multiple of GROW_STEPS.
        if few or self._verified or self._num_steps % GROW_STEPS == 0:
            self._give_blocks(step)
        wants_compact = step.wants_compact(self._scheduler.num_running, self._scheduler.end)
        if wants_compact and (moves := self._scheduler.compact(step=self._num_steps)):
            step.move_rows(moves)
        self._verified = few and self._verify_drafts(step)
        if not self._verified:
            step.decode(self._scheduler.end)
        if self._prompts.pending is not None:
            self._prompts.pending.advance()
        self._remove_ended_rows(step)
        self._num_steps += 1
        if self._verified or self._num_steps % self._loaded().prover.size.steps == 0:
            self._end_stopped_rows(step)
            self._fold_states(step)

    def _verify_drafts(self, step: "CpuStep | CudaStep") -> bool:
        """Feeds every running row its newest token and a draft. Returns whether there were any drafts."""
        assert self._drafting is not None
        slots = sorted(self._scheduler.running)
        if not slots:
            return False
        rows = [self._scheduler.running[slot] for slot in slots]
        drawn = step.slots.read_drawn(slots)
        drafts_RT = self._drafting.drafts(
            [(row.number, row.request, tokens) for row, tokens in zip(rows, drawn, strict=True)]
        )
        if drafts_RT.shape[1] == 0:
            return False
        if not self._verified:  # a verification may need all the free states that a fold leaves
            self._end_stopped_rows(step)
            self._fold_states(step)
        step.verify(slots, drafts_RT)
        counts = step.slots.num_drawn_S[upload(np.array(slots), self._device)].tolist()
        self._scheduler.set_drawn(slots, counts, step=self._num_steps + 1)
        return True

    def _give_blocks(self, step: "CpuStep | CudaStep") -> None:
        """Gives rows the blocks of their next tokens. Where none is free, drops unused prompts, then preempts rows."""
        scheduler = self._scheduler
        while (given := scheduler.grow(step=self._num_steps)) is None:
            self._prompts.clear()
            freed = scheduler.places.evict()
            step.forget_prompts(scheduler.places.place(()).freed)
            if not freed:
                slot, number = scheduler.preempt()
                step.preempt_row(slot)
                self._loaded().prover.forget_row(number)
        step.slots.give_blocks(given)

    def _fold_states(self, step: "CpuStep | CudaStep") -> None:
        """Hands complete segments of states to the prover."""
        prover = self._loaded().prover
        segment = prover.size.segment
        complete = [
            (slot, row.number, prover.num_folded(row.number) * segment)
            for slot, row in self._scheduler.running.items()
            if row.fed(self._num_steps) >= (prover.num_folded(row.number) + 1) * segment
        ]
        if complete:
            slots, numbers, firsts = zip(*complete, strict=True)
            prover.fold(numbers, step.slots.read_states(slots, firsts, segment))

    def _end_stopped_rows(self, step: "CpuStep | CudaStep") -> None:
        """Lets rows whose text has a stop string end with their next token; the prover cuts them after the stop string.

        Called before each fold: a row is not more than one fold longer than its answer, so its states are still there.
        """
        rows = [(slot, row.request.stop) for slot, row in self._scheduler.running.items() if row.request.stop]
        if not rows:
            return
        slots, decode = step.slots, self._loaded().tokenizer.decode
        slots_R = upload(np.array([slot for slot, _ in rows]), self._device)
        counts = slots.num_drawn_S[slots_R].tolist()
        tokens_RN = slots.tokens_SN[slots_R, : max(counts)].cpu().numpy()
        stopped = [
            slot
            for (slot, stop), tokens_N, count in zip(rows, tokens_RN, counts, strict=True)
            if stops_now(tokens_N[:count].tolist(), stop, decode)
        ]
        if stopped:
            slots.max_drawn_S[upload(np.array(stopped), self._device)] = 0

    def _exchange_rows(self, step: "CpuStep | CudaStep") -> int:
        """Returns how many rows must have ended before they are replaced by waiting ones."""
        return 1 if step.gapless else max(1, step.slots.size.rows // EXCHANGE_SHARE)

    def _remove_ended_rows(self, step: "CpuStep | CudaStep") -> None:
        """Hands rows that have ended to the prover and frees their slots."""
        self._ended_rows.start_copy(self._num_steps, step.slots.ended_S)
        for number, ended_S in self._ended_rows.read(wait=self._verified):
            slots = self._scheduler.finished(np.flatnonzero(ended_S).tolist(), step=number)
            if len(slots) >= min(self._exchange_rows(step), max(1, self._scheduler.num_running)):
                counts = ended_S[slots].tolist()
                outputs = step.slots.read_rows(slots, max(counts))
                rows = self._scheduler.remove(slots)
                step.remove_rows(slots)
                self._loaded().prover.add(rows, counts, outputs)

    def _step_that_fits(self) -> "CpuStep | CudaStep":
        """Returns a step whose slots are enough for all submitted rows; running rows are copied into new slots."""
        assert self._cache_size is not None
        old = self._step
        if old is not None and old.slots.size == self._cache_size:
            return old
        wanted = self._cache_size
        self._cache_size = size = self._fit(wanted, old)
        self._fewer_rows = size.rows < wanted.rows
        if old is not None and old.slots.size == size:
            return old
        if old is not None and old.slots.size.blocks < size.least_blocks and not self._paged:
            self._restart()  # the new blocks do not fit beside the old ones
            old = None
        self._step = new = _make_step(self._loaded(), size, old, graphs=self._graphs)
        if old is not None:
            if self._prompts.pending is not None:
                self._prompts.pending.finish()  # it writes to the old step's prompts
            new.copy_from(old)  # type: ignore[arg-type] # both were made for the same device
        else:
            self._ended_rows = EndedRowsReader(new.lookahead)
        self._scheduler.resize(size)
        return new

    @property
    def memory_was_short(self) -> bool:
        """Returns whether memory changed the order of the work since the engine was last idle.

        Rows are then right, but their last bits may be others: prompts were computed beside other prompts.
        """
        return self._fewer_rows or self._scheduler.num_short > 0

    def _make_drafting(self, model: "LoadedModel", draft: DraftSettings) -> Drafting:
        # A row keeps states of one fold more than a segment, and one token may follow after a stop string was found.
        num_tokens = min(DRAFT_TOKENS, model.prover.size.steps - 1, GROW_STEPS - 1)
        if draft.source == "lookup":
            return Drafting(PromptLookup(), max_rows=draft.rows, max_tokens=num_tokens)
        small = LoadedModel(Path(draft.source), self._dtype, self._device, None, None)
        check_same_tokenizer(small.tokenizer, model.tokenizer, draft.source)
        source = DraftModel(
            small.decoder.shape,
            lambda size: _make_step(small, size, None, graphs=self._graphs),
            max_rows=draft.rows,
            vocab_size=model.decoder.shape.vocab_size,
        )
        return Drafting(source, max_rows=draft.rows, max_tokens=num_tokens)

    @property
    def _paged(self) -> bool:
        """Returns whether rows have ranges of addresses (CPU) instead of blocks of a pool."""
        return self._loaded().threads is not None

    def _fit(self, size: CacheSize, old: "CpuStep | CudaStep | None") -> CacheSize:
        """Returns `size` limited to the free memory, but with at least the rows and blocks that there are already."""
        shape, value_bytes = self._loaded().decoder.shape, cache_dtype(self._dtype, self._device).itemsize
        pool, available = self._scheduler.pool, free_bytes(self._device)
        # Under a limit of the process, addresses count without memory behind them: those of the old rows are in use already.
        whole_rows = self._paged and free_data_bytes() is not None
        free = max(0, min(int(MEMORY_SHARE * available), available - whole_rows * LIBRARY_BYTES))
        used = pool.num_blocks - pool.num_free if self._paged else pool.num_blocks
        used_bytes = used * block_bytes(shape, value_bytes)
        if whole_rows and old is not None and old.slots.rows_cache is not None:
            used_bytes = old.slots.rows_cache.num_bytes
        if self._max_blocks is not None:  # a longer row that came since needs more
            size = size._replace(blocks=min(size.blocks, max(self._max_blocks, size.least_blocks)))
        fitting = fit_blocks(
            shape,
            size,
            value_bytes=value_bytes,
            state_tokens=self._loaded().prover.size.kept,
            budget_bytes=free + used_bytes,
            whole_rows=whole_rows,
        )
        if old is None:
            return fitting
        blocks = fitting.blocks
        if not self._paged and old.slots.size.blocks >= size.least_blocks:  # allocated beside the old blocks
            blocks = min(blocks, free // block_bytes(shape, value_bytes))
        if blocks <= GROWTH * old.slots.size.blocks and old.slots.size.blocks >= size.least_blocks:
            blocks = old.slots.size.blocks
        return fitting._replace(rows=max(fitting.rows, old.slots.size.rows), blocks=blocks)

    def _halve_cache(self, error: BaseException) -> None:
        """Starts all rows again with half the blocks, after another process took the memory of the rest."""
        assert self._cache_size is not None
        blocks = self._cache_size.blocks // 2
        least, self._max_blocks = self._cache_size.least_blocks, blocks
        self._restart()
        if blocks < least:
            self._max_blocks = None
            raise ValueError(
                f"out of memory with {2 * blocks} blocks in the cache, and the longest row needs {least}; free memory on "
                f"{self._device}, or lower max_new_tokens; the rows wait and start again with the next step"
            ) from error
        _LOG.warning(f"out of memory on {self._device}: all rows start again, with {blocks} cache blocks")
        self._cache_size = self._cache_size._replace(blocks=blocks)

    def _restart(self) -> None:
        """Puts all running rows back into the queue and frees their memory. They draw the same tokens again."""
        self._prompts.clear()
        self._scheduler.restart()
        self._scheduler.num_short += 1
        self._loaded().prover.forget()
        self._step = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class LoadedModel:
    """A model on its device, with tokenizer, threads and prover."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        proof: ProofSpec | None,
        weights: WeightFormat | None,
    ) -> None:
        self.decoder = load_decoder(folder, dtype, device)
        if weights is not None:
            round_weights(self.decoder, weights)
        self.weights = fuse(self.decoder)
        self.packed = pack(self.weights) if device.type == "cpu" else self.weights
        self.tokenizer = load_tokenizer(folder)
        self.is_end_V = torch.zeros(self.decoder.shape.vocab_size, dtype=torch.bool, device=device)
        self.is_end_V[sorted(self.tokenizer.end_tokens)] = True
        self.threads = CoreThreads() if device.type == "cpu" else None
        self.prover = Prover(proof, self.tokenizer, device)

    def swap(self, folder: Path, weights: WeightFormat | None) -> None:
        """Copies new weights over the old ones, in place."""
        load_weights(self.decoder, folder / WEIGHTS_FILE)
        if weights is not None:
            round_weights(self.decoder, weights)
        if self.threads is not None:
            self.threads.run(repack_jobs(self.packed, self.weights))


def _make_step(
    model: LoadedModel, size: CacheSize, old: "CpuStep | CudaStep | None", *, graphs: bool
) -> "CpuStep | CudaStep":
    """Returns a step with slots of `size`. It keeps the blocks of the old step if there are no more."""
    kept = model.prover.size.kept
    if model.threads is not None:
        slots = KVSlots(model.weights, size, state_tokens=kept, paged=True)
        return CpuStep(model.decoder, model.packed, slots, model.is_end_V, model.threads)
    from shoal.rollout.engine.step_cuda import CudaStep  # needs Triton, which machines without a GPU lack

    blocks: BlockCache | None = None
    if old is not None and old.slots.size.blocks == size.blocks:
        blocks = old.slots.blocks
    slots = KVSlots(model.weights, size, state_tokens=kept, paged=False, blocks=blocks)
    return CudaStep(model.weights, slots, model.is_end_V, graphs=graphs)
