"""The main reason of a wait for a batch."""

import pytest

from shoal.trainer.data.inbox import main_reason


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ([], ""),
        (["rollouts: 3 of 4 groups ready"], "rollouts: 3 of 4 groups ready"),
        (
            ["workers: none live (0 of 2 enrolled)"] * 5
            + [
                "workers: none live (0 of 3 enrolled)",
                "rollouts: 0 of 4 groups ready",
                "rollouts: 2 of 4 groups ready",
            ],
            "workers: none live (0 of 3 enrolled)",
        ),
        (["x" * 500], "x" * 300),
    ],
)
def test_main_reason_is_the_newest_of_the_most_frequent_kind(reasons: list[str], expected: str) -> None:
    assert main_reason(reasons) == expected
