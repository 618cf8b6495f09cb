"""What a worker asks of an engine: requests in, finished rows with log-probs and proofs out.

make_requests, make_table   from a lease to requests, and from finished rows to the table that is submitted
Engine, generate            the interface that TorchEngine, TransformersEngine and VllmEngine have, and a loop over its steps
Behaviour                   hooks between lease, engine and submission; adversary/ overrides them

No torch here. selection.make_engine chooses between the engines.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from shoal.model.stop_strings import stopped_after
from shoal.model.tokenizer import Tokenizer, encode_leased_prompts
from shoal.net.waiting import Stopped
from shoal.wire.lease import Lease
from shoal.wire.rollouts import Finish, Rollout, RolloutTable
from shoal.wire.seeded_draw import sample_seed

if TYPE_CHECKING:
    from shoal.model.shape import Shape
    from shoal.model.transformers_model import ModelLimits

EngineName = Literal["torch", "vllm"]
ComputeDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One row to generate. Its tokens depend on prompt, weights and `sample_seed` (wire/seeded_draw.py) alone."""

    prompt_index: int
    sample_index: int
    prompt_tokens: tuple[int, ...]
    sample_seed: int
    max_new_tokens: int
    temperature: float
    stop: tuple[str, ...] = ()
    """The row ends with the token that completes one of these texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRow:
    """One generated row: N tokens, N log-probs, and proofs of the N-1 states that decoding passed through."""

    request: GenerationRequest
    output_tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    proof: bytes

    def to_rollout(self) -> Rollout:
        return Rollout(
            prompt_index=self.request.prompt_index,
            sample_index=self.request.sample_index,
            prompt_tokens=self.request.prompt_tokens,
            output_tokens=self.output_tokens,
            logprobs=self.logprobs,
            finish=self.finish,
            proof=self.proof,
        )


def make_requests(lease: Lease, tokenizer: Tokenizer) -> list[GenerationRequest]:
    """Returns a request for every sample of every prompt, with the seed from which a validator repeats the draw."""
    return [
        GenerationRequest(
            prompt_index=prompt_index,
            sample_index=sample_index,
            prompt_tokens=prompt_tokens,
            sample_seed=sample_seed(lease.seed, prompt_index, sample_index),
            max_new_tokens=lease.sampling.max_new_tokens,
            temperature=lease.sampling.temperature,
            stop=lease.task.stop,
        )
        for prompt_index, prompt_tokens in enumerate(map(tuple, encode_leased_prompts(lease, tokenizer)))
        for sample_index in range(lease.sampling.samples_per_prompt)
    ]


def make_table(
    lease: Lease, policy_version: int, finished: Iterable[FinishedRow], made_by: str = "", replay: str = ""
) -> RolloutTable:
    """Returns the table that answers a lease. `made_by` is the declared compute class, `replay` the declared ReplayTerms."""
    rows = tuple(row.to_rollout() for row in finished)
    return RolloutTable(
        lease_id=lease.lease_id, policy_version=policy_version, rows=rows, made_by=made_by, replay=replay
    )


def ending(request: GenerationRequest, tokens: Sequence[int], tokenizer: Tokenizer) -> tuple[int, Finish]:
    """Returns how many of the generated tokens belong to the row, and why it ends there."""
    count = stopped_after(tokens, request.stop, tokenizer.decode)
    kept = tokens if count is None else tokens[:count]
    if kept[-1] in tokenizer.end_tokens:
        return len(kept), Finish.EOS
    return len(kept), Finish.LENGTH if count is None else Finish.STOP


class Engine(Protocol):
    """Generates rows with the weights it holds."""

    @property
    def policy_version(self) -> int | None:
        """Version of the weights; None before the first load, and during and after a load that failed."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def has_work(self) -> bool:
        """Returns whether `step` has anything left to do."""

    def load(self, folder: Path, version: int) -> None:
        """Loads the weights in `folder`. The first call builds the model, later calls swap weights in place."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues rows. They start in this order, as memory allows."""

    def step(self) -> list[FinishedRow]:
        """Generates one token for every running row. Returns completed rows with their proofs, in any order.

        A row may be returned some steps after its last token, but not later than when nothing else is left to do.
        """


def generate(
    engine: Engine, requests: Sequence[GenerationRequest], stop: threading.Event | None
) -> Iterator[list[FinishedRow]]:
    """Yields the rows that each step finished, until all are finished. Raises Stopped if `stop` is set."""
    engine.submit(requests)
    while engine.has_work:
        if stop is not None and stop.is_set():
            raise Stopped("stopped while generating")
        yield engine.step()


class Behaviour:
    """What a worker does with a lease, at each point where a dishonest worker would interfere.

    This class changes nothing: it is the honest behaviour. `shoal worker --lie` passes one of adversary/lies.py instead,
    so that the honest code needs no branches for lies.
    """

    def compute_dtype(self, leased: ComputeDtype) -> ComputeDtype:
        """Returns the dtype that the engine computes in."""
        return leased

    def engine(self, engine: Engine) -> Engine:
        """Returns the engine to use. Called for each new engine, before it loads anything."""
        return engine

    def requests(self, requests: Sequence[GenerationRequest], lease: Lease) -> Sequence[GenerationRequest]:
        """Returns the requests that are generated for a lease."""
        return requests

    def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
        """Returns the table that is reported for a lease."""
        return table

    def data(self, data: bytes) -> bytes:
        """Returns the bytes that are sent."""
        return data


def check_idle(engine: Engine, version: int) -> None:
    """Raises ValueError if rows are unfinished, which the weights of `version` would change."""
    if engine.has_work:
        raise ValueError(
            f"version {version} came while rows of version {engine.policy_version} are unfinished; finish them first"
        )


def check_requests(
    requests: Sequence[GenerationRequest], version: int | None, limits: "Shape | ModelLimits"
) -> None:
    """Raises ValueError for rows that an engine with weights of `version` cannot generate.

    Accepting one would block every later row.
    """
    if version is None:
        raise ValueError("the engine holds no complete weights; load a version first")
    prompt: tuple[int, ...] = ()
    for request in requests:
        name = f"row ({request.prompt_index}, {request.sample_index})"
        num_prompt, num_new = len(request.prompt_tokens), request.max_new_tokens
        if not num_prompt or num_new < 1 or not request.temperature > 0:
            raise ValueError(
                f"{name}: {num_prompt} prompt tokens, max_new_tokens={num_new}, temperature={request.temperature}; "
                "all must be above 0"
            )
        if num_prompt + num_new > limits.max_positions:
            raise ValueError(
                f"{name}: {num_prompt} prompt + {num_new} new tokens exceed the model's {limits.max_positions} positions; "
                "lower max_new_tokens or shorten the prompt"
            )
        # Consecutive samples share their prompt: its tokens are checked once.
        if request.prompt_tokens is prompt:
            continue
        prompt = request.prompt_tokens
        if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
            raise ValueError(
                f"{name}: prompt tokens from {min(prompt)} to {max(prompt)}, but the model's vocabulary has "
                f"{limits.vocab_size} entries; use the model's own tokenizer"
            )
