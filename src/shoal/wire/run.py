"""What a run is, as everybody in it may know: the public terms a worker, validator and auditor go by."""

from typing import Literal

from pydantic import Field

from shoal.wire.record import Record

PROTOCOL = 1
"""Raised when a client of one number cannot talk to a server of another."""


class TaskSpec(Record):
    """A task by name, with its difficulty knobs. The name and the knobs fix every problem it can pose."""

    name: str
    options: dict[str, int | float | str] = Field(default_factory=dict)


class Sampling(Record):
    """How tokens are drawn. Temperature only: truncating the distribution would bias the ratio in the loss."""

    temperature: float = Field(default=1.0, gt=0)
    max_new_tokens: int = Field(default=16, ge=1)
    samples_per_prompt: int = Field(default=16, ge=1)


class ProofSpec(Record):
    """TOPLOC parameters: `topk` values of every `segment_tokens` decode states."""

    topk: int = Field(default=128, ge=1, le=1024)
    segment_tokens: int = Field(default=32, ge=1)


class Tolerances(Record):
    """How far an honest recomputation may lie from what the worker did. Defaults fit float32 compute.

    Proof figures are per segment, as TOPLOC has them; the published ones for bfloat16 are 38, 10, 8.
    """

    exponent_mismatches: int = Field(default=12, ge=0)
    mantissa_mean: float = Field(default=2.0, ge=0)
    mantissa_median: float = Field(default=1.0, ge=0)
    control_hits: int = Field(default=12, ge=0)
    logprob: float = Field(default=0.02, gt=0)
    """Largest mean |claimed - recomputed| log-prob over a row."""
    draw: float = Field(default=0.01, gt=0)
    """How far outside a token's interval of the cumulative distribution its uniform may lie."""
    draw_misses: float = Field(default=0.01, ge=0, lt=1)
    """Share of a submission's tokens whose draw may lie further out than that."""
    eos_probability: float = Field(default=0.1, gt=0, lt=1)
    """An answer may end on an end token only if the model gave it at least this much, or the draw fits exactly."""


class RunSpec(Record):
    """The terms of a run."""

    run: str
    task: TaskSpec
    compute_dtype: Literal["float32", "bfloat16"]
    """What engine and validator compute in. Published weights are bfloat16 either way."""
    sampling: Sampling
    proof: ProofSpec = ProofSpec()
    tolerances: Tolerances = Tolerances()
    max_lag: int = Field(default=2, ge=0)
    last_version: int = Field(ge=1)
