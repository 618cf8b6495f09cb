"""A policy version in memory, and the forward pass over rows that are finished.

The state at position p predicts the token at p + 1. A row of P prompt and T output tokens therefore needs the states at
P-1 .. P+T-2: all of them predict an output token, and all but the first have a proof.

    B  rows    P  prompts    T  tokens of a row    H  hidden size
"""

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.files import is_out_of_memory
from shoal.model.decoder import Decoder, KVCache, run_prompts, supports_flash_attention
from shoal.model.load_model import device_name, kernel_release
from shoal.model.packed_prefill import packed_states
from shoal.model.rounded_weights import round_weights
from shoal.model.tokenizer import Tokenizer
from shoal.model.transformers_model import TransformersModel
from shoal.wire.requirements import ComputeClass, WeightFormat, precision_of
from shoal.wire.rollouts import Rollout

BATCH_TOKENS = 4096
"""Tokens of one prefill on a CPU, with prompts and padding. They bound the memory for keys and values."""
DEVICE_BATCH_TOKENS = 3 << 15
"""Tokens of one prefill on a GPU: 98,304. The host needs 20 ms to launch a batch of 30 layers and its proofs, in which an H200
computes 30,000 tokens. A 7B model needs 8 GB of activations for a batch of this size."""

Model = Decoder | TransformersModel


class CannotCheck(Exception):
    """The validator's own side failed, so the submission is void and its node is not blamed."""


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy version in memory."""

    version: int
    decoder: Model
    tokenizer: Tokenizer
    batch_tokens: int = BATCH_TOKENS
    plain: bool = False
    """Whether attention is computed by plain matrix products: a second path with other rounding."""
    weights: WeightFormat | None = None
    """The format that the layers' weights are rounded to; None: as published."""
    rounded: dict[WeightFormat, Model] = field(default_factory=dict)
    """Copies with rounded weights, made when they are first needed."""
    folder: Path | None = None
    """Where the version was loaded from, if it is kept."""

    def with_weights(self, weights: WeightFormat) -> "LoadedPolicy":
        """Returns this version with rounded weights. Raises CannotCheck if there is no memory for a copy."""
        if weights not in self.rounded:
            try:
                model = copy.deepcopy(self.decoder)
                round_weights(model, weights)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise CannotCheck(f"no memory for a copy with {weights} weights: {error}") from None
            self.rounded[weights] = model
        return replace(self, decoder=self.rounded[weights], weights=weights)

    def compute_class(self) -> ComputeClass:
        """Returns what this validator checks with."""
        weight = self.decoder.head().weight_VH
        path = "transformers" if isinstance(self.decoder, TransformersModel) else "prefill"
        return ComputeClass(
            device=device_name(weight.device),
            engine="plain" if self.plain else path,
            kernels=kernel_release(),
            precision=precision_of(str(weight.dtype).removeprefix("torch."), self.weights),
        )


def num_fed(row: Rollout) -> int:
    """Returns the number of tokens to run: all but the last, which predicts no token of the row."""
    return len(row.prompt_tokens) + len(row.output_tokens) - 1


def prefill(model: Model, rows: Sequence[Rollout], *, plain: bool = False) -> list[Tensor]:
    """Returns for each row the states that predict its output tokens, [T, H]."""
    end = max(num_fed(row) for row in rows)
    if end >= model.shape.max_positions:
        raise CannotCheck(f"{end + 1} tokens are more than the model's {model.shape.max_positions} positions")
    with sdpa_kernel(SDPBackend.MATH) if plain else contextlib.nullcontext():
        if isinstance(model, TransformersModel):
            return _prefill_padded(model, rows)
        weight = model.model.norm.weight
        if not plain and supports_flash_attention(weight.device, weight.dtype):
            return packed_states(model, [(row.prompt_tokens, row.output_tokens[:-1]) for row in rows])
        return _prefill_cached(model, rows, end, weight.device)


def _prefill_padded(model: TransformersModel, rows: Sequence[Rollout]) -> list[Tensor]:
    """Computes whole rows, padded on the right, which a causal model does not attend to."""
    tokens_BT = torch.zeros(len(rows), max(num_fed(row) for row in rows), dtype=torch.int64)
    for place, row in enumerate(rows):
        fed = row.prompt_tokens + row.output_tokens[:-1]
        tokens_BT[place, : len(fed)] = torch.tensor(fed)
    states_BTH = model(tokens_BT.to(model.head().weight_VH.device), tokens_BT)
    return [states_BTH[place, len(row.prompt_tokens) - 1 : num_fed(row)] for place, row in enumerate(rows)]


def _prefill_cached(
    decoder: Decoder, rows: Sequence[Rollout], end: int, device: torch.device
) -> list[Tensor]:
    """Computes rows with the same prompt from one prefill of it."""
    prompts = list(dict.fromkeys(row.prompt_tokens for row in rows))
    prompt_cache = KVCache(decoder, num_slots=len(prompts), max_context=max(map(len, prompts)))
    last_PH = run_prompts(decoder, prompts, prompt_cache)
    index_B = torch.tensor([prompts.index(row.prompt_tokens) for row in rows], device=device)
    slots_B = torch.arange(len(rows), device=device)
    cache = KVCache(decoder, num_slots=len(rows), max_context=end + 1)
    cache.copy_from(
        prompt_cache, source_slots=index_B, slots=slots_B, context=min(prompt_cache.max_context, end + 1)
    )
    fed_BTH = _run_outputs(decoder, rows, cache, device)
    return [
        torch.cat([last_PH[index_B[place]][None], fed_BTH[place, : len(row.output_tokens) - 1]])
        for place, row in enumerate(rows)
    ]


def _run_outputs(decoder: Decoder, rows: Sequence[Rollout], cache: KVCache, device: torch.device) -> Tensor:
    """Returns the states at all output tokens but the last, [B, T, H]. The cache must hold the prompts."""
    width = max(len(row.output_tokens) for row in rows) - 1
    if width == 0:
        return decoder.model.norm.weight.new_empty(len(rows), 0, decoder.shape.hidden_size)
    tokens_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    # Padding is written to the last position, which no row reaches.
    positions_BT = torch.full_like(tokens_BT, cache.max_context - 1)
    for place, row in enumerate(rows):
        fed, start = len(row.output_tokens) - 1, len(row.prompt_tokens)
        tokens_BT[place, :fed] = torch.tensor(row.output_tokens[:-1], dtype=torch.int64)
        positions_BT[place, :fed] = torch.arange(start, start + fed)
    states_BTH: Tensor = decoder(tokens_BT.to(device), positions_BT.to(device), cache=cache)
    return states_BTH
