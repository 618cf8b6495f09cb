"""The run file: one TOML file describes one run. Unknown keys and wrong values are refused, each with the key and the value."""

import difflib
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from shoal.cli.run.overrides import apply_overrides
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.tasks import make_task
from shoal.tasks.code_files import allow_code
from shoal.tasks.datasets.file_options import is_file_option, without_digests
from shoal.trainer.config import TrainerConfig
from shoal.wire.codes import Rejected
from shoal.wire.proof_noise import Noise
from shoal.wire.record import Record
from shoal.wire.requirements import Needs
from shoal.wire.run_spec import (
    RECALIBRATE_AT,
    AdmittedWeights,
    EvalSpec,
    ProofSpec,
    RunSpec,
    Sampling,
    TaskSpec,
    Tolerances,
    default_tolerances,
)


class RunSettings(Record):
    """The section [run]."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")
    model: str
    """`tiny`, `smollm2-135m`, or the path of a folder in the Hugging Face layout."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    calibration: str | None = None
    """A file that `shoal toploc calibrate` wrote, relative to the run file. Proofs are then judged over a whole submission."""
    uncalibrated: bool = False
    """Whether a bfloat16 run may start without a calibration. Then int8 weights and steered draws pass."""
    recalibrate_at: float = Field(default=RECALIBRATE_AT, ge=0)
    """How far weights may move from those of the calibration, relative to their norm, before it is repeated. It is
    repeated at versions 4, 8, 16, 32, ... as well. 0: never."""
    last_version: int = Field(ge=0)
    """The last version to train; 0: only evaluates the model."""
    max_lag: int = Field(default=2, ge=0)
    keep_versions: int = Field(default=5, ge=1)
    """Number of versions that origin and relays keep."""


class ShardcastSection(Record):
    """The section [shardcast]: how weights are sent."""

    shard_bytes: int = Field(default=2 << 20, ge=4096)
    snapshot_every: int = Field(default=8, ge=1)
    private: bool = False
    """Whether the origin, and the relays that `shoal run` starts, serve only members of the run."""


class LocalSection(Record):
    """The section [local]: what `shoal run` starts on this machine."""

    relays: int = Field(default=2, ge=1, le=16)
    workers: int = Field(default=2, ge=1, le=64)
    """Number of honest workers; each name in `lies` adds a lying one."""
    lies: tuple[str, ...] = ()
    validators: int = Field(default=1, ge=1, le=16)
    max_rows: int = Field(default=64, ge=1)
    engine: Literal["torch", "vllm"] = "torch"
    """The engine of the workers."""
    trainer_threads: int = Field(default=1, ge=1)
    worker_threads: int = Field(default=1, ge=1)
    deadline_s: float = Field(default=900.0, gt=0)
    """Seconds that a role waits for another before it gives up."""
    expect_gain: float | None = Field(default=None, ge=0)
    """`shoal run` fails unless held-out reward rises by this much. Without it, no gain is required."""


class EvalSection(Record):
    """The section [[eval]]: a held-out evaluation."""

    task: str | TaskSpec
    """The label of a [[task]], whose held-out part is evaluated, or the table of a task that is not trained on."""
    label: str = ""
    """Its name in metrics and curves; empty: that of its task."""
    every: int = Field(default=10, ge=1)
    """Versions between two evaluations. Version 0 and the last version are always evaluated."""
    prompts: int = Field(default=64, ge=1)
    samples: int = Field(default=4, ge=1)
    """Answers to each prompt: the k of pass@k and of the majority."""
    temperature: float | None = Field(default=None, gt=0)
    """Its own temperature; without it, that of [sampling]."""
    max_new_tokens: int | None = Field(default=None, ge=1)

    def spec(self, tasks: tuple[TaskSpec, ...]) -> EvalSpec:
        """Returns the evaluation of a run that trains on `tasks`."""
        task = self.task
        if isinstance(task, str):
            known = {one.title: one for one in tasks}
            if task not in known:
                raise ValueError(
                    f"eval: task = {task!r} is not the label of a task of this file; it has {', '.join(known)}"
                )
            task = known[task]
        own = {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens}
        changed = {name: value for name, value in own.items() if value is not None}
        # Validated again, because model_copy does not.
        values = task.model_dump(mode="json") | {"weight": 1.0, "difficulty": False}
        values["sampling"] |= changed
        values["label"] = self.label or task.label
        return EvalSpec(
            task=TaskSpec.model_validate_json(json.dumps(values)),
            every=self.every,
            prompts=self.prompts,
            samples=self.samples,
        )


class RunFile(Record):
    """A whole run file."""

    run: RunSettings
    task: tuple[TaskSpec, ...] = Field(min_length=1)
    """`[task]`, or `[[task]]` for each of several."""
    eval: tuple[EvalSection, ...] = ()
    """`[[eval]]` for each evaluation. Without any, the held-out part of each task is evaluated as [coordinator] says."""
    sampling: Sampling = Sampling()
    trainer: TrainerConfig = TrainerConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    proof: ProofSpec = ProofSpec()
    tolerances: Tolerances | None = None
    """Tolerances that are not set here come from `default_tolerances` for the run's compute_dtype."""
    admitted_weights: AdmittedWeights = AdmittedWeights()
    """Formats that workers may round weights to, each with its share of credit."""
    shardcast: ShardcastSection = ShardcastSection()
    needs: Needs = Needs()
    """What a worker's machine must have."""
    local: LocalSection = LocalSection()

    @field_validator("task")
    @classmethod
    def _tasks_exist(cls, tasks: tuple[TaskSpec, ...]) -> tuple[TaskSpec, ...]:
        for task in tasks:
            _check_task(task)
        return tasks

    @field_validator("eval")
    @classmethod
    def _evals_exist(cls, evals: tuple[EvalSection, ...]) -> tuple[EvalSection, ...]:
        for one in evals:
            if isinstance(one.task, TaskSpec):
                _check_task(one.task)
        return evals

    @model_validator(mode="after")
    def _fits_together(self) -> "RunFile":
        spec = self.spec()
        for sampling in (self.sampling.of(task) for task in spec.tasks):
            if self.trainer.row_tokens <= sampling.max_new_tokens:
                raise ValueError(
                    f"trainer.row_tokens = {self.trainer.row_tokens} cannot hold a prompt and sampling.max_new_tokens = "
                    f"{sampling.max_new_tokens}; raise it"
                )
            if sampling.samples_per_prompt < 2:
                raise ValueError(
                    "sampling.samples_per_prompt = 1: an answer is compared with the others to its prompt, so one alone teaches "
                    "nothing; set it to 2 or more"
                )
        for task in self.task:
            if task.name == "judge" and self.trainer.supervised_steps and not task.options.get("reference"):
                raise ValueError(
                    f"trainer.supervised_steps = {self.trainer.supervised_steps} trains on right answers, and task {task.title!r} has "
                    "none; set its option reference, or supervised_steps = 0"
                )
        trainer = self.trainer
        if (
            self.admitted_weights.formats
            and trainer.behaviour == "recompute"
            and trainer.correction == "none"
        ):
            raise ValueError(
                f'admitted_weights has {", ".join(self.admitted_weights.formats)}, but trainer.behaviour = "recompute" with '
                'correction = "none" trains as if the published weights had drawn those tokens; set trainer.correction = "truncate", '
                'or leave trainer.behaviour at "worker"'
            )
        if self.trainer.optimizer_steps > self.coordinator.groups_per_step:
            raise ValueError(
                f"trainer.optimizer_steps = {self.trainer.optimizer_steps} is more than coordinator.groups_per_step = "
                f"{self.coordinator.groups_per_step}, so some updates would have no group; lower the one or raise the other"
            )
        return self

    @property
    def lacks_calibration(self) -> bool:
        """Whether the run computes in bfloat16, has no calibration, and its file does not say that it needs none."""
        run = self.run
        return run.compute_dtype == "bfloat16" and run.calibration is None and not run.uncalibrated

    def spec(self) -> RunSpec:
        """Returns the public terms of the run."""
        return RunSpec(
            run=self.run.name,
            task=self.task[0],
            more_tasks=self.task[1:],
            evals=tuple(one.spec(self.task) for one in self.eval),
            compute_dtype=self.run.compute_dtype,
            sampling=self.sampling,
            proof=self.proof,
            tolerances=self._tolerances(),
            noise=None if self.run.calibration is None else _read_noise(Path(self.run.calibration)),
            recalibrate_at=self.run.recalibrate_at,
            admitted_weights=self.admitted_weights,
            max_lag=self.run.max_lag,
            keep_versions=self.run.keep_versions,
            last_version=self.run.last_version,
            needs=self.needs,
        )

    def _tolerances(self) -> Tolerances:
        named = {} if self.tolerances is None else self.tolerances.model_dump(exclude_unset=True)
        return default_tolerances(self.run.compute_dtype).model_copy(update=named)


def _check_task(task: TaskSpec) -> None:
    allow_code(task)  # the user of this machine wrote the run file
    make_task(without_digests(task))  # without its files, which may be on the coordinator's machine only


def _read_noise(path: Path) -> Noise:
    try:
        return Noise.parse(path.read_bytes())
    except OSError as error:
        raise ValueError(
            f"run.calibration: {path}: {str(error.strerror).lower()}; make it with shoal toploc calibrate"
        ) from None
    except Rejected as rejected:
        raise ValueError(
            f"run.calibration: {path} is not a calibration file: {rejected.detail}; make it with shoal toploc calibrate"
        ) from None


def load_run_file(path: Path, *, calibration: Path | None = None, overrides: Sequence[str] = ()) -> RunFile:
    """Returns the run file at `path`. Raises ValueError that names the file, the key and the value.

    `calibration` replaces the file's run.calibration; `overrides` are those of --set.
    """
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except FileNotFoundError:
        raise ValueError(f"no run file at {path}; `shoal init {path}` writes one") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder, not a run file; give the .toml file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}; runs/demo.toml is an example") from None
    apply_overrides(table, overrides)
    single = isinstance(table.get("task"), dict)
    if single:
        table["task"] = [table["task"]]
    _find_files(path, table)
    run = table.get("run")
    if isinstance(run, dict) and calibration is not None:
        run["calibration"] = str(calibration)
    try:
        # Parsed as JSON, because its rules take a list for a tuple and refuse "20" for 20.
        return RunFile.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise ValueError(
            "\n".join(
                f"{path}: {_describe(problem, single=single)}" for problem in error.errors(include_url=False)
            )
        ) from None


def _find_files(path: Path, table: dict[str, Any]) -> None:
    """Makes paths absolute that are relative to the run file: the calibration always, model and data files if they exist there.

    Other paths are relative to the working directory.
    """
    named = [(run, "model") for run in _tables([table.get("run")])]
    evals = [one.get("task") for one in _tables(table.get("eval"))]
    for task in (*_tables(table.get("task")), *_tables(evals)):
        named += [
            (options, name)
            for options in _tables([task.get("options")])
            for name in options
            if is_file_option(name)
        ]
    for one, key in named:
        if isinstance(value := one.get(key), str) and value and (path.parent / value).exists():
            one[key] = str(path.parent / value)
    for run in _tables([table.get("run")]):
        if isinstance(run.get("calibration"), str):
            run["calibration"] = str(path.parent / run["calibration"])


def _tables(value: object) -> list[dict[str, Any]]:
    """Returns the tables of a list; an empty list for any other value, which validation reports later."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def check_calibrated(path: Path, file: RunFile) -> None:
    """Raises ValueError for a bfloat16 run without a calibration."""
    if file.lacks_calibration:
        raise ValueError(
            f"{path}: run.compute_dtype is bfloat16 and there is no calibration, so int8 weights and steered draws would pass; "
            f"run `shoal toploc calibrate-run {path} --out noise.json` on the trainer's machine and set run.calibration, or accept "
            "the risk with run.uncalibrated = true"
        )


_NAMES_ELSEWHERE = {
    "lr": "trainer.learning_rate",
    "max_steps": "run.last_version",
    "steps": "run.last_version",
    "num_generations": "sampling.samples_per_prompt",
    "rollouts_per_example": "sampling.samples_per_prompt",
    "max_tokens": "sampling.max_new_tokens",
    "max_completion_length": "sampling.max_new_tokens",
    "batch_size": "coordinator.groups_per_step",
    "seq_len": "trainer.row_tokens",
    "report_to": "trainer.metrics",
}
"""Keys by the names that they have in TRL and prime-rl (docs/coming-from.md)."""


def _similar_key(where: str) -> str:
    """Returns a question that names the key of this name in another section or system, or one that is spelt alike; or nothing."""
    sections = {
        section: kind
        for section, field in RunFile.model_fields.items()
        for kind in (field.annotation, *get_args(field.annotation))
        if isinstance(kind, type) and issubclass(kind, Record)
    }
    known = [f"{section}.{key}" for section, kind in sections.items() for key in kind.model_fields]
    same = [key for key in known if "." in where and key.endswith(f".{where.rpartition('.')[2]}")]
    named = where.rpartition(".")[2]
    elsewhere = [_NAMES_ELSEWHERE[named]] if named in _NAMES_ELSEWHERE else []
    close = same or elsewhere or difflib.get_close_matches(where, [*known, *sections], n=1, cutoff=0.8)
    return f"did you mean {close[0]}? " if close else ""


def _describe(problem: Any, *, single: bool) -> str:
    # A single [task] is validated as a list of one.
    where = ".".join(str(part) for part in problem["loc"] if not single or part != 0)
    if problem["type"] == "extra_forbidden":
        return f"{where} is not a key of a run file; {_similar_key(where)}`shoal docs run-file` lists them"
    if problem["type"] == "missing":
        return f"{where} is missing; `shoal docs run-file` says what it is"
    # Shoal's own errors name the value; `input` would be the whole table.
    if problem["type"] == "value_error":
        reason = str(problem["ctx"]["error"])
        return f"{where}: {reason}" if where else reason
    if where == "run.name" and problem["type"] == "string_pattern_mismatch":
        return f"{where} = {problem['input']!r}: use lower-case letters, digits and hyphens, 40 at most"
    # A value of several types has one problem for each of them; the type's name is not part of the key.
    where = re.sub(r"\.(bool|int|float|str)$", "", where)
    reason = str(problem["msg"]).replace("Input should be", "it must be")
    return f"{where} = {problem['input']!r}: {reason}"


def derived_numbers(file: RunFile) -> dict[str, str]:
    """Returns the numbers that follow from the file, by name, for `--dry-run`."""
    sampling, coordinator = file.sampling, file.coordinator
    rollouts = coordinator.groups_per_step * sampling.samples_per_prompt
    evals = coordinator.evaluations(file.spec())
    times = [1 + -(-file.run.last_version // one.every) for one in evals]
    eval_rollouts = sum(count * one.prompts * one.samples for count, one in zip(times, evals, strict=True))
    held_out = [
        f"{count} of {one.prompts} x {one.samples} = {one.prompts * one.samples:,} rollouts"
        + (f" ({one.task.title})" if len(evals) > 1 else "")
        for count, one in zip(times, evals, strict=True)
    ]
    own = {
        f"sampling of {task.title}": f"temperature {of.temperature:g}, {of.samples_per_prompt} samples of up to {of.max_new_tokens} tokens"
        for task in file.task
        if (of := sampling.of(task)) != sampling
    }
    return {
        "prompts x samples = rollouts a step": f"{coordinator.groups_per_step} x {sampling.samples_per_prompt} = {rollouts:,}",
        "output tokens a step, at most": f"{rollouts * sampling.max_new_tokens:,}",
        **own,
        "updates a step": f"{file.trainer.optimizer_steps} of about {rollouts // file.trainer.optimizer_steps:,} rollouts",
        "tokens a micro-batch": f"{file.trainer.rows_per_micro_batch} rows x {file.trainer.row_tokens} = {file.trainer.rows_per_micro_batch * file.trainer.row_tokens:,}",
        "rollouts a lease": f"{coordinator.prompts_per_lease} x {sampling.samples_per_prompt} = {coordinator.prompts_per_lease * sampling.samples_per_prompt:,}",
        "leases a step, at least": f"{-(-coordinator.groups_per_step // coordinator.prompts_per_lease)}",
        "groups ahead of the trainer, at most": f"{coordinator.groups_per_step * (file.run.max_lag + 1)}",
        "proof bytes a rollout, at most": f"{-(-(sampling.max_new_tokens - 1) // file.proof.segment_tokens) * (2 + 2 * file.proof.topk):,}",
        "held-out evaluations": "; ".join(held_out) or "none",
        "rollouts in all, at least": f"{rollouts * file.run.last_version + eval_rollouts:,}",
        "processes": f"1 coordinator, 1 trainer, {_count(file.local.relays, 'relay')}, {_count(file.local.workers + len(file.local.lies), 'worker')} ({len(file.local.lies)} lying), {_count(file.local.validators, 'validator')}",
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
