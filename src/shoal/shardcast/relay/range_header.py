"""The Range header (RFC 9110, section 14): one range of bytes, or a refusal."""

import re

from shoal.wire.codes import Rejected

_RANGE = re.compile(r"bytes=(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})")


def parse_range(header: str, num_bytes: int) -> tuple[int, int]:
    """First byte and the one after the last: `bytes=2-5` of 10 -> (2, 6); `bytes=-3` -> (7, 10)."""
    match = _RANGE.fullmatch(header.strip())
    if match is None or not (match["first"] or match["last"]):
        raise Rejected("request.bad_range", f"{header[:80]!r} is not one range of bytes")
    if not match["first"]:
        start, stop = max(0, num_bytes - int(match["last"])), num_bytes
    else:
        start = int(match["first"])
        stop = min(int(match["last"]) + 1, num_bytes) if match["last"] else num_bytes
    if start >= stop:
        raise Rejected("request.bad_range", f"{header[:80]!r} lies outside a file of {num_bytes} bytes")
    return start, stop
