"""The learner: fp32 master weights, their optimiser, and one step of each kind.

N counts the output tokens of a micro-batch.
"""

import math
import threading
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.model.logprobs import TokenScores
from shoal.net.deadline import Stopped
from shoal.trainer.batch import TrainBatch
from shoal.trainer.config import TrainerConfig
from shoal.trainer.loss import grpo_loss
from shoal.trainer.pack import MicroBatch
from shoal.trainer.policy import Causal, Policy, score
from shoal.trainer.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """What one step can say of itself."""

    loss: float
    grad_norm: float
    """Before clipping."""
    clip_fraction: float
    logprob_gap: float
    """Mean |worker's - trainer's| log-prob before the update: over the tokens of lag 0, or over all if none is."""
    learning_rate: float
    train_s: float


class Learner:
    """Master weights of policy version `version`. They stay in float32; what is published is a rounded copy."""

    def __init__(
        self,
        decoder: Causal,
        config: TrainerConfig,
        *,
        temperature: float,
        version: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        self.decoder = decoder
        """The master weights; of several ranks, each holds a part of every one."""
        self.ranks = ranks
        self.policy = Policy(decoder, config, ranks)
        """What computes with them."""
        self.config = config
        self.temperature = temperature
        self.version = version
        self.optimizer = make_optimizer(decoder, config, learning_rate=config.learning_rate)

    @property
    def device(self) -> torch.device:
        return next(self.decoder.parameters()).device

    def step(self, batch: TrainBatch, stop: threading.Event) -> StepFigures:
        """Version v becomes v + 1. Stopped leaves the weights as they were."""
        assert batch.version == self.version, f"batch for {batch.version}, learner at {self.version}"
        started_s = time.monotonic()
        rate = warmed_up(self.config.learning_rate, step=self.version, warmup_steps=self.config.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        sums = self._accumulate(batch, stop)
        grad_norm = clip_gradient(self.decoder, self.config.clip_norm)
        if not math.isfinite(grad_norm):
            raise ArithmeticError(
                f"step from version {self.version}: gradient norm is {grad_norm}; "
                f"lower learning_rate ({self.config.learning_rate}) and resume from an earlier checkpoint"
            )
        self.optimizer.step()
        self.version += 1
        return StepFigures(
            loss=sums.loss,
            grad_norm=grad_norm,
            clip_fraction=sums.num_clipped / batch.num_outputs,
            logprob_gap=sums.logprob_gap,
            learning_rate=rate,
            train_s=time.monotonic() - started_s,
        )

    def _accumulate(self, batch: TrainBatch, stop: threading.Event) -> "_Sums":
        """Gradients of the whole batch, one micro-batch after another."""
        sums = _Sums()
        for micro in self.ranks.share(
            batch.samples,
            row_tokens=self.config.row_tokens,
            rows_per_micro_batch=self.config.rows_per_micro_batch,
        ):
            if stop.is_set():
                raise Stopped(f"stopped in the step from version {self.version}")
            on_device = micro.to(self.device)
            logprobs_N = output_logprobs(self.policy, on_device, temperature=self.temperature)
            result = grpo_loss(
                logprobs_N,
                on_device.behaviour_N,
                on_device.advantages_N,
                num_tokens=batch.num_outputs,
                eps=self.config.eps,
                delta=self.config.delta,
            )
            result.loss.backward()  # type: ignore[no-untyped-call]
            sums.loss += float(result.loss.detach())
            sums.num_clipped += result.num_clipped
            sums.add_gap((logprobs_N.detach() - on_device.behaviour_N).abs(), on_device.lags_N)
        return self.ranks.add_up(sums)


class _Sums:
    """Figures of a batch, added up over its micro-batches."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.num_clipped = 0
        self._gap, self._num = 0.0, 0
        self._fresh_gap, self._num_fresh = 0.0, 0

    def add_gap(self, gaps_N: Tensor, lags_N: Tensor) -> None:
        fresh_N = lags_N == 0
        self._gap += float(gaps_N.sum())
        self._num += gaps_N.numel()
        self._fresh_gap += float(gaps_N[fresh_N].sum())
        self._num_fresh += int(fresh_N.sum())

    @property
    def logprob_gap(self) -> float:
        return self._fresh_gap / self._num_fresh if self._num_fresh else self._gap / max(1, self._num)


def output_logprobs(model: Policy | Causal, micro: MicroBatch, *, temperature: float) -> Tensor:
    """Log-prob of every output token of a micro-batch, with gradient."""
    return output_scores(model, micro, temperature=temperature).logprobs_N


def output_scores(model: Policy | Causal, micro: MicroBatch, *, temperature: float) -> TokenScores:
    """Log-prob and entropy of every output token of a micro-batch, with gradient."""
    if isinstance(model, Policy):
        return model.scores(micro, temperature)
    return score(model, micro, temperature)


def make_optimizer(model: nn.Module, config: TrainerConfig, *, learning_rate: float) -> torch.optim.AdamW:
    """AdamW; biases and norms are not decayed, as is the custom, and frozen weights are none of its business."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(one.is_cuda for one in trained) or None  # None: torch's own choice
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(config.beta1, config.beta2), fused=fused)


def warmed_up(learning_rate: float, *, step: int, warmup_steps: int) -> float:
    """The rate of step number `step`, counted from 0: linear up to `warmup_steps`, then constant."""
    return learning_rate * min(1.0, (step + 1) / (warmup_steps + 1))


def clip_gradient(model: nn.Module, clip_norm: float) -> float:
    """Scale the gradient down to `clip_norm` at most; its norm before, over all ranks."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
