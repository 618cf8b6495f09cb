"""Which run a machine takes."""

import pytest

from shoal.wire.requirements import Capabilities, Needs, Offer, misfits, pick

LAPTOP = Capabilities(
    device="cpu", memory_gb=16.0, dtypes=("float32", "bfloat16"), families=("llama", "qwen2")
)


@pytest.mark.parametrize(
    ("needs", "dtype", "word"),
    [
        (Needs(device="cuda"), "float32", "device cuda"),
        (Needs(memory_gb=24.0), "float32", "24 GB of memory, here are 16.0"),
        (Needs(), "float8", "computes in float8"),
        (Needs(family="mamba"), "float32", "mamba"),
    ],
)
def test_each_need_by_itself(needs: Needs, dtype: str, word: str) -> None:
    [reason] = misfits(LAPTOP, needs, dtype)
    assert word in reason


def test_what_fits() -> None:
    assert misfits(LAPTOP, Needs(), "float32") == []
    assert misfits(LAPTOP, Needs(device="cpu", memory_gb=16.0, family="qwen2"), "bfloat16") == []


def offer(run: str, **values: object) -> Offer:
    return Offer.model_validate({"run": run, "path": f"/runs/{run}", "compute_dtype": "float32"} | values)


def test_the_first_that_fits_is_taken() -> None:
    offers = [
        offer("huge", needs=Needs(memory_gb=80.0)),
        offer("over", finished=True),
        offer("a"),
        offer("b"),
    ]
    assert pick(offers, LAPTOP).run == "a"
    assert pick(offers, LAPTOP, "b").run == "b"
    # Whoever asks for a run by name may look at one that is over.
    assert pick(offers, LAPTOP, "over").run == "over"


def test_none_fits_and_each_says_why() -> None:
    offers = [offer("huge", needs=Needs(memory_gb=80.0)), offer("over", finished=True)]
    with pytest.raises(ValueError, match=r"huge: it needs 80 GB.*over: it is finished"):
        pick(offers, LAPTOP)
    with pytest.raises(ValueError, match="no run 'b'"):
        pick(offers, LAPTOP, "b")
    with pytest.raises(ValueError, match="the list is empty"):
        pick([], LAPTOP)
