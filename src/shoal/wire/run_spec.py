"""What a run is, as everybody in it may know: the public terms a worker, validator and auditor go by."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.wire.proof_noise import Noise
from shoal.wire.record import Record
from shoal.wire.requirements import Needs

PROTOCOL = 1
"""Raised when a client of one number cannot talk to a server of another."""


class TaskSpec(Record):
    """A task by name, with its difficulty knobs. The name and the knobs fix every problem it can pose.

    Options called `path` or `..._path` are files. In a run file they are paths; in the public terms, `sha256:` and the
    file's digest, so that the terms still fix every problem and say nothing of anybody's disk.
    """

    name: str
    options: dict[str, int | float | str] = Field(default_factory=dict)
    budgets: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Lengths in tokens, one of which each prompt asks for; none leaves length alone."""
    budget_alpha: float = Field(default=0.0003, gt=0)
    """What each token of difference from the length asked for costs."""


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

    Proof figures are per full segment, as TOPLOC has them, and wider for short ones; the published ones for bfloat16 are
    38, 10, 8. docs/toploc.md says what honest work measures.
    """

    exponent_mismatches: int = Field(default=8, ge=0)
    mantissa_mean: float = Field(default=0.5, ge=0)
    mantissa_median: float = Field(default=0.5, ge=0)
    control_hits: int = Field(default=12, ge=0)
    """Of 128 control points, beyond those another model's proof would hit."""
    logprob: float = Field(default=0.01, gt=0)
    """Largest mean |claimed - recomputed| log-prob over a submission; a short row may be off by more."""
    draw: float = Field(default=0.0005, gt=0)
    """How far outside a token's interval of the cumulative distribution its uniform may lie."""
    draw_misses: float = Field(default=0.0, ge=0, lt=1)
    """Share of a submission's tokens whose draw may lie further out than that; above 0 it allows at least one."""
    eos_probability: float = Field(default=0.1, gt=0, lt=1)
    """An answer may end on an end token only if the model gave it at least this much, or the draw fits exactly."""


def default_tolerances(compute_dtype: Literal["float32", "bfloat16"]) -> Tolerances:
    """What a run of this dtype goes by unless its file says otherwise."""
    if compute_dtype == "float32":
        return Tolerances()
    # SmolLM2-135M, decode against prefill: 8 exponents, 2.2, 2; log-probs 0.05; 3 % of draws past 0.01, none past 0.06.
    return Tolerances(
        exponent_mismatches=24,
        mantissa_mean=6.0,
        mantissa_median=5.0,
        logprob=0.15,
        draw=0.08,
        draw_misses=0.02,
    )


class RunSpec(Record):
    """The terms of a run."""

    run: str
    task: TaskSpec
    compute_dtype: Literal["float32", "bfloat16"]
    """What engine and validator compute in. Published weights are bfloat16 either way."""
    sampling: Sampling
    proof: ProofSpec = ProofSpec()
    tolerances: Tolerances = Tolerances()
    noise: Noise | None = None
    """What honest proofs look like, as calibrated. Without it every segment is judged alone, by `tolerances`."""
    max_lag: int = Field(default=2, ge=0)
    keep_versions: int = Field(default=5, ge=1)
    """How many versions origin and relays keep; older ones are neither leased nor evaluated."""
    last_version: int = Field(ge=1)
    needs: Needs = Needs()
    """What it asks of a worker's machine."""

    @model_validator(mode="after")
    def _leased_versions_are_kept(self) -> "RunSpec":
        if self.keep_versions <= self.max_lag:
            raise ValueError(
                f"keep_versions = {self.keep_versions} must exceed max_lag = {self.max_lag}, or leased versions vanish "
                "from the relays; raise the one or lower the other"
            )
        return self

    @model_validator(mode="after")
    def _noise_is_of_this_dtype(self) -> "RunSpec":
        if self.noise is not None and self.noise.compute_dtype != self.compute_dtype:
            raise ValueError(
                f"the calibration is of {self.noise.compute_dtype}, compute_dtype is {self.compute_dtype}; "
                "calibrate in the run's dtype"
            )
        return self

    @model_validator(mode="after")
    def _noise_is_of_these_terms(self) -> "RunSpec":
        """Honest work on other terms has other noise, and would be refused."""
        if self.noise is None:
            return self
        if self.noise.temperature != self.sampling.temperature:
            raise ValueError(
                f"the calibration is of temperature {self.noise.temperature:g}, sampling.temperature is "
                f"{self.sampling.temperature:g}; prove and calibrate with --temperature {self.sampling.temperature:g}"
            )
        measured = (self.noise.topk, self.noise.segment_tokens)
        if measured != (self.proof.topk, self.proof.segment_tokens):
            raise ValueError(
                f"the calibration is of proofs with topk = {measured[0]}, segment_tokens = {measured[1]}; [proof] has "
                f"{self.proof.topk} and {self.proof.segment_tokens}: leave one of the two out"
            )
        return self
