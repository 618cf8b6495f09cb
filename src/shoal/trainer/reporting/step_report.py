"""The report of a step: what the coordinator and the metrics get to know."""

from collections import Counter
from dataclasses import asdict

from shoal.trainer.data.batch import TrainBatch
from shoal.trainer.reporting.step_figures import StepFigures
from shoal.wire.messages import StepReport


def step_report(batch: TrainBatch, figures: StepFigures, wait_s: float) -> StepReport:
    """Tokens count prompts and outputs of the rollouts trained on."""
    lags = [sample.lag for sample in batch.samples]
    by_lag = Counter(lags)
    return StepReport(
        version=batch.version + 1,
        reward_mean=batch.reward_mean,
        groups=batch.num_groups,
        dropped_groups=batch.dropped_groups,
        dropped_share=batch.dropped_share,
        unparseable=batch.unparseable,
        stale_groups=batch.stale_groups,
        rollouts=len(batch.samples),
        tokens=batch.num_tokens,
        lag_mean=sum(lags) / len(lags),
        lag_max=max(lags),
        lags=tuple(by_lag[lag] for lag in range(max(lags) + 1)),
        wait_s=wait_s,
        waited_on=batch.waited_on,
        tokens_per_s=batch.num_tokens / max(figures.train_s, 1e-9),
        **asdict(figures),
    )
