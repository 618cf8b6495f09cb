"""TorchEngine: our own small continuous-batching decoder.

    submit ──▶ waiting ──▶ shelf: each prompt computed once ──▶ slots ──decode, a token a step──▶ prover ──▶ finished
                           └ first token of each row            └ state of each fed token         └ beside the decoding

A row of N tokens is fed N-1 of them: the first is drawn from the prompt's last state, the last is never fed.
rows.py and room.py keep the books, slots.py has the tensors, cpu_step.py and cuda_step.py take a step.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from shoal.model.fused import fuse, pack, repack_jobs
from shoal.model.load_model import DTYPES, load_decoder
from shoal.model.packed_prefill import upload
from shoal.model.shape import read_shape
from shoal.model.tokenizer import Tokenizer, load_tokenizer
from shoal.model.weights import WEIGHTS_FILE, load_weights
from shoal.rollout.engine.api import Finished, Request, check_requests
from shoal.rollout.engine.cpu_threads import Lanes
from shoal.rollout.engine.kv_slots import Slots, cache_dtype
from shoal.rollout.engine.prompt_cache import SHELF_SIZES, Ahead, Shelf
from shoal.rollout.engine.proofs import Prover
from shoal.rollout.engine.rows import Rows, by_batch, next_prompts, prompts_at_hand
from shoal.rollout.engine.scheduler import Room, fit, free_memory_bytes, room_for
from shoal.rollout.engine.step_cpu import CpuStep
from shoal.rollout.engine.step_watchdog import Watch
from shoal.wire.run_spec import ProofSpec

if TYPE_CHECKING:
    from shoal.rollout.engine.step_cuda import CudaStep

MEMORY_SHARE = 0.7
"""Of the memory that is free, for slots. Prefills, logits and other processes need some too."""
FEW_SHARE = 64
"""On a GPU rows come and go when one slot in this many has ended: that takes as many launches for one as for several."""


class TorchEngine:
    def __init__(
        self,
        *,
        compute_dtype: Literal["float32", "bfloat16"],
        proof: ProofSpec | None,
        max_rows: int,
        device: str = "cpu",
        graphs: bool = True,
    ) -> None:
        """`proof` None and `graphs` False are for measuring what proofs and CUDA graphs cost and bring."""
        if compute_dtype not in DTYPES:
            raise ValueError(f"compute_dtype={compute_dtype!r} must be one of {sorted(DTYPES)}")
        self.policy_version: int | None = None
        self._dtype = DTYPES[compute_dtype]
        self._proof = proof
        self._device = torch.device(device)
        self._graphs = graphs
        self._rows = Rows(max_rows)
        self._shelf = Shelf()
        self._model: _Loaded | None = None
        self._need: Room | None = None
        self._running: _Running | None = None
        self._watch = Watch(lookahead=0)
        self._num_steps = 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded().tokenizer

    @property
    def has_work(self) -> bool:
        rows = self._rows
        return bool(rows.waiting or rows.running or (self._model and self._model.prover.has_work))

    def load(self, folder: Path, version: int) -> None:
        if self.has_work:
            raise ValueError(
                f"version {version} came while rows of version {self.policy_version} are unfinished; finish them first"
            )
        self.policy_version = None  # until the copy is complete the weights are neither version
        self._shelf.clear()
        if self._model is None:
            self._model = _Loaded(folder, self._dtype, self._device, self._proof)
        elif (shape := read_shape(folder)) != self._model.decoder.shape:
            raise ValueError(f"{folder}: {shape} is not what this engine was built for; start a new engine")
        else:
            self._model.swap(folder)
        self.policy_version = version

    def submit(self, requests: Sequence[Request]) -> None:
        check_requests(requests, self.policy_version, self._loaded().decoder.shape)
        rows, size = self._rows, SHELF_SIZES[self._device.type]
        rows.submit(requests)
        if requests:
            known = [*rows.running.values(), *rows.waiting]  # prompts of earlier rows need their places too
            num_rows = min(rows.max_rows, len(known))
            need = room_for(known, num_rows, shelf_prompts=size.shelves * size.prompts)
            self._need = need if self._need is None else need.union(self._need)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        if self.policy_version is None:
            raise ValueError("the engine holds no complete weights; load a version first")
        if self._rows.waiting:
            self._admit()
        if self._rows.running:
            self._decode()
        idle = not (self._rows.running or self._rows.waiting)
        return self._loaded().prover.collect(wait=idle)

    def _loaded(self) -> "_Loaded":
        if self._model is None:
            raise ValueError("the engine holds no model; load a version first")
        return self._model

    def _admit(self) -> None:
        """Start waiting rows and draw their first tokens."""
        rows, running = self._rows, self._make_room()
        if rows.num_free < min(self._few(running), len(rows.waiting)):
            return
        if rows.waiting[0].prompt_tokens not in self._shelf.homes:
            self._stock(running)
        admitted = rows.admit(self._shelf.homes, step=self._num_steps)
        running.step.enter(admitted)
        for number, pairs in by_batch(admitted, self._shelf.homes).items():
            places_R, slots_R = upload(np.array(pairs).T, self._device)
            running.step.start(self._shelf.batches[number], places_R, slots_R)
        if SHELF_SIZES[self._device.type].shelves > 1 and self._shelf.ahead is None:
            self._shelf.ahead = self._compute(running)
        if running.step.lookahead == 0:
            self._look(running)

    def _stock(self, running: "_Running") -> None:
        """Have the prompts that come next at hand."""
        ahead = self._shelf.ahead
        if ahead is None or self._rows.waiting[0].prompt_tokens not in ahead.prompts:
            self._shelf.clear()
            ahead = self._compute(running)
        assert ahead is not None
        self._shelf.stock(ahead.finish())

    def _compute(self, running: "_Running") -> Ahead | None:
        """Begin with the next prompts that are not at hand; None if there are none."""
        waiting, size = self._rows.waiting, SHELF_SIZES[self._device.type]
        kept = prompts_at_hand(waiting, self._shelf.homes)
        prompts = next_prompts(waiting, max_tokens=size.tokens, max_prompts=size.prompts, but=kept)
        return running.step.compute(prompts, keep=kept) if prompts else None

    def _decode(self) -> None:
        """Feed every running row its newest token and draw the next."""
        running = self._make_room()
        if running.step.gapless and (moves := self._rows.compact()):
            running.slots.move(moves)
        running.step.decode(self._rows.end)
        if self._shelf.ahead is not None:
            self._shelf.ahead.go_on()
        self._look(running)
        self._num_steps += 1

    def _few(self, running: "_Running") -> int:
        """How many rows are worth taking out, and as many in, at a time."""
        return 1 if running.step.gapless else max(1, running.slots.room.rows // FEW_SHARE)

    def _look(self, running: "_Running") -> None:
        """See which rows have ended, and take them out."""
        self._watch.note(self._num_steps, running.slots.ended_S)
        for step, ended in self._watch.read():
            done = self._rows.finished(np.flatnonzero(ended).tolist(), step=step)
            if len(done) >= min(self._few(running), max(1, self._rows.num_running)):
                counts = ended[done].tolist()
                taken = running.slots.take(done, max(counts))
                requests = self._rows.remove(done)
                running.step.leave(done, requests)
                self._loaded().prover.add(requests, counts, taken)

    def _make_room(self) -> "_Running":
        """Slots enough and long enough for all that was submitted; what the running rows hold is kept."""
        assert self._need is not None
        old = self._running
        if old is not None and old.slots.room == self._need:
            return old
        self._need = need = self._fit(self._need, old)
        if old is not None and old.slots.room == need:
            return old
        self._running = new = _Running(self._loaded(), need, graphs=self._graphs)
        if old is not None:
            if self._shelf.ahead is not None:
                self._shelf.ahead.finish()  # it writes to where the old step keeps prompts
            new.take_over(old)
        else:
            self._watch = Watch(new.step.lookahead)
        self._rows.open_slots(need.rows)
        return new

    def _fit(self, need: Room, old: "_Running | None") -> Room:
        """What memory allows of it; never fewer rows than there are slots already."""
        shape, value_bytes = self._loaded().decoder.shape, cache_dtype(self._dtype, self._device).itemsize
        budget = int(MEMORY_SHARE * _free_bytes(self._device))
        fitting = fit(shape, need, value_bytes=value_bytes, budget_bytes=budget)
        return fitting if old is None else fitting._replace(rows=max(fitting.rows, old.slots.room.rows))


class _Loaded:
    """A model and what the engine needs to know of it."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, proof: ProofSpec | None
    ) -> None:
        self.decoder = load_decoder(folder, dtype, device)
        self.weights = fuse(self.decoder)
        self.packed = pack(self.weights) if device.type == "cpu" else self.weights
        self.tokenizer = load_tokenizer(folder)
        self.is_end_V = torch.zeros(self.decoder.shape.vocab_size, dtype=torch.bool, device=device)
        self.is_end_V[sorted(self.tokenizer.end_tokens)] = True
        self.lanes = Lanes() if device.type == "cpu" else None
        self.prover = Prover(proof, self.tokenizer.end_tokens, device)

    def swap(self, folder: Path) -> None:
        load_weights(self.decoder, folder / WEIGHTS_FILE)
        if self.lanes is not None:
            self.lanes.run(repack_jobs(self.packed, self.weights))


class _Running:
    """The slots and what steps them: made anew when rows come that need more room."""

    def __init__(self, loaded: _Loaded, room: Room, *, graphs: bool) -> None:
        self.slots = Slots(loaded.weights, room)
        self.step = _make_step(loaded, self.slots, graphs=graphs)

    def take_over(self, old: "_Running") -> None:
        self.slots.take_over(old.slots)
        self.step.take_over(old.step)  # type: ignore[arg-type] # both were made for the same device


def _make_step(loaded: _Loaded, slots: Slots, *, graphs: bool) -> "CpuStep | CudaStep":
    if loaded.lanes is not None:
        return CpuStep(loaded.decoder, loaded.packed, slots, loaded.is_end_V, loaded.lanes)
    from shoal.rollout.engine.step_cuda import CudaStep  # needs Triton, which machines without a GPU lack

    return CudaStep(loaded.weights, slots, loaded.is_end_V, graphs=graphs)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return free_memory_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
