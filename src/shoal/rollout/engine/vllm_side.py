"""The part of VllmEngine that runs inside vLLM's own worker: the seeded draw, and the states that proofs are made of.

    model ──final norm──▶ states of the rows' newest tokens ──lm_head──▶ logits ──▶ SeededDraw ──▶ one token left
                          └ stored by the hook                                      └ assigns the states to its rows

vLLM samples greedily from what SeededDraw leaves: the drawn token, with its log-prob as its logit. So token and log-prob
come out of vLLM's usual path, in step with the states. A step costs the same few launches for any number of rows; tables about
rows are rebuilt when the batch changes. Every FOLD_STEPS steps complete segments of states become proofs.

Only vLLM imports this module, in its own process: it needs the extra `vllm`.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from shoal.rollout.engine.proofs import FoldSize, fold_size, prove_states
from shoal.rollout.engine.sampling import draw_tokens
from shoal.wire.run_spec import ProofSpec
from shoal.wire.seeded_draw import uniforms


@dataclass
class _BatchRow:
    """A row in vLLM's batch. `outputs` is vLLM's own list of drawn tokens, which grows as it draws."""

    number: int
    sample_seed: int
    temperature: float
    outputs: list[int]


@dataclass
class _KeptRow:
    """What is kept of a row: a line of the ring of states, how many states it had at the last fold, and proofs of its first
    segments."""

    line: int
    num_states: int = 0
    parts: list[bytes] = field(default_factory=list)


class _RowStates:
    """The newest states of every row, at most one segment and FOLD_STEPS more, and the proofs of earlier segments.

    A state's place follows from its token's position, because vLLM feeds the last token of a preempted row a second time when
    the row resumes.
    """

    def __init__(self) -> None:
        self.newest_BH: Tensor | None = None
        self.proof: ProofSpec | None = None
        self.watched: Any = None
        """The model whose states a hook stores."""
        self.rows: dict[int, _KeptRow] = {}
        self._free: list[int] = []
        self._ring_LAH: Tensor | None = None
        """Line 0 takes the states of rows that have drawn nothing yet, which belong to prompts."""

    @property
    def size(self) -> FoldSize:
        return fold_size(self.proof)

    @property
    def num_bytes(self) -> int:
        return 0 if self._ring_LAH is None else self._ring_LAH.nbytes

    def keep(self, number: int) -> _KeptRow:
        """Returns what is kept of a row; a new row gets a free line."""
        if number not in self.rows:
            if not self._free:
                first = 1 + len(self.rows)
                self._free = list(range(2 * first - 1, first - 1, -1))
            self.rows[number] = _KeptRow(self._free.pop())
        return self.rows[number]

    def store(self, states_RH: Tensor, lines_R: Tensor, counts_R: Tensor) -> None:
        """Stores the state of each row's newest token. `counts_R`: tokens drawn before this step."""
        num_lines = 1 + max((row.line for row in self.rows.values()), default=0)
        if self._ring_LAH is None or len(self._ring_LAH) < num_lines:
            old = self._ring_LAH
            size = (2 * num_lines, self.size.kept, states_RH.shape[1])
            self._ring_LAH = torch.zeros(size, dtype=torch.bfloat16, device=states_RH.device)
            if old is not None:
                self._ring_LAH[: len(old)] = old
        places_R = (counts_R - 1).clamp(min=0) % self.size.kept
        self._ring_LAH[torch.where(counts_R > 0, lines_R, 0), places_R] = states_RH.to(torch.bfloat16)

    def fold(self, rows: list[_KeptRow]) -> None:
        """Turns the complete segments of these rows into proofs."""
        segment = self.size.segment
        complete = [row for row in rows if row.num_states >= (len(row.parts) + 1) * segment]
        if complete and self.proof is not None:
            states = [self._states(row, (len(row.parts) + 1) * segment) for row in complete]
            for row, part in zip(complete, prove_states(states, self.proof), strict=True):
                row.parts.append(part)

    def prove(self, ended: list[tuple[int, int]]) -> list[bytes] | None:
        """Returns the proofs of (row number, number of tokens) and forgets the rows; None if this rank stored no states."""
        assert self.proof is not None, "shoal_watch was called without a proof"
        rows = [self.rows.pop(number, _KeptRow(0)) for number, _ in ended]
        self._free += [row.line for row in rows if row.line]
        counts = [num_tokens - 1 for _, num_tokens in ended]
        if self._ring_LAH is None and any(counts):
            return None
        rest = [self._states(row, count) for row, count in zip(rows, counts, strict=True)]
        last = prove_states(rest, self.proof)
        return [b"".join(row.parts) + part for row, part in zip(rows, last, strict=True)]

    def forget(self) -> None:
        self.rows.clear()
        self._free.clear()

    def _states(self, row: _KeptRow, end: int) -> Tensor:
        """Returns the states after a row's folded segments, up to that of new token `end`."""
        start = len(row.parts) * self.size.segment
        if self._ring_LAH is None or end <= start:
            return torch.empty(0, 0 if self.proof is None else self.proof.topk)
        places = torch.arange(start, end, device=self._ring_LAH.device) % self.size.kept
        return self._ring_LAH[row.line, places]


_STATES = _RowStates()
"""Shared by SeededDraw and WorkerExtension; vLLM runs one engine per process."""


@dataclass
class _BatchTables:
    """Tables about the rows of a batch; made when rows come, go or move."""

    num_logits: int
    rows: list[_BatchRow]
    kept: list[_KeptRow]
    seeds_R: "np.ndarray[Any, np.dtype[np.uint64]]"
    places_R: Tensor
    temperatures_R: Tensor
    lines_R: Tensor


class SeededDraw(LogitsProcessor):  # type: ignore[misc] # vLLM is an extra
    """Draws tokens as docs/wire/draw.md says, independently of the other rows in the batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, _BatchRow] = {}
        self._tables: _BatchTables | None = None
        self._num_steps = 0

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        self._tables = None
        for place in batch_update.removed:
            self._rows.pop(place, None)
        for place, params, _, outputs in batch_update.added:
            self._rows.pop(place, None)
            if arguments := (params.extra_args or {}).get("shoal"):
                number, sample_seed, temperature = arguments
                self._rows[place] = _BatchRow(number, sample_seed, temperature, outputs)
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction is MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def apply(self, logits_BV: Tensor) -> Tensor:
        if not self._rows:  # vLLM runs its sampler once before there are rows
            return logits_BV
        if self._tables is None or self._tables.num_logits != len(logits_BV):
            self._tables = self._make_tables(len(logits_BV))
        tables = self._tables
        # vLLM also samples rows whose prompt is not complete, and drops the token: only its own lists count the tokens.
        counts = np.fromiter((len(row.outputs) for row in tables.rows), np.int64, len(tables.rows))
        uniforms_R = torch.from_numpy(uniforms(tables.seeds_R, counts.astype(np.uint64)))
        counts_R = torch.from_numpy(counts).to(self._device, non_blocking=True)
        tokens_R, logprobs_R = draw_tokens(
            logits_BV[tables.places_R],
            tables.temperatures_R,
            uniforms_R.to(self._device, non_blocking=True),
        )
        logits_BV[tables.places_R] = float("-inf")
        logits_BV[tables.places_R, tokens_R] = logprobs_R
        self._store_states(tables, counts, counts_R)
        return logits_BV

    def _make_tables(self, num_logits: int) -> _BatchTables:
        places = sorted(place for place in self._rows if place < num_logits)
        rows = [self._rows[place] for place in places]
        kept = [_STATES.keep(row.number) for row in rows]
        # A row that was preempted may have been away at every fold: without this its ring could fill up.
        for row, one in zip(rows, kept, strict=True):
            one.num_states = max(0, len(row.outputs) - 1)
        _STATES.fold(kept)
        return _BatchTables(
            num_logits=num_logits,
            rows=rows,
            kept=kept,
            seeds_R=np.array([row.sample_seed for row in rows], dtype=np.uint64),
            places_R=torch.tensor(places, device=self._device),
            # float32 as in TorchEngine: with float64 the softmax would be float64, and other log-probs would come out.
            temperatures_R=torch.tensor(
                [row.temperature for row in rows], dtype=torch.float32, device=self._device
            ),
            lines_R=torch.tensor([one.line for one in kept], device=self._device),
        )

    def _store_states(
        self, tables: _BatchTables, counts: "np.ndarray[Any, np.dtype[np.int64]]", counts_R: Tensor
    ) -> None:
        newest_BH, _STATES.newest_BH = _STATES.newest_BH, None
        assert newest_BH is not None, "the hook of shoal_watch runs before the logits processor"
        _STATES.store(newest_BH[tables.places_R], tables.lines_R, counts_R)
        self._num_steps += 1
        if self._num_steps % _STATES.size.steps == 0:
            for one, count in zip(tables.kept, counts.tolist(), strict=True):
                one.num_states = count
            _STATES.fold(tables.kept)


class WorkerExtension:
    """Mixed into vLLM's worker. vLLM calls these methods by name, on every rank."""

    model_runner: Any
    reload_weights: Any

    def shoal_watch(self, topk: int | None, segment_tokens: int) -> None:
        """Registers a hook that stores the states behind the logits: the final norm's output, one per row.

        `topk=None`: no proofs are asked for.
        """
        _STATES.proof = None if topk is None else ProofSpec(topk=topk, segment_tokens=segment_tokens)
        model = self.model_runner.get_model()
        if _STATES.watched is model:
            return
        _STATES.watched = model

        def store(module: Any, arguments: tuple[Any, ...]) -> None:
            _STATES.newest_BH = arguments[1].to(torch.bfloat16, copy=True)

        model.logits_processor.register_forward_pre_hook(store)

    def shoal_reload(self, folder: str) -> None:
        """Replaces the weights in place."""
        self.reload_weights(weights_path=folder)
        # A head that shares the embedding's weights is in no file, so vLLM does not reload it. On CPUs it multiplies by a
        # packed copy, which would keep the old weights.
        head = self.model_runner.get_model().lm_head
        head.quant_method.process_weights_after_loading(head)

    def shoal_prove(self, rows: list[tuple[int, int]]) -> list[bytes] | None:
        """Returns proofs of (row number, number of tokens); None on a rank that draws nothing."""
        return _STATES.prove(rows)

    def shoal_forget(self) -> None:
        _STATES.forget()
