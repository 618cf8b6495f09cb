"""The public terms of a run, which workers, validators and auditors use."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.wire.proof_noise import Noise
from shoal.wire.record import Record
from shoal.wire.requirements import Needs

PROTOCOL = 1
"""Protocol version. Increase it when clients and servers of different numbers cannot work together."""


class TaskSpec(Record):
    """A task by name, with its options. Name and options determine every problem that it can pose.

    Options called `path` or `..._path` are files. In a run file they are paths; in the public terms they are `sha256:` and
    the file's digest, so that the terms still determine every problem and reveal no path.
    """

    name: str
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    budgets: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Answer lengths in tokens; each prompt asks for one of them. Empty: prompts ask for no length."""
    budget_alpha: float = Field(default=0.0003, gt=0)
    """Reward subtracted per token of difference from the requested length."""


class Sampling(Record):
    """How tokens are sampled. There is only a temperature: truncating the distribution would bias the ratio in the loss."""

    temperature: float = Field(default=1.0, gt=0)
    max_new_tokens: int = Field(default=16, ge=1)
    samples_per_prompt: int = Field(default=16, ge=1)


class ProofSpec(Record):
    """TOPLOC parameters: a proof has `topk` values of every `segment_tokens` decode states."""

    topk: int = Field(default=128, ge=1, le=1024)
    segment_tokens: int = Field(default=32, ge=1)


class Tolerances(Record):
    """How far a validator's recomputation may differ from an honest worker's values. The defaults are for float32.

    Proof tolerances are per full segment, as in TOPLOC, and wider for short segments; the published ones for bfloat16 are
    38, 10, 8. docs/toploc.md has measurements of honest work.
    """

    exponent_mismatches: int = Field(default=8, ge=0)
    mantissa_mean: float = Field(default=0.5, ge=0)
    mantissa_median: float = Field(default=0.5, ge=0)
    control_hits: int = Field(default=12, ge=0)
    """How many of 128 control points must match, beyond those that another model's proof would match."""
    logprob: float = Field(default=0.01, gt=0)
    """Largest mean |claimed - recomputed| log-prob over a submission; a short row may differ by more."""
    draw: float = Field(default=0.0005, gt=0)
    """How far a token's uniform may be outside the token's interval of the cumulative distribution."""
    draw_misses: float = Field(default=0.0, ge=0, lt=1)
    """Share of a submission's tokens whose uniform may be further outside than `draw`; above 0 it allows at least one."""
    eos_probability: float = Field(default=0.1, gt=0, lt=1)
    """An answer may end on an end token only if the model gave it at least this probability, or if the draw matches exactly."""


def default_tolerances(compute_dtype: Literal["float32", "bfloat16"]) -> Tolerances:
    """Returns the tolerances of a run of this dtype whose run file sets none."""
    if compute_dtype == "float32":
        return Tolerances()
    # Measured with SmolLM2-135M, decode against prefill: 8 exponents, 2.2, 2; log-probs 0.05; 3% of draws past 0.01, none past 0.06.
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
    """Dtype in which engine and validator compute. Published weights are bfloat16 in both cases."""
    sampling: Sampling
    proof: ProofSpec = ProofSpec()
    tolerances: Tolerances = Tolerances()
    noise: Noise | None = None
    """The calibration of honest proofs. Without it every segment is judged alone, by `tolerances`."""
    max_lag: int = Field(default=2, ge=0)
    keep_versions: int = Field(default=5, ge=1)
    """How many versions origin and relays keep. Older ones are neither leased nor evaluated."""
    last_version: int = Field(ge=1)
    needs: Needs = Needs()
    """What the run requires of a worker's machine."""

    @model_validator(mode="after")
    def _leased_versions_are_kept(self) -> "RunSpec":
        if self.keep_versions <= self.max_lag:
            raise ValueError(
                f"keep_versions = {self.keep_versions} must exceed max_lag = {self.max_lag}, or relays delete versions "
                "that are still leased; raise keep_versions or lower max_lag"
            )
        return self

    @model_validator(mode="after")
    def _noise_is_of_this_dtype(self) -> "RunSpec":
        if self.noise is not None and self.noise.compute_dtype != self.compute_dtype:
            raise ValueError(
                f"the calibration was measured in {self.noise.compute_dtype}, compute_dtype is {self.compute_dtype}; "
                "calibrate in the run's dtype"
            )
        return self

    @model_validator(mode="after")
    def _noise_is_of_these_terms(self) -> "RunSpec":
        """Honest work with another temperature or proof format has other noise, and would be refused."""
        if self.noise is None:
            return self
        if self.noise.temperature != self.sampling.temperature:
            raise ValueError(
                f"the calibration was measured at temperature {self.noise.temperature:g}, sampling.temperature is "
                f"{self.sampling.temperature:g}; prove and calibrate with --temperature {self.sampling.temperature:g}"
            )
        measured = (self.noise.topk, self.noise.segment_tokens)
        if measured != (self.proof.topk, self.proof.segment_tokens):
            raise ValueError(
                f"the calibration was measured with topk = {measured[0]}, segment_tokens = {measured[1]}, but [proof] has "
                f"{self.proof.topk} and {self.proof.segment_tokens}; remove [proof] or the calibration"
            )
        return self
