"""What a step says of itself: sums over its micro-batches, and the figures they come to.

Everything is added up in one tensor on the device, so that no micro-batch waits for a number to reach the host, and so
that several ranks can add theirs together: `totals_F` by sum, `gap_max` by maximum.

N counts the output tokens of one micro-batch, F the sums.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from shoal.trainer.distributed.ranks import Ranks
from shoal.trainer.optim.loss import MAX_LOG_RATIO

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
    """What one step can say of itself; StepReport in wire/messages.py has the same words."""

    loss: float
    grad_norm: float
    """Before clipping; the largest of the step's updates."""
    clip_fraction: float
    corrected_fraction: float
    entropy: float
    kl: float
    logprob_gap: float
    """Mean |worker's - trainer's| log-prob before the first update: over the tokens of lag 0, or over all if none is."""
    logprob_gap_max: float
    logprob_gap_kl: float
    gap_fresh_tokens: int
    """Tokens of lag 0 that the gap was measured on; 0: it is over stale ones, and also how far the policy has moved."""
    learning_rate: float
    optimizer_steps: int
    train_s: float


class Sums:
    """Figures of a batch, added up over its micro-batches."""

    def __init__(self, device: torch.device) -> None:
        self.totals_F = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.gap_max = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.totals_F[SUMS.index(name)] += value.detach().double()

    def add_gap(self, trainer_N: Tensor, worker_N: Tensor, lags_N: Tensor) -> None:
        """How far the engine's log-probs lie from the trainer's, before it changed its weights."""
        difference_N = (trainer_N - worker_N).detach().double()
        gap_N = difference_N.abs()
        # k3 once more: from the engine, which drew these tokens, to the trainer.
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
        """Of the whole batch: what all ranks have added up, together."""
        sums = SimpleNamespace(**dict(zip(SUMS, self.totals_F.tolist(), strict=True)))
        total = vars(ranks.add_up(sums))
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
