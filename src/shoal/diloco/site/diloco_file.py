"""The file of a DiLoCo run, which all sites share. docs/diloco.md describes every key."""

import json
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from shoal.diloco.codec import CodecName
from shoal.diloco.optimizer import Schedule
from shoal.diloco.robust import AverageKind, RobustSettings
from shoal.wire.record import Record


class DilocoRunSection(Record):
    """The section [run]."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")
    model: str
    """`tiny`, `smollm2-135m`, or the path of a model folder that transformers can load."""
    seed: int = Field(default=0, ge=0)
    steps: int = Field(ge=1)
    """Inner steps of the whole run. The learning rate falls along a cosine until the last one."""
    engine: Literal["hivemind", "torchft", "local"] = "hivemind"


class DataSection(Record):
    """The section [data]."""

    files: tuple[str, ...] = Field(min_length=1)
    """Text files, or .npy files of token ids; patterns such as data/*.txt are allowed."""
    validation: tuple[str, ...] = ()
    """Held-out files, like `files`; without it the last hundredth of `files` is held out."""
    sequence: int = Field(default=256, ge=2)
    """Tokens per sample."""


class InnerSection(Record):
    """The section [inner]: the inner optimizer."""

    lr: float = Field(default=4e-4, gt=0)
    warmup_steps: int = Field(default=100, ge=0)
    final_lr_share: float = Field(default=0.1, ge=0, le=1)
    """The rate at the last step, as a share of `lr`. OpenDiLoCo's is 0."""
    weight_decay: float = Field(default=0.1, ge=0)
    decay_norms: bool = False
    """Whether norms and biases are decayed too, as in OpenDiLoCo."""
    batch: int = Field(default=32, ge=1)
    """Samples per inner step and site."""
    micro_batch: int = Field(default=32, ge=1)
    """Samples per forward pass; the gradients of a batch are accumulated over several."""
    clip_norm: float = Field(default=1.0, gt=0)
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: weights stay float32, matrix products are bfloat16 (autocast)."""


class OuterSection(Record):
    """The section [outer]: the outer optimizer."""

    lr: float = Field(default=0.7, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)


class RoundsSection(Record):
    """The section [rounds]."""

    inner_steps: int = Field(default=500, ge=1)
    codec: CodecName = "fp16-scaled"
    average: AverageKind = "mean"
    """"trimmed" leaves out the highest and lowest quarter of the sites at every coordinate."""
    max_norm_ratio: float = Field(default=3.0, ge=1)
    """Largest norm and weight of a site's update, as a multiple of the group's median."""
    admit: tuple[str, ...] = ()
    """Peer ids of all sites, as `shoal diloco id` prints them; empty admits every peer that knows the run's name."""
    fragments: int = Field(default=1, ge=1)
    overlap_steps: int = Field(default=0, ge=0)
    mix: float = Field(default=0.5, ge=0, lt=1)
    gather_s: float = Field(default=120.0, gt=0)
    """Seconds that a round waits for sites that are alive but not ready."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Seconds after which a round without agreement is taken alone."""
    min_peers: int = Field(default=1, ge=1)
    """Smallest group of a round; with fewer sites each continues alone after the deadline."""
    eval_every: int = Field(default=1, ge=1)
    """Rounds between two validation losses."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Rounds between two checkpoints of a site."""

    @property
    def schedule(self) -> Schedule:
        """Returns the optimizer's part of these settings. Raises ValueError if they do not fit together."""
        return Schedule(**{field.name: getattr(self, field.name) for field in fields(Schedule)})

    @model_validator(mode="after")
    def _schedule_fits(self) -> "RoundsSection":
        _ = self.schedule
        return self


class DilocoFile(Record):
    """A DiLoCo run file."""

    run: DilocoRunSection
    data: DataSection
    inner: InnerSection = InnerSection()
    outer: OuterSection = OuterSection()
    rounds: RoundsSection = RoundsSection()

    def shared(self) -> str:
        """Returns, as text, the settings that must be equal at all sites for them to commit a round."""
        return (
            f"inner_steps = {self.rounds.inner_steps}, fragments = {self.rounds.fragments}, codec = {self.rounds.codec}, "
            f"outer lr = {self.outer.lr}, momentum = {self.outer.momentum}, {self.robust().as_text()}"
        )

    def robust(self) -> RobustSettings:
        """Returns how the sites' updates become one."""
        return RobustSettings(average=self.rounds.average, max_norm_ratio=self.rounds.max_norm_ratio)

    @model_validator(mode="after")
    def _fits_together(self) -> "DilocoFile":
        if self.rounds.admit and self.run.engine != "hivemind":
            raise ValueError(
                f'rounds.admit needs run.engine = "hivemind": the peers of {self.run.engine!r} have no keys'
            )
        return self


def load_diloco_file(path: Path) -> DilocoFile:
    """Reads the file at `path`. Raises ValueError that names the file and the key."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except FileNotFoundError:
        raise ValueError(f"no file at {path}; runs/diloco/tiny.toml is an example") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}; runs/diloco/tiny.toml is an example") from None
    try:
        return DilocoFile.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        lines = (
            f"{path}: {'.'.join(str(part) for part in problem['loc'])}"
            + (
                " is not a key of this file"
                if problem["type"] == "extra_forbidden"
                else f": {problem['msg'].removeprefix('Value error, ')}"
            )
            for problem in error.errors(include_url=False)
        )
        raise ValueError("\n".join(lines) + "\n`shoal docs diloco` lists the keys") from None
