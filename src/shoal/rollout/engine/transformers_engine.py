"""TransformersEngine: generates with a model of transformers, for families that neither TorchEngine nor vLLM has.

Rows with the same prompt run together, without padding, through the family's own cache. One batch after another: an answer takes
as many passes as it has tokens, and short rows do not make room for new ones. It is slow, but works for every family.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.files import is_out_of_memory
from shoal.model.load_model import DTYPES, load_transformers_model
from shoal.model.rounded_weights import round_weights
from shoal.model.shape import read_json
from shoal.model.stop_strings import stops_now
from shoal.model.tokenizer import Tokenizer, load_tokenizer
from shoal.model.transformers_model import CachedRows, TransformersModel
from shoal.model.weights import WEIGHTS_FILE, load_weights
from shoal.rollout.engine.api import (
    ComputeDtype,
    FinishedRow,
    GenerationRequest,
    check_idle,
    check_requests,
    ending,
)
from shoal.rollout.engine.proofs import prove_states
from shoal.rollout.engine.sampling import draw_tokens
from shoal.wire.requirements import WeightFormat
from shoal.wire.run_spec import ProofSpec
from shoal.wire.seeded_draw import uniforms


@dataclass(slots=True)
class _GrowingRow:
    """A row that is being generated."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    """The state of each fed output token, in bfloat16; proofs are built from them."""


@dataclass(slots=True)
class _Batch:
    """Rows of one prompt that are generated together. A row that ended leaves `rows` and the cache."""

    rows: list[_GrowingRow]
    cached: CachedRows
    next_BH: Tensor
    """The states that predict the next token of each row."""


class TransformersEngine:
    """The Engine (api.py) that computes with transformers."""

    def __init__(
        self, *, compute_dtype: ComputeDtype, proof: ProofSpec | None, max_rows: int, device: str = "cpu"
    ) -> None:
        """`proof=None` is for measuring what proofs cost."""
        self.policy_version: int | None = None
        self.weights: WeightFormat | None = None
        """The format that `load` rounds the layers' weights to; None: they are not rounded."""
        self._dtype, self._device, self._proof = DTYPES[compute_dtype], torch.device(device), proof
        self._max_rows = max_rows
        # Draws and proofs need float64, which Apple's GPUs do not have.
        self._exact_device = torch.device("cpu") if self._device.type == "mps" else self._device
        self._model: TransformersModel | None = None
        self._config: dict[str, object] = {}
        self._tokenizer: Tokenizer | None = None
        self._waiting: deque[GenerationRequest] = deque()
        self._batch: _Batch | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ValueError("the engine holds no model; load a version first")
        return self._tokenizer

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._batch)

    def load(self, folder: Path, version: int) -> None:
        check_idle(self, version)
        self.policy_version = None  # until the copy is complete the weights are neither version
        config = read_json(folder / "config.json")
        if self._model is not None and config != self._config:
            # Values that no tensor's shape shows, such as rope_theta, would keep their old values.
            keys = sorted(
                name for name in config.keys() | self._config if config.get(name) != self._config.get(name)
            )
            raise ValueError(
                f"{folder}/config.json has another {', '.join(keys)} than what this engine was built for; start a new engine"
            )
        if self._model is None:
            model = load_transformers_model(folder, self._dtype, self._device)
            self._tokenizer, self._config, self._model = load_tokenizer(folder), config, model
        else:
            load_weights(self._model, folder / WEIGHTS_FILE)
        if self.weights is not None:
            round_weights(self._model, self.weights)
        self.policy_version = version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        check_requests(requests, self.policy_version, self._loaded().shape)
        self._waiting += requests

    @torch.inference_mode()
    def step(self) -> list[FinishedRow]:
        if self.policy_version is None:
            raise ValueError("the engine holds no complete weights; load a version first")
        rows: list[GenerationRequest] = []
        try:
            if self._batch is None:
                if not self._waiting:
                    return []
                rows = self._next_rows()
                cached = CachedRows(self._loaded())
                prompts_BT = torch.tensor([row.prompt_tokens for row in rows], device=self._device)
                self._batch = _Batch([*map(_GrowingRow, rows)], cached, cached.feed(prompts_BT)[:, -1])
            rows = [row.request for row in self._batch.rows]
            return self._decode(self._batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._start_smaller(rows, error)
            return []

    def _start_smaller(self, rows: list[GenerationRequest], error: BaseException) -> None:
        """Puts rows that did not fit into memory back into the queue; they start again, half as many at once."""
        self._batch = None
        if len(rows) == 1:  # it stays out of the queue, where it would block every later row
            raise ValueError(
                f"one row of {len(rows[0].prompt_tokens)} + {rows[0].max_new_tokens} tokens does not fit into memory ({error}); lower "
                "max_new_tokens, or use a machine with more memory"
            ) from None
        self._waiting.extendleft(reversed(rows))
        self._max_rows = len(rows) // 2

    def _loaded(self) -> TransformersModel:
        if self._model is None:
            raise ValueError("the engine holds no model; load a version first")
        return self._model

    def _next_rows(self) -> list[GenerationRequest]:
        """Takes the next rows with one prompt from the queue."""
        prompt = self._waiting[0].prompt_tokens
        rows: list[GenerationRequest] = []
        while self._waiting and len(rows) < self._max_rows and self._waiting[0].prompt_tokens == prompt:
            rows.append(self._waiting.popleft())
        return rows

    def _decode(self, batch: _Batch) -> list[FinishedRow]:
        """Draws one token for every row and computes the states after it. Returns the rows that ended."""
        tokens_B, logprobs_B = self._draw(batch)
        for row, token, logprob in zip(batch.rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
        running = [place for place, row in enumerate(batch.rows) if not self._ended(row)]
        ended = [row for place, row in enumerate(batch.rows) if place not in running]
        finished = self._finish(ended)
        if not running:
            self._batch = None
            return finished
        if ended:
            batch.cached.select(torch.tensor(running, device=self._device))
            batch.rows = [batch.rows[place] for place in running]
        states_BTH = batch.cached.feed(tokens_B[running][:, None])
        batch.next_BH = states_BTH[:, -1]
        for row, state_H in zip(batch.rows, batch.next_BH.to(torch.bfloat16), strict=True):
            row.states.append(state_H)
        return finished

    def _draw(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        seeds = np.array([row.request.sample_seed for row in batch.rows], dtype=np.uint64)
        counts = np.array([len(row.tokens) for row in batch.rows], dtype=np.uint64)
        temperatures = [row.request.temperature for row in batch.rows]
        temperatures_B = torch.tensor(temperatures, device=self._exact_device)
        uniforms_B = torch.from_numpy(uniforms(seeds, counts)).to(self._exact_device)
        logits_BV = self._loaded().logits(batch.next_BH).float().to(self._exact_device)
        tokens_B, logprobs_B = draw_tokens(logits_BV, temperatures_B, uniforms_B)
        return tokens_B.to(self._device), logprobs_B

    def _ended(self, row: _GrowingRow) -> bool:
        tokens, request = row.tokens, row.request
        if tokens[-1] in self.tokenizer.end_tokens or len(tokens) == request.max_new_tokens:
            return True
        return stops_now(tokens, request.stop, self.tokenizer.decode)

    def _finish(self, rows: list[_GrowingRow]) -> list[FinishedRow]:
        proofs = [b""] * len(rows)
        if self._proof is not None and rows:
            none = torch.empty(0, self._loaded().shape.hidden_size)
            states = [torch.stack(row.states).to(self._exact_device) if row.states else none for row in rows]
            proofs = prove_states(states, self._proof)
        return [
            FinishedRow(
                request=row.request,
                output_tokens=tuple(row.tokens),
                logprobs=tuple(row.logprobs),
                finish=ending(row.request, row.tokens, self.tokenizer)[1],
                proof=proof,
            )
            for row, proof in zip(rows, proofs, strict=True)
        ]
