"""On whom a batch was waited for."""

import pytest

from shoal.trainer.data.inbox import most_heard


@pytest.mark.parametrize(
    ("reasons", "on"),
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
def test_the_last_sentence_of_what_was_heard_most(reasons: list[str], on: str) -> None:
    assert most_heard(reasons) == on
