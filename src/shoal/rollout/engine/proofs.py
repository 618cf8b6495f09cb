"""Proofs of rows, built beside the decoding: in a thread and, on CUDA, on a stream of their own.

A segment of states becomes a proof while its row runs (`Prover.fold`), so a row holds one segment of states and a few more, however
long it is. The rest of them follows when the row has ended (`Prover.add`).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal import toploc
from shoal.files import is_out_of_memory
from shoal.model.packed_prefill import upload
from shoal.model.tokenizer import Tokenizer
from shoal.rollout.engine.api import FinishedRow, GenerationRequest, ending
from shoal.rollout.engine.cpu_threads import single_core_pool
from shoal.rollout.engine.kv_slots import RowOutputs
from shoal.rollout.engine.scheduler import RemovedRow
from shoal.wire.run_spec import ProofSpec

PROVE_ROWS = 64
"""Finished rows wait until this many can be proven together. On a CPU a call costs 2 ms and each row 0.1 ms; on a
device a call is about 30 launches for any number of rows."""
MAX_JOBS = 16
"""Most proof jobs that run at once. If proving is slower than decoding, decoding waits for it instead of filling the memory."""
FOLD_STEPS = 8
"""Steps between two calls of `Prover.fold`. Rows hold this many states more than a segment has."""


class FoldSize(NamedTuple):
    """How many states of a row are kept and turned into proofs at a time."""

    segment: int
    steps: int
    """Steps between two folds: not more than a segment has, so that no two of a row's segments are complete at once."""

    @property
    def kept(self) -> int:
        return self.segment + self.steps


def fold_size(proof: ProofSpec | None) -> FoldSize:
    segment = (proof or ProofSpec()).segment_tokens
    return FoldSize(segment, min(FOLD_STEPS, segment))


class _Part(NamedTuple):
    """The proof of one segment: number `at` of a job's results."""

    job: "Future[list[bytes]]"
    at: int

    def read(self) -> bytes:
        """Returns the proof; waits until it is built."""
        return self.job.result()[self.at]


class RawStates(ProofSpec):
    """Asks an engine for the states themselves, as bfloat16 bytes, in the place of proofs: for measurements of other schemes."""


def prove_states(states: Sequence[Tensor], proof: ProofSpec) -> list[bytes]:
    """Returns the proofs of each row's states, [T, H] each, in the form that `proof` asks for."""
    if isinstance(proof, RawStates):
        return [row.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes() for row in states]
    return toploc.build_proofs(states, topk=proof.topk, segment_tokens=proof.segment_tokens)


class _EndedRows(NamedTuple):
    """Rows that left their slots together and have no proofs yet."""

    requests: Sequence[GenerationRequest]
    counts: Sequence[int]
    parts: Sequence[Sequence[_Part]]
    """Proofs of the segments that were folded, for each row."""
    tokens_RN: Tensor
    logprobs_RN: Tensor
    states_RAH: Tensor
    """The states stay on the device. Tokens and log-probs are on the host once `copied` has happened."""
    copied: torch.cuda.Event | None


class ProvingFailure(NamedTuple):
    """Rows that could not be proven because memory ran out."""

    requests: Sequence[GenerationRequest]
    error: BaseException


class Prover:
    """Turns ended rows into finished rows. With `proof=None` rows get empty proofs, to measure what proofs cost."""

    def __init__(self, proof: ProofSpec | None, tokenizer: Tokenizer, device: torch.device) -> None:
        self._proof, self._tokenizer = proof, tokenizer
        self.size = fold_size(proof)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        self._thread = single_core_pool(1, "prover")
        self._waiting: list[_EndedRows] = []
        self._jobs: deque[tuple[list[_EndedRows], Future[list[FinishedRow]]]] = deque()
        self._failure: ProvingFailure | None = None
        self._folds: deque[Future[list[bytes]]] = deque()
        self._parts: dict[int, list[_Part]] = {}
        """The parts of each running row, by the number of the row."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._jobs or self._failure)

    def num_folded(self, number: int) -> int:
        """Returns how many segments of a row were folded."""
        return len(self._parts.get(number, ()))

    def fold(self, numbers: Sequence[int], states_RTH: Tensor) -> None:
        """Takes the next segment of some rows, given by their numbers. Does not wait for the device."""
        if self._proof is None:
            return
        while len(self._folds) >= MAX_JOBS:
            self._folds.popleft().result()
        job = self._thread.submit(self._build_parts, states_RTH, self._copied())
        self._folds.append(job)
        for at, number in enumerate(numbers):
            self._parts.setdefault(number, []).append(_Part(job, at))

    def forget(self) -> None:
        """Drops the segments of all rows, which start again."""
        self._parts.clear()
        self._folds.clear()  # an error of one of them concerns no row any more

    def forget_row(self, number: int) -> None:
        """Drops the segments of a row that was preempted."""
        self._parts.pop(number, None)

    def take_folded(self, number: int, num_states: int) -> list[_Part]:
        """Returns the folded segments of a row that ended with `num_states`, and forgets the row.

        An end may be noticed late, when a segment that the row did not complete was folded.
        """
        return self._parts.pop(number, [])[: num_states // self.size.segment]

    def add(self, rows: Sequence[RemovedRow], counts: Sequence[int], outputs: RowOutputs) -> None:
        """Takes rows that have ended after `counts` tokens. Does not wait for the device."""
        tokens_RN, logprobs_RN = outputs.tokens_RN, outputs.logprobs_RN
        if self._stream is not None:
            tokens_RN, logprobs_RN = _to_host(tokens_RN), _to_host(logprobs_RN)
        parts = [self.take_folded(row.number, count - 1) for row, count in zip(rows, counts, strict=True)]
        requests = [row.request for row in rows]
        self._waiting.append(
            _EndedRows(requests, counts, parts, tokens_RN, logprobs_RN, outputs.states_RAH, self._copied())
        )

    def _copied(self) -> torch.cuda.Event | None:
        """Returns an event that happens when the copies launched so far are complete."""
        if self._stream is None:
            return None
        copied = torch.cuda.Event()
        copied.record()
        return copied

    def collect(self, *, wait: bool) -> list[FinishedRow]:
        """Returns the rows whose proofs are ready; with `wait`, waits for all of them."""
        num_waiting = sum(len(rows.requests) for rows in self._waiting)
        if num_waiting >= PROVE_ROWS or (wait and num_waiting):
            self._jobs.append((self._waiting, self._thread.submit(self._finish, self._waiting)))
            self._waiting = []
        found: list[FinishedRow] = []
        while self._jobs and (wait or len(self._jobs) > MAX_JOBS or self._jobs[0][1].done()):
            batches, job = self._jobs.popleft()
            try:
                found += job.result()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failed = [request for batch in batches for request in batch.requests]
                before = [] if self._failure is None else self._failure.requests
                self._failure = ProvingFailure([*before, *failed], error)
        return found

    def take_failure(self) -> ProvingFailure | None:
        """Returns the rows for whose proofs memory was short, and forgets them: they must be computed once more."""
        failure, self._failure = self._failure, None
        return failure

    @torch.inference_mode()
    def _build_parts(self, states_RTH: Tensor, copied: torch.cuda.Event | None) -> list[bytes]:
        if self._stream is None:
            return self._build(list(states_RTH))
        assert copied is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(copied)
            states_RTH.record_stream(self._stream)
            return self._build(list(states_RTH))

    @torch.inference_mode()
    def _finish(self, batches: Sequence[_EndedRows]) -> list[FinishedRow]:
        if self._stream is None:
            batches = [self._cut(batch) for batch in batches]
            proofs = self._prove(batches)
        else:
            with torch.cuda.stream(self._stream):
                for batch in batches:
                    assert batch.copied is not None
                    self._stream.wait_event(batch.copied)
                    if any(request.stop for request in batch.requests):
                        batch.copied.synchronize()
                batches = [self._cut(batch) for batch in batches]
                proofs = self._prove(batches)
                self._stream.synchronize()
        ready = iter(proofs)
        return [row for batch in batches for row in self._finished_rows(batch, ready)]

    def _cut(self, batch: _EndedRows) -> _EndedRows:
        """Returns the rows without the tokens after a stop string, which the engine notices a few steps late."""
        if not any(request.stop for request in batch.requests):
            return batch
        counts = [
            ending(request, tokens_N[:count].tolist(), self._tokenizer)[0]
            for request, count, tokens_N in zip(
                batch.requests, batch.counts, batch.tokens_RN.numpy(), strict=True
            )
        ]
        parts = [
            row[: (count - 1) // self.size.segment] for row, count in zip(batch.parts, counts, strict=True)
        ]
        return batch._replace(counts=counts, parts=parts)

    def _prove(self, batches: Sequence[_EndedRows]) -> list[bytes]:
        if self._proof is None:
            return [b""] * sum(len(batch.counts) for batch in batches)
        last = self._build([states for batch in batches for states in self._unfolded(batch)])
        parts = [row for batch in batches for row in batch.parts]
        return [b"".join(part.read() for part in row) + rest for row, rest in zip(parts, last, strict=True)]

    def _unfolded(self, batch: _EndedRows) -> list[Tensor]:
        """Returns the states of each row after its folded segments."""
        kept, segment = self.size.kept, self.size.segment
        firsts_R = np.array([len(parts) * segment for parts in batch.parts])
        lines_RA = upload((firsts_R[:, None] + np.arange(kept)) % kept, batch.states_RAH.device)
        in_order_RAH = torch.take_along_dim(batch.states_RAH, lines_RA[:, :, None], 1)
        counts = [count - 1 - int(first) for count, first in zip(batch.counts, firsts_R, strict=True)]
        return [states_AH[:count] for states_AH, count in zip(in_order_RAH, counts, strict=True)]

    def _build(self, states: list[Tensor]) -> list[bytes]:
        assert self._proof is not None
        return prove_states(states, self._proof)

    def _finished_rows(self, batch: _EndedRows, proofs: Iterator[bytes]) -> list[FinishedRow]:
        # NumPy arrays: slicing tensors holds the interpreter lock, which decoding needs too, twice as long.
        columns = batch.requests, batch.counts, batch.tokens_RN.numpy(), batch.logprobs_RN.numpy()
        rows = []
        for request, count, tokens_N, logprobs_N in zip(*columns, strict=True):
            tokens = tokens_N[:count].tolist()
            rows.append(
                FinishedRow(
                    request=request,
                    output_tokens=tuple(tokens),
                    logprobs=tuple(logprobs_N[:count].tolist()),
                    finish=ending(request, tokens, self._tokenizer)[1],
                    proof=next(proofs),
                )
            )
        return rows


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
