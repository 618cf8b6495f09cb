"""Token buckets under a virtual clock."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.net import rate_limit
from shoal.net.rate_limit import Buckets


@given(st.lists(st.floats(0, 3), min_size=1, max_size=200))
def test_never_more_than_the_rate_and_the_burst(waits: list[float]) -> None:
    bucket, now_s, taken = Buckets(rate=2.0, burst=5.0), 0.0, 0
    for wait_s in waits:
        now_s += wait_s
        left_s = bucket.wait_s("a", now_s)
        taken += left_s == 0
        assert left_s <= 0.5
        assert taken <= 5 + 2 * now_s + 1e-6


def test_names_do_not_share() -> None:
    bucket = Buckets(rate=1.0, burst=2.0)
    assert [bucket.wait_s("a", 0.0) for _ in range(3)] == [0.0, 0.0, 1.0]
    assert bucket.wait_s("b", 0.0) == 0.0
    assert bucket.wait_s("a", 1.0) == 0.0
    assert bucket.wait_s("a", 0.5) > 0  # a clock that was set back gives nothing


def test_full_buckets_are_forgotten() -> None:
    bucket = Buckets(rate=1.0, burst=2.0)
    for number in range(100):
        bucket.wait_s(str(number), 0.0)
    bucket._forget(0.5)
    assert len(bucket._levels) == 100
    bucket._forget(2.0)
    assert bucket._levels == {}
    assert rate_limit.MOST_NAMES > 100
