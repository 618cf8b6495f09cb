"""The trainer's part of a run file. What everybody must know (task, sampling, max_lag) is in wire.run.RunSpec."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.wire.record import Record

Loss = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"]
Normalisation = Literal["token", "sequence", "constant"]
AdvantageKind = Literal["std", "mean"]
Beta = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a loss's paper sets with it. A run file may replace each; docs/losses.md has the formulas."""

    eps: float
    eps_high: float
    advantage: AdvantageKind
    normalisation: Normalisation


RECIPES: dict[Loss, Recipe] = {
    "grpo": Recipe(eps=0.2, eps_high=0.2, advantage="std", normalisation="token"),
    "dr_grpo": Recipe(eps=0.2, eps_high=0.2, advantage="mean", normalisation="constant"),
    "dapo": Recipe(eps=0.2, eps_high=0.28, advantage="std", normalisation="token"),
    # The ratio of a whole answer is a geometric mean and hardly moves: the paper clips at a thousandth of the others.
    "gspo": Recipe(eps=3e-4, eps_high=4e-4, advantage="std", normalisation="sequence"),
    # No lower side; the weight of a token is at most 5.
    "cispo": Recipe(eps=1.0, eps_high=4.0, advantage="std", normalisation="token"),
}


class DilocoConfig(Record):
    """Several trainer sites, each with its own coordinator and workers, that merge what they learnt now and then."""

    inner_steps: int = Field(default=10, ge=1)
    """Updates between two merges: H. Optimiser steps, of which a version takes `optimizer_steps`."""
    engine: Literal["hivemind", "torchft"] = "hivemind"
    codec: Literal["fp32", "fp16", "int8", "int4"] = "fp16"
    """How a merge travels (diloco.codec, which is not asked: a run file is read without torch)."""
    outer_lr: float = Field(default=1.0, gt=0)
    outer_momentum: float = Field(default=0.3, ge=0, lt=1)
    """1 and 0 make a merge the mean of the sites. The papers' 0.7 and 0.9 go on in the direction of earlier merges further
    than a policy stands that is trained on its own answers (docs/LOG.md)."""
    deadline_s: float = Field(default=600.0, gt=0)
    """A merge without agreement by then is taken alone; sites that live but are not ready are waited for half as long."""


class TrainerConfig(Record):
    """How accepted groups become the next policy version."""

    learning_rate: float = Field(default=3e-4, gt=0)
    warmup_steps: int = Field(default=5, ge=0)
    """The rate rises linearly over this many optimiser steps, then stays."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest global norm of a step's gradient."""
    loss: Loss = "grpo"
    advantage: AdvantageKind | None = None
    """Rewards minus the group's mean; "std" also divides by the group's standard deviation, as the report does."""
    eps: float | None = Field(default=None, gt=0, le=1)
    """A bad answer's token stops counting below ratio 1 - eps, a good one's above 1 + eps_high."""
    eps_high: float | None = Field(default=None, gt=0)
    delta: float = Field(default=4.0, gt=1)
    """A bad answer's token stops counting above this ratio too: the second side of the clip. Token ratios only."""
    normalisation: Normalisation | None = None
    """What a token counts: the same in the whole batch, 1/|o| of its answer, or a constant fraction."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the KL term to version 0."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    behaviour: Literal["worker", "recompute"] = "worker"
    """Whose log-probs are the ratio's denominator: the worker's, or this trainer's at the start of the step."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """With `recompute`: weigh each token by min(trainer/worker, high), or leave out those outside the band."""
    correction_band: tuple[float, float] = (0.5, 2.0)
    optimizer_steps: int = Field(default=1, ge=1)
    """Updates a batch is good for: it is cut into this many parts of whole groups."""
    supervised_steps: int = Field(default=0, ge=0)
    """Steps on the task's own answers before version 0; a model of random weights earns nothing without them."""
    supervised_learning_rate: float = Field(default=1e-3, gt=0)
    """Problems in each of those steps."""
    row_tokens: int = Field(default=512, ge=2)
    """Samples are packed into rows of this many tokens. At least prompt + max_new_tokens."""
    rows_per_micro_batch: int = Field(default=8, ge=1)
    """Rows in memory at once. Changes speed and memory, never the gradient."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What forward and backward compute in; master weights, their gradients and the optimiser stay float32."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and its attention, and compute the rest again: less memory, about a quarter slower."""
    compile: bool = False
    """torch.compile each layer. Faster; the report saw runs collapse late with it, so it is off unless asked for."""
    lora_rank: int = Field(default=0, ge=0)
    """Train adapters of this rank beside every linear layer instead of all weights; 0 trains all weights."""
    lora_alpha: int = Field(default=32, ge=1)
    """An adapter's product is scaled by lora_alpha / lora_rank."""
    keep_checkpoints: int = Field(default=2, ge=1)
    diloco: DilocoConfig | None = None
    """With it, this trainer is one of several sites (docs/diloco.md)."""
    metrics: tuple[str, ...] = ()
    """Where figures go besides metrics.jsonl: "tensorboard", "prometheus:PORT", "wandb"."""
    seed: int = Field(default=0, ge=0)

    @property
    def recipe(self) -> Recipe:
        """The loss's own settings, with what the file sets in their place."""
        own = RECIPES[self.loss]
        # A file that sets only `eps` means both sides, where the loss's own sides are equal.
        both = self.eps if self.eps is not None and own.eps == own.eps_high else own.eps_high
        return Recipe(
            eps=own.eps if self.eps is None else self.eps,
            eps_high=both if self.eps_high is None else self.eps_high,
            advantage=self.advantage or own.advantage,
            normalisation=self.normalisation or own.normalisation,
        )

    @model_validator(mode="after")
    def _clip_sides(self) -> "TrainerConfig":
        bounds_delta = self.loss in ("grpo", "dr_grpo", "dapo")
        if bounds_delta and self.delta <= 1 + self.recipe.eps_high:
            raise ValueError(
                f"delta={self.delta} must lie above 1 + eps = {1 + self.recipe.eps_high}; the report has 4 and 0.2"
            )
        return self

    @model_validator(mode="after")
    def _correction_has_something_to_correct(self) -> "TrainerConfig":
        low, high = self.correction_band
        if not 0 <= low < 1 < high:
            raise ValueError(f"correction_band={[low, high]} must lie around 1, such as [0.5, 2.0]")
        if self.correction != "none" and self.behaviour == "worker":
            raise ValueError(
                f'correction="{self.correction}" needs behaviour="recompute": with the worker\'s log-probs the gap is '
                "inside the ratio, and the clip bounds it"
            )
        return self

    @model_validator(mode="after")
    def _metrics_are_known(self) -> "TrainerConfig":
        for name in self.metrics:
            kind, _, where = name.partition(":")
            port = where.rpartition(":")[2]
            if kind == "prometheus" and port.isdigit() and int(port) < 65536:
                continue
            if name not in ("tensorboard", "wandb"):
                raise ValueError(
                    f"metrics: {name!r} is none of tensorboard, wandb, prometheus:PORT, prometheus:HOST:PORT"
                )
        return self
