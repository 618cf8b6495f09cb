"""What passes between the validator and its reading child: length-prefixed frames of one JSON line and plain arrays.

No pickle: the child has just read a stranger's file, and the validator believes nothing it says that it cannot check.

    frame    8 bytes big-endian length, then that many bytes
    request  limits as a JSON line, then the Parquet bytes
    reply    {"code": ..., "detail": ...}   or   {"lease_id": ..., "policy_version": ..., "num_rows": ...} and arrays
"""

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.wire.codes import CODES, Rejected
from shoal.wire.rollouts import Finish, Rollout, RolloutTable, TableLimits

LENGTH_BYTES = 8
READY = b"ready\n"
"""What a child says before its first frame, once its limits stand and all it needs is loaded."""
_LIMITS = ("max_rows", "max_prompt_tokens", "max_output_tokens", "max_proof_bytes")


class BadReply(Exception):
    """The child's words make no sense."""


def encode_request(data: bytes, limits: TableLimits) -> bytes:
    return _line({name: getattr(limits, name) for name in _LIMITS}) + data


def decode_request(frame: bytes) -> tuple[bytes, TableLimits]:
    head, data = _split(frame)
    return data, TableLimits(**head)


def encode_refusal(rejected: Rejected) -> bytes:
    return _line({"code": rejected.code, "detail": rejected.detail[:500]})


def encode_table(table: RolloutTable) -> bytes:
    rows = table.rows
    head = {"lease_id": table.lease_id, "policy_version": table.policy_version, "num_rows": len(rows)}
    numbers = [
        (
            row.prompt_index,
            row.sample_index,
            row.finish,
            len(row.prompt_tokens),
            len(row.output_tokens),
            len(row.proof),
        )
        for row in rows
    ]
    return b"".join(
        [
            _line(head),
            np.array(numbers, dtype="<i4").tobytes(),
            np.array([token for row in rows for token in row.prompt_tokens], dtype="<i4").tobytes(),
            np.array([token for row in rows for token in row.output_tokens], dtype="<i4").tobytes(),
            np.array([value for row in rows for value in row.logprobs], dtype="<f4").tobytes(),
            *(row.proof for row in rows),
        ]
    )


def decode_reply(frame: bytes, limits: TableLimits) -> RolloutTable:
    """The table; or Rejected, as the child says; or BadReply."""
    try:
        head, body = _split(frame)
        if "code" in head:
            raise _refusal(head)
        num_rows = int(head["num_rows"])
        if not 0 <= num_rows <= limits.max_rows:
            raise BadReply(f"{num_rows} rows, at most {limits.max_rows}")
        return RolloutTable(
            lease_id=str(head["lease_id"]),
            policy_version=int(head["policy_version"]),
            rows=_rows(body, num_rows),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BadReply(f"{type(error).__name__}: {error}") from None


def _rows(body: bytes, num_rows: int) -> tuple[Rollout, ...]:
    cursor = _Cursor(body)
    numbers = cursor.array("<i4", 6 * num_rows).reshape(num_rows, 6)
    if (numbers[:, 3:] < 0).any():
        raise ValueError("a length is negative")
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


def _refusal(head: dict[str, Any]) -> Exception:
    code = str(head["code"])
    if code not in CODES or not code.startswith("reject."):
        return BadReply(f"refusal with the code {code[:80]!r}")
    return Rejected(code, str(head["detail"])[:500])


def _line(head: dict[str, Any]) -> bytes:
    return json.dumps(head).encode() + b"\n"


def _split(frame: bytes) -> tuple[dict[str, Any], bytes]:
    line, newline, body = frame.partition(b"\n")
    head = json.loads(line)
    if not newline or not isinstance(head, dict):
        raise ValueError("no header line")
    return head, body
