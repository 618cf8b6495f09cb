"""The public terms of a run, which workers, validators and auditors use."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.wire.proof_noise import LaterNoise, Noise
from shoal.wire.record import Record
from shoal.wire.requirements import Needs, WeightFormat

PROTOCOL = 1
"""Protocol version. Increase it when clients and servers of different numbers cannot work together."""


StopString = Annotated[str, Field(min_length=1, max_length=64)]
Label = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,39}$")]


class OwnSampling(Record):
    """The values of `[sampling]` that a task or an evaluation replaces; None keeps the run's."""

    temperature: float | None = Field(default=None, gt=0)
    max_new_tokens: int | None = Field(default=None, ge=1)
    samples_per_prompt: int | None = Field(default=None, ge=1)


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
    label: Label | Literal[""] = ""
    """The task's name in leases, metrics and curves; empty: `name`. The labels of a run's tasks differ."""
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Share of train leases, relative to the weights of the run's other tasks."""
    sampling: OwnSampling = OwnSampling()
    system: str = Field(default="", max_length=20_000)
    """A system prompt before every problem that has none of its own. For tasks that ask in chat turns."""
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments of the model's chat template, such as `enable_thinking`."""
    stop: Annotated[tuple[StopString, ...], Field(max_length=8)] = ()
    """An answer ends with the token that completes one of these texts (model/stop_strings.py)."""
    difficulty: bool = False
    """Whether problems are drawn more often if the model solves them sometimes (rules/difficulty.py). For tasks of a known size."""

    @property
    def title(self) -> str:
        """The name by which leases, metrics and the ledger tell the task from others."""
        return self.label or self.name


class EvalSpec(Record):
    """A held-out evaluation: problems of the split `eval` of a task, which is trained on or not."""

    task: TaskSpec
    every: int = Field(ge=1)
    """Versions between two evaluations. Version 0 and the last version are always evaluated."""
    prompts: int = Field(ge=1)
    samples: int = Field(ge=1)
    """Answers to each prompt: the k of pass@k and of the majority."""


class Sampling(Record):
    """How tokens are sampled. There is only a temperature: truncating the distribution would bias the ratio in the loss."""

    temperature: float = Field(default=1.0, gt=0)
    max_new_tokens: int = Field(default=16, ge=1)
    samples_per_prompt: int = Field(default=16, ge=1)

    def of(self, task: TaskSpec) -> "Sampling":
        """Returns the sampling of a task: its own values, and these for all others."""
        own = task.sampling.model_dump(exclude_none=True)
        return self.model_copy(update=own) if own else self


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
    """How many of 128 control points a proof may match, beyond those that another model's proof would match."""
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


RECALIBRATE_AT = 0.05

CreditShare = Annotated[float, Field(gt=0, le=1)]


class AdmittedWeights(Record):
    """The formats that workers may round the layers' weights to, if they declare it, and the credit of a token made with each,
    relative to one that is made with the published weights. None: not admitted."""

    int8: CreditShare | None = None
    fp8: CreditShare | None = None

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """The admitted formats."""
        named: tuple[tuple[WeightFormat, float | None], ...] = (("int8", self.int8), ("fp8", self.fp8))
        return tuple(name for name, credit in named if credit is not None)


class RunSpec(Record):
    """The terms of a run."""

    run: str
    task: TaskSpec
    """The first task."""
    more_tasks: tuple[TaskSpec, ...] = ()
    """The other tasks of a run with several. The seed of a train lease draws one of all by their weights."""
    evals: tuple[EvalSpec, ...] = ()
    """The evaluations; empty: the held-out part of each task, by the coordinator's `eval_...` settings."""
    compute_dtype: Literal["float32", "bfloat16"]
    """Dtype in which engine and validator compute. Published weights are bfloat16 in both cases."""
    sampling: Sampling
    proof: ProofSpec = ProofSpec()
    tolerances: Tolerances = Tolerances()
    noise: Noise | None = None
    """The calibration of honest proofs. Without it every segment is judged alone, by `tolerances`."""
    recalibrate_at: float = Field(default=RECALIBRATE_AT, ge=0)
    """How far published weights may be from those of the calibration, relative to their norm, before it is repeated. It is
    repeated at versions 4, 8, 16, 32, ... and on doubt as well. 0: never."""
    later_noise: tuple[LaterNoise, ...] = ()
    """The calibrations that were repeated, by version. The coordinator adds them; a run begins without any."""
    admitted_weights: AdmittedWeights = AdmittedWeights()
    max_lag: int = Field(default=2, ge=0)
    keep_versions: int = Field(default=5, ge=1)
    """How many versions origin and relays keep. Older ones are neither leased nor evaluated."""
    last_version: int = Field(ge=0)
    """0: the run does not train; version 0 is published and evaluated."""
    needs: Needs = Needs()
    """What the run requires of a worker's machine."""

    @property
    def tasks(self) -> tuple[TaskSpec, ...]:
        """The tasks that are trained on."""
        return (self.task, *self.more_tasks)

    def noise_of(self, version: int) -> Noise | None:
        """Returns the calibration that judges the work of a version."""
        later = [one.noise for one in self.later_noise if one.from_version <= version]
        return later[-1] if later else self.noise

    def calibrated_at(self, version: int) -> int:
        """Returns the first version that is judged by the same calibration as the given one; -1 for the run's first calibration."""
        return max((one.from_version for one in self.later_noise if one.from_version <= version), default=-1)

    def as_calibrated_at(self, first: int) -> "RunSpec":
        """Returns the terms without the calibrations that came after the one which judges from version `first` on."""
        known = tuple(one for one in self.later_noise if one.from_version <= first)
        return self.model_copy(update={"later_noise": known})

    def task_specs(self) -> tuple[TaskSpec, ...]:
        """Returns the specs of all tasks, also of those that are only evaluated."""
        return (*self.tasks, *(one.task for one in self.evals))

    def with_tasks(self, change: Callable[[TaskSpec], TaskSpec]) -> "RunSpec":
        """Returns the terms with `change` applied to every task, for example with local files."""
        update = {
            "task": change(self.task),
            "more_tasks": tuple(change(one) for one in self.more_tasks),
            "evals": tuple(one.model_copy(update={"task": change(one.task)}) for one in self.evals),
        }
        return self.model_copy(update=update)

    def find_task(self, title: str, *, trained: bool) -> TaskSpec | None:
        """Returns the task of this title: one that is trained on, or that of an evaluation; None if there is none."""
        known = self.tasks if trained or not self.evals else tuple(one.task for one in self.evals)
        return next((one for one in known if one.title == title), None)

    @model_validator(mode="after")
    def _consistent(self) -> "RunSpec":
        for section, specs in (("task", self.tasks), ("eval", tuple(one.task for one in self.evals))):
            titles = [spec.title for spec in specs]
            for title in titles:
                if titles.count(title) > 1:
                    raise ValueError(
                        f"two entries of [[{section}]] are called {title!r}; give one of them another label"
                    )
        if self.keep_versions <= self.max_lag:
            raise ValueError(
                f"keep_versions = {self.keep_versions} must exceed max_lag = {self.max_lag}, or relays delete versions "
                "that are still leased; raise keep_versions or lower max_lag"
            )
        for noise in (self.noise, *(one.noise for one in self.later_noise)):
            if noise is not None:
                self._check_noise(noise)
        return self

    def _check_noise(self, noise: Noise) -> None:
        """Raises ValueError for the noise of another dtype, temperature or proof format: honest work would be refused."""
        if noise.compute_dtype != self.compute_dtype:
            raise ValueError(
                f"the calibration was measured in {noise.compute_dtype}, compute_dtype is {self.compute_dtype}; "
                "calibrate in the run's dtype"
            )
        named = {f"task {one.title!r}": one for one in self.tasks}
        named |= {f"evaluation {one.task.title!r}": one.task for one in self.evals}
        for what, task in named.items():
            temperature = self.sampling.of(task).temperature
            if temperature not in noise.temperatures:
                known = " and ".join(f"{one:g}" for one in noise.temperatures)
                raise ValueError(
                    f"the calibration was measured at temperature {known}, {what} has {temperature:g}; calibrate this run file "
                    "(shoal toploc calibrate-run), which measures all its temperatures, or set that temperature here"
                )
        measured = (noise.topk, noise.segment_tokens)
        if measured != (self.proof.topk, self.proof.segment_tokens):
            raise ValueError(
                f"the calibration was measured with topk = {measured[0]}, segment_tokens = {measured[1]}, but [proof] has "
                f"{self.proof.topk} and {self.proof.segment_tokens}; remove [proof] or the calibration"
            )
