"""Behaviours of dishonest workers, each cheating in one way, to see them caught: `shoal worker --lie KIND`.

Allowed only against a coordinator on this machine. Each lie is made as well as it can be without doing the work, so that
the check it is meant for is the one that has to find it. Honest code does not import this package: the command line
passes one of these behaviours to `run_worker`.
"""

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import httpx2

from shoal.model.load_model import DTYPES
from shoal.model.tokenizer import Tokenizer, encode_leased_prompts, leased_setting
from shoal.rollout.adversary.lying_engines import (
    OTHER_SEED,
    Alter,
    AlteredEngine,
    BestEngine,
    FrozenEngine,
    PrefilledEngine,
    TypicalEngine,
    WrappedEngine,
    quantised_by_channel,
    quantised_in_blocks,
    with_noise,
)
from shoal.rollout.engine.api import Behaviour, ComputeDtype, Engine, GenerationRequest
from shoal.tasks import make_task
from shoal.toploc.field import PRIME
from shoal.toploc.proof import num_segments
from shoal.wire.lease import Lease
from shoal.wire.rollouts import Finish, Rollout, RolloutTable
from shoal.wire.seeded_draw import problem_seeds

FORGED_VALUE = 0x4010
"""2.25 as bfloat16: about the size of the largest normed states, so that exponents match as often as possible."""


def make_behaviour(lie: str, coordinator: str) -> Behaviour:
    """Returns the behaviour of that name. Raises ValueError if it is unknown or the coordinator is not on this machine."""
    if lie not in LIES:
        raise ValueError(f"unknown lie {lie!r}; known: {', '.join(LIES)}")
    if not is_loopback(coordinator):
        raise ValueError(
            f"--lie {lie} is allowed only with a coordinator on this machine, and {coordinator} is not; "
            "another operator's run would eject this node"
        )
    return LIES[lie]()


def is_loopback(url: str) -> bool:
    host = httpx2.URL(url).host
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class OtherEngine(Behaviour):
    """Works with the engine that `make` returns for the honest one, and tells it which proofs the lease asks for."""

    def __init__(self, make: Callable[[Engine], WrappedEngine]) -> None:
        self._make = make
        self._engine: WrappedEngine | None = None

    def engine(self, engine: Engine) -> Engine:
        self._engine = self._make(engine)
        return self._engine

    def requests(self, requests: Sequence[GenerationRequest], lease: Lease) -> Sequence[GenerationRequest]:
        assert self._engine is not None, "engine() must be called before requests()"
        self._engine.proof = lease.proof
        return requests


class OtherWeights(OtherEngine):
    """Generates with weights that were never published: the leased ones, changed by `alter`."""

    def __init__(self, alter: Alter) -> None:
        super().__init__(partial(AlteredEngine, alter=alter))


class OtherDtype(Behaviour):
    """Computes in the dtype that was not leased: bfloat16 is faster, and some hardware has float32 only."""

    def compute_dtype(self, leased: ComputeDtype) -> ComputeDtype:
        return "bfloat16" if leased == "float32" else "float32"


class Prefilled(OtherEngine):
    """Takes a cheaper model's tokens and runs them once through the leased one, which gives real proofs and log-probs."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(lambda engine: PrefilledEngine(engine, DTYPES[self._dtype], device))
        self._dtype: ComputeDtype = "float32"

    def compute_dtype(self, leased: ComputeDtype) -> ComputeDtype:
        self._dtype = leased
        return leased


class ChangedRequests(Behaviour):
    """Generates what `change` makes of each request."""

    def __init__(self, change: Callable[[GenerationRequest, Lease], GenerationRequest]) -> None:
        self._change = change

    def requests(self, requests: Sequence[GenerationRequest], lease: Lease) -> Sequence[GenerationRequest]:
        return [self._change(request, lease) for request in requests]


def edited_prompt(request: GenerationRequest, lease: Lease) -> GenerationRequest:
    """Exchanges two tokens of one prompt, in what is run and in what is sent."""
    changed = request.prompt_index == 0
    return replace(request, prompt_tokens=_swapped(request.prompt_tokens)) if changed else request


def cut_short(request: GenerationRequest, lease: Lease) -> GenerationRequest:
    """Stops at half the allowed length; the row then claims that it was reached."""
    return replace(request, max_new_tokens=max(1, lease.sampling.max_new_tokens // 2))


def other_temperature(request: GenerationRequest, lease: Lease, *, factor: float) -> GenerationRequest:
    """Samples at `factor` times the leased temperature."""
    return replace(request, temperature=factor * request.temperature)


def other_seed(request: GenerationRequest, lease: Lease) -> GenerationRequest:
    """Samples honestly but with other seeds. A liar could draw many answers this way and send only the best."""
    return replace(request, sample_seed=request.sample_seed ^ OTHER_SEED)


class ChangedRows(Behaviour):
    """Sends what `change` makes of each generated row."""

    def __init__(self, change: Callable[[Rollout, Lease], Rollout]) -> None:
        self._change = change

    def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
        return replace(table, rows=tuple(self._change(row, lease) for row in table.rows))


def forged_proof(row: Rollout, lease: Lease) -> Rollout:
    """Makes a proof that needs no states: a constant polynomial claims the same likely value at every index."""
    words = (PRIME, FORGED_VALUE, *[0] * (lease.proof.topk - 1))
    segments = num_segments(len(row.output_tokens) - 1, lease.proof.segment_tokens)
    return replace(row, proof=b"".join(word.to_bytes(2, "big") for word in words) * segments)


def replaced_tokens(row: Rollout, lease: Lease) -> Rollout:
    """Replaces one token in eight by the one before it, after the proofs were made.

    Keeps the last token: other checks look at how an answer ends.
    """
    tokens = list(row.output_tokens)
    tokens[7:-1:8] = row.output_tokens[6:-2:8]
    return replace(row, output_tokens=tuple(tokens))


def wrong_logprobs(row: Rollout, lease: Lease) -> Rollout:
    """Reports every token as less likely than it was, which would double its weight in the loss."""
    return replace(row, logprobs=tuple(logprob - 0.7 for logprob in row.logprobs))


class HiddenEdit(Behaviour):
    """Runs prompts changed by `edit` and reports the leased ones."""

    def __init__(self, edit: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
        self._edit = edit
        self._leased: dict[int, tuple[int, ...]] = {}

    def requests(self, requests: Sequence[GenerationRequest], lease: Lease) -> Sequence[GenerationRequest]:
        self._leased = {request.prompt_index: request.prompt_tokens for request in requests}
        return [replace(request, prompt_tokens=self._edit(request.prompt_tokens)) for request in requests]

    def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
        rows = tuple(replace(row, prompt_tokens=self._leased[row.prompt_index]) for row in table.rows)
        return replace(table, rows=rows)


class KnowsTokenizer(Behaviour):
    """A behaviour that uses the tokenizer of the engine."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def engine(self, engine: Engine) -> Engine:
        self._engine = engine
        return engine

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._engine is not None, "engine() must be called first"
        return self._engine.tokenizer


class OtherPrompts(KnowsTokenizer):
    """Answers problems of its own choice, which could be the easy ones."""

    def requests(self, requests: Sequence[GenerationRequest], lease: Lease) -> Sequence[GenerationRequest]:
        task = make_task(lease.task)
        candidates = (task.problem("train", seed).prompt for seed in range(1000))
        chosen = [prompt for prompt in candidates if prompt not in lease.prompts][: len(lease.prompts)]
        other = lease.model_copy(update={"prompts": tuple(chosen)})
        encoded = [tuple(tokens) for tokens in encode_leased_prompts(other, self.tokenizer)]
        return [replace(request, prompt_tokens=encoded[request.prompt_index]) for request in requests]


class Truncated(KnowsTokenizer):
    """Stops early and claims that the model ended there. Every state and proof is real: the last token is never fed."""

    def requests(self, requests: Sequence[GenerationRequest], lease: Lease) -> Sequence[GenerationRequest]:
        cap = max(1, lease.sampling.max_new_tokens // 4)
        return [replace(request, max_new_tokens=cap) for request in requests]

    def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
        end = min(self.tokenizer.end_tokens)
        rows = tuple(
            replace(
                row,
                output_tokens=(*row.output_tokens[:-1], end),
                logprobs=(*row.logprobs[:-1], -0.05),
                finish=Finish.EOS,
            )
            if row.finish is Finish.LENGTH
            else row
            for row in table.rows
        )
        return replace(table, rows=rows)


class CopiedRows(Behaviour):
    """Answers each prompt once and sends that answer for all of its samples."""

    def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
        first = {row.prompt_index: row for row in reversed(table.rows)}
        rows = tuple(replace(first[row.prompt_index], sample_index=row.sample_index) for row in table.rows)
        return replace(table, rows=rows)


class Replay(Behaviour):
    """Works once and sends the same file for every later lease."""

    def __init__(self) -> None:
        self._first: bytes | None = None

    def data(self, data: bytes) -> bytes:
        self._first = self._first or data
        return self._first


class Fabricated(KnowsTokenizer):
    """Sends a file that needs no model, the cheapest lie: see `fabricate`."""

    def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
        return fabricate(lease, table.policy_version, self.tokenizer)


def fabricate(lease: Lease, policy_version: int, tokenizer: Tokenizer) -> RolloutTable:
    """Returns a table of the right form without running a model: the right answer in each prompt's first sample, the reversed one in
    the others, so that every group has signal, with invented log-probs and random proofs."""
    task, rng = make_task(lease.task), Random(lease.lease_id)
    seeds = problem_seeds(
        lease.seed,
        run=lease.run,
        purpose=lease.purpose,
        chunk=lease.chunk,
        num_prompts=len(lease.prompts),
        attempts=lease.attempts,
    )
    rows = []
    for prompt_index, seed in enumerate(seeds):
        problem = task.problem(lease.purpose, seed)
        setting = leased_setting(lease, prompt_index)
        prompt_tokens = tuple(tokenizer.encode_prompt(problem.prompt, chat=lease.chat, setting=setting))
        for sample_index in range(lease.sampling.samples_per_prompt):
            text = problem.answer if sample_index == 0 else problem.answer[::-1]
            answer = tuple(tokenizer.encode_prompt(text, chat=False))[-len(text) :]
            output = (*answer[: lease.sampling.max_new_tokens - 1], min(tokenizer.end_tokens))
            segments = num_segments(len(output) - 1, lease.proof.segment_tokens)
            words = [
                word
                for _ in range(segments)
                for word in (PRIME, *(rng.randrange(PRIME) for _ in range(lease.proof.topk)))
            ]
            rows.append(
                Rollout(
                    prompt_index=prompt_index,
                    sample_index=sample_index,
                    prompt_tokens=prompt_tokens,
                    output_tokens=output,
                    logprobs=(-0.5,) * len(output),
                    finish=Finish.EOS,
                    proof=b"".join(word.to_bytes(2, "big") for word in words),
                )
            )
    return RolloutTable(lease_id=lease.lease_id, policy_version=policy_version, rows=tuple(rows))


LIES: dict[str, Callable[[], Behaviour]] = {
    "wrong-weights": partial(OtherWeights, partial(with_noise, relative=0.3)),
    "q8-weights": partial(OtherWeights, quantised_in_blocks),
    "int8-weights": partial(OtherWeights, partial(quantised_by_channel, bits=8)),
    "int4-weights": partial(OtherWeights, partial(quantised_by_channel, bits=4)),
    "other-dtype": OtherDtype,
    "stale-weights": partial(OtherEngine, FrozenEngine),
    "smaller-model": Prefilled,
    "forged-proof": partial(ChangedRows, forged_proof),
    "typical-proof": partial(OtherEngine, TypicalEngine),
    "edited-prompt": partial(ChangedRequests, edited_prompt),
    "hidden-prompt": partial(HiddenEdit, lambda tokens: tokens[:1] + tokens),
    "hidden-token": partial(HiddenEdit, lambda tokens: _one_changed(tokens)),
    "other-prompts": OtherPrompts,
    "replaced-tokens": partial(ChangedRows, replaced_tokens),
    "truncated": Truncated,
    "cut-short": partial(ChangedRequests, cut_short),
    "wrong-logprobs": partial(ChangedRows, wrong_logprobs),
    "hot-sampling": partial(ChangedRequests, partial(other_temperature, factor=2.0)),
    "cold-sampling": partial(ChangedRequests, partial(other_temperature, factor=0.5)),
    "other-seeds": partial(ChangedRequests, other_seed),
    "best-of-n": partial(OtherEngine, BestEngine),
    "copied-rows": CopiedRows,
    "replay": Replay,
    "fabricated": Fabricated,
}


TOKEN_LIES = frozenset((
    "replaced-tokens", "truncated", "cut-short", "hot-sampling", "cold-sampling", "other-seeds", "best-of-n",
    "copied-rows", "honest-prefix-then-copy", "edge-0.003", "edge-0.015", "edge-0.08",
))  # fmt: skip
"""Lies that only change tokens. An answer that still has the honest tokens contains no lie, and measurements leave it out."""


def _one_changed(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Replaces the last token that differs from the one before it by that one."""
    for index in range(len(tokens) - 1, 0, -1):
        if tokens[index] != tokens[index - 1]:
            return (*tokens[:index], tokens[index - 1], *tokens[index + 1 :])
    return (*tokens, tokens[-1])


def _swapped(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Exchanges the last two neighbours that differ."""
    for index in range(len(tokens) - 1, 0, -1):
        if tokens[index] != tokens[index - 1]:
            return (*tokens[: index - 1], tokens[index], tokens[index - 1], *tokens[index + 1 :])
    return (*tokens, tokens[-1])
