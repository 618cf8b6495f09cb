"""Responses: records as JSON, refusals as problem documents (RFC 9457), and how a body's declared length is checked."""

from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Send

from shoal.net.rate_limit import retry_after_header
from shoal.wire.codes import CODES, Rejected
from shoal.wire.messages import ProblemDetails
from shoal.wire.record import Record

JSON = "application/json"


def as_described(answer: Record, gives: type[Record] | None) -> Record:
    """Returns the answer after checking that it has the type that /openapi.json names."""
    assert gives is not None and isinstance(answer, gives), f"/openapi.json says {gives}, not {type(answer)}"
    return answer


def to_json(answer: Record | Sequence[Record]) -> bytes:
    if isinstance(answer, Record):
        return answer.model_dump_json().encode()
    return f"[{','.join(record.model_dump_json() for record in answer)}]".encode()


def problem(code: str, detail: str, *, now_s: float, retry_after_s: float | None = None) -> Response:
    meaning = CODES[code]
    body = ProblemDetails(
        code=code,
        detail=detail,
        fix=meaning.remedy,
        retry_after_s=retry_after_s,
        server_time_s=now_s,
    )
    headers = {} if retry_after_s is None else {"Retry-After": retry_after_header(retry_after_s)}
    return Response(
        body.model_dump_json(),
        status_code=meaning.status,
        media_type="application/problem+json",
        headers=headers,
    )


async def send_json(send: Send, content: bytes) -> None:
    """Sends JSON as plain ASGI messages: a framework's response object costs more than most of our requests."""
    headers = [(b"content-length", b"%d" % len(content)), (b"content-type", JSON.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def check_length(declared: str, max_bytes: int) -> None:
    """Raises Rejected if the declared length of a body is no number or too large. Runs before a byte is read."""
    if not declared.isascii() or not declared.isdecimal() or len(declared) > 15:
        raise Rejected("request.malformed", f"Content-Length is {declared[:32]!r}, expected a number")
    if int(declared) > max_bytes:
        raise Rejected("request.too_large", f"{declared} bytes announced, {max_bytes} allowed here")
