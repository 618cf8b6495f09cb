"""Tests of the choice of a run for a machine."""

import pytest

from shoal.wire.requirements import Capabilities, Needs, Offer, pick, unmet_needs

LAPTOP = Capabilities(
    device="cpu", memory_gb=16.0, dtypes=("float32", "bfloat16"), families=("llama", "qwen2")
)


@pytest.mark.parametrize(
    ("needs", "dtype", "word"),
    [
        (Needs(device="cuda"), "float32", "device cuda"),
        (Needs(memory_gb=24.0), "float32", "24 GB of memory, this machine has 16.0 GB"),
        (Needs(), "float8", "computes in float8"),
        (Needs(family="mamba"), "float32", "mamba"),
    ],
)
def test_each_unmet_need_gives_a_reason(needs: Needs, dtype: str, word: str) -> None:
    [reason] = unmet_needs(LAPTOP, needs, dtype)
    assert word in reason


def test_a_machine_that_meets_all_needs() -> None:
    assert unmet_needs(LAPTOP, Needs(), "float32") == []
    assert unmet_needs(LAPTOP, Needs(device="cpu", memory_gb=16.0, family="qwen2"), "bfloat16") == []


def offer(run: str, **values: object) -> Offer:
    return Offer.model_validate({"run": run, "path": f"/runs/{run}", "compute_dtype": "float32"} | values)


def test_the_first_suitable_run_is_picked() -> None:
    offers = [
        offer("huge", needs=Needs(memory_gb=80.0)),
        offer("over", finished=True),
        offer("a"),
        offer("b"),
    ]
    assert pick(offers, LAPTOP).run == "a"
    assert pick(offers, LAPTOP, "b").run == "b"
    # A run that is asked for by name may be finished.
    assert pick(offers, LAPTOP, "over").run == "over"


def test_the_error_names_a_reason_for_each_run() -> None:
    offers = [offer("huge", needs=Needs(memory_gb=80.0)), offer("over", finished=True)]
    with pytest.raises(ValueError, match=r"huge: it needs 80 GB.*over: it is finished"):
        pick(offers, LAPTOP)
    with pytest.raises(ValueError, match=r"no run 'b' .*; name one of them"):
        pick(offers, LAPTOP, "b")
    with pytest.raises(ValueError, match="the list of runs is empty"):
        pick([], LAPTOP)
