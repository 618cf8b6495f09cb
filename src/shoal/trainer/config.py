"""The trainer's part of a run file. What everybody must know (task, sampling, max_lag) is in wire.run.RunSpec."""

from typing import Literal

from pydantic import Field, model_validator

from shoal.wire.record import Record


class TrainerConfig(Record):
    """How accepted groups become the next policy version."""

    learning_rate: float = Field(default=3e-4, gt=0)
    warmup_steps: int = Field(default=5, ge=0)
    """The rate rises linearly over this many steps, then stays."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest global norm of a step's gradient."""
    advantage: Literal["std", "mean"] = "std"
    """Rewards minus the group's mean; "std" also divides by the group's standard deviation, as the report does."""
    eps: float = Field(default=0.2, gt=0, lt=1)
    """A good answer's token stops counting above ratio 1 + eps, a bad one's below 1 - eps."""
    delta: float = Field(default=4.0, gt=1)
    """A bad answer's token stops counting above this ratio too: the second side of the clip."""
    supervised_steps: int = Field(default=0, ge=0)
    """Steps on the task's own answers before version 0; a model of random weights earns nothing without them."""
    supervised_learning_rate: float = Field(default=1e-3, gt=0)
    supervised_batch: int = Field(default=64, ge=1)
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
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _clip_sides(self) -> "TrainerConfig":
        if self.delta <= 1 + self.eps:
            raise ValueError(
                f"delta={self.delta} must lie above 1 + eps = {1 + self.eps}; the report has 4 and 0.2"
            )
        return self
