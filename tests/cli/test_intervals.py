"""Shares and how sure one can be of them, against values worked out elsewhere."""

import itertools
import math

import pytest

from shoal.cli.ui.values import pass_at, wilson


def test_wilson_against_known_values() -> None:
    for share, count, low, high in (
        (0.0, 10, 0.0, 0.2775),
        (0.5, 10, 0.2366, 0.7634),
        (0.9, 100, 0.8256, 0.9448),
    ):
        assert wilson(share, count) == pytest.approx((low, high), abs=5e-5)
    assert wilson(1.0, 10)[1] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="at least one"):
        wilson(0.5, 0)


@pytest.mark.parametrize(("samples", "right"), [(1, 0), (1, 1), (8, 0), (8, 3), (8, 8), (5, 1)])
def test_pass_at_k_is_what_counting_gives(samples: int, right: int) -> None:
    answers = [True] * right + [False] * (samples - right)
    for k in range(1, samples + 1):
        chosen = list(itertools.combinations(answers, k))
        expected = math.fsum(any(one) for one in chosen) / len(chosen)
        assert pass_at(k, samples=samples, right=right) == pytest.approx(expected)


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="pass@3 needs at least 3 samples, there are 2"):
        pass_at(3, samples=2, right=1)
