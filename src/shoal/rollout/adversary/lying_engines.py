"""Engines that do not compute what was leased, for the behaviours in lies.py. Each wraps an honest engine.

B rows, T tokens, H hidden size, V vocabulary.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shoal.model.builtin import copy_all_but_weights
from shoal.model.decoder import Decoder
from shoal.model.load_model import load_causal
from shoal.model.tokenizer import Tokenizer
from shoal.model.transformers_model import TransformersModel
from shoal.model.weights import WEIGHTS_FILE, save_weights
from shoal.rollout.engine.api import Engine, FinishedRow, GenerationRequest
from shoal.rollout.engine.proofs import prove_states
from shoal.wire.run_spec import ProofSpec

Alter = Callable[[Tensor], Tensor]
"""Returns the matrix that is used instead of a weight matrix."""

OTHER_SEED = 0x5EED
"""Changes a leased sample seed into another one, by exclusive or."""
Q8_BLOCK = 32
"""Weights that share one scale in llama.cpp's Q8_0."""


def with_noise(weight: Tensor, *, relative: float) -> Tensor:
    generator = torch.Generator().manual_seed(weight.numel())
    noise = torch.randn(weight.shape, generator=generator)
    return weight + noise * relative * weight.square().mean().sqrt()


def quantised_by_channel(weight: Tensor, *, bits: int) -> Tensor:
    """Rounds weights to `bits` bits with one scale per row."""
    return _rounded(weight, levels=2 ** (bits - 1) - 1)


def quantised_in_blocks(weight: Tensor) -> Tensor:
    """Rounds weights as Q8_0 does: 8 bits, one scale for every 32 weights. Leaves rows of other lengths unchanged."""
    if weight.shape[-1] % Q8_BLOCK:
        return weight
    return _rounded(weight.reshape(-1, Q8_BLOCK), levels=127).reshape(weight.shape)


def older(weight: Tensor, *, rate: float, versions: int = 1) -> Tensor:
    """Returns weights of an earlier version: each weight moved by plus or minus the learning rate, once per version.

    A sum of n random signs is 2 b - n, where b is the number of set bits among n random bits.
    """
    generator = torch.Generator().manual_seed(weight.numel())
    bits = torch.randint(0, 1 << versions, weight.shape, generator=generator, dtype=torch.uint8)
    steps = torch.tensor([2.0 * value.bit_count() - versions for value in range(1 << versions)])
    return weight + rate * steps[bits.int()]


def typical_sizes(model: Decoder | TransformersModel) -> Tensor:
    """Returns [H] the usual size of each channel of a state: the scale of the final norm, or 1 if it has none or scales by 1 + 0."""
    width = model.shape.hidden_size
    scales = [
        one for name, one in model.named_parameters() if one.shape == (width,) and name.endswith("weight")
    ]
    return scales[-1].detach() if scales and scales[-1].any() else torch.ones(width)


def _rounded(weight: Tensor, *, levels: int) -> Tensor:
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / levels
    return (weight / scale).round() * scale


class WrappedEngine:
    """Passes every call on to `inner`; subclasses change what they lie about."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.policy_version = inner.policy_version
        self.proof = ProofSpec()
        """The proof settings of the current lease, for engines that build their own proofs."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.inner.tokenizer

    @property
    def has_work(self) -> bool:
        return self.inner.has_work

    def load(self, folder: Path, version: int) -> None:
        self.inner.load(folder, version)
        self.policy_version = version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.inner.submit(requests)

    def step(self) -> list[FinishedRow]:
        return self.inner.step()


class AlteredEngine(WrappedEngine):
    """Generates with weights that were never published."""

    def __init__(self, inner: Engine, alter: Alter) -> None:
        super().__init__(inner)
        self._alter = alter

    def load(self, folder: Path, version: int) -> None:
        model = load_causal(folder)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:  # the experts of a layer are one tensor of three dimensions
                    parameter.copy_(self._alter(parameter))
        with tempfile.TemporaryDirectory(prefix="shoal-lie-") as scratch:
            altered = Path(scratch)
            copy_all_but_weights(folder, altered)
            save_weights(model, altered / WEIGHTS_FILE)
            super().load(altered, version)


class FrozenEngine(WrappedEngine):
    """Keeps the first version it loaded and claims to have every later one."""

    def load(self, folder: Path, version: int) -> None:
        if self.inner.policy_version is None:
            self.inner.load(folder, version)
        self.policy_version = version


class PrefilledEngine(AlteredEngine):
    """Takes tokens from a cheaper model (here: coarser weights), states and log-probs from the leased one."""

    def __init__(self, inner: Engine, dtype: torch.dtype, device: str) -> None:
        super().__init__(inner, lambda weight: quantised_by_channel(weight, bits=4))
        self._dtype, self._device = dtype, device
        self._leased: Decoder | TransformersModel | None = None

    def load(self, folder: Path, version: int) -> None:
        self._leased = load_causal(folder, self._dtype, self._device)
        super().load(folder, version)

    @torch.inference_mode()
    def step(self) -> list[FinishedRow]:
        return [self._through_leased(row) for row in self.inner.step()]

    def _through_leased(self, row: FinishedRow) -> FinishedRow:
        assert self._leased is not None, "load() must be called before step()"
        prompt, output = row.request.prompt_tokens, row.output_tokens
        tokens_1T = torch.tensor([prompt + output[:-1]], device=self._device)
        positions_1T = torch.arange(tokens_1T.shape[1], device=self._device)[None]
        states_TH = self._leased(tokens_1T, positions_1T)[0, len(prompt) - 1 :]
        logprobs_TV = torch.log_softmax(
            self._leased.logits(states_TH).float() / row.request.temperature, dim=-1
        )
        logprobs_T = logprobs_TV.gather(1, torch.tensor(output, device=self._device)[:, None])[:, 0]
        (proof,) = prove_states([states_TH[1:]], self.proof)
        return replace(row, logprobs=tuple(logprobs_T.tolist()), proof=proof)


class TypicalEngine(WrappedEngine):
    """Generates real tokens but builds proofs from each channel's usual size, which is its norm weight."""

    def load(self, folder: Path, version: int) -> None:
        super().load(folder, version)
        self._typical_H = typical_sizes(load_causal(folder))

    def step(self) -> list[FinishedRow]:
        rows = self.inner.step()
        states = [self._typical_H.expand(len(row.output_tokens) - 1, -1) for row in rows]
        proofs = prove_states(states, self.proof)
        return [replace(row, proof=proof) for row, proof in zip(rows, proofs, strict=True)]


class BestEngine(WrappedEngine):
    """Draws each row several times, once as leased, and keeps the draw with the highest mean log-prob."""

    NUM_DRAWS = 4

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self._draws: dict[tuple[int, int], list[FinishedRow]] = {}
        self._leased: dict[tuple[int, int], GenerationRequest] = {}

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self._leased[request.prompt_index, request.sample_index] = request
        self.inner.submit(
            [
                replace(request, sample_seed=request.sample_seed ^ draw * OTHER_SEED)
                for request in requests
                for draw in range(self.NUM_DRAWS)
            ]
        )

    def step(self) -> list[FinishedRow]:
        best = []
        for row in self.inner.step():
            place = (row.request.prompt_index, row.request.sample_index)
            draws = self._draws.setdefault(place, [])
            draws.append(row)
            if len(draws) == self.NUM_DRAWS:
                chosen = max(self._draws.pop(place), key=lambda one: sum(one.logprobs) / len(one.logprobs))
                best.append(replace(chosen, request=self._leased.pop(place)))
        return best
