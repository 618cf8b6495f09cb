"""Properties of the pure rules under a virtual clock, for any order of events."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal.swarm.coordinator.rules as rules_package
from shoal.swarm.coordinator.rules import credit
from shoal.swarm.coordinator.rules.credit import Earning, balance, held_since_s, to_revoke
from shoal.swarm.coordinator.rules.node_status import (
    Liveness,
    is_older,
    liveness,
    outdated_since_s,
)
from shoal.swarm.coordinator.rules.trust import (
    LAPSES_END_TRUST,
    LONGEST_BACKOFF_S,
    REDEEM_S,
    REDEEM_TIMES,
    NodeStanding,
    Trust,
    TrustEvent,
    check_draw,
    check_rate,
    gets_every_check,
    lease_prompts,
    next_lease_s,
    next_standing,
    open_leases,
)

N = 3
steps = st.lists(st.tuples(st.sampled_from(list(TrustEvent)), st.floats(0, 2 * REDEEM_S)), max_size=60)


def live(
    events: list[tuple[TrustEvent, float]],
) -> list[tuple[TrustEvent, NodeStanding, NodeStanding, float]]:
    """Yields each event with the standing before and after it, and its time."""
    now_s, standing, story = 1e9, NodeStanding(trust=Trust.PROBATION, since_s=1e9), []
    for event, wait_s in events:
        now_s += wait_s
        after = next_standing(standing, event, now_s, trusted_after=N)
        story.append((event, standing, after, now_s))
        standing = after
    return story


@given(steps)
def test_trust_moves_only_along_the_documented_arrows(events: list[tuple[TrustEvent, float]]) -> None:
    for event, before, after, now_s in live(events):
        assert min(after.streak, after.rejected, after.lapses) >= 0
        if after.trust is not before.trust:
            assert after.since_s == now_s
        else:
            assert after.since_s == before.since_s
        if event is TrustEvent.TAKEN_ON_TRUST:
            assert replace(after, lapses=0) == replace(before, lapses=0)
        if event is TrustEvent.UNCERTAIN and before.trust is not Trust.BANNED:
            assert after == replace(before, streak=0) and check_rate(after, floor=0.05) == 1.0
        if before.trust is Trust.BANNED and event not in (TrustEvent.RESTORE, TrustEvent.UPHELD):
            assert after == before
        if after.trust is Trust.TRUSTED and before.trust is not Trust.TRUSTED:
            assert (before.trust, event, after.streak) == (
                Trust.PROBATION,
                TrustEvent.ACCEPTED,
                before.streak + 1,
            )
            assert after.streak >= N
        if event is TrustEvent.REJECTED:
            assert after.trust in (Trust.QUARANTINED, Trust.BANNED) and after.streak == 0
        if (
            before.trust is Trust.QUARANTINED
            and event is TrustEvent.ACCEPTED
            and after.trust is Trust.PROBATION
        ):
            assert now_s - before.since_s >= REDEEM_S and before.streak + 1 >= REDEEM_TIMES * N


@given(steps)
def test_only_full_checks_build_trust(events: list[tuple[TrustEvent, float]]) -> None:
    """A node without a full check never becomes trusted, so every submission of it is checked."""
    for _, _, after, _ in live([step for step in events if step[0] is not TrustEvent.ACCEPTED]):
        assert after.trust is not Trust.TRUSTED
        assert check_rate(after, floor=0.05) == 1.0
        assert open_leases(after, most=64, trusted_after=N) == 1


@given(steps, st.floats(0, 1))
def test_checks_and_leases_of_a_standing_are_within_bounds(
    events: list[tuple[TrustEvent, float]], floor: float
) -> None:
    for _, before, after, now_s in live(events):
        rate = check_rate(after, floor=floor)
        assert floor <= rate <= 1
        assert rate == 1 or after.trust is Trust.TRUSTED
        assert rate == 1 or rate == max(floor, 1 / after.streak)
        assert 1 <= open_leases(after, most=8, trusted_after=N) <= 8
        assert 1 <= lease_prompts(after, most=16) <= 16
        assert next_lease_s(after, lease_s=120) <= now_s + LONGEST_BACKOFF_S
        if after.lapses > before.lapses >= 2:
            assert next_lease_s(after, lease_s=120) > now_s


def test_a_node_that_lets_leases_expire_loses_trust_and_waits_longer() -> None:
    standing = NodeStanding(trust=Trust.TRUSTED, streak=40)
    waits = []
    for count in range(1, LAPSES_END_TRUST + 1):
        standing = next_standing(standing, TrustEvent.LAPSED, 1000.0, trusted_after=N)
        assert standing.trust is (Trust.PROBATION if count == LAPSES_END_TRUST else Trust.TRUSTED)
        waits.append(next_lease_s(standing, lease_s=100.0))
    assert waits == [0.0, 1100.0, 1200.0, 1400.0, 1800.0]
    assert next_standing(standing, TrustEvent.ACCEPTED, 0.0, trusted_after=N).lapses == 0


def test_leaving_does_not_end_a_quarantine() -> None:
    standing = NodeStanding(trust=Trust.PROBATION)
    for event in (TrustEvent.REJECTED, TrustEvent.LEAVE, TrustEvent.RETURN):
        standing = next_standing(standing, event, 0.0, trusted_after=N)
    assert standing.trust is Trust.QUARANTINED
    honest = next_standing(
        NodeStanding(trust=Trust.TRUSTED, streak=9), TrustEvent.LEAVE, 0.0, trusted_after=N
    )
    assert next_standing(honest, TrustEvent.RETURN, 0.0, trusted_after=N).trust is Trust.PROBATION


def test_an_appeal_takes_one_rejection_back() -> None:
    banned = NodeStanding(trust=Trust.BANNED, rejected=2)
    once = next_standing(banned, TrustEvent.UPHELD, 5.0, trusted_after=N)
    assert (once.trust, once.rejected) == (Trust.QUARANTINED, 1)
    twice = next_standing(once, TrustEvent.UPHELD, 6.0, trusted_after=N)
    assert (twice.trust, twice.rejected) == (Trust.PROBATION, 0)


@given(st.lists(st.floats(0.01, 500), min_size=1), st.floats(1, 60))
def test_liveness_only_ages_in_order(waits: list[float], heartbeat_s: float) -> None:
    order = [Liveness.LIVE, Liveness.LATE, Liveness.OFFLINE]
    now_s, ranks = 1000.0, []
    for wait_s in waits:
        now_s += wait_s
        ranks.append(order.index(liveness(1000.0, now_s, heartbeat_s)))
    assert ranks == sorted(ranks)
    assert liveness(now_s, now_s, heartbeat_s) is Liveness.LIVE  # one request, from anywhere


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["shoal 0.1.0", "shoal 0.3.1", "shoal 1.0.0", "other 7"]), st.floats(0, 100)
        )
    )
)
def test_a_grace_period_does_not_start_again(meetings: list[tuple[str, float]]) -> None:
    now_s, since_s, first = 0.0, None, None
    for software, wait_s in meetings:
        now_s += wait_s
        since_s = outdated_since_s(since_s, software, min_software="shoal 0.3.0", now_s=now_s)
        old = is_older(software, "shoal 0.3.0")
        first = (now_s if first is None else first) if old else None
        assert since_s == first


@pytest.mark.parametrize(
    ("software", "wanted", "older"),
    [
        ("shoal 0.1.0", "shoal 0.2.0", True),
        ("shoal 0.10.0", "shoal 0.9.9", False),
        ("shoal 0.2", "shoal 0.2.0", False),
        ("shoal 0.1.0", "", False),
        ("mine 0.0.1", "shoal 0.2.0", False),
    ],
)
def test_versions_compare_as_numbers(software: str, wanted: str, older: bool) -> None:
    assert is_older(software, wanted) is older


earnings_given = st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 3e5), st.booleans(), st.booleans()))


@given(earnings_given, st.floats(0, 3e5), st.sampled_from(list(Trust)), st.floats(0, 3e5))
def test_credit_adds_up_and_never_goes_back_from_final_to_held(
    given_earnings: list[tuple[int, float, bool, bool]], now_s: float, trust: Trust, since_s: float
) -> None:
    earnings = [
        Earning(
            lease_id=str(index), amount=amount, given_at_s=min(at_s, now_s), checked=checked, revoked=revoked
        )
        for index, (amount, at_s, checked, revoked) in enumerate(given_earnings)
    ]
    since = held_since_s(trust, min(since_s, now_s), now_s, hold_s=86400.0)
    sums = balance(earnings, since)
    assert sums.final + sums.held == sum(earning.amount for earning in earnings if not earning.revoked)
    later = balance(earnings, held_since_s(trust, min(since_s, now_s), now_s + 1e5, hold_s=86400.0))
    assert later.final >= sums.final >= 0
    if trust in (Trust.QUARANTINED, Trust.BANNED):
        assert later == sums  # the clock does not move
    taken = to_revoke(earnings, since)
    assert not any(earning.checked or earning.revoked for earning in taken)
    assert sum(earning.amount for earning in taken) <= sums.held


def test_credit_is_a_whole_number() -> None:
    assert [credit.amount(tokens, factor) for tokens, factor in ((10, 1.0), (3, 0.5), (7, 2.5))] == [
        10,
        1,
        17,
    ]


def test_draws_are_uniform_secret_and_repeatable() -> None:
    secret, other = bytes(32), bytes([1]) * 32
    draws = [check_draw(secret, f"{index:032x}", "ab" * 32) for index in range(2000)]
    assert draws == [check_draw(secret, f"{index:032x}", "ab" * 32) for index in range(2000)]
    for tenth in range(10):
        assert 140 < sum(tenth / 10 <= value < (tenth + 1) / 10 for value in draws) < 260
    # The draw depends on the secret, the lease and the bytes.
    assert (
        len({draws[0], check_draw(other, "0" * 32, "ab" * 32), check_draw(secret, "0" * 32, "cd" * 32)}) == 3
    )
    assert all(gets_every_check(secret, "0" * 32, "ab" * 32, 1.0) for _ in range(3))
    assert not gets_every_check(secret, "0" * 32, "ab" * 32, 0.0)


def test_rules_do_no_io_and_import_only_wire_and_each_other() -> None:
    pure = {"dataclasses", "enum", "hashlib", "hmac", "math", "re", "typing", "collections.abc"}
    allowed = ("shoal.wire.", "shoal.swarm.coordinator.rules.")
    for path in Path(rules_package.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name in pure or name.startswith(allowed), f"{path.name} imports {name}"
