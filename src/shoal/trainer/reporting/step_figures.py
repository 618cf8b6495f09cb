"""The figures of a step: sums over its micro-batches, the figures computed from them, and the report that is sent.

The sums are kept in one tensor on the device, so that no micro-batch waits for a number to reach the host.

N counts the output tokens of one micro-batch, F the sums.
"""

from collections import Counter
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from shoal.diloco.ranks import Ranks
from shoal.trainer.data.batch import TrainBatch
from shoal.trainer.optim.loss import MAX_LOG_RATIO
from shoal.wire.messages import StepReport

SUMS = (
    "loss",
    "clipped",
    "corrected",
    "entropy",
    "kl",
    "tokens",
    "gap",
    "gap_kl",
    "gap_tokens",
    "fresh_gap",
    "fresh_gap_kl",
    "fresh_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """What the learner measured in one step. StepReport in wire/messages has the same names."""

    loss: float
    grad_norm: float
    """Before clipping; the largest of the step's updates."""
    clip_fraction: float
    corrected_fraction: float
    entropy: float
    kl: float
    logprob_gap: float
    """Mean |worker's - trainer's| log-prob before the first update, over the tokens of lag 0, or over all if there are none."""
    logprob_gap_max: float
    logprob_gap_kl: float
    gap_fresh_tokens: int
    """Tokens of lag 0 in `logprob_gap`. If 0, the gap is over stale tokens and includes how far the policy has moved."""
    learning_rate: float
    optimizer_steps: int
    train_s: float


class StepSums:
    """Sums of one step over its micro-batches, on this rank."""

    def __init__(self, device: torch.device) -> None:
        self.totals_F = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.gap_max = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, **values: Tensor) -> None:
        """Adds values to the sums of these names."""
        for name, value in values.items():
            self.totals_F[SUMS.index(name)] += value.detach().double()

    def add_gap(self, trainer_N: Tensor, worker_N: Tensor, lags_N: Tensor) -> None:
        """Adds the gap between the engine's and the trainer's log-probs. Call it before the weights change."""
        difference_N = (trainer_N - worker_N).detach().double()
        gap_N = difference_N.abs()
        # The k3 estimate of the KL divergence from the engine, which sampled these tokens, to the trainer.
        kl_N = difference_N.clamp(max=MAX_LOG_RATIO).exp() - difference_N - 1
        fresh_N = (lags_N == 0).double()
        if gap_N.numel():
            self.gap_max = torch.maximum(self.gap_max, gap_N.max())
        self.add(
            gap=gap_N.sum(),
            gap_kl=kl_N.sum(),
            gap_tokens=torch.ones_like(fresh_N).sum(),
            fresh_gap=(gap_N * fresh_N).sum(),
            fresh_gap_kl=(kl_N * fresh_N).sum(),
            fresh_tokens=fresh_N.sum(),
        )

    def figures(
        self, ranks: Ranks, *, grad_norm: float, learning_rate: float, optimizer_steps: int, train_s: float
    ) -> StepFigures:
        """Returns the figures of the whole step, from the sums of all ranks."""
        total = dict(zip(SUMS, ranks.totals(self.totals_F.tolist()), strict=True))
        which = "fresh_" if total["fresh_tokens"] else ""
        gap_tokens = total["fresh_tokens"] or total["gap_tokens"] or 1.0
        tokens = total["tokens"] or 1.0
        return StepFigures(
            loss=total["loss"] / optimizer_steps,
            grad_norm=grad_norm,
            clip_fraction=total["clipped"] / tokens,
            corrected_fraction=total["corrected"] / tokens,
            entropy=total["entropy"] / tokens,
            kl=total["kl"] / tokens,
            logprob_gap=total[f"{which}gap"] / gap_tokens,
            logprob_gap_max=ranks.largest(float(self.gap_max)),
            logprob_gap_kl=total[f"{which}gap_kl"] / gap_tokens,
            gap_fresh_tokens=round(total["fresh_tokens"]),
            learning_rate=learning_rate,
            optimizer_steps=optimizer_steps,
            train_s=train_s,
        )


def step_report(
    batch: TrainBatch,
    figures: StepFigures,
    wait_s: float,
    *,
    disk_bytes: int = 0,
    publish_exposed_s: float = 0.0,
    checkpoint_exposed_s: float = 0.0,
    train_passes: int = 3,
) -> StepReport:
    """Returns the report for the coordinator and the metrics. Its tokens count prompts and outputs that were trained on."""
    lags = [sample.lag for sample in batch.samples]
    by_lag = Counter(lags)
    told = {name: value for name, value in batch.told if name not in ("version", "groups")}
    return StepReport(
        version=batch.version + 1,
        answer_tokens_mean=batch.num_outputs / len(batch.samples),
        groups=batch.num_groups,
        rollouts=len(batch.samples),
        tokens=batch.num_tokens,
        lag_mean=sum(lags) / len(lags),
        lag_max=max(lags),
        lags=tuple(by_lag[lag] for lag in range(max(lags) + 1)),
        wait_s=wait_s,
        waited_on=batch.waited_on,
        disk_bytes=disk_bytes,
        publish_exposed_s=publish_exposed_s,
        checkpoint_exposed_s=checkpoint_exposed_s,
        train_passes=train_passes,
        tokens_per_s=batch.num_tokens / max(figures.train_s, 1e-9),
        **told,
        **asdict(figures),
    )
