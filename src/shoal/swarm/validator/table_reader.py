"""Reads submitted Parquet files in a child process, which a hostile file may crash or exhaust without harm to the validator.

Request and reply are a JSON line followed by bytes. Pickle is not used: the child has just read an untrusted file, and the
validator must be able to check everything that it sends.

    request  limits of the table, then the Parquet bytes
    reply    {"code": ..., "detail": ...}   or   {"lease_id": ..., "policy_version": ..., "num_rows": ...}, then arrays

A child that cannot start, does not answer in time or is killed (SIGKILL: the out-of-memory killer) is the validator's own failure
(ReaderFailed). A file is refused for ending the child in another way, and only if a second child ended too, because something else
may have ended the first.
"""

import json
import signal
import sys
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shoal.child_process import (
    BadFrame,
    ChildDied,
    ChildError,
    ChildLimits,
    ChildProcess,
    limit_cpu,
    limit_memory,
    serve,
)
from shoal.wire.codes import CODES, Rejected
from shoal.wire.requirements import CLASS_PATTERN, REPLAY_PATTERN
from shoal.wire.rollouts import Finish, Rollout, RolloutTable, TableLimits, decode, encode

MAX_MEMORY_BYTES = 1_000_000_000
"""Memory that a file may take on top of what the child holds before its first file."""
CPU_S = 2
"""Seconds of processor time that a file may take, apart from what its size needs."""
BYTES_PER_CPU_S = 10_000_000
"""Bytes of a file for which it may take one more second. Honest files take 0.1 s for as many: 0.31 s for 512 rows of
4,096 tokens, 30 MB."""
PROMPT_TOKENS_PER_CPU_S = 2_000_000
"""Leased prompt tokens for which it may take one more second: equal prompts compress to nothing. Honest ones
take 0.12 s."""
WALL_S = 120.0
"""Seconds to wait for the child's answer."""
ATTEMPTS = 2


class ReaderFailed(RuntimeError):
    """The validator's own side could not read a file. The sender is not to blame."""


class BadReply(Exception):
    """A reply of the child does not decode to a table."""


class TableReader:
    """Reads tables in a child process that serves many files. Use it as a context manager."""

    def __init__(
        self,
        *,
        max_memory_bytes: int = MAX_MEMORY_BYTES,
        wall_s: float = WALL_S,
        python: str = sys.executable,
    ) -> None:
        self._wall_s = wall_s
        self.child = ChildProcess(
            "shoal.swarm.validator.table_reader:serve_tables",
            limits=ChildLimits(memory_bytes=max_memory_bytes, cpu_s=CPU_S),
            # The system allocator returns memory and reserves no address space, of which the limit would take a part.
            env={"ARROW_DEFAULT_MEMORY_POOL": "system"},
            max_reply_bytes=max_memory_bytes,
            python=python,
        )

    def __enter__(self) -> Self:
        """Starts the child, so that a validator that cannot read files fails before it claims any."""
        try:
            self.child.start()
        except ChildError as error:
            raise ReaderFailed(str(error)) from None
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.child.close()

    def read(self, data: bytes, limits: TableLimits) -> RolloutTable:
        """Returns the table. Raises Rejected with the reason, or ReaderFailed."""
        request = _line(asdict(limits)) + data
        for _ in range(ATTEMPTS):
            try:
                reply = self.child.exchange(request, timeout_s=self._wall_s, attempts=ATTEMPTS)
                return decode_reply(reply, limits)
            except (BadFrame, BadReply) as error:
                self.child.close()
                problem = str(error)
            except ChildDied as died:
                if died.status == -signal.SIGKILL:
                    # Nothing that a file does sends it: its memory and processor time end in MemoryError and SIGXCPU.
                    raise ReaderFailed(
                        f"{died}; the machine's out-of-memory killer may have chosen it: free some memory"
                    ) from None
                problem = f"reading it ends the reading process (status {died.status})"
                if died.status == -signal.SIGXCPU:
                    problem = "reading it needs more processor time than a submission may take"
                raise Rejected("reject.malformed_file", problem) from None
            except ChildError as error:
                raise ReaderFailed(str(error)) from None
        raise Rejected("reject.malformed_file", f"reading it gives no table: {problem}")


# -- the child ----------------------------------------------------------------------------------------------


def serve_tables(limits: ChildLimits) -> None:
    """Runs in the child: answers requests until the validator closes the pipe."""
    limit_memory(limits.memory_bytes)
    _check_own_table()
    serve(partial(_answer, cpu_s=limits.cpu_s), limits)


def _answer(request: bytes, *, cpu_s: int) -> bytes:
    head, data = _split(request)
    del request
    limits = TableLimits(**head)
    limit_cpu(cpu_s + extra_cpu_s(len(data), limits))
    try:
        return encode_table(decode(data, limits))
    except Rejected as rejected:
        return _encode_refusal(rejected)
    except MemoryError:
        return _encode_refusal(
            Rejected("reject.oversized_table", "decoding needs more memory than a submission may take")
        )


def extra_cpu_s(num_bytes: int, limits: TableLimits) -> int:
    """Returns the seconds of processor time that a file of this size and lease may take beyond CPU_S."""
    prompt_tokens = limits.max_rows * limits.max_prompt_tokens
    return num_bytes // BYTES_PER_CPU_S + prompt_tokens // PROMPT_TOKENS_PER_CPU_S


def _check_own_table() -> None:
    """Reads a table written here, under the limits. A child that cannot would blame every sender for its own fault."""
    row = Rollout(
        prompt_index=0,
        sample_index=0,
        prompt_tokens=(1,),
        output_tokens=(2,),
        logprobs=(-1.0,),
        finish=Finish.EOS,
        proof=b"",
    )
    table = RolloutTable(lease_id="0" * 32, policy_version=0, rows=(row,))
    limits = TableLimits(max_rows=1, max_prompt_tokens=1, max_output_tokens=1, max_proof_bytes=1)
    assert decode(encode(table), limits) == table, "a table that was written here does not read back"


# -- replies ------------------------------------------------------------------------------------------------


def encode_table(table: RolloutTable) -> bytes:
    rows = table.rows
    head = {
        "lease_id": table.lease_id,
        "policy_version": table.policy_version,
        "made_by": table.made_by,
        "replay": table.replay,
        "num_rows": len(rows),
    }
    places = [(row.prompt_index, row.sample_index, row.finish) for row in rows]
    lengths = [(len(row.prompt_tokens), len(row.output_tokens), len(row.proof)) for row in rows]
    return b"".join(
        [
            _line(head),
            np.hstack([places, lengths]).astype("<i4").tobytes(),
            np.array([token for row in rows for token in row.prompt_tokens], dtype="<i4").tobytes(),
            np.array([token for row in rows for token in row.output_tokens], dtype="<i4").tobytes(),
            np.array([value for row in rows for value in row.logprobs], dtype="<f4").tobytes(),
            *(row.proof for row in rows),
        ]
    )


def decode_reply(frame: bytes, limits: TableLimits) -> RolloutTable:
    """Returns the table. Raises Rejected if the child refused the file, BadReply if the reply is neither.

    Everything that `wire.rollouts.decode` promises of a table is checked here again: a file may have taken over the child.
    """
    try:
        head, body = _split(frame)
        if "code" in head:
            code = str(head["code"])
            if code not in CODES or not code.startswith("reject."):
                raise BadReply(f"refusal with the code {code[:80]!r}")
            raise Rejected(code, str(head["detail"])[:500])
        num_rows = int(head["num_rows"])
        if not 0 <= num_rows <= limits.max_rows:
            raise BadReply(f"{num_rows} rows, at most {limits.max_rows}")
        made_by, replay = str(head["made_by"]), str(head["replay"])
        if made_by and not CLASS_PATTERN.fullmatch(made_by):
            raise BadReply(f"compute class {made_by[:64]!r}")
        if replay and not REPLAY_PATTERN.fullmatch(replay):
            raise BadReply(f"replay terms {replay[:64]!r}")
        return RolloutTable(
            lease_id=str(head["lease_id"]),
            policy_version=int(head["policy_version"]),
            rows=_decode_rows(body, num_rows, limits),
            made_by=made_by,
            replay=replay,
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BadReply(f"{type(error).__name__}: {error}") from None


def _decode_rows(body: bytes, num_rows: int, limits: TableLimits) -> tuple[Rollout, ...]:
    cursor = _Cursor(body)
    numbers = cursor.array("<i4", 6 * num_rows).reshape(num_rows, 6)
    most = (limits.max_prompt_tokens, limits.max_output_tokens, limits.max_proof_bytes)
    if (numbers[:, 3:] < (0, 1, 0)).any() or (numbers[:, 3:] > most).any():
        raise ValueError("a length that the lease does not allow")
    places = numbers[:, :2].tolist()
    if places != sorted(places):
        raise ValueError("rows are not sorted by prompt_index, sample_index")
    prompts = cursor.ragged("<i4", numbers[:, 3])
    outputs = cursor.ragged("<i4", numbers[:, 4])
    logprobs = cursor.ragged("<f4", numbers[:, 4])
    proofs = cursor.ragged("u1", numbers[:, 5])
    cursor.expect_end()
    return tuple(
        Rollout(
            prompt_index=int(numbers[row, 0]),
            sample_index=int(numbers[row, 1]),
            prompt_tokens=tuple(prompts[row].tolist()),
            output_tokens=tuple(outputs[row].tolist()),
            logprobs=tuple(logprobs[row].tolist()),
            finish=Finish(int(numbers[row, 2])),
            proof=proofs[row].tobytes(),
        )
        for row in range(num_rows)
    )


class _Cursor:
    """Reads arrays one after another from bytes. Raises ValueError beyond the end."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    def array(self, dtype: str, count: int) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = np.frombuffer(self._body, dtype=dtype, count=count, offset=self._at)
        self._at += values.nbytes
        return values

    def ragged(self, dtype: str, lengths: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        ends = np.cumsum(lengths.astype(np.int64))
        values = self.array(dtype, int(ends[-1]) if len(ends) else 0)
        return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def expect_end(self) -> None:
        if self._at != len(self._body):
            raise ValueError(f"{len(self._body) - self._at} bytes too many")


def _encode_refusal(rejected: Rejected) -> bytes:
    return _line({"code": rejected.code, "detail": rejected.detail[:500]})


def _line(head: dict[str, Any]) -> bytes:
    return json.dumps(head).encode() + b"\n"


def _split(frame: bytes) -> tuple[dict[str, Any], bytes]:
    line, newline, body = frame.partition(b"\n")
    head = json.loads(line)
    if not newline or not isinstance(head, dict):
        raise ValueError("no header line")
    return head, body
