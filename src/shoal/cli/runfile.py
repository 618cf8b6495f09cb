"""The run file: one TOML file is one run. Unknown keys are refused, nothing is repaired, the numbers it implies are shown."""

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.tasks import make_task
from shoal.trainer.config import TrainerConfig
from shoal.wire.record import Record
from shoal.wire.run import ProofSpec, RunSpec, Sampling, TaskSpec, Tolerances


class RunSection(Record):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")
    model: str
    """`tiny`, `smollm2-135m`, or the path of a folder in the Hugging Face layout."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    last_version: int = Field(ge=1)
    max_lag: int = Field(default=2, ge=0)


class ShardcastSection(Record):
    shard_bytes: int = Field(default=4_000_000, ge=4096)
    keep_versions: int = Field(default=5, ge=1)


class LocalSection(Record):
    """What `shoal run` starts on this machine."""

    relays: int = Field(default=2, ge=1, le=16)
    workers: int = Field(default=2, ge=1, le=64)
    """Honest ones; each name in `lies` adds one that lies."""
    lies: tuple[str, ...] = ()
    validators: int = Field(default=1, ge=1, le=16)
    max_rows: int = Field(default=64, ge=1)
    trainer_threads: int = Field(default=1, ge=1)
    worker_threads: int = Field(default=1, ge=1)
    deadline_s: float = Field(default=900.0, gt=0)
    """How long a role waits for another before it gives up and says for whom."""
    expect_gain: float = Field(default=0.0, ge=0)
    """`shoal run` fails unless held-out reward rises by this much."""


class RunFile(Record):
    run: RunSection
    task: TaskSpec
    sampling: Sampling
    trainer: TrainerConfig
    coordinator: CoordinatorConfig
    proof: ProofSpec = ProofSpec()
    tolerances: Tolerances = Tolerances()
    shardcast: ShardcastSection = ShardcastSection()
    local: LocalSection = LocalSection()

    @model_validator(mode="after")
    def _fits_together(self) -> "RunFile":
        make_task(self.task)
        if self.shardcast.keep_versions <= self.run.max_lag:
            raise ValueError(
                f"shardcast.keep_versions={self.shardcast.keep_versions} must exceed run.max_lag={self.run.max_lag}, or leased versions vanish from the relays"
            )
        return self

    def spec(self) -> RunSpec:
        """The public terms of the run."""
        return RunSpec(
            run=self.run.name,
            task=self.task,
            compute_dtype=self.run.compute_dtype,
            sampling=self.sampling,
            proof=self.proof,
            tolerances=self.tolerances,
            max_lag=self.run.max_lag,
            last_version=self.run.last_version,
        )


def load_run_file(path: Path) -> RunFile:
    """The run file at `path`, or a ValueError that names the key, the value and the file."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except FileNotFoundError:
        raise ValueError(f"no run file at {path}; the ones that ship are in runs/") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    try:
        # TOML has no tuples and JSON's rules for them are the ones we want: lists stand for them.
        return RunFile.model_validate(table, strict=False)
    except ValidationError as error:
        raise ValueError(
            "\n".join(f"{path}: {_complaint(problem)}" for problem in error.errors(include_url=False))
        ) from None


def _complaint(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "the file"
    if problem["type"] == "extra_forbidden":
        return f"{where} is not a key of a run file; docs/run-file.md lists them"
    if problem["type"] == "missing":
        return f"{where} is missing"
    return f"{where} = {problem['input']!r}: {problem['msg']}"


def derived_numbers(file: RunFile) -> dict[str, str]:
    """What the file implies, for `--dry-run`."""
    sampling, coordinator = file.sampling, file.coordinator
    rollouts = coordinator.groups_per_step * sampling.samples_per_prompt
    evaluations = 1 + -(-file.run.last_version // coordinator.eval_every)
    eval_rollouts = coordinator.eval_prompts * coordinator.eval_samples
    return {
        "prompts x samples = rollouts a step": f"{coordinator.groups_per_step} x {sampling.samples_per_prompt} = {rollouts:,}",
        "output tokens a step, at most": f"{rollouts * sampling.max_new_tokens:,}",
        "tokens a micro-batch": f"{file.trainer.rows_per_micro_batch} rows x {file.trainer.row_tokens} = {file.trainer.rows_per_micro_batch * file.trainer.row_tokens:,}",
        "rollouts a lease": f"{coordinator.prompts_per_lease} x {sampling.samples_per_prompt} = {coordinator.prompts_per_lease * sampling.samples_per_prompt:,}",
        "leases a step, at least": f"{-(-coordinator.groups_per_step // coordinator.prompts_per_lease)}",
        "groups in flight, at most": f"{coordinator.groups_per_step * (file.run.max_lag + 1)}",
        "proof bytes a rollout, at most": f"{-(-(sampling.max_new_tokens - 1) // file.proof.segment_tokens) * (2 + 2 * file.proof.topk):,}",
        "held-out evaluations": f"{evaluations} of {coordinator.eval_prompts} x {coordinator.eval_samples} = {eval_rollouts:,} rollouts",
        "rollouts in all, at least": f"{rollouts * file.run.last_version + evaluations * eval_rollouts:,}",
        "processes": f"1 coordinator, 1 trainer, {file.local.relays} relays, {file.local.workers + len(file.local.lies)} workers ({len(file.local.lies)} lying), {file.local.validators} validators",
    }
