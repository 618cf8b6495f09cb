"""Runs every row once through the claimed policy version and compares its tokens, log-probs and proofs with the result.

    B  rows of a batch    T  tokens of a row    N  output tokens of a batch    H  hidden size    V  vocabulary

The state at position p predicts the token at p + 1. A row of P prompt and T output tokens therefore needs the states at
P-1 .. P+T-2: all of them predict an output token, and all but the first have a proof.
"""

import contextlib
import functools
import itertools
import math
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.model.decoder import Decoder, KVCache, supports_flash_attention
from shoal.model.load_model import device_name, kernel_release
from shoal.model.packed_prefill import flat, packed_states, upload
from shoal.model.tokenizer import Tokenizer
from shoal.model.transformers_model import TransformersModel
from shoal.net.waiting import Stopped
from shoal.swarm.validator.fact_checks import RowFacts
from shoal.swarm.validator.format_checks import where
from shoal.toploc import ProofError, SegmentCheck, start_verifying
from shoal.toploc.device import HostCopy
from shoal.toploc.verify import Verification
from shoal.wire.codes import Rejected
from shoal.wire.requirements import ComputeClass
from shoal.wire.rollouts import Rollout
from shoal.wire.run_spec import ProofSpec, Sampling
from shoal.wire.seeded_draw import sample_seed, uniforms

BATCH_TOKENS = 4096
"""Tokens of one prefill on a CPU, with prompts and padding. They bound the memory for keys and values."""
DEVICE_BATCH_TOKENS = 3 << 15
"""Tokens of one prefill on a GPU: 98,304. The host needs 20 ms to launch a batch of 30 layers and its proofs, in which an H200
computes 30,000 tokens. A 7B model needs 8 GB of activations for a batch of this size."""
LOGITS_AT_ONCE = 1 << 23
"""Logits in memory at once on a CPU: 32 MiB of float32."""
DEVICE_LOGITS_AT_ONCE = 1 << 30
"""Logits in memory at once on a GPU, where they are read once and in the states' dtype: 2 GiB of bfloat16."""


Floats = npt.NDArray[np.float64]
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

    def compute_class(self) -> ComputeClass:
        """Returns what this validator checks with."""
        weight = self.decoder.head().weight_VH
        path = "transformers" if isinstance(self.decoder, TransformersModel) else "prefill"
        return ComputeClass(
            device=device_name(weight.device),
            engine="plain" if self.plain else path,
            kernels=kernel_release(),
            precision=str(weight.dtype).removeprefix("torch."),
        )


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
    # A GPU works on one batch while the host finishes the batch before it.
    while work or started is not None:
        if stop is not None and stop.is_set():
            raise Stopped("stopped between two batches of a check")
        previous, started = started, None
        if work:
            batch = work.popleft()
            try:
                started = _start_batch(policy, batch, control_seed)
            except torch.OutOfMemoryError as error:
                work.extendleft(reversed(_smaller(batch, error, alone=previous is None)))
        if previous is not None:
            new_facts, new_malformed = _finish_batch(previous, control_seed, skip=malformed.keys())
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
    total = sum(_length(entry.row) for entry in entries)
    share = total / max(1, math.ceil(total / batch_tokens))
    batch: list[_Entry] = []
    num_tokens = 0
    for entry in sorted(entries, key=lambda entry: _length(entry.row), reverse=True):
        if batch and (num_tokens >= share or (len(batch) + 1) * _length(batch[0].row) > batch_tokens):
            yield batch
            batch, num_tokens = [], 0
        batch.append(entry)
        num_tokens += _length(entry.row)
    if batch:
        yield batch


def _smaller(batch: list[_Entry], error: torch.OutOfMemoryError, *, alone: bool) -> list[list[_Entry]]:
    """Returns the halves of a batch for which memory was short. Raises CannotCheck if one row is too much, with no other batch
    in memory (`alone`)."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if len(batch) > 1:
        return [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
    if not alone:
        return [batch]
    raise CannotCheck(f"out of memory for a row of {_length(batch[0].row)} tokens: {error}") from None


def _length(row: Rollout) -> int:
    """Returns the number of tokens to run: all but the last, which predicts no token of the row."""
    return len(row.prompt_tokens) + len(row.output_tokens) - 1


def _prefill(model: Model, rows: Sequence[Rollout], *, plain: bool = False) -> list[Tensor]:
    """Returns for each row the states that predict its output tokens, [T, H]."""
    with sdpa_kernel(SDPBackend.MATH) if plain else contextlib.nullcontext():
        return _prefill_by(model, rows, packed=not plain)


def _prefill_by(model: Model, rows: Sequence[Rollout], *, packed: bool) -> list[Tensor]:
    end = max(_length(row) for row in rows)
    if end >= model.shape.max_positions:
        raise CannotCheck(f"{end + 1} tokens are more than the model's {model.shape.max_positions} positions")
    if isinstance(model, TransformersModel):
        return _prefill_padded(model, rows)
    weight = model.model.norm.weight
    if packed and supports_flash_attention(weight.device, weight.dtype):
        return packed_states(model, [(row.prompt_tokens, row.output_tokens[:-1]) for row in rows])
    return _prefill_cached(model, rows, end, weight.device)


def _prefill_padded(model: TransformersModel, rows: Sequence[Rollout]) -> list[Tensor]:
    """Computes whole rows, padded on the right, which a causal model does not attend to."""
    tokens_BT = torch.zeros(len(rows), max(_length(row) for row in rows), dtype=torch.int64)
    for place, row in enumerate(rows):
        fed = row.prompt_tokens + row.output_tokens[:-1]
        tokens_BT[place, : len(fed)] = torch.tensor(fed)
    states_BTH = model(tokens_BT.to(model.head().weight_VH.device), tokens_BT)
    return [states_BTH[place, len(row.prompt_tokens) - 1 : _length(row)] for place, row in enumerate(rows)]


def _prefill_cached(
    decoder: Decoder, rows: Sequence[Rollout], end: int, device: torch.device
) -> list[Tensor]:
    """Computes rows with the same prompt from one prefill of it."""
    prompts = list(dict.fromkeys(row.prompt_tokens for row in rows))
    prompt_cache, last_PH = _run_prompts(decoder, prompts, device)
    index_B = torch.tensor([prompts.index(row.prompt_tokens) for row in rows], device=device)
    slots_B = torch.arange(len(rows), device=device)
    cache = _make_cache(decoder, num_slots=len(rows), max_context=end + 1, device=device)
    cache.copy_from(
        prompt_cache, source_slots=index_B, slots=slots_B, context=min(prompt_cache.max_context, end + 1)
    )
    fed_BTH = _run_outputs(decoder, rows, cache, device)
    return [
        torch.cat([last_PH[index_B[place]][None], fed_BTH[place, : len(row.output_tokens) - 1]])
        for place, row in enumerate(rows)
    ]


def _run_prompts(
    decoder: Decoder, prompts: Sequence[tuple[int, ...]], device: torch.device
) -> tuple[KVCache, Tensor]:
    """Returns the cache with the prompts' keys and values, and the state at the end of each prompt, [P, H]."""
    width = max(len(prompt) for prompt in prompts)
    # Padding comes after the tokens, where nothing reads it before it is overwritten.
    tokens_PT = torch.tensor([prompt + (0,) * (width - len(prompt)) for prompt in prompts], device=device)
    positions_PT = torch.arange(width, device=device).expand_as(tokens_PT)
    cache = _make_cache(decoder, num_slots=len(prompts), max_context=width, device=device)
    states_PTH = decoder(tokens_PT, positions_PT, cache=cache)
    last_P = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    return cache, states_PTH[torch.arange(len(prompts), device=device), last_P]


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


def _make_cache(decoder: Decoder, *, num_slots: int, max_context: int, device: torch.device) -> KVCache:
    dtype = decoder.model.norm.weight.dtype
    return KVCache(decoder.shape, num_slots=num_slots, max_context=max_context, dtype=dtype, device=device)


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
    """Of each output token: log-prob, both ends of its interval of the cumulative distribution, entropy, variance of -log p,
    and the uniform that the lease's seed gives."""


@torch.inference_mode()
def recompute_rows(submissions: Sequence[RowsToCheck], policy: LoadedPolicy) -> list[RecomputedRow]:
    """Returns states and token distributions of the rows of all submissions, to measure other schemes (`shoal arena`)."""
    found: dict[int, RecomputedRow] = {}
    whole = [(row, one.lease) for one in submissions for row in one.rows]
    entries = [_Entry(0, place, row, lease) for place, (row, lease) in enumerate(whole)]
    for batch in _batches(entries, policy.batch_tokens):
        states = _prefill(policy.decoder, [entry.row for entry in batch], plain=policy.plain)
        columns_5N = _intervals(policy.decoder, batch, torch.cat(states)).double().cpu().numpy()
        columns_6N = np.concatenate([columns_5N, _uniforms(batch)[None]])
        for entry, states_TH, columns_6T in zip(batch, states, _per_token(batch, columns_6N), strict=True):
            found[entry.place] = RecomputedRow(states_TH, columns_6T)
    return [found[place] for place in range(len(whole))]


def _start_batch(policy: LoadedPolicy, batch: list[_Entry], control_seed: int) -> _StartedBatch:
    """Starts the prefill, the proofs and the token distributions of a batch; on a GPU this only queues them."""
    decoder = policy.decoder
    states_NH = torch.cat(_prefill(decoder, [entry.row for entry in batch], plain=policy.plain))
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
    distribution = _device_distribution if on_device else _distribution
    # Rows of one temperature are neighbours: evaluations may have another one than training.
    runs = itertools.groupby(batch, key=lambda entry: entry.lease.sampling.temperature)
    sizes = [(value, sum(len(entry.row.output_tokens) for entry in entries)) for value, entries in runs]
    lengths = [size for _, size in sizes]
    parts = [
        distribution(decoder, hidden, tokens, temperature)
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


def _device_distribution(decoder: Model, hidden_NH: Tensor, tokens_N: Tensor, temperature: float) -> Tensor:
    from shoal.model.kernels.logits import token_intervals

    return token_intervals(decoder.logits(hidden_NH), tokens_N, temperature)


def _distribution(decoder: Model, hidden_NH: Tensor, tokens_N: Tensor, temperature: float) -> Tensor:
    """Returns [5, N] float64: each token's log-prob, the two ends of its interval of the cumulative distribution over
    ascending ids, and entropy and variance of -log p under the whole distribution."""
    logprobs_NV = torch.log_softmax(decoder.logits(hidden_NH).float() / temperature, dim=-1)
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
