"""Which run a machine can work for: what runs need, what machines bring, and whether the two fit. Pure.

A coordinator may serve several runs. Its list of them comes with the one that needs workers most first; a node takes the first
that fits, or the one it was told to take.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from shoal.wire.record import Record

Word = Annotated[str, Field(max_length=40)]
Gigabytes = Annotated[float, Field(ge=0, le=1e6)]


class Needs(Record):
    """What a run asks of a worker's machine; the dtype it computes in is the run's own `compute_dtype`."""

    device: Literal["any", "cpu", "cuda"] = "any"
    memory_gb: Gigabytes = 0.0
    """Of that device."""
    family: Word = ""
    """The model's, as config.json has it (`model_type`); empty: any engine will do."""


class Capabilities(Record):
    """What a worker's machine brings. Taken at its word: whoever exaggerates only fails at the work."""

    device: Literal["cpu", "cuda"]
    memory_gb: Gigabytes
    dtypes: Annotated[tuple[Word, ...], Field(max_length=16)]
    """What its engine computes in."""
    families: Annotated[tuple[Word, ...], Field(max_length=64)]
    """Models its engine knows."""


def misfits(brings: Capabilities, needs: Needs, compute_dtype: str) -> list[str]:
    """Why a machine cannot work for a run; empty if it can."""
    reasons = []
    if needs.device not in ("any", brings.device):
        reasons.append(f"it needs device {needs.device}, this is {brings.device}")
    if brings.memory_gb < needs.memory_gb:
        reasons.append(f"it needs {needs.memory_gb:g} GB of memory, here are {brings.memory_gb:.1f}")
    if compute_dtype not in brings.dtypes:
        reasons.append(f"it computes in {compute_dtype}, this engine in {', '.join(brings.dtypes)}")
    if needs.family and needs.family not in brings.families:
        reasons.append(f"its model is a {needs.family}, this engine knows {', '.join(brings.families)}")
    return reasons


class Offer(Record):
    """What of a run decides whether a machine takes it."""

    run: str
    path: str = ""
    """Where its routes are, below the coordinator's URL: `/runs/NAME`; empty for the first."""
    compute_dtype: str
    needs: Needs = Needs()
    finished: bool = False


def pick(offers: Iterable[Offer], brings: Capabilities, wanted: str | None = None) -> Offer:
    """The run that is wanted, or the first that is not over and fits; else a ValueError that says why not, for each."""
    refusals = []
    for offer in offers:
        if wanted is not None and offer.run != wanted:
            refusals.append(f"{offer.run}: not the one asked for")
            continue
        reasons = misfits(brings, offer.needs, offer.compute_dtype)
        if offer.finished and wanted is None:
            reasons.append("it is finished")
        if not reasons:
            return offer
        refusals.append(f"{offer.run}: {'; '.join(reasons)}")
    which = "no run" if wanted is None else f"no run {wanted!r}"
    raise ValueError(
        f"there is {which} for this machine here ({' | '.join(refusals) or 'the list is empty'})"
    )
