"""The part of VllmEngine that runs inside vLLM's own worker: our draw, and the states that proofs are made of.

    model ──final norm──▶ states of the rows' newest tokens ──lm_head──▶ logits ──▶ SeededDraw ──▶ one token left
                          └ kept by the hook                                        └ files the states under its rows

vLLM samples greedily from what SeededDraw leaves: the drawn token, with its log-prob for a logit, and nothing else. So the token
and its log-prob come out by vLLM's usual way, and in step with the states. Tested with vLLM 0.32.0 (docs/engine.md).

Imported by vLLM, in its process, and by nobody else: it needs the extra.
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
class _Row:
    """A row in vLLM's batch. `outputs` is vLLM's own list of what it has drawn so far, which grows as it draws."""

    number: int
    sample_seed: int
    temperature: float
    outputs: list[int]


@dataclass
class _States:
    """Which row has which state: (tensor of a step, its place there) by the position of the output token that was fed.

    By position, because a row that was put aside for lack of room comes back with its last token fed once more.
    """

    newest_BH: Tensor | None = None
    of_row: dict[int, dict[int, tuple[Tensor, int]]] = field(default_factory=dict)


_STATES = _States()
"""One engine in a process, as vLLM has it too."""


class SeededDraw(LogitsProcessor):  # type: ignore[misc] # vLLM is an extra
    """Draws as docs/wire/draw.md says, whatever rows stand beside."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for place in batch_update.removed:
            self._rows.pop(place, None)
        for place, params, _, outputs in batch_update.added:
            self._rows.pop(place, None)
            if terms := (params.extra_args or {}).get("shoal"):
                number, sample_seed, temperature = terms
                self._rows[place] = _Row(number, sample_seed, temperature, outputs)
        for source, target, way in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and way is MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def apply(self, logits_BV: Tensor) -> Tensor:
        places = [place for place in range(len(logits_BV)) if place in self._rows]
        if not places:  # vLLM tries out its sampler before there are rows
            return logits_BV
        rows = [self._rows[place] for place in places]
        counts = [len(row.outputs) for row in rows]
        seeds = np.array([row.sample_seed for row in rows], dtype=np.uint64)
        uniforms_R = torch.from_numpy(uniforms(seeds, np.array(counts, dtype=np.uint64))).to(self._device)
        temperatures_R = torch.tensor(
            [row.temperature for row in rows], dtype=torch.float64, device=self._device
        )
        places_R = torch.tensor(places, device=self._device)
        tokens_R, logprobs_R = draw_tokens(logits_BV[places_R], temperatures_R, uniforms_R)
        logits_BV[places_R] = float("-inf")
        logits_BV[places_R, tokens_R] = logprobs_R
        self._file_states(rows, counts, places)
        return logits_BV

    def _file_states(self, rows: list[_Row], counts: list[int], places: list[int]) -> None:
        newest_BH, _STATES.newest_BH = _STATES.newest_BH, None
        assert newest_BH is not None, "the hook sees the states before the logits are made of them"
        for row, count, place in zip(rows, counts, places, strict=True):
            if count:  # before the first token the state is the prompt's
                _STATES.of_row.setdefault(row.number, {})[count - 1] = (newest_BH, place)


class Side:
    """Mixed into vLLM's worker. vLLM calls these by name, on every rank."""

    model_runner: Any
    reload_weights: Any

    def shoal_watch(self) -> None:
        """Keep the states that the logits are made of: the final norm's output, one a row."""
        model = self.model_runner.get_model()

        def keep(module: Any, arguments: tuple[Any, ...]) -> None:
            _STATES.newest_BH = arguments[1].to(torch.bfloat16, copy=True)

        model.logits_processor.register_forward_pre_hook(keep)

    def shoal_reload(self, folder: str) -> None:
        """New weights in the place of the old."""
        self.reload_weights(weights_path=folder)
        # A head that shares the embedding's weights is in no file, so vLLM does not load it anew; but on CPUs it multiplies
        # by a packed copy, which would stay the old one.
        head = self.model_runner.get_model().lm_head
        head.quant_method.process_weights_after_loading(head)

    def shoal_prove(self, rows: list[tuple[int, int]], topk: int, segment_tokens: int) -> list[bytes] | None:
        """Proofs of rows, each by its number and how many tokens it has; None on a rank that draws nothing."""
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
