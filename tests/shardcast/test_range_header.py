"""The Range header: one range inside the file, or a refusal."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.shardcast.relay.relay_app import parse_range
from shoal.wire.codes import Rejected


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=2-5", (2, 6)),
        ("bytes=2-", (2, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-99", (0, 10)),
        ("bytes=8-99", (8, 10)),
    ],
)
def test_ranges_of_ten_bytes(header: str, expected: tuple[int, int]) -> None:
    assert parse_range(header, 10) == expected


@pytest.mark.parametrize(
    "header",
    [
        "bytes=10-11",
        "bytes=5-2",
        "bytes=-",
        "bytes=-0",
        "bytes=0-1,4-5",
        "bytes=a-b",
        "items=0-1",
        "bytes= 0-1",
        "bytes=0-" + "9" * 5000,
        "",
    ],
)
def test_anything_else_is_refused(header: str) -> None:
    with pytest.raises(Rejected) as caught:
        parse_range(header, 10)
    assert caught.value.code == "request.bad_range"


@given(header=st.text(max_size=30), num_bytes=st.integers(0, 100))
@settings(deadline=None, derandomize=True)
def test_every_range_is_inside_the_file(header: str, num_bytes: int) -> None:
    try:
        start, stop = parse_range("bytes=" + header, num_bytes)
    except Rejected:
        return
    assert 0 <= start < stop <= num_bytes
