"""What a worker asks of an engine: rows in, finished rows with log-probs and proofs out. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.model.tokenizer import Tokenizer
from shoal.wire.rollouts import Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One row to generate. Its tokens follow from the prompt, the weights and `sample_seed` (wire/draw.py) alone."""

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


def check_request(request: Request, max_positions: int) -> None:
    """ValueError for a row that no engine can make."""
    where = f"row ({request.prompt_index}, {request.sample_index})"
    length = len(request.prompt_tokens) + request.max_new_tokens
    if not request.prompt_tokens or request.max_new_tokens < 1 or request.temperature <= 0:
        raise ValueError(
            f"{where}: {len(request.prompt_tokens)} prompt tokens, max_new_tokens={request.max_new_tokens}, "
            f"temperature={request.temperature}; all must be above 0"
        )
    if length > max_positions:
        raise ValueError(
            f"{where}: {len(request.prompt_tokens)} prompt + {request.max_new_tokens} new tokens pass the model's "
            f"{max_positions} positions; lower max_new_tokens"
        )
