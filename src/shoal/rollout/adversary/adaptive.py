"""Lies of workers that know how they are checked, for `shoal arena`: they save work or steer draws where a scheme looks least.

PlainEngine decodes with the plain decoder and a KV cache, slowly and with a hook at each place where a liar would interfere.
Unchanged it is honest. B rows, T tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.model.decoder import Decoder, KVCache, run_prompts
from shoal.model.load_model import DTYPES, load_decoder
from shoal.model.tokenizer import Tokenizer, load_tokenizer
from shoal.rollout.adversary.lies import OtherWeights, other_seed
from shoal.rollout.adversary.lying_engines import older, quantised_by_channel
from shoal.rollout.engine.api import (
    Behaviour,
    ComputeDtype,
    Engine,
    FinishedRow,
    GenerationRequest,
    check_requests,
)
from shoal.rollout.engine.proofs import prove_states
from shoal.rollout.engine.sampling import draw_tokens
from shoal.wire.lease import Lease
from shoal.wire.rollouts import Finish, Rollout, RolloutTable
from shoal.wire.run_spec import ProofSpec
from shoal.wire.seeded_draw import uniforms


class PlainEngine:
    """Decodes batches of rows with Decoder. Subclasses override `alter`, `make_cache`, `forward` or `draw`."""

    def __init__(
        self,
        *,
        compute_dtype: ComputeDtype,
        proof: ProofSpec,
        max_rows: int,
        device: str,
        bits: int = 8,
        distance: float = 0.0,
    ) -> None:
        """`bits` and `distance` say how far a subclass departs from the honest computation."""
        self._bits, self._distance = bits, distance
        self.policy_version: int | None = None
        self._dtype, self._proof, self._max_rows = DTYPES[compute_dtype], proof, max_rows
        self._device = device
        self._waiting: list[GenerationRequest] = []
        self._decoder: Decoder | None = None
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None, "load() must be called first"
        return self._tokenizer

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def load(self, folder: Path, version: int) -> None:
        self._decoder = load_decoder(folder, self._dtype, self._device)
        self._tokenizer = load_tokenizer(folder)
        with torch.no_grad():
            self.alter(self._decoder)
        self.policy_version = version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        assert self._decoder is not None, "load() must be called first"
        check_requests(requests, self.policy_version, self._decoder.shape)
        self._waiting += requests

    @torch.inference_mode()
    def step(self) -> list[FinishedRow]:
        """Generates the next rows completely."""
        some, self._waiting = self._waiting[: self._max_rows], self._waiting[self._max_rows :]
        return self._generate(some) if some else []

    # -- what subclasses change ----------------------------------------------------------------------------

    def alter(self, decoder: Decoder) -> None:
        """Changes the weights after they were loaded."""

    def make_cache(self, decoder: Decoder, num_rows: int, context: int) -> KVCache:
        return KVCache(decoder, num_slots=num_rows, max_context=context)

    def forward(
        self, decoder: Decoder, tokens_BT: Tensor, positions_BT: Tensor, cache: KVCache, late: bool
    ) -> Tensor:
        """Returns the states after the final norm. `late` is true in the second half of the answers."""
        states_BTH: Tensor = decoder(tokens_BT, positions_BT, cache=cache)
        return states_BTH

    def draw(self, logits_BV: Tensor, temperatures_B: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
        return draw_tokens(logits_BV, temperatures_B, uniforms_B)

    # -- decoding ------------------------------------------------------------------------------------------

    def _generate(self, requests: Sequence[GenerationRequest]) -> list[FinishedRow]:
        decoder = self._decoder
        assert decoder is not None
        device, rows = torch.device(self._device), range(len(requests))
        lengths_B = torch.tensor([len(one.prompt_tokens) for one in requests], device=device)
        width, longest = int(lengths_B.max()), max(one.max_new_tokens for one in requests)
        cache = self.make_cache(decoder, len(requests), width + longest)
        next_BH = run_prompts(decoder, [one.prompt_tokens for one in requests], cache)
        temperatures_B = torch.tensor([one.temperature for one in requests], device=device)
        seeds = np.array([one.sample_seed for one in requests], dtype=np.uint64)
        ends = self.tokenizer.end_tokens
        tokens: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        states_NBH: list[Tensor] = []
        for number in range(longest):
            uniforms_B = torch.from_numpy(uniforms(seeds, np.full(len(seeds), number, dtype=np.uint64)))
            drawn_B, logprobs_B = self.draw(
                decoder.logits(next_BH).float(), temperatures_B, uniforms_B.to(device)
            )
            running = False
            for row, token, logprob in zip(rows, drawn_B.tolist(), logprobs_B.tolist(), strict=True):
                if len(tokens[row]) == number < requests[row].max_new_tokens and (
                    number == 0 or tokens[row][-1] not in ends
                ):
                    tokens[row].append(token)
                    logprobs[row].append(logprob)
                    running = running or (token not in ends and number + 1 < requests[row].max_new_tokens)
            if not running:
                break
            cache.context = width + number + 1
            late, positions_B1 = 2 * number >= longest, (lengths_B + number)[:, None]
            next_BH = self.forward(decoder, drawn_B[:, None], positions_B1, cache, late)[:, 0]
            states_NBH.append(next_BH.to(torch.bfloat16))
        width_H = decoder.shape.hidden_size
        states_BNH = (
            torch.stack(states_NBH, dim=1) if states_NBH else next_BH.new_empty(len(rows), 0, width_H)
        )
        proofs = prove_states([states_BNH[row, : len(tokens[row]) - 1] for row in rows], self._proof)
        return [
            FinishedRow(
                request=requests[row],
                output_tokens=tuple(tokens[row]),
                logprobs=tuple(logprobs[row]),
                finish=Finish.EOS if tokens[row][-1] in ends else Finish.LENGTH,
                proof=proofs[row],
            )
            for row in rows
        ]


class LowerPrecisionEngine(PlainEngine):
    """Rounds the weights of the second half of the layers to `bits` bits and leaves the first half as published."""

    def alter(self, decoder: Decoder) -> None:
        layers = decoder.model.layers
        for layer in layers[len(layers) // 2 :]:
            for parameter in layer.parameters():
                if parameter.ndim == 2:
                    rounded = quantised_by_channel(parameter.float(), bits=self._bits)
                    parameter.copy_(rounded.to(parameter.dtype))


class SkippedLayersEngine(PlainEngine):
    """Leaves out the last quarter of the layers, at least one, in the second half of each answer."""

    def forward(
        self, decoder: Decoder, tokens_BT: Tensor, positions_BT: Tensor, cache: KVCache, late: bool
    ) -> Tensor:
        whole = decoder.model.layers
        if late:
            decoder.model.layers = whole[: len(whole) - max(1, len(whole) // 4)]
        try:
            return super().forward(decoder, tokens_BT, positions_BT, cache, late)
        finally:
            decoder.model.layers = whole


class _QuantisedCache(KVCache):
    """Stores keys and values rounded to `bits` bits, with one scale per head and token."""

    bits = 8

    def write(
        self, layer: int, positions_BT: Tensor, keys_BTKD: Tensor, values_BTKD: Tensor
    ) -> tuple[Tensor, Tensor]:
        rounded = [
            quantised_by_channel(side.float(), bits=self.bits).to(side.dtype)
            for side in (keys_BTKD, values_BTKD)
        ]
        return super().write(layer, positions_BT, *rounded)


class QuantisedCacheEngine(PlainEngine):
    """Keeps the KV cache in `bits` bits, which holds more rows at once."""

    def make_cache(self, decoder: Decoder, num_rows: int, context: int) -> KVCache:
        cache = _QuantisedCache(decoder, num_slots=num_rows, max_context=context)
        cache.bits = self._bits
        return cache


class EdgeEngine(PlainEngine):
    """Picks, among the tokens whose intervals are at most `distance` away from the uniform, the one it prefers."""

    def draw(self, logits_BV: Tensor, temperatures_B: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_BV = torch.log_softmax(logits_BV / temperatures_B.float()[:, None], dim=-1)
        probs_BV = logprobs_BV.double().exp()
        high_BV = probs_BV.cumsum(-1)
        point_B1 = uniforms_B[:, None] * high_BV[:, -1:]
        away_BV = torch.maximum(high_BV - probs_BV - point_B1, point_B1 - high_BV)
        near_BV = (away_BV <= self._distance) & (probs_BV > 1e-4)
        near_BV |= away_BV == away_BV.amin(-1, keepdim=True)
        generator = torch.Generator().manual_seed(1)
        liked_V = torch.rand(probs_BV.shape[1], generator=generator).to(probs_BV.device)
        tokens_B = torch.where(near_BV, liked_V, -1.0).argmax(-1)
        return tokens_B, logprobs_BV.gather(1, tokens_B[:, None]).squeeze(1)


ADAPTED_ROWS = 256
"""Rows at once of the engine of a lie."""


class Adapted(Behaviour):
    """Uses a PlainEngine in the place of the worker's engine. `make` gets the settings of PlainEngine."""

    def __init__(self, make: Callable[..., PlainEngine], *, device: str = "cpu") -> None:
        self._make, self._device = make, device
        self._dtype: ComputeDtype = "float32"
        self.proof = ProofSpec()

    def compute_dtype(self, leased: ComputeDtype) -> ComputeDtype:
        self._dtype = leased
        return leased

    def engine(self, engine: Engine) -> Engine:
        return self._make(
            compute_dtype=self._dtype, proof=self.proof, max_rows=ADAPTED_ROWS, device=self._device
        )


class HonestPrefix(Behaviour):
    """Generates each prompt's first sample, and of the others the first half; the rest is copied from the first sample.

    Needs RawStates: a liar has the states of its own rows. All of them are real, but those after the copy began belong to
    another prefix.
    """

    def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
        first = {row.prompt_index: row for row in table.rows if row.sample_index == 0}
        rows = tuple(
            row if row.sample_index == 0 else _continued(row, first[row.prompt_index]) for row in table.rows
        )
        return replace(table, rows=rows)


def _continued(row: Rollout, other: Rollout) -> Rollout:
    """Returns the first half of `row` followed by the rest of `other`."""
    cut = min(len(row.output_tokens), len(other.output_tokens)) // 2
    if cut < 1:
        return replace(other, sample_index=row.sample_index)
    size = len(other.proof) // max(1, len(other.output_tokens) - 1) or len(row.proof) // max(
        1, len(row.output_tokens) - 1
    )
    return replace(
        row,
        output_tokens=row.output_tokens[:cut] + other.output_tokens[cut:],
        logprobs=row.logprobs[:cut] + other.logprobs[cut:],
        finish=other.finish,
        proof=row.proof[: (cut - 1) * size] + other.proof[(cut - 1) * size :],
    )


class CachedAnswers(OtherWeights):
    """Sends answers that it gave to the same prompts earlier: one version older, and drawn with another lease's seed."""

    def requests(self, requests: Sequence[GenerationRequest], lease: Lease) -> Sequence[GenerationRequest]:
        return [other_seed(request, lease) for request in requests]


STALE_RATES = (1e-6, 1e-5, 1e-4)
"""Learning rates of the step that a stale worker leaves out."""

ENGINE_LIES: dict[str, Callable[..., PlainEngine]] = {
    "int8-half-of-layers": partial(LowerPrecisionEngine, bits=8),
    "int4-half-of-layers": partial(LowerPrecisionEngine, bits=4),
    "skipped-layers-late": SkippedLayersEngine,
    "int8-cache": partial(QuantisedCacheEngine, bits=8),
    "int4-cache": partial(QuantisedCacheEngine, bits=4),
    "edge-0.003": partial(EdgeEngine, distance=0.003),
    "edge-0.015": partial(EdgeEngine, distance=0.015),
    "edge-0.08": partial(EdgeEngine, distance=0.08),
}
"""Lies that need an engine of their own; they run only models that Decoder supports."""

ADAPTIVE_LIES: dict[str, Callable[[], Behaviour]] = {
    "honest-prefix-then-copy": HonestPrefix,
    "cached-answers": partial(CachedAnswers, partial(older, rate=1e-5)),
    **{f"stale-by-1-at-{rate:g}": partial(OtherWeights, partial(older, rate=rate)) for rate in STALE_RATES},
}
