"""One prefill of every row under the claimed policy version, and what it says about tokens and proofs.

    B  rows of a batch    T  tokens of a row    N  output tokens of a batch    H  hidden size    V  vocabulary

The state at position p predicts the token at p + 1. So a row of P prompt and T output tokens needs the states at
P-1 .. P+T-2: all of them predict an output token, all but the first are proven.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.model.decoder import Decoder, KVCache, supports_flash_attention
from shoal.model.packed_prefill import flat, packed_states, upload
from shoal.model.tokenizer import Tokenizer
from shoal.net.waiting import Stopped
from shoal.swarm.validator.fact_checks import RowFacts
from shoal.swarm.validator.format_checks import where
from shoal.toploc import ProofError, SegmentCheck, start_verifying
from shoal.toploc.device import HostCopy
from shoal.toploc.verify import Verification
from shoal.wire.codes import Rejected
from shoal.wire.rollouts import Rollout
from shoal.wire.run_spec import ProofSpec, Sampling
from shoal.wire.seeded_draw import sample_seed, uniforms

BATCH_TOKENS = 4096
"""Tokens of one prefill, prompts and padding included: they bound the keys and values held at once."""
DEVICE_BATCH_TOKENS = 3 << 15
"""The same on a GPU: 98,304. To launch a batch of 30 layers and its proofs takes the host 20 ms, which an H200 needs 30,000 tokens to be
busy for; a model of 7B holds 8 GB of activations for these."""
LOGITS_AT_ONCE = 1 << 23
"""Logits held at a time: 32 MiB of float32."""
DEVICE_LOGITS_AT_ONCE = 1 << 30
"""The same on a GPU, where they are read once and in the states' dtype: 2 GiB of bfloat16."""


Floats = npt.NDArray[np.float64]


class CannotCheck(Exception):
    """Our own side failed; nobody is to blame."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy version, ready to run."""

    version: int
    decoder: Decoder
    tokenizer: Tokenizer
    batch_tokens: int = BATCH_TOKENS


class Leased(Protocol):
    """Of a lease, what rows are drawn and proven by."""

    @property
    def seed(self) -> str: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def proof(self) -> ProofSpec: ...


class Unleased(NamedTuple):
    """The same for rows that no lease asked for: to calibrate by, or to measure."""

    seed: str
    sampling: Sampling
    proof: ProofSpec


class Checked(NamedTuple):
    """Rows that are checked under one lease's terms."""

    rows: Sequence[Rollout]
    lease: Leased


def recompute(
    rows: Sequence[Rollout],
    lease: Leased,
    policy: Policy,
    *,
    control_seed: int,
    stop: threading.Event | None = None,
) -> list[RowFacts]:
    """Facts about each row, in the order given. Rejected if a proof turns out to be malformed; CannotCheck; Stopped."""
    (found,) = recompute_many([Checked(rows, lease)], policy, control_seed=control_seed, stop=stop)
    if isinstance(found, Rejected):
        raise found
    return found


@torch.inference_mode()
def recompute_many(
    submissions: Sequence[Checked],
    policy: Policy,
    *,
    control_seed: int,
    stop: threading.Event | None = None,
) -> list[list[RowFacts] | Rejected]:
    """The same for several submissions at once, whose rows share prefills. A malformed proof is one submission's own affair.

    Their leases are of one run: sampling and proofs by the same terms, only seeds differ.
    """
    entries = [
        _Entry(number, index, row, one.lease)
        for number, one in enumerate(submissions)
        for index, row in enumerate(one.rows)
    ]
    facts: dict[tuple[int, int], RowFacts] = {}
    refused: dict[int, Rejected] = {}
    begun: _Begun | None = None
    # A device works on one batch while the host reads what the one before it gave.
    for batch in (*_batches(entries, policy.batch_tokens), None):
        if stop is not None and stop.is_set():
            raise Stopped("stopped between two batches of a check")
        before, begun = begun, None if batch is None else _begin(policy.decoder, batch, control_seed)
        if before is not None:
            facts.update(_finish(before, control_seed, refused))
    return [
        refused.get(number) or [facts[number, index] for index in range(len(one.rows))]
        for number, one in enumerate(submissions)
    ]


class _Entry(NamedTuple):
    """A row, and whose it is."""

    submission: int
    place: int
    row: Rollout
    lease: Leased


def _batches(entries: Sequence[_Entry], batch_tokens: int) -> Iterator[list[_Entry]]:
    """Longest first, so that rows of one batch are of about one length and little is padded. As few batches as need be, of about as
    many tokens each: a small one at the end would take as long to launch as a large one."""
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


def _length(row: Rollout) -> int:
    """Tokens that are run: the last one predicts nothing that was sent."""
    return len(row.prompt_tokens) + len(row.output_tokens) - 1


def _prefill(decoder: Decoder, rows: Sequence[Rollout]) -> list[Tensor]:
    """For each row the states that predict its output tokens, [T, H]. A prompt is run once, however many rows share it."""
    device = decoder.model.norm.weight.device
    end = max(_length(row) for row in rows)
    if end >= decoder.shape.max_positions:
        raise CannotCheck(f"{end + 1} tokens pass the model's {decoder.shape.max_positions} positions")
    if supports_flash_attention(device, decoder.model.norm.weight.dtype):
        return packed_states(decoder, [(row.prompt_tokens, row.output_tokens[:-1]) for row in rows])
    return _prefill_cached(decoder, rows, end, device)


def _prefill_cached(
    decoder: Decoder, rows: Sequence[Rollout], end: int, device: torch.device
) -> list[Tensor]:
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
    """Keys and values of the prompts, and the state at the end of each, [P, H]."""
    width = max(len(prompt) for prompt in prompts)
    # Padding stands behind the tokens, where nothing looks at it before it is overwritten.
    tokens_PT = torch.tensor([prompt + (0,) * (width - len(prompt)) for prompt in prompts], device=device)
    positions_PT = torch.arange(width, device=device).expand_as(tokens_PT)
    cache = _make_cache(decoder, num_slots=len(prompts), max_context=width, device=device)
    states_PTH = decoder(tokens_PT, positions_PT, cache=cache)
    last_P = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    return cache, states_PTH[torch.arange(len(prompts), device=device), last_P]


def _run_outputs(decoder: Decoder, rows: Sequence[Rollout], cache: KVCache, device: torch.device) -> Tensor:
    """States at all output tokens but the last, [B, T, H], behind the prompts in the cache."""
    width = max(len(row.output_tokens) for row in rows) - 1
    if width == 0:
        return decoder.model.norm.weight.new_empty(len(rows), 0, decoder.shape.hidden_size)
    tokens_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    # Padding goes to the one position that no row reaches.
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


class _Begun(NamedTuple):
    """A batch whose work is done or, on a device, queued."""

    batch: list[_Entry]
    states: tuple[Tensor, ...]
    """Kept until all is done: a device's memory must not be given to others while one of two queues still reads it."""
    finite: HostCopy
    proofs: Verification | None
    """None if some row's proof is malformed at first sight."""
    per_token_4N: HostCopy


def _begin(decoder: Decoder, batch: list[_Entry], control_seed: int) -> _Begun:
    states_NH = torch.cat(_prefill(decoder, [entry.row for entry in batch]))
    states = torch.split(states_NH, [len(entry.row.output_tokens) for entry in batch])
    with _beside(states_NH.device):
        finite = HostCopy(torch.isfinite(states_NH).all())
        try:
            proofs = _start_proofs(batch, states, control_seed)
        except ProofError:
            proofs = None
    return _Begun(batch, states, finite, proofs, HostCopy(_token_columns(decoder, batch, states_NH)))


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Queue what follows behind all that is queued on a device, and beside all that comes later: the hundred small steps that proofs
    take leave most of it free."""
    if device.type != "cuda":
        yield
        return
    queue = _side_queue(device)
    queue.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(queue):
        yield


@functools.cache
def _side_queue(device: torch.device) -> torch.cuda.Stream:
    # Before others: the host reads what it gives while the device does the rest.
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _finish(
    begun: _Begun, control_seed: int, refused: dict[int, Rejected]
) -> dict[tuple[int, int], RowFacts]:
    """Facts of the rows of submissions that have no malformed proof; the others join `refused`."""
    if not bool(begun.finite.wait()):
        raise CannotCheck("the policy's own states are not finite; its weights are broken")
    segments = _proof_checks(begun, control_seed, refused)
    per_token = _per_token(begun.batch, begun.per_token_4N.wait().numpy())
    return {
        (entry.submission, entry.place): RowFacts(tuple(segments[place]), *per_token[place])
        for place, entry in enumerate(begun.batch)
        if place in segments
    }


def _proof_checks(
    begun: _Begun, control_seed: int, refused: dict[int, Rejected]
) -> dict[int, list[SegmentCheck]]:
    """By place in the batch."""
    kept = list(range(len(begun.batch)))
    proofs = begun.proofs if all(entry.submission not in refused for entry in begun.batch) else None
    while True:
        try:
            if proofs is None:
                kept = [place for place in kept if begun.batch[place].submission not in refused]
                batch, states = (
                    [begun.batch[place] for place in kept],
                    [begun.states[place] for place in kept],
                )
                proofs = _start_proofs(batch, states, control_seed)
            return dict(zip(kept, proofs.checks(), strict=True))
        except ProofError as error:
            culprit = begun.batch[kept[error.row]]
            refused[culprit.submission] = Rejected(
                "reject.malformed_proof", f"{where(culprit.row)}: {error.reason}"
            )
            proofs = None


def _start_proofs(batch: Sequence[_Entry], states: Sequence[Tensor], control_seed: int) -> Verification:
    if not batch:
        return start_verifying([], [], control_seed=control_seed)
    proof = batch[0].lease.proof
    return start_verifying(
        [entry.row.proof for entry in batch],
        [s[1:] for s in states],
        topk=proof.topk,
        segment_tokens=proof.segment_tokens,
        control_seed=control_seed,
    )


def _token_columns(decoder: Decoder, batch: Sequence[_Entry], states_NH: Tensor) -> Tensor:
    """[4, N] float64: log-prob of each output token, draw distance, surprise and the variance of that."""
    tokens_N = upload(flat(entry.row.output_tokens for entry in batch).astype(np.int64), states_NH.device)
    on_device = states_NH.device.type == "cuda"
    chunk = max(1, (DEVICE_LOGITS_AT_ONCE if on_device else LOGITS_AT_ONCE) // decoder.shape.vocab_size)
    temperature = batch[0].lease.sampling.temperature
    distribution = _device_distribution if on_device else _distribution
    parts = [
        distribution(decoder, hidden, tokens, temperature)
        for hidden, tokens in zip(torch.split(states_NH, chunk), torch.split(tokens_N, chunk), strict=True)
    ]
    uniform_N = upload(_uniforms(batch), states_NH.device)
    logprob_N, low_N, high_N, entropy_N, variance_N = torch.cat(parts, dim=1).double()
    distance_N = torch.maximum(low_N - uniform_N, uniform_N - high_N).clamp(min=0)
    return torch.stack([logprob_N, distance_N, -logprob_N - entropy_N, variance_N])


def _per_token(batch: Sequence[_Entry], columns_4N: Floats) -> list[Floats]:
    """For each row, its part of the columns."""
    ends = np.cumsum([len(entry.row.output_tokens) for entry in batch])[:-1]
    return np.split(columns_4N, ends, axis=1)


def _device_distribution(decoder: Decoder, hidden_NH: Tensor, tokens_N: Tensor, temperature: float) -> Tensor:
    from shoal.model.kernels.logits import token_intervals

    return token_intervals(decoder.logits(hidden_NH), tokens_N, temperature)


def _distribution(decoder: Decoder, hidden_NH: Tensor, tokens_N: Tensor, temperature: float) -> Tensor:
    """Five lines of N, in float64: each token's log-prob, the two ends of its interval of the cumulative distribution over
    ascending ids, and entropy and variance of -log p under the whole distribution."""
    logprobs_NV = torch.log_softmax(decoder.logits(hidden_NH).float() / temperature, dim=-1)
    logprob_N = logprobs_NV.gather(1, tokens_N[:, None]).squeeze(1).double()
    ids_V = torch.arange(logprobs_NV.shape[1], device=tokens_N.device)
    probs_NV = logprobs_NV.exp()
    total_N = probs_NV.sum(dim=1, dtype=torch.float64)  # 1 but for rounding
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
    """Of all output tokens of all rows, in one go: a call a row takes three times as long."""
    counts = [len(entry.row.output_tokens) for entry in batch]
    seeds = np.array(
        [sample_seed(entry.lease.seed, entry.row.prompt_index, entry.row.sample_index) for entry in batch],
        dtype=np.uint64,
    )
    firsts = np.cumsum([0, *counts[:-1]])
    position_N = np.arange(sum(counts)) - np.repeat(firsts, counts)
    return uniforms(np.repeat(seeds, counts), position_N.astype(np.uint64))
