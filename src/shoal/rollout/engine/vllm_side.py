"""The part of VllmEngine that runs inside vLLM's own worker: the seeded draw, and the states that proofs are made of.

    model ──final norm──▶ states of the rows' newest tokens ──lm_head──▶ logits ──▶ SeededDraw ──▶ one token left
                          └ stored by the hook                                      └ assigns the states to its rows

vLLM samples greedily from what SeededDraw leaves: the drawn token, with its log-prob as its logit. So token and log-prob
come out of vLLM's usual path, in step with the states. Tested with vLLM 0.32.0 (docs/engine.md).

Only vLLM imports this module, in its own process: it needs the extra `vllm`.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from shoal import toploc
from shoal.rollout.engine.sampling import draw_tokens
from shoal.wire.seeded_draw import uniforms


@dataclass
class _BatchRow:
    """A row in vLLM's batch. `outputs` is vLLM's own list of drawn tokens, which grows as it draws."""

    number: int
    sample_seed: int
    temperature: float
    outputs: list[int]


@dataclass
class _RowStates:
    """States of each row: (tensor of a step, line in it) by the position of the output token that was fed.

    By position, because vLLM feeds the last token of a preempted row a second time when the row resumes.
    """

    newest_BH: Tensor | None = None
    of_row: dict[int, dict[int, tuple[Tensor, int]]] = field(default_factory=dict)


_STATES = _RowStates()
"""Shared by SeededDraw and WorkerExtension; vLLM runs one engine per process."""


class SeededDraw(LogitsProcessor):  # type: ignore[misc] # vLLM is an extra
    """Draws tokens as docs/wire/draw.md says, independently of the other rows in the batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, _BatchRow] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
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
        places = [place for place in range(len(logits_BV)) if place in self._rows]
        if not places:  # vLLM runs its sampler once before there are rows
            return logits_BV
        rows = [self._rows[place] for place in places]
        counts = [len(row.outputs) for row in rows]
        seeds = np.array([row.sample_seed for row in rows], dtype=np.uint64)
        uniforms_R = torch.from_numpy(uniforms(seeds, np.array(counts, dtype=np.uint64))).to(self._device)
        # float32 as in TorchEngine: with float64 the softmax would be float64, and other log-probs would come out.
        temperatures_R = torch.tensor(
            [row.temperature for row in rows], dtype=torch.float32, device=self._device
        )
        places_R = torch.tensor(places, device=self._device)
        tokens_R, logprobs_R = draw_tokens(logits_BV[places_R], temperatures_R, uniforms_R)
        logits_BV[places_R] = float("-inf")
        logits_BV[places_R, tokens_R] = logprobs_R
        self._store_states(rows, counts, places)
        return logits_BV

    def _store_states(self, rows: list[_BatchRow], counts: list[int], places: list[int]) -> None:
        newest_BH, _STATES.newest_BH = _STATES.newest_BH, None
        assert newest_BH is not None, "the hook of shoal_watch runs before the logits processor"
        for row, count, place in zip(rows, counts, places, strict=True):
            if count:  # before the first token the state belongs to the prompt
                _STATES.of_row.setdefault(row.number, {})[count - 1] = (newest_BH, place)


class WorkerExtension:
    """Mixed into vLLM's worker. vLLM calls these methods by name, on every rank."""

    model_runner: Any
    reload_weights: Any

    def shoal_watch(self) -> None:
        """Registers a hook that stores the states behind the logits: the final norm's output, one per row."""
        model = self.model_runner.get_model()

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

    def shoal_prove(self, rows: list[tuple[int, int]], topk: int, segment_tokens: int) -> list[bytes] | None:
        """Returns proofs of (row number, number of tokens); None on a rank that draws nothing."""
        states = []
        for number, num_tokens in rows:
            kept = _STATES.of_row.pop(number, {})
            if num_tokens > 1 and not kept:
                return None
            states.append([kept[position] for position in range(num_tokens - 1)])
        tensors = [
            torch.stack([step_BH[place] for step_BH, place in row]) if row else torch.empty(0, topk)
            for row in states
        ]
        return toploc.build_proofs(tensors, topk=topk, segment_tokens=segment_tokens)

    def shoal_forget(self) -> None:
        _STATES.of_row.clear()
