"""Runs every row once through the claimed policy version and compares its tokens, log-probs and proofs with the result.

B  rows of a batch    T  tokens of a row    N  output tokens of a batch    H  hidden size    V  vocabulary
"""

import contextlib
import functools
import itertools
import math
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.files import is_out_of_memory
from shoal.model.packed_prefill import flat, upload
from shoal.net.waiting import Stopped
from shoal.swarm.validator.fact_checks import RowFacts
from shoal.swarm.validator.format_checks import where
from shoal.swarm.validator.prefill import CannotCheck, LoadedPolicy, Model, num_fed, prefill
from shoal.toploc import ProofError, SegmentCheck, start_verifying
from shoal.toploc.device import HostCopy
from shoal.toploc.verify import Verification
from shoal.wire.codes import Rejected
from shoal.wire.rollouts import Rollout
from shoal.wire.run_spec import ProofSpec, Sampling
from shoal.wire.seeded_draw import sample_seed, uniforms

LOGITS_AT_ONCE = 1 << 23
"""Logits in memory at once on a CPU: 32 MiB of float32."""
DEVICE_LOGITS_AT_ONCE = 1 << 30
"""Logits in memory at once on a GPU, where they are read once and in the states' dtype: 2 GiB of bfloat16."""


Floats = npt.NDArray[np.float64]


class SamplingTerms(Protocol):
    """The parts of a lease that decide how its rows are sampled and proven."""

    @property
    def seed(self) -> str: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def proof(self) -> ProofSpec: ...


class CalibrationTerms(NamedTuple):
    """Sampling terms of rows without a lease, for calibration and benchmarks."""

    seed: str
    sampling: Sampling
    proof: ProofSpec


class RowsToCheck(NamedTuple):
    """The rows of one submission and the terms of its lease."""

    rows: Sequence[Rollout]
    lease: SamplingTerms


def recompute(
    rows: Sequence[Rollout],
    lease: SamplingTerms,
    policy: LoadedPolicy,
    *,
    control_seed: int,
    stop: threading.Event | None = None,
) -> list[RowFacts]:
    """Returns the facts about each row, in order. Raises Rejected for a malformed proof, CannotCheck, or Stopped."""
    (found,) = recompute_many([RowsToCheck(rows, lease)], policy, control_seed=control_seed, stop=stop)
    if isinstance(found, Rejected):
        raise found
    return found


@torch.inference_mode()
def recompute_many(
    submissions: Sequence[RowsToCheck],
    policy: LoadedPolicy,
    *,
    control_seed: int,
    stop: threading.Event | None = None,
) -> list[list[RowFacts] | Rejected]:
    """Returns for each submission the facts about its rows, or Rejected if one of its proofs is malformed.

    Rows of all submissions share prefills. Their leases must belong to one run, so that only their seeds differ. Raises
    CannotCheck or Stopped.
    """
    entries = [
        _Entry(number, index, row, one.lease)
        for number, one in enumerate(submissions)
        for index, row in enumerate(one.rows)
    ]
    facts: dict[tuple[int, int], RowFacts] = {}
    malformed: dict[int, Rejected] = {}
    started: _StartedBatch | None = None
    work = deque(_batches(entries, policy.batch_tokens))
    overlap = True
    # A GPU works on one batch while the host finishes the batch before it.
    while work or started is not None:
        if stop is not None and stop.is_set():
            raise Stopped("stopped between two batches of a check")
        previous, started = started, None
        if work and (overlap or previous is None):
            batch = work.popleft()
            try:
                started = _start_batch(policy, batch, control_seed)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                work.extendleft(reversed(_smaller(batch, error, alone=previous is None)))
        if previous is None:
            continue
        try:
            new_facts, new_malformed = _finish_batch(previous, control_seed, skip=malformed.keys())
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            work.extendleft(reversed(_smaller(previous.batch, error, alone=started is None)))
            overlap = False  # from now on one batch has all the memory
            continue
        facts.update(new_facts)
        malformed.update(new_malformed)
    return [
        malformed.get(number) or [facts[number, index] for index in range(len(one.rows))]
        for number, one in enumerate(submissions)
    ]


class _Entry(NamedTuple):
    """A row, with the number of its submission and its place in it."""

    submission: int
    place: int
    row: Rollout
    lease: SamplingTerms


def _batches(entries: Sequence[_Entry], batch_tokens: int) -> Iterator[list[_Entry]]:
    """Yields batches of rows, longest first, so that rows of one batch have similar lengths and need little padding.

    Uses as few batches as possible, of about equal size: a small last batch would take as long to launch as a large one.
    """
    total = sum(num_fed(entry.row) for entry in entries)
    share = total / max(1, math.ceil(total / batch_tokens))
    batch: list[_Entry] = []
    num_tokens = 0
    for entry in sorted(entries, key=lambda entry: num_fed(entry.row), reverse=True):
        if batch and (num_tokens >= share or (len(batch) + 1) * num_fed(batch[0].row) > batch_tokens):
            yield batch
            batch, num_tokens = [], 0
        batch.append(entry)
        num_tokens += num_fed(entry.row)
    if batch:
        yield batch


def _smaller(batch: list[_Entry], error: Exception, *, alone: bool) -> list[list[_Entry]]:
    """Returns the halves of a batch that was too large. Raises CannotCheck if it is one row, `alone` in memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if len(batch) > 1:
        return [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
    if not alone:
        return [batch]
    raise CannotCheck(f"out of memory for a row of {num_fed(batch[0].row)} tokens: {error}") from None


class _StartedBatch(NamedTuple):
    """A batch that is computed or, on a GPU, queued."""

    batch: list[_Entry]
    states: tuple[Tensor, ...]
    """Kept until the batch is finished: the allocator must not reuse the memory while a second CUDA stream reads it."""
    finite: HostCopy
    proofs: Verification | None
    """None if a proof could not even be parsed."""
    per_token_4N: HostCopy


class RecomputedRow(NamedTuple):
    """What a validator computes of a row, before any comparison with what the worker sent."""

    states_TH: Tensor
    """The states that predict the output tokens; all but the first have a proof."""
    columns_6T: Floats
    """For each output token: log-prob, both ends of its interval of the cumulative distribution, entropy, variance of -log p,
    and the uniform that the lease's seed gives."""


@torch.inference_mode()
def recompute_rows(submissions: Sequence[RowsToCheck], policy: LoadedPolicy) -> list[RecomputedRow]:
    """Returns states and token distributions of the rows of all submissions, to measure other schemes (`shoal arena`)."""
    found: dict[int, RecomputedRow] = {}
    whole = [(row, one.lease) for one in submissions for row in one.rows]
    entries = [_Entry(0, place, row, lease) for place, (row, lease) in enumerate(whole)]
    for batch in _batches(entries, policy.batch_tokens):
        states = prefill(policy.decoder, [entry.row for entry in batch], plain=policy.plain)
        columns_5N = _intervals(policy.decoder, batch, torch.cat(states)).double().cpu().numpy()
        columns_6N = np.concatenate([columns_5N, _uniforms(batch)[None]])
        for entry, states_TH, columns_6T in zip(batch, states, _per_token(batch, columns_6N), strict=True):
            found[entry.place] = RecomputedRow(states_TH, columns_6T)
    return [found[place] for place in range(len(whole))]


def _start_batch(policy: LoadedPolicy, batch: list[_Entry], control_seed: int) -> _StartedBatch:
    """Starts the prefill, the proofs and the token distributions of a batch; on a GPU this only queues them."""
    decoder = policy.decoder
    states_NH = torch.cat(prefill(decoder, [entry.row for entry in batch], plain=policy.plain))
    states = torch.split(states_NH, [len(entry.row.output_tokens) for entry in batch])
    with _side_stream(states_NH.device):
        finite = HostCopy(torch.isfinite(states_NH).all())
        try:
            proofs = _start_proofs(batch, states, control_seed)
        except ProofError:
            proofs = None
    return _StartedBatch(batch, states, finite, proofs, HostCopy(_token_columns(decoder, batch, states_NH)))


@contextlib.contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """Queues the block on a second CUDA stream, after everything queued so far and parallel to everything queued later.

    Proofs take about a hundred small kernels, which leave most of the GPU free.
    """
    if device.type != "cuda":
        yield
        return
    stream = _priority_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


@functools.cache
def _priority_stream(device: torch.device) -> torch.cuda.Stream:
    # High priority, because the host reads its results while the GPU computes the rest.
    return torch.cuda.Stream(device, priority=-1)


def _finish_batch(
    started: _StartedBatch, control_seed: int, *, skip: Collection[int]
) -> tuple[dict[tuple[int, int], RowFacts], dict[int, Rejected]]:
    """Returns the facts by submission and row, and Rejected for each submission with a malformed proof.

    Submissions in `skip` are left out.
    """
    if not bool(started.finite.wait()):
        raise CannotCheck("the policy's own states are not finite; its weights are broken")
    segments, malformed = _verify_proofs(started, control_seed, skip=skip)
    per_token = _per_token(started.batch, started.per_token_4N.wait().numpy())
    facts = {
        (entry.submission, entry.place): RowFacts(tuple(segments[place]), *per_token[place])
        for place, entry in enumerate(started.batch)
        if place in segments
    }
    return facts, malformed


def _verify_proofs(
    started: _StartedBatch, control_seed: int, *, skip: Collection[int]
) -> tuple[dict[int, list[SegmentCheck]], dict[int, Rejected]]:
    """Returns the checks of each row by its place in the batch, and Rejected for each submission with a malformed proof.

    A malformed proof excludes its whole submission, and the remaining proofs are verified again.
    """
    batch = started.batch
    places = [place for place, entry in enumerate(batch) if entry.submission not in skip]
    proofs = started.proofs if len(places) == len(batch) else None
    malformed: dict[int, Rejected] = {}
    while places:
        try:
            if proofs is None:
                proofs = _start_proofs(
                    [batch[place] for place in places],
                    [started.states[place] for place in places],
                    control_seed,
                )
            return dict(zip(places, proofs.checks(), strict=True)), malformed
        except ProofError as error:
            entry = batch[places[error.row]]
            malformed[entry.submission] = Rejected(
                "reject.malformed_proof", f"{where(entry.row)}: {error.reason}"
            )
            places = [place for place in places if batch[place].submission != entry.submission]
            proofs = None
    return {}, malformed


def _start_proofs(batch: Sequence[_Entry], states: Sequence[Tensor], control_seed: int) -> Verification:
    proof = batch[0].lease.proof
    return start_verifying(
        [entry.row.proof for entry in batch],
        [s[1:] for s in states],
        topk=proof.topk,
        segment_tokens=proof.segment_tokens,
        control_seed=control_seed,
    )


def _intervals(decoder: Model, batch: Sequence[_Entry], states_NH: Tensor) -> Tensor:
    """Returns [5, N] of each output token: log-prob, both ends of its interval, entropy and variance of -log p."""
    tokens_N = upload(flat(entry.row.output_tokens for entry in batch).astype(np.int64), states_NH.device)
    on_device = states_NH.device.type == "cuda"
    chunk = max(1, (DEVICE_LOGITS_AT_ONCE if on_device else LOGITS_AT_ONCE) // decoder.shape.vocab_size)
    distribution = _distribution
    if on_device:
        from shoal.model.kernels.logits import token_intervals as distribution
    # Rows of one temperature are neighbours: evaluations may have another one than training.
    runs = itertools.groupby(batch, key=lambda entry: entry.lease.sampling.temperature)
    sizes = [(value, sum(len(entry.row.output_tokens) for entry in entries)) for value, entries in runs]
    lengths = [size for _, size in sizes]
    parts = [
        distribution(decoder.logits(hidden), tokens, temperature)
        for (temperature, _), states, ids in zip(
            sizes, torch.split(states_NH, lengths), torch.split(tokens_N, lengths), strict=True
        )
        for hidden, tokens in zip(torch.split(states, chunk), torch.split(ids, chunk), strict=True)
    ]
    return torch.cat(parts, dim=1)


def _token_columns(decoder: Model, batch: Sequence[_Entry], states_NH: Tensor) -> Tensor:
    """Returns [4, N] float64: each output token's log-prob, draw distance, surprise and variance of the surprise."""
    uniform_N = upload(_uniforms(batch), states_NH.device)
    logprob_N, low_N, high_N, entropy_N, variance_N = _intervals(decoder, batch, states_NH).double()
    distance_N = torch.maximum(low_N - uniform_N, uniform_N - high_N).clamp(min=0)
    return torch.stack([logprob_N, distance_N, -logprob_N - entropy_N, variance_N])


def _per_token(batch: Sequence[_Entry], columns_4N: Floats) -> list[Floats]:
    """Returns each row's part of the columns."""
    ends = np.cumsum([len(entry.row.output_tokens) for entry in batch])[:-1]
    return np.split(columns_4N, ends, axis=1)


def _distribution(logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> Tensor:
    """Returns [5, N] float64: each token's log-prob, the two ends of its interval of the cumulative distribution over
    ascending ids, and entropy and variance of -log p under the whole distribution."""
    logprobs_NV = torch.log_softmax(logits_NV.float() / temperature, dim=-1)
    logprob_N = logprobs_NV.gather(1, tokens_N[:, None]).squeeze(1).double()
    ids_V = torch.arange(logprobs_NV.shape[1], device=tokens_N.device)
    probs_NV = logprobs_NV.exp()
    total_N = probs_NV.sum(dim=1, dtype=torch.float64)  # 1 except for rounding
    low_N = torch.where(ids_V < tokens_N[:, None], probs_NV, 0.0).sum(dim=1, dtype=torch.float64)
    entropy_N = -torch.einsum("nv,nv->n", probs_NV, logprobs_NV).double()
    square_N = torch.einsum("nv,nv->n", probs_NV, logprobs_NV.square()).double()
    return torch.stack(
        [
            logprob_N,
            low_N / total_N,
            (low_N + logprob_N.exp()) / total_N,
            entropy_N,
            (square_N - entropy_N.square()).clamp(min=0),
        ]
    )


def _uniforms(batch: Sequence[_Entry]) -> Floats:
    """Returns the uniforms of all output tokens, computed together: one call per row takes three times as long."""
    counts = [len(entry.row.output_tokens) for entry in batch]
    seeds = np.array(
        [sample_seed(entry.lease.seed, entry.row.prompt_index, entry.row.sample_index) for entry in batch],
        dtype=np.uint64,
    )
    firsts = np.cumsum([0, *counts[:-1]])
    position_N = np.arange(sum(counts)) - np.repeat(firsts, counts)
    return uniforms(np.repeat(seeds, counts), position_N.astype(np.uint64))
