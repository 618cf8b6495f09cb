"""What runs need, what machines have, and which run a machine can work for. Pure functions.

A coordinator may serve several runs. It lists the run that needs workers most first; a node takes the first one whose
requirements it meets, or the one it was told to take.
"""

import re
from collections.abc import Iterable
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from shoal.wire.record import Record

ShortName = Annotated[str, Field(max_length=40)]
CLASS_PART = 40
CLASS_PATTERN = re.compile(rf"([A-Za-z0-9._-]{{1,{CLASS_PART}}}/){{3}}[A-Za-z0-9._-]{{1,{CLASS_PART}}}")
"""The text of a compute class: device, engine, kernels and precision."""
REPLAY_PATTERN = re.compile(r"[0-9a-f]{16}/[0-9]{1,4}/[0-9]{1,6}")
"""The text of ReplayTerms."""
WeightFormat = Literal["int8", "fp8"]
"""Formats that a run may let workers round the layers' weights to (model/rounded_weights.py)."""
Gigabytes = Annotated[float, Field(ge=0, le=1e6)]


class Needs(Record):
    """What a run requires of a worker's machine, besides its `compute_dtype`."""

    device: Literal["any", "cpu", "cuda"] = "any"
    memory_gb: Gigabytes = 0.0
    """Memory of that device."""
    family: ShortName = ""
    """The model family, as in config.json (`model_type`); empty: any."""


class Capabilities(Record):
    """What a worker's machine has. The coordinator does not verify it: a machine that claims too much only fails at the work."""

    device: Literal["cpu", "cuda"]
    memory_gb: Gigabytes
    dtypes: Annotated[tuple[ShortName, ...], Field(max_length=16)]
    """Dtypes that its engine can compute in."""
    families: Annotated[tuple[ShortName, ...], Field(max_length=64)]
    """Model families that its engine supports; `any` for those that transformers has."""


class ComputeClass(NamedTuple):
    """What computes, as it declares itself. Rows of one class, checked by one class, have the same noise (proof_noise.py)."""

    device: str
    """The processor, such as `x86_64` or `NVIDIA-H200`."""
    engine: str
    """What generates (`torch`, `transformers`, `vllm`) or checks (`prefill`, `plain`, `transformers`)."""
    kernels: str
    """The library of kernels and its release, such as `torch-2.11`."""
    precision: str
    """The dtype that is computed in, followed by `-int8` or `-fp8` if the weights were rounded to that format."""

    def __str__(self) -> str:
        return "/".join(re.sub(r"[^A-Za-z0-9._-]+", "-", part)[:CLASS_PART] for part in self)


class ReplayTerms(NamedTuple):
    """What a worker's numbers depend on, to the last bit, besides its compute class. It declares them to promise that the same
    engine with the same terms generates the same bits."""

    machine: str
    """Digest of the processor's features and the libraries' releases."""
    threads: int
    max_rows: int
    """Rows that are decoded at once."""

    def __str__(self) -> str:
        return f"{self.machine}/{self.threads}/{self.max_rows}"

    @classmethod
    def parse(cls, text: str) -> "ReplayTerms":
        """Reads what `str` wrote. The text must match REPLAY_PATTERN."""
        machine, threads, max_rows = text.split("/")
        return cls(machine, int(threads), int(max_rows))


def precision_of(compute_dtype: str, weights: WeightFormat | None) -> str:
    """Returns the last part of a compute class."""
    return compute_dtype if weights is None else f"{compute_dtype}-{weights}"


def declared_weights(made_by: str) -> str:
    """Returns the format that a declared class says its weights were rounded to; empty if it says none."""
    return made_by.rpartition("/")[2].partition("-")[2]


def unmet_needs(machine: Capabilities, needs: Needs, compute_dtype: str) -> list[str]:
    """Returns the reasons why a machine cannot work for a run; an empty list if it can."""
    reasons = []
    if needs.device not in ("any", machine.device):
        reasons.append(f"it needs device {needs.device}, this machine has {machine.device}")
    if machine.memory_gb < needs.memory_gb:
        reasons.append(
            f"it needs {needs.memory_gb:g} GB of memory, this machine has {machine.memory_gb:.1f} GB"
        )
    if compute_dtype not in machine.dtypes:
        reasons.append(f"it computes in {compute_dtype}, this engine in {', '.join(machine.dtypes)}")
    if needs.family and not {needs.family, "any"} & set(machine.families):
        reasons.append(
            f"its model family is {needs.family}, this engine supports {', '.join(machine.families)}"
        )
    return reasons


class Offer(Record):
    """The facts about a run by which a machine decides whether to join it."""

    run: str
    path: str = ""
    """Path of its routes below the coordinator's URL: `/runs/NAME`; empty for the first run."""
    compute_dtype: str
    needs: Needs = Needs()
    finished: bool = False


def pick(offers: Iterable[Offer], machine: Capabilities, wanted: str | None = None) -> Offer:
    """Returns the wanted run, or the first unfinished run whose needs the machine meets.

    Raises ValueError with the reason for each run if there is none.
    """
    refusals = []
    for offer in offers:
        if wanted is not None and offer.run != wanted:
            refusals.append(f"{offer.run}: not the requested run")
            continue
        reasons = unmet_needs(machine, offer.needs, offer.compute_dtype)
        if offer.finished and wanted is None:
            reasons.append("it is finished")
        if not reasons:
            return offer
        refusals.append(f"{offer.run}: {'; '.join(reasons)}")
    which = "no run" if wanted is None else f"no run {wanted!r}"
    remedy = "; name one of them" if wanted is not None and refusals else ""
    raise ValueError(
        f"there is {which} for this machine here ({' | '.join(refusals) or 'the list of runs is empty'}){remedy}"
    )
