"""The part of VllmEngine that runs inside vLLM's own workers: the seeded draw, and the states that proofs are made of.

    model ──final norm──▶ states of the rows' newest tokens ──head──▶ logits ──▶ SeededDraw ──▶ drawn token is the largest
                          └ kept by a hook                                       └ stores states and log-probs

vLLM samples greedily, so it takes the token that SeededDraw raises. A step costs the same few launches for any number of rows and
no Python code per row; what concerns one row is done when it comes, moves or ends. Every FOLD_STEPS steps complete segments of
states become proofs. The head is outside of compiled code and CUDA graphs.

vLLM imports this module in the process of each of its workers, one engine per process: it needs the extra `vllm`.
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from shoal.model.packed_prefill import upload
from shoal.model.stop_strings import stops_now
from shoal.model.tokenizer import Tokenizer, load_tokenizer
from shoal.rollout.engine.proofs import Prover, prove_states
from shoal.rollout.engine.sampling import draw_tokens
from shoal.wire.run_spec import ProofSpec
from shoal.wire.seeded_draw import uniforms

OWNER_POLL_S = 1.0
MORE_LINES = 32
"""Lines by which the store of rows grows when it is full."""

Ints = npt.NDArray[np.int64]
Answer = tuple[bytes, bytes]
"""Proofs of a row, and its log-probs as float32."""


class RowStore:
    """What is kept of every row until it has ended: one segment of states and FOLD_STEPS more, its folded segments, its log-probs.

    A state's place follows from its token's position, because vLLM feeds the last token of a preempted row a second time when
    the row resumes. Rows have lines; line 0 takes the states of rows that have drawn nothing yet, which belong to prompts.
    """

    def __init__(self, proof: ProofSpec | None, tokenizer: Tokenizer, device: torch.device) -> None:
        self.proof, self.tokenizer = proof, tokenizer
        self.prover = Prover(proof, tokenizer, device)
        self.newest_BH: Tensor | None = None
        """The states behind the newest logits; a hook sets them."""
        self.lines: dict[int, int] = {}
        self._free: list[int] = []
        self._num_folded_L = np.zeros(1, np.int64)
        self._ring_LAH: Tensor | None = None
        self._logprobs_LN: Tensor | None = None

    def line(self, number: int) -> int:
        """Returns the line of a row; a new row gets a free one."""
        if number not in self.lines:
            if not self._free:
                num_lines = len(self._num_folded_L)
                self._free = list(range(num_lines + MORE_LINES - 1, num_lines - 1, -1))
                self._num_folded_L = np.pad(self._num_folded_L, (0, MORE_LINES))
            line = self.lines[number] = self._free.pop()
            self._num_folded_L[line] = 0
        return self.lines[number]

    def take_newest(self, num_rows: int) -> Tensor:
        """Returns the states behind the newest logits. Raises RuntimeError if they do not belong to `num_rows` rows."""
        states_BH, self.newest_BH = self.newest_BH, None
        if states_BH is None or len(states_BH) != num_rows:
            num_states = 0 if states_BH is None else len(states_BH)
            raise RuntimeError(
                f"vLLM computed {num_rows} logits from {num_states} states; use --engine torch"
            )
        return states_BH

    def store(
        self, lines_R: Tensor, counts_R: Tensor, states_RH: Tensor, logprobs_R: Tensor, longest: int
    ) -> None:
        """Stores the states and log-probs of one step. `counts_R`: tokens that each row had before the step, `longest` at most."""
        num_lines, kept = len(self._num_folded_L), self.prover.size.kept
        self._ring_LAH = _grown(
            self._ring_LAH, (num_lines, kept, states_RH.shape[1]), torch.bfloat16, states_RH
        )
        width = 0 if self._logprobs_LN is None else self._logprobs_LN.shape[1]
        if longest >= width:
            width = longest + max(256, longest // 4)
        self._logprobs_LN = _grown(self._logprobs_LN, (num_lines, width), torch.float32, states_RH)
        places_R = (counts_R - 1).clamp(min=0) % kept
        self._ring_LAH[torch.where(counts_R > 0, lines_R, 0), places_R] = states_RH.to(torch.bfloat16)
        self._logprobs_LN[lines_R, counts_R] = logprobs_R

    def fold(self, numbers_R: Ints, lines_R: Ints, counts_R: Ints) -> None:
        """Turns segments that are complete with `counts_R` states into proofs. At most one of a row is."""
        segment = self.prover.size.segment
        complete = np.flatnonzero(counts_R >= (self._num_folded_L[lines_R] + 1) * segment)
        if len(complete) == 0 or self.proof is None:
            return
        lines = lines_R[complete]
        states_RTH = self._states(lines, self._num_folded_L[lines] * segment, segment)
        self.prover.fold(numbers_R[complete].tolist(), states_RTH)
        self._num_folded_L[lines] += 1

    def finish(self, ended: list[tuple[int, int]]) -> list[Answer] | None:
        """Returns what belongs to (row number, number of tokens) and forgets the rows; None if this rank drew nothing."""
        if self._logprobs_LN is None:
            return None
        size, proofs = self.prover.size, [b""] * len(ended)
        lines = [self.lines.pop(number) for number, _ in ended]
        self._free += lines
        lines_R, longest = np.array(lines, dtype=np.int64), max((count for _, count in ended), default=0)
        if self.proof is not None:
            folded = [self.prover.take_folded(number, count - 1) for number, count in ended]
            firsts_R = np.array([len(parts) * size.segment for parts in folded], dtype=np.int64)
            rest = [
                states_AH[: count - 1 - first]
                for states_AH, first, (_, count) in zip(
                    self._states(lines_R, firsts_R, size.kept), firsts_R.tolist(), ended, strict=True
                )
            ]
            proofs = [
                b"".join(part.read() for part in parts) + last
                for parts, last in zip(folded, prove_states(rest, self.proof), strict=True)
            ]
        # One copy for all rows: the device does nothing else meanwhile.
        logprobs_RN = self._logprobs_LN[upload(lines_R, self._logprobs_LN.device), :longest].cpu().numpy()
        return [
            (proof, logprobs_N[:count].tobytes())
            for proof, logprobs_N, (_, count) in zip(proofs, logprobs_RN, ended, strict=True)
        ]

    def forget(self) -> None:
        """Drops all rows."""
        self._free += self.lines.values()
        self.lines.clear()
        self.prover.forget()

    def _states(self, lines_R: Ints, firsts_R: Ints, count: int) -> Tensor:
        """Returns `count` states of each row, from that of new token `firsts_R` on."""
        assert self._ring_LAH is not None, "a step stored states"
        places_RT = (firsts_R[:, None] + np.arange(count)) % self.prover.size.kept
        lines_R1 = np.broadcast_to(lines_R[:, None], places_RT.shape)
        at_2RT = upload(np.stack((lines_R1, places_RT)), self._ring_LAH.device)
        return self._ring_LAH[at_2RT[0], at_2RT[1]]


def _grown(old: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Returns a tensor of `shape` with the old one's values; the old one if it is as large."""
    if old is not None and old.shape == shape:
        return old
    new = torch.zeros(shape, dtype=dtype, device=like.device)
    if old is not None:
        new[tuple(slice(size) for size in old.shape)] = old
    return new


_STORE: RowStore | None = None
"""Shared by SeededDraw and WorkerExtension."""


class _BatchRow(NamedTuple):
    """A row in vLLM's batch. `outputs` is vLLM's own list of drawn tokens, which grows as it draws."""

    outputs: list[int]
    stop: tuple[str, ...]


class VllmBatch:
    """The rows of vLLM's batch in its order. Columns are changed place by place and uploaded when one changed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, _BatchRow] = {}
        self._columns = np.zeros(
            64, [("number", np.int64), ("line", np.int64), ("seed", np.uint64), ("temperature", np.float32)]
        )
        self._outputs: list[list[int]] | None = None
        """The output tokens of the rows, in the order of the batch; None if they must be listed again."""
        self.resumed = False
        """Whether a row came that has tokens already: it was preempted."""

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Returns the number, line, seed or temperature of each row."""
        return self._columns[name][: len(self)]

    def update(self, update: BatchUpdate, store: RowStore) -> None:
        self._outputs = None
        for place in update.removed:
            self._rows.pop(place, None)
        for place, params, _, outputs in update.added:
            number, sample_seed, temperature, stop = params.extra_args["shoal"]
            if place >= len(self._columns):
                self._columns = np.pad(self._columns, (0, place))
            self._columns[place] = (number, store.line(number), sample_seed, temperature)
            self._rows[place] = _BatchRow(outputs, tuple(stop))
            self.resumed |= bool(outputs)
        for source, target, direction in update.moved:
            self._columns[[source, target]] = self._columns[[target, source]]
            moved, replaced = self._rows.pop(source), self._rows.pop(target, None)
            self._rows[target] = moved
            if replaced is not None and direction is MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def upload(self) -> None:
        """Copies changed columns to the device."""
        if self._outputs is None:
            self._outputs = [self._rows[place].outputs for place in range(len(self))]
            # float32 as in TorchEngine: with float64 the softmax would be float64, and other log-probs would come out.
            self.temperatures_R = upload(self.column("temperature").copy(), self._device)
            self.lines_R = upload(self.column("line").copy(), self._device)
            self.places_R = torch.arange(len(self), device=self._device)

    def counts(self) -> Ints:
        """Returns how many tokens each row has.

        vLLM also samples rows whose prompt is not complete, and drops the token: only its own lists count.
        """
        assert self._outputs is not None
        return np.fromiter(map(len, self._outputs), np.int64, len(self))

    def stopped(self, tokenizer: Tokenizer) -> list[int]:
        """Returns the places of the rows whose newest tokens have a stop string."""
        return [
            place for place, row in self._rows.items() if stops_now(row.outputs, row.stop, tokenizer.decode)
        ]


class SeededDraw(LogitsProcessor):  # type: ignore[misc] # vLLM is an extra
    """Draws tokens as docs/wire/draw.md says, independently of the other rows in the batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._batch = VllmBatch(device)
        self._num_steps = 0

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            assert _STORE is not None, "shoal_watch is called before rows are added"
            self._batch.update(batch_update, _STORE)

    def apply(self, logits_BV: Tensor) -> Tensor:
        if not self._batch:  # vLLM runs its sampler once before there are rows
            return logits_BV
        assert _STORE is not None
        batch, states_BH = self._batch, _STORE.take_newest(len(logits_BV))
        if len(logits_BV) != len(batch):
            raise RuntimeError(
                f"vLLM sampled {len(logits_BV)} times for {len(batch)} rows; use --engine torch"
            )
        batch.upload()
        counts = batch.counts()
        points = uniforms(batch.column("seed"), counts.astype(np.uint64))
        # One copy, from pinned memory: from pageable memory the host would wait for the step that is being computed.
        numbers_2R = upload(np.stack((counts, points.view(np.int64))), self._device)
        counts_R, uniforms_R = numbers_2R[0], numbers_2R[1].view(torch.float64)
        tokens_R, logprobs_R = draw_tokens(logits_BV, batch.temperatures_R, uniforms_R)
        # A row that was preempted may have missed every fold: its buffer of states must not overflow.
        must_fold = batch.resumed or self._num_steps % _STORE.prover.size.steps == 0
        batch.resumed = False
        self._num_steps += 1
        if must_fold and (stopped := batch.stopped(_STORE.tokenizer)):
            # Ends the row; VllmEngine cuts it after the stop string. Its states are still there, because it is not more than
            # one fold longer than its answer.
            tokens_R[stopped] = min(_STORE.tokenizer.end_tokens)
        logits_BV[batch.places_R, tokens_R] = float("inf")
        _STORE.store(batch.lines_R, counts_R, states_BH, logprobs_R, longest=int(counts.max()))
        if must_fold:
            _STORE.fold(batch.column("number"), batch.column("line"), counts)
        return logits_BV


class WorkerExtension:
    """Mixed into vLLM's worker. vLLM calls these methods by name, on every rank."""

    model_runner: Any
    reload_weights: Any

    def shoal_watch(self, folder: str, topk: int | None, segment_tokens: int, owner: int) -> None:
        """Starts to keep states and log-probs. `topk=None`: without proofs. `owner`: the process that VllmEngine is in."""
        global _STORE
        model = self.model_runner.get_model()
        if _STORE is None:
            _find_logits_layer(model).register_forward_pre_hook(_keep_states)
            if os.getpid() != owner:
                threading.Thread(target=_end_with_owner, args=(owner,), daemon=True).start()
        proof = None if topk is None else ProofSpec(topk=topk, segment_tokens=segment_tokens)
        if _STORE is None or _STORE.proof != proof:
            _STORE = RowStore(proof, load_tokenizer(Path(folder)), next(model.parameters()).device)

    def shoal_reload(self, folder: str) -> None:
        """Replaces the weights in place."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        self.reload_weights(weights_path=folder)
        # A head that shares the embedding's weights is in no file, so vLLM does not reload it. On CPUs it multiplies by a
        # packed copy, which would keep the old weights.
        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, VocabParallelEmbedding):
                layer.quant_method.process_weights_after_loading(layer)

    def shoal_finish(self, rows: list[tuple[int, int]]) -> list[Answer] | None:
        """Returns proofs and log-probs of (row number, number of tokens); None on a rank that draws nothing."""
        assert _STORE is not None, "shoal_watch is called first"
        return _STORE.finish([(number, count) for number, count in rows])

    def shoal_forget(self) -> None:
        if _STORE is not None:
            _STORE.forget()


def _find_logits_layer(model: Any) -> Any:
    """Returns the layer whose inputs are the head and the final norm's output."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor as LogitsLayer

    layers = [layer for layer in model.modules() if isinstance(layer, LogitsLayer)]
    if len(layers) != 1:
        raise ValueError(
            f"vLLM's {type(model).__name__} computes logits in {len(layers)} layers instead of one; use --engine torch"
        )
    return layers[0]


def _keep_states(module: Any, arguments: tuple[Any, ...]) -> None:
    if _STORE is not None:
        _STORE.newest_BH = arguments[1].to(torch.bfloat16, copy=True)


def _end_with_owner(owner: int) -> None:
    """Ends vLLM's processes when `owner` has died without telling them: they would hold the device's memory for ever."""
    child = os.getpid()
    while (parent := _parent_of(child)) != owner:
        if parent <= 1:  # not started by it
            return
        child = parent
    while _parent_of(child) == owner:
        time.sleep(OWNER_POLL_S)
    if child != os.getpid():
        os.kill(child, signal.SIGKILL)
    os._exit(1)


def _parent_of(process: int) -> int:
    """Returns the id of a process's parent; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
