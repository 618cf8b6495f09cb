"""Proofs of finished rows, built beside the decoding: in a thread of its own, on a stream of its own."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from shoal import toploc
from shoal.rollout.engine.api import Finished, Request
from shoal.rollout.engine.cpu_threads import one_core_threads
from shoal.rollout.engine.kv_slots import Taken
from shoal.wire.rollouts import Finish
from shoal.wire.run_spec import ProofSpec

PROVE_ROWS = 64
"""Finished rows wait until this many can be proven together. On a CPU a call costs 2 ms however few they are, a row 0.1 ms; on a
device it is some 30 launches however many they are."""
MAX_JOBS = 16
"""Jobs under way at once. Should proving ever be the slower part, decoding waits for it rather than fill the memory."""


class _Batch(NamedTuple):
    requests: Sequence[Request]
    counts: Sequence[int]
    tokens_RN: Tensor
    logprobs_RN: Tensor
    states_RNH: Tensor
    """On the device; the rest is on the host once `written` has happened."""
    written: torch.cuda.Event | None


class Prover:
    """`proof` None: rows are finished without proofs, to measure what proofs cost."""

    def __init__(self, proof: ProofSpec | None, end_tokens: frozenset[int], device: torch.device) -> None:
        self._proof, self._end_tokens = proof, end_tokens
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = one_core_threads(1, "prover")
        self._waiting: list[_Batch] = []
        self._jobs: deque[Future[list[Finished]]] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._jobs)

    def add(self, requests: Sequence[Request], counts: Sequence[int], taken: Taken) -> None:
        """Rows whose slots are given up. Nothing here waits for the device."""
        tokens_RN, logprobs_RN, written = taken.tokens_RN, taken.logprobs_RN, None
        if self._stream is not None:
            tokens_RN, logprobs_RN = _to_host(tokens_RN), _to_host(logprobs_RN)
            written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            written.record()
        self._waiting.append(_Batch(requests, counts, tokens_RN, logprobs_RN, taken.states_RNH, written))

    def collect(self, *, wait: bool) -> list[Finished]:
        """Rows that are complete; all of them if `wait`."""
        num_waiting = sum(len(batch.requests) for batch in self._waiting)
        if num_waiting >= PROVE_ROWS or (wait and num_waiting):
            self._jobs.append(self._thread.submit(self._finish, self._waiting))
            self._waiting = []
        found: list[Finished] = []
        while self._jobs and (wait or len(self._jobs) > MAX_JOBS or self._jobs[0].done()):
            found += self._jobs.popleft().result()
        return found

    @torch.inference_mode()
    def _finish(self, batches: Sequence[_Batch]) -> list[Finished]:
        if self._stream is None:
            proofs = self._prove(batches)
        else:
            with torch.cuda.stream(self._stream):
                for batch in batches:
                    assert batch.written is not None
                    self._stream.wait_event(batch.written)
                proofs = self._prove(batches)
                self._stream.synchronize()
        ready = iter(proofs)
        return [row for batch in batches for row in self._rows(batch, ready)]

    def _prove(self, batches: Sequence[_Batch]) -> list[bytes]:
        if self._proof is None:
            return [b""] * sum(len(batch.counts) for batch in batches)
        states = [
            batch.states_RNH[row, : count - 1] for batch in batches for row, count in enumerate(batch.counts)
        ]
        return toploc.build_proofs(states, topk=self._proof.topk, segment_tokens=self._proof.segment_tokens)

    def _rows(self, batch: _Batch, proofs: Iterator[bytes]) -> list[Finished]:
        # As arrays: slices and lists of tensors keep the interpreter, which decoding wants too, twice as long.
        columns = batch.tokens_RN.numpy(), batch.logprobs_RN.numpy()
        return [
            self._row(request, tokens_N[:count].tolist(), logprobs_N[:count].tolist(), next(proofs))
            for request, count, tokens_N, logprobs_N in zip(
                batch.requests, batch.counts, *columns, strict=True
            )
        ]

    def _row(self, request: Request, tokens: list[int], logprobs: list[float], proof: bytes) -> Finished:
        return Finished(
            request=request,
            output_tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            finish=Finish.EOS if tokens[-1] in self._end_tokens else Finish.LENGTH,
            proof=proof,
        )


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
