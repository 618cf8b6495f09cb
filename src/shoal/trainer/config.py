"""The `[trainer]` table of a run file. Settings that every role needs (task, sampling, max_lag) are in wire.run_spec."""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.wire.record import Record

Loss = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"]
Normalisation = Literal["token", "sequence", "constant"]
AdvantageKind = Literal["std", "mean"]
Beta = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Defaults that belong to a loss, from its paper. A run file may replace each; docs/losses.md has the formulas."""

    eps: float
    eps_high: float
    delta: float
    advantage: AdvantageKind
    normalisation: Normalisation


RECIPES: dict[Loss, Recipe] = {
    "grpo": Recipe(eps=0.2, eps_high=0.2, delta=4.0, advantage="std", normalisation="token"),
    "dr_grpo": Recipe(eps=0.2, eps_high=0.2, delta=4.0, advantage="mean", normalisation="constant"),
    "dapo": Recipe(eps=0.2, eps_high=0.28, delta=4.0, advantage="std", normalisation="token"),
    # The ratio of a whole answer is a geometric mean and changes little: the paper clips it a thousand times tighter.
    "gspo": Recipe(eps=3e-4, eps_high=4e-4, delta=4.0, advantage="std", normalisation="sequence"),
    # No lower bound; the weight of a token is at most 5. A policy that moves for a few steps does not reach the ratio 20.
    "cispo": Recipe(eps=1.0, eps_high=4.0, delta=20.0, advantage="std", normalisation="token"),
}


class DilocoConfig(Record):
    """Settings of several trainer sites, each with its own coordinator and workers, that merge their updates."""

    inner_steps: int = Field(default=10, ge=1)
    """Optimizer steps between two merges (H). A version takes `optimizer_steps` of them."""
    engine: Literal["hivemind", "torchft"] = "hivemind"
    codec: Literal["fp32", "fp16", "fp16-scaled", "int8", "int4"] = "fp16-scaled"
    """Encoding of a merge on the network, one of diloco.codec's. Repeated here, because run files are read without torch.
    Plain fp16 loses up to a third of a merge at reinforcement learning's small rates."""
    average: Literal["mean", "trimmed"] = "mean"
    """"trimmed" leaves out the highest and lowest quarter of the sites at every coordinate."""
    max_norm_ratio: float = Field(default=3.0, ge=1)
    """Largest norm and weight of a site's update, as a multiple of the sites' median."""
    outer_lr: float = Field(default=1.0, gt=0)
    outer_momentum: float = Field(default=0.3, ge=0, lt=1)
    """With outer_lr 1 and outer_momentum 0 a merge is the mean of the sites. The papers' 0.7 and 0.9 overshoot in
    reinforcement learning, where the policy trains on its own answers (measured in bench/log)."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Timeout of a merge; after it the site continues alone. It waits half as long for sites that are alive but not ready."""


class TrainerConfig(Record):
    """How the trainer makes the next policy version from accepted groups."""

    learning_rate: float = Field(default=3e-4, gt=0)
    warmup_steps: int = Field(default=5, ge=0)
    """The learning rate rises linearly over this many optimizer steps."""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up the rate stays, or falls along a cosine to 0 at optimizer step `decay_steps`."""
    decay_steps: int = Field(default=0, ge=0)
    """Optimizer steps of the whole cosine schedule, warm-up included: versions times `optimizer_steps`."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest global norm of a step's gradient."""
    loss: Loss = "grpo"
    advantage: AdvantageKind | None = None
    """"mean" subtracts the group's mean reward; "std" also divides by its standard deviation, as the report does."""
    eps: float | None = Field(default=None, gt=0, le=1)
    """Tokens of bad answers are clipped below ratio 1 - eps, tokens of good ones above 1 + eps_high."""
    eps_high: float | None = Field(default=None, gt=0)
    delta: float | None = Field(default=None, gt=1)
    """Tokens of bad answers are also clipped above this ratio: the second side of the clip. gspo applies it to the answer's
    ratio, cispo to tokens of all answers. Default: 4, and 20 for cispo."""
    normalisation: Normalisation | None = None
    """Weight of a token: equal in the batch ("token"), 1/|o| of its answer ("sequence"), or constant."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the KL term to version 0."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    behaviour: Literal["worker", "recompute"] = "worker"
    """The ratio's denominator: the worker's log-probs, or this trainer's at the start of the step."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """With `recompute`: weight each token by min(trainer/worker, high), or drop tokens outside `correction_band`."""
    correction_band: tuple[float, float] = (0.5, 2.0)
    optimizer_steps: int = Field(default=1, ge=1)
    """Updates per batch, which is split into this many minibatches of whole groups."""
    supervised_steps: int = Field(default=0, ge=0)
    """Steps on the task's own answers before version 0. A model with random weights needs them to earn any reward."""
    supervised_learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate of the supervised steps; it rises linearly over the first tenth of them."""
    row_tokens: int = Field(default=512, ge=2)
    """Samples are packed into rows of this many tokens. At least prompt + max_new_tokens."""
    rows_per_micro_batch: int = Field(default=8, ge=1)
    """Rows per forward pass. Changes speed and memory, not the gradient."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of forward and backward; master weights, their gradients and the optimizer stay float32."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and attention, and recompute the rest: less memory, about a quarter slower."""
    compile: bool = False
    """torch.compile each layer. Faster; off by default, because the report saw runs collapse late with it."""
    optimizer_states: Literal["float32", "int8"] = "float32"
    """Number format of AdamW's two moments: 8 bytes per parameter in float32, 2 in int8 (optim/compact_adamw.py)."""
    lora_rank: int = Field(default=0, ge=0)
    """Train adapters of this rank beside every linear layer instead of all weights; 0 trains all weights."""
    lora_alpha: int = Field(default=32, ge=1)
    """An adapter's product is scaled by lora_alpha / lora_rank."""
    checkpoint_minutes: float = Field(default=10.0, ge=0)
    """Least time between two checkpoints, which are written in the background; 0 writes one for every version. With `diloco`
    every version gets one, because merges with other sites cannot be made again."""
    keep_checkpoints: int = Field(default=2, ge=1)
    archive: bool = True
    """Whether the trainer keeps the deltas of all versions, so that every version can be exported and audited later."""
    diloco: DilocoConfig | None = None
    """With it, this trainer is one of several sites (docs/diloco.md)."""
    metrics: tuple[str, ...] = ()
    """Sinks besides metrics.jsonl: "tensorboard", "wandb", "trackio", "mlflow", "prometheus:PORT"."""
    seed: int = Field(default=0, ge=0)

    @property
    def passes_per_token(self) -> int:
        """Returns the arithmetic of training on a token, in forward passes: 1 forward, 2 backward, recomputation and scoring."""
        return 3 + self.activation_checkpointing + (self.behaviour == "recompute") + (self.kl > 0)

    @property
    def recipe(self) -> Recipe:
        """Returns the loss's defaults with the run file's settings in their place."""
        own = RECIPES[self.loss]
        names = [field.name for field in fields(Recipe)]
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        # A run file that sets only `eps` means both sides if the loss's defaults are symmetric.
        if "eps" in given and own.eps == own.eps_high:
            given.setdefault("eps_high", given["eps"])
        return replace(own, **given)

    @model_validator(mode="after")
    def _check_together(self) -> "TrainerConfig":
        """Refuses settings that contradict each other."""
        recipe, (low, high) = self.recipe, self.correction_band
        if recipe.delta <= 1 + recipe.eps_high:
            raise ValueError(
                f"delta={recipe.delta} must be above 1 + eps = {1 + recipe.eps_high}; the report uses 4 and 0.2"
            )
        if self.optimizer_states == "int8" and self.diloco is not None:
            raise ValueError(
                'optimizer_states="int8" with [trainer.diloco]: a site keeps its moments in float32; leave optimizer_states out'
            )
        if (self.lr_schedule == "cosine") != (self.decay_steps > 0):
            raise ValueError(
                f'lr_schedule="{self.lr_schedule}" with decay_steps={self.decay_steps}: "cosine" needs decay_steps, such as '
                'last_version * optimizer_steps, and "constant" does not use it'
            )
        if self.decay_steps and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps={self.decay_steps} must be above warmup_steps={self.warmup_steps}")
        if not 0 <= low < 1 < high:
            raise ValueError(f"correction_band={[low, high]} must contain 1, such as [0.5, 2.0]")
        if self.correction != "none" and self.behaviour == "worker":
            raise ValueError(
                f'correction="{self.correction}" needs behaviour="recompute": with the worker\'s log-probs the gap is '
                "part of the ratio, and the clip bounds it"
            )
        return self

    @model_validator(mode="after")
    def _check_metrics(self) -> "TrainerConfig":
        for name in self.metrics:
            kind, _, where = name.partition(":")
            port = where.rpartition(":")[2]
            if kind == "prometheus" and port.isdigit() and int(port) < 65536:
                continue
            if name not in ("tensorboard", "wandb", "trackio", "mlflow"):
                raise ValueError(
                    f"metrics: unknown sink {name!r}; use tensorboard, wandb, trackio, mlflow, prometheus:PORT or prometheus:HOST:PORT"
                )
        return self
