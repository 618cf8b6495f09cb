"""What a worker asks of an engine: rows in, finished rows with log-probs and proofs out. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.model.tokenizer import Tokenizer
from shoal.wire.rollouts import Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One row to generate. Its tokens follow from the prompt, the weights and `sample_seed` (wire/seeded_draw.py) alone."""

    prompt_index: int
    sample_index: int
    prompt_tokens: tuple[int, ...]
    sample_seed: int
    max_new_tokens: int
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One row generated. N tokens, N log-probs, and the proofs of the N-1 states that decoding went through."""

    request: Request
    output_tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    proof: bytes


class Engine(Protocol):
    policy_version: int | None
    """The weights it holds; None before the first load, and while or after one failed."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything left to do."""

    def load(self, folder: Path, version: int) -> None:
        """Take the weights in `folder`: the first call builds the model, later ones swap in place."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue rows. They start as room comes free, in this order."""

    def step(self) -> list[Finished]:
        """One new token for every running row. Returns rows that are complete, proofs included, in no promised order;
        a row's proofs may come some steps after its last token, but never while nothing else is left to do."""


class Limits(Protocol):
    """Of a model: model.shape.Shape."""

    @property
    def max_positions(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


def check_requests(requests: Sequence[Request], version: int | None, limits: Limits) -> None:
    """ValueError for rows that an engine with weights of `version` cannot make: taken, they would keep it from any other."""
    if version is None:
        raise ValueError("the engine holds no complete weights; load a version first")
    prompt: tuple[int, ...] = ()
    for request in requests:
        _check_row(request, limits)
        if request.prompt_tokens is not prompt:  # samples of a prompt follow each other, and share it
            prompt = request.prompt_tokens
            _check_words(request, limits)


def _check_row(request: Request, limits: Limits) -> None:
    num_prompt, num_new = len(request.prompt_tokens), request.max_new_tokens
    if not num_prompt or num_new < 1 or not request.temperature > 0:
        raise ValueError(
            f"{_where(request)}: {num_prompt} prompt tokens, max_new_tokens={num_new}, "
            f"temperature={request.temperature}; all must be above 0"
        )
    if num_prompt + num_new > limits.max_positions:
        raise ValueError(
            f"{_where(request)}: {num_prompt} prompt + {num_new} new tokens pass the model's "
            f"{limits.max_positions} positions; lower max_new_tokens"
        )


def _check_words(request: Request, limits: Limits) -> None:
    least, most = min(request.prompt_tokens), max(request.prompt_tokens)
    if least < 0 or most >= limits.vocab_size:
        raise ValueError(
            f"{_where(request)}: prompt tokens from {least} to {most}, and the model has {limits.vocab_size} words; "
            "use its own tokenizer"
        )


def _where(request: Request) -> str:
    return f"row ({request.prompt_index}, {request.sample_index})"
