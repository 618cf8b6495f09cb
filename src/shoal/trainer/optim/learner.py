"""The learner: fp32 master weights, their optimizer, and the training step.

A step turns one batch into the next version, in `optimizer_steps` updates:

    batch ──▶ minibatches of whole groups ──▶ packed ──▶ scored before any update ──▶ each: gradient, clip, update

N counts the output tokens of a micro-batch.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from shoal.diloco.ranks import SINGLE_PROCESS, Ranks
from shoal.model.logprobs import TokenScores
from shoal.net.waiting import Stopped
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.batch import TrainBatch, TrainSample
from shoal.trainer.data.pack import MicroBatch, pack_for_rank
from shoal.trainer.optim.compact_adamw import CompactAdamW
from shoal.trainer.optim.loss import AnswerTokens, gap_weights, policy_loss, reference_kl, token_weights
from shoal.trainer.optim.policy import Causal, TrainerPolicy
from shoal.trainer.optim.reference import Reference
from shoal.trainer.reporting.step_figures import StepFigures, StepSums

PROGRESS_EVERY_S = 5.0
"""Seconds between two log lines about a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredMicroBatch:
    """A micro-batch with the log-probs that are computed before the step's first update."""

    micro: MicroBatch
    """Its behaviour log-probs are the denominator of the ratio."""
    correction_N: Tensor | None = None
    """Weights that correct the gap between engine and trainer."""
    reference_N: Tensor | None = None
    """Log-probs under version 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """What one update trains on. `micros` are this rank's share; the counts are over all ranks."""

    num_tokens: int
    num_samples: int
    micros: list[ScoredMicroBatch]


class SiteMerger(Protocol):
    """Makes updates and merges them with other sites' at intervals: Sites on rank 0, SiteFollower on the other ranks."""

    def count_samples(self, num_samples: float) -> None: ...

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Learner:
    """The master weights of policy version `version`, in float32. Published versions are rounded copies."""

    def __init__(
        self,
        decoder: Causal,
        config: TrainerConfig,
        *,
        max_new_tokens: int = 0,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        if config.recipe.normalisation == "constant" and max_new_tokens < 1:
            raise ValueError('normalisation = "constant" divides by max_new_tokens; give it to the learner')
        self.decoder = decoder
        """The model with the master weights; with several ranks each holds a shard of every weight."""
        self.ranks = ranks
        self.policy = TrainerPolicy(decoder, config, ranks)
        """Computes log-probs with the master weights."""
        self.config = config
        self.max_new_tokens = max_new_tokens
        """The divisor of the "constant" normalisation; other kinds do not use it."""
        self.version = 0
        self.reference: Reference | None = None
        """Version 0's weights; must be set before a step if `kl` is above 0."""
        self.optimizer = make_optimizer(decoder, config, learning_rate=config.learning_rate)
        self.sites: SiteMerger | None = None
        """Set if this trainer is one of several sites; it then makes the updates."""
        self.before_change: Callable[[], None] = lambda: None
        """Called in a step before the weights change for the first time. It waits until nobody reads the last version any more."""
        self.between_versions = False
        """Whether the weights have some updates of a step that is not complete; a checkpoint of them would repeat those updates."""
        self._progress = StepProgress(0, 0)

    @property
    def device(self) -> torch.device:
        return next(self.decoder.parameters()).device

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that train, by name: all of them, or the adapters."""
        return {name: one for name, one in self.decoder.named_parameters() if one.requires_grad}

    def optimizer_names(self) -> list[str]:
        """Returns the parameters' names in the optimizer's order, by which its state_dict numbers them."""
        names = {id(parameter): name for name, parameter in self.decoder.named_parameters()}
        return [names[id(one)] for group in self.optimizer.param_groups for one in group["params"]]

    def step(self, batch: TrainBatch, stop: threading.Event) -> StepFigures:
        """Trains on a batch: version v becomes v + 1.

        Raises Stopped if `stop` is set; the version then stays, and finished updates of this step remain in the weights.
        """
        assert batch.version == self.version, f"batch for {batch.version}, learner at {self.version}"
        started_s = time.monotonic()
        sums = StepSums(self.device)
        minibatches = self._prepare(batch, sums, stop)
        num_micros = sum(len(one.micros) for one in minibatches) if self.ranks.leads else 0
        self._progress = StepProgress(self.version + 1, num_micros)
        grad_norms = [self._update(one, index, sums, stop) for index, one in enumerate(minibatches)]
        self.version, self.between_versions = self.version + 1, False
        return sums.figures(
            self.ranks,
            grad_norm=max(grad_norms),
            learning_rate=self.optimizer.param_groups[0]["lr"],
            optimizer_steps=len(minibatches),
            train_s=time.monotonic() - started_s,
        )

    def _update(self, minibatch: Minibatch, index: int, sums: StepSums, stop: threading.Event) -> float:
        """Makes one optimizer step and returns the gradient's norm before clipping."""
        config = self.config
        number = self.version * config.optimizer_steps + index
        for group in self.optimizer.param_groups:
            group["lr"] = update_rate(config, number)
        self.optimizer.zero_grad(set_to_none=True)
        # The gap to the worker's log-probs can be measured only until the first update changes the weights.
        self._accumulate(minibatch, sums, stop, with_gap=config.behaviour == "worker" and index == 0)
        grad_norm = clip_gradient(self.decoder, config.clip_norm)
        if not math.isfinite(grad_norm):
            raise ArithmeticError(
                f"step from version {self.version}: gradient norm is {grad_norm}; "
                f"lower learning_rate ({config.learning_rate}) and resume from an earlier checkpoint"
            )
        if index == 0:
            self.before_change()
        self.between_versions = True
        if self.sites is None:
            self.optimizer.step()
        else:
            self.sites.count_samples(minibatch.num_samples)
            self.sites.step()
        return grad_norm

    def _prepare(self, batch: TrainBatch, sums: StepSums, stop: threading.Event) -> list[Minibatch]:
        """Splits and packs the batch, and scores it if the recipe needs recomputed or reference log-probs."""
        minibatches = [
            Minibatch(
                num_tokens=sum(sample.num_outputs for sample in samples),
                num_samples=len(samples),
                micros=[ScoredMicroBatch(micro=micro) for micro in self.micro_batches(samples)],
            )
            for samples in batch.split(self.config.optimizer_steps)
        ]
        if self.config.behaviour == "recompute":
            minibatches = self._score(minibatches, lambda scored: self._recompute(scored, sums), stop)
        if self.config.kl:
            assert self.reference is not None, "kl is above 0, but no reference is set"
            self.before_change()  # the reference's weights take the place of the learner's for a while
            with self.reference.in_place_of(self.decoder, self.policy.reshard):
                minibatches = self._score(minibatches, self._with_reference, stop)
        return minibatches

    def _score(
        self,
        minibatches: list[Minibatch],
        change: Callable[[ScoredMicroBatch], ScoredMicroBatch],
        stop: threading.Event,
    ) -> list[Minibatch]:
        """Applies `change` to every micro-batch, without gradient."""
        changed = []
        with torch.no_grad():
            for minibatch in minibatches:
                micros = []
                for scored in minibatch.micros:
                    self._check(stop)
                    micros.append(change(scored))
                changed.append(replace(minibatch, micros=micros))
        return changed

    def _recompute(self, scored: ScoredMicroBatch, sums: StepSums) -> ScoredMicroBatch:
        """Replaces the worker's log-probs by the current policy's, measures the gap, and computes its correction."""
        config, micro = self.config, scored.micro.to(self.device)
        logprobs_N = self.policy.scores(micro).logprobs_N
        sums.add_gap(logprobs_N, micro.behaviour_N, micro.lags_N)
        correction_N = None
        if config.correction != "none":
            correction_N = gap_weights(
                logprobs_N,
                micro.behaviour_N,
                truncate=config.correction == "truncate",
                band=config.correction_band,
            )
            bounded_N = (
                (correction_N >= config.correction_band[1])
                if config.correction == "truncate"
                else (correction_N == 0)
            )
            sums.add(corrected=bounded_N.sum())
        return replace(
            scored, micro=replace(scored.micro, behaviour_N=logprobs_N.cpu()), correction_N=correction_N
        )

    def _with_reference(self, scored: ScoredMicroBatch) -> ScoredMicroBatch:
        micro = scored.micro.to(self.device)
        return replace(scored, reference_N=self.policy.scores(micro).logprobs_N)

    def micro_batches(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        """Returns this rank's packed share of the samples."""
        return pack_for_rank(
            samples,
            self.ranks,
            row_tokens=self.config.row_tokens,
            rows_per_micro_batch=self.config.rows_per_micro_batch,
        )

    def _accumulate(
        self, minibatch: Minibatch, sums: StepSums, stop: threading.Event, *, with_gap: bool
    ) -> None:
        """Accumulates the gradient of a minibatch over its micro-batches."""
        for scored in minibatch.micros:
            self._check(stop)
            micro = scored.micro.to(self.device)
            scores = self.policy.scores(micro)
            if with_gap:
                sums.add_gap(scores.logprobs_N, micro.behaviour_N, micro.lags_N)
            loss = self._loss(minibatch, replace(scored, micro=micro), scores, sums)
            loss.backward()
            self._progress.add()

    def _loss(
        self, minibatch: Minibatch, scored: ScoredMicroBatch, scores: TokenScores, sums: StepSums
    ) -> Tensor:
        """Returns a micro-batch's share of its minibatch's loss, as a scalar."""
        config, micro, logprobs_N = self.config, scored.micro, scores.logprobs_N
        policy = policy_loss(
            logprobs_N,
            AnswerTokens(
                behaviour_N=micro.behaviour_N, advantages_N=micro.advantages_N, samples_N=micro.samples_N
            ),
            config,
        )
        loss_N = policy.loss_N if scored.correction_N is None else policy.loss_N * scored.correction_N
        if scored.reference_N is not None:
            kl_N = reference_kl(logprobs_N, scored.reference_N)
            loss_N = loss_N + config.kl * kl_N
            sums.add(kl=kl_N.sum())
        if config.entropy_bonus:
            loss_N = loss_N - config.entropy_bonus * scores.entropy_N
        weights_N = token_weights(
            config.recipe.normalisation,
            micro.samples_N,
            num_tokens=minibatch.num_tokens,
            num_samples=minibatch.num_samples,
            constant=self.max_new_tokens,
        )
        loss = (loss_N * weights_N).sum()
        sums.add(
            loss=loss,
            clipped=policy.clipped_N.sum(),
            entropy=scores.entropy_N.sum(),
            tokens=torch.ones_like(logprobs_N).sum(),
        )
        return loss

    def _check(self, stop: threading.Event) -> None:
        if stop.is_set():
            raise Stopped(f"stopped in the step from version {self.version}")


class StepProgress:
    """Logs how far a long step is, which `shoal run` shows; nothing if the number of micro-batches is 0."""

    def __init__(self, version: int, num_micro_batches: int) -> None:
        self._version, self._num = version, num_micro_batches
        self._done, self._began_s = 0, time.monotonic()
        self._logged_s = self._began_s

    def add(self) -> None:
        """Counts a micro-batch."""
        self._done += 1
        now_s = time.monotonic()
        if now_s - self._logged_s < PROGRESS_EVERY_S or self._done >= self._num:
            return
        self._logged_s = now_s
        left_s = (now_s - self._began_s) / self._done * (self._num - self._done)
        Log("trainer").info(
            "training", version=self._version, micro_batches=f"{self._done}/{self._num}", left_s=round(left_s)
        )


def make_optimizer(model: nn.Module, config: TrainerConfig, *, learning_rate: float) -> torch.optim.Optimizer:
    """Returns AdamW over the trained parameters. Biases and norms are not decayed, as is usual."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if config.optimizer_states == "int8":
        optimizer = CompactAdamW(groups, lr=learning_rate, betas=config.betas, seed=config.seed & 0xFFFF)
    else:
        fused = all(one.is_cuda for one in trained) or None  # None lets torch choose
        optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=config.betas, fused=fused)
    # A fused kernel does not count its writes in `_version`, by which WorkingCopy.refresh detects new weights.
    optimizer.register_step_post_hook(lambda *_: increment_version(trained))
    return optimizer


def warmup_rate(learning_rate: float, *, step: int, warmup_steps: int) -> float:
    """Returns the learning rate of step number `step`, counted from 0: linear up to `warmup_steps`, then constant."""
    return learning_rate * min(1.0, (step + 1) / (warmup_steps + 1))


def update_rate(config: TrainerConfig, step: int) -> float:
    """Returns the learning rate of update number `step`, counted from 0: the warm-up, then constant or a cosine to 0."""
    rate = warmup_rate(config.learning_rate, step=step, warmup_steps=config.warmup_steps)
    if config.lr_schedule == "constant" or step < config.warmup_steps:
        return rate
    done = min(1.0, (step - config.warmup_steps) / (config.decay_steps - config.warmup_steps))
    return rate * 0.5 * (1 + math.cos(math.pi * done))


def clip_gradient(model: nn.Module, clip_norm: float) -> float:
    """Scales the gradient to a norm of at most `clip_norm`; returns its norm before, over all ranks."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
