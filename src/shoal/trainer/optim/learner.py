"""The learner: fp32 master weights, their optimiser, and one step of each kind.

A step takes one batch and makes the next version of it, in as many updates as `optimizer_steps` says:

    batch ──▶ parts of whole groups ──▶ packed ──▶ scored before any update ──▶ for each part: gradient, clip, update

N counts the output tokens of a micro-batch.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from shoal.model.logprobs import TokenScores
from shoal.net.waiting import Stopped
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.batch import Sample, TrainBatch
from shoal.trainer.data.pack import MicroBatch
from shoal.trainer.distributed.ranks import ALONE, Ranks
from shoal.trainer.optim.loss import Answers, gap_weights, policy_loss, reference_kl, token_weights
from shoal.trainer.optim.policy import Causal, Policy, score
from shoal.trainer.optim.reference import Reference
from shoal.trainer.reporting.step_figures import StepFigures, Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A micro-batch with what was computed of it before the step's first update."""

    micro: MicroBatch
    """Its behaviour log-probs are those the ratio is taken with."""
    correction_N: Tensor | None = None
    """Weights for the gap between engine and trainer."""
    reference_N: Tensor | None = None
    """Log-probs under version 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one update trains on. The counts are of the whole part, on however many processes it lies."""

    num_tokens: int
    num_samples: int
    scored: list[Scored]


class Merging(Protocol):
    """Updates that are merged with other sites' now and then (sites.Sites)."""

    def update(self, num_samples: int) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...


class Learner:
    """Master weights of policy version `version`. They stay in float32; what is published is a rounded copy."""

    def __init__(
        self,
        decoder: Causal,
        config: TrainerConfig,
        *,
        temperature: float,
        max_new_tokens: int = 0,
        version: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        if config.recipe.normalisation == "constant" and max_new_tokens < 1:
            raise ValueError('normalisation = "constant" divides by max_new_tokens; give it to the learner')
        self.decoder = decoder
        """The master weights; of several ranks, each holds a part of every one."""
        self.ranks = ranks
        self.policy = Policy(decoder, config, ranks)
        """What computes with them."""
        self.config = config
        self.temperature = temperature
        self.max_new_tokens = max_new_tokens
        """The constant of the "constant" normalisation; other kinds do not need it."""
        self.version = version
        self.reference: Reference | None = None
        """Set by whoever begins or resumes the run, where `kl` is above 0."""
        self.optimizer = make_optimizer(decoder, config, learning_rate=config.learning_rate)
        self.sites: Merging | None = None
        """Set where this trainer is one of several sites: it then takes the updates."""

    @property
    def device(self) -> torch.device:
        return next(self.decoder.parameters()).device

    def step(self, batch: TrainBatch, stop: threading.Event) -> StepFigures:
        """Version v becomes v + 1. Stopped leaves the version, and the weights where the last update left them."""
        assert batch.version == self.version, f"batch for {batch.version}, learner at {self.version}"
        started_s = time.monotonic()
        sums = Sums(self.device)
        parts = self._prepare(batch, sums, stop)
        grad_norms = [self._update(parts[index], index, sums, stop) for index in range(len(parts))]
        self.version += 1
        return sums.figures(
            self.ranks,
            grad_norm=max(grad_norms),
            learning_rate=self.optimizer.param_groups[0]["lr"],
            optimizer_steps=len(parts),
            train_s=time.monotonic() - started_s,
        )

    def _update(self, part: Part, index: int, sums: Sums, stop: threading.Event) -> float:
        """One step of the optimiser; the gradient's norm before clipping."""
        config = self.config
        number = self.version * config.optimizer_steps + index
        for group in self.optimizer.param_groups:
            group["lr"] = warmed_up(config.learning_rate, step=number, warmup_steps=config.warmup_steps)
        self.optimizer.zero_grad(set_to_none=True)
        # What a worker-scored batch says of the gap is true only until the first update.
        self._accumulate(part, sums, stop, with_gap=config.behaviour == "worker" and index == 0)
        grad_norm = clip_gradient(self.decoder, config.clip_norm)
        if not math.isfinite(grad_norm):
            raise ArithmeticError(
                f"step from version {self.version}: gradient norm is {grad_norm}; "
                f"lower learning_rate ({config.learning_rate}) and resume from an earlier checkpoint"
            )
        if self.sites is None:
            self.optimizer.step()
        else:
            self.sites.update(part.num_samples)
        return grad_norm

    def _prepare(self, batch: TrainBatch, sums: Sums, stop: threading.Event) -> list[Part]:
        """The batch in parts, packed, and scored where the recipe asks for it."""
        parts = [
            Part(
                num_tokens=sum(sample.num_outputs for sample in samples),
                num_samples=len(samples),
                scored=[Scored(micro=micro) for micro in self._micro_batches(samples)],
            )
            for samples in batch.split(self.config.optimizer_steps)
        ]
        if self.config.behaviour == "recompute":
            parts = self._each(parts, lambda scored: self._recomputed(scored, sums), stop)
        if self.config.kl:
            assert self.reference is not None, "kl is above 0, and nobody set the reference"
            with self.reference.in_place_of(self.decoder, self.policy.reread):
                parts = self._each(parts, self._with_reference, stop)
        return parts

    def _each(
        self, parts: list[Part], change: Callable[[Scored], Scored], stop: threading.Event
    ) -> list[Part]:
        """Every micro-batch changed, without gradient."""
        changed = []
        with torch.no_grad():
            for part in parts:
                scored = []
                for one in part.scored:
                    self._check(stop)
                    scored.append(change(one))
                changed.append(replace(part, scored=scored))
        return changed

    def _recomputed(self, scored: Scored, sums: Sums) -> Scored:
        """Behaviour log-probs of the policy as it is now; how far the worker's lie from them, and what to do about it."""
        config, micro = self.config, scored.micro.to(self.device)
        logprobs_N = output_logprobs(self.policy, micro, temperature=self.temperature)
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

    def _with_reference(self, scored: Scored) -> Scored:
        micro = scored.micro.to(self.device)
        return replace(scored, reference_N=output_logprobs(self.policy, micro, temperature=self.temperature))

    def _micro_batches(self, samples: tuple[Sample, ...]) -> list[MicroBatch]:
        """What this process computes of a part's samples."""
        return self.ranks.share(
            samples,
            row_tokens=self.config.row_tokens,
            rows_per_micro_batch=self.config.rows_per_micro_batch,
        )

    def _accumulate(self, part: Part, sums: Sums, stop: threading.Event, *, with_gap: bool) -> None:
        """Gradients of a whole part, one micro-batch after another."""
        for scored in part.scored:
            self._check(stop)
            micro = scored.micro.to(self.device)
            scores = output_scores(self.policy, micro, temperature=self.temperature)
            if with_gap:
                sums.add_gap(scores.logprobs_N, micro.behaviour_N, micro.lags_N)
            loss = self._loss(part, replace(scored, micro=micro), scores, sums)
            loss.backward()  # type: ignore[no-untyped-call]

    def _loss(self, part: Part, scored: Scored, scores: TokenScores, sums: Sums) -> Tensor:
        """A micro-batch's share of its part's loss, a number."""
        config, micro, logprobs_N = self.config, scored.micro, scores.logprobs_N
        policy = policy_loss(
            logprobs_N,
            Answers(
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
            num_tokens=part.num_tokens,
            num_samples=part.num_samples,
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
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=config.betas, fused=fused)
    # The fused kernel writes to weights without leaving a trace, and a working copy goes by the trace.
    optimizer.register_step_post_hook(lambda *_: increment_version(trained))
    return optimizer


def warmed_up(learning_rate: float, *, step: int, warmup_steps: int) -> float:
    """The rate of step number `step`, counted from 0: linear up to `warmup_steps`, then constant."""
    return learning_rate * min(1.0, (step + 1) / (warmup_steps + 1))


def clip_gradient(model: nn.Module, clip_norm: float) -> float:
    """Scale the gradient down to `clip_norm` at most; its norm before, over all ranks."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
