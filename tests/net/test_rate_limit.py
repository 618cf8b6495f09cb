"""Token buckets, limits per address and Retry-After, under a virtual clock."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.net import rate_limit
from shoal.net.rate_limit import (
    AddressUsage,
    Buckets,
    ServerLimits,
    UsageByAddress,
    retry_after_header,
    viewer_network,
)


@given(st.lists(st.floats(0, 3), min_size=1, max_size=200))
def test_never_more_than_the_rate_and_the_burst(waits: list[float]) -> None:
    bucket, now_s, taken = Buckets(rate=2.0, burst=5.0), 0.0, 0
    for wait_s in waits:
        now_s += wait_s
        left_s = bucket.wait_s("a", now_s)
        taken += left_s == 0
        assert left_s <= 0.5
        assert taken <= 5 + 2 * now_s + 1e-6


def test_each_name_has_its_own_bucket() -> None:
    bucket = Buckets(rate=1.0, burst=2.0)
    assert [bucket.wait_s("a", 0.0) for _ in range(3)] == [0.0, 0.0, 1.0]
    assert bucket.wait_s("b", 0.0) == 0.0
    assert bucket.wait_s("a", 1.0) == 0.0
    assert bucket.wait_s("a", 0.5) > 0  # a clock that was set back adds no tokens


def test_full_buckets_are_removed() -> None:
    bucket = Buckets(rate=1.0, burst=2.0)
    for number in range(100):
        bucket.wait_s(str(number), 0.0)
    bucket._remove_full(0.5)
    assert len(bucket._levels) == 100
    bucket._remove_full(2.0)
    assert bucket._levels == {}
    assert rate_limit.MAX_NAMES > 100


def test_debts_and_connections_are_counted_per_network() -> None:
    usages = UsageByAddress(ServerLimits(connections_per_address=1, bytes_per_s=100.0))
    mine = usages.connect("1.2.3.4", 0.0)
    assert isinstance(mine, AddressUsage)
    assert usages.take_bytes(mine, 500, 0.0) == 0.0
    assert usages.take_bytes(mine, 100, 1.0) == 4.0
    assert usages.debt_s(mine, 1.0) == 5.0
    assert usages.debt_s(mine, 7.0) == 0.0
    again = usages.connect("::ffff:1.2.3.4", 1.0)
    assert again is mine and usages.has_too_many(mine)
    usages.disconnect(mine)
    assert not usages.has_too_many(mine)
    assert usages.connect("2001:db8::1", 0.0) is usages.connect("2001:db8::2", 0.0)
    assert usages.connect("2001:db8:0:1::1", 0.0) is not usages.connect("2001:db8::2", 0.0)


@pytest.mark.parametrize("address", ["2001:db8:0:{:x}::1", "192.0.2.{}"])
def test_one_network_does_not_take_all_connections(address: str) -> None:
    usages = UsageByAddress(ServerLimits(connections=100, connections_per_address=2))
    taken = [usage for number in range(100) if (usage := usages.connect(address.format(number), 0.0))]
    assert len(taken) == 50
    other = usages.connect("2001:db8:1::1", 0.0)
    assert other is not None
    for usage in (*taken, other):
        usages.disconnect(usage)
    assert usages.connections == 0 and not usages._networks


def test_all_ipv6_networks_of_a_customer_are_one_viewer() -> None:
    assert viewer_network("2001:db8::1") == viewer_network("2001:db8:0:ffff::1") == "2001:db8::/48"
    assert viewer_network("192.0.2.1") == viewer_network("::ffff:192.0.2.1") == "192.0.2.1"
    assert viewer_network("somewhere") == "somewhere"


def test_idle_addresses_are_removed() -> None:
    usages = UsageByAddress(ServerLimits())
    for index in range(20_000):
        usage = usages.connect(f"10.{index >> 16}.{(index >> 8) & 255}.{index & 255}", float(index))
        assert usage is not None
        usages.disconnect(usage)
    assert len(usages._usages) < 5_000
    assert usages.connections == 0


@pytest.mark.parametrize("bad", [{"connections": 0}, {"connections_per_address": 0}, {"bytes_per_s": 0.0}])
def test_limits_below_one_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|must be positive"):
        ServerLimits(**bad)


@pytest.mark.parametrize(
    ("wait_s", "header"), [(0.0, "1"), (0.1, "1"), (1.0, "1"), (1.2, "2"), (59.01, "60")]
)
def test_retry_after_is_rounded_up(wait_s: float, header: str) -> None:
    assert retry_after_header(wait_s) == header
