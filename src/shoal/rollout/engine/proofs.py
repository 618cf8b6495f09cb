"""Proofs of finished rows, built beside the decoding: in a thread and, on CUDA, on a stream of their own."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from shoal import toploc
from shoal.rollout.engine.api import FinishedRow, GenerationRequest
from shoal.rollout.engine.kv_slots import RowOutputs
from shoal.rollout.engine.step_cpu import single_core_pool
from shoal.wire.rollouts import Finish
from shoal.wire.run_spec import ProofSpec

PROVE_ROWS = 64
"""Finished rows wait until this many can be proven together. On a CPU a call costs 2 ms and each row 0.1 ms; on a
device a call is about 30 launches for any number of rows."""
MAX_JOBS = 16
"""Jobs under way at once. If proving is slower than decoding, decoding waits for it instead of filling the memory."""


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
    tokens_RN: Tensor
    logprobs_RN: Tensor
    states_RNH: Tensor
    """On the device. Tokens and log-probs are on the host once `copied` has happened."""
    copied: torch.cuda.Event | None


class Prover:
    """Turns ended rows into finished rows. With `proof=None` rows get empty proofs, to measure what proofs cost."""

    def __init__(self, proof: ProofSpec | None, end_tokens: frozenset[int], device: torch.device) -> None:
        self._proof, self._end_tokens = proof, end_tokens
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        self._thread = single_core_pool(1, "prover")
        self._waiting: list[_EndedRows] = []
        self._jobs: deque[Future[list[FinishedRow]]] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._jobs)

    def add(self, requests: Sequence[GenerationRequest], counts: Sequence[int], outputs: RowOutputs) -> None:
        """Takes rows that have ended after `counts` tokens. Does not wait for the device."""
        tokens_RN, logprobs_RN, copied = outputs.tokens_RN, outputs.logprobs_RN, None
        if self._stream is not None:
            tokens_RN, logprobs_RN = _to_host(tokens_RN), _to_host(logprobs_RN)
            copied = torch.cuda.Event()
            copied.record()
        rows = _EndedRows(requests, counts, tokens_RN, logprobs_RN, outputs.states_RNH, copied)
        self._waiting.append(rows)

    def collect(self, *, wait: bool) -> list[FinishedRow]:
        """Returns the rows whose proofs are ready; with `wait`, waits for all of them."""
        num_waiting = sum(len(rows.requests) for rows in self._waiting)
        if num_waiting >= PROVE_ROWS or (wait and num_waiting):
            self._jobs.append(self._thread.submit(self._finish, self._waiting))
            self._waiting = []
        found: list[FinishedRow] = []
        while self._jobs and (wait or len(self._jobs) > MAX_JOBS or self._jobs[0].done()):
            found += self._jobs.popleft().result()
        return found

    @torch.inference_mode()
    def _finish(self, batches: Sequence[_EndedRows]) -> list[FinishedRow]:
        if self._stream is None:
            proofs = self._prove(batches)
        else:
            with torch.cuda.stream(self._stream):
                for batch in batches:
                    assert batch.copied is not None
                    self._stream.wait_event(batch.copied)
                proofs = self._prove(batches)
                self._stream.synchronize()
        ready = iter(proofs)
        return [row for batch in batches for row in self._finished_rows(batch, ready)]

    def _prove(self, batches: Sequence[_EndedRows]) -> list[bytes]:
        if self._proof is None:
            return [b""] * sum(len(batch.counts) for batch in batches)
        states = [
            batch.states_RNH[row, : count - 1] for batch in batches for row, count in enumerate(batch.counts)
        ]
        return prove_states(states, self._proof)

    def _finished_rows(self, batch: _EndedRows, proofs: Iterator[bytes]) -> list[FinishedRow]:
        # NumPy arrays: slicing tensors holds the interpreter lock, which decoding needs too, twice as long.
        columns = batch.tokens_RN.numpy(), batch.logprobs_RN.numpy()
        return [
            self._finished_row(request, tokens_N[:count].tolist(), logprobs_N[:count].tolist(), next(proofs))
            for request, count, tokens_N, logprobs_N in zip(
                batch.requests, batch.counts, *columns, strict=True
            )
        ]

    def _finished_row(
        self, request: GenerationRequest, tokens: list[int], logprobs: list[float], proof: bytes
    ) -> FinishedRow:
        return FinishedRow(
            request=request,
            output_tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            finish=Finish.EOS if tokens[-1] in self._end_tokens else Finish.LENGTH,
            proof=proof,
        )


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
