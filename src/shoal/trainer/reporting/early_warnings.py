"""Early warnings: what the last steps say about the next ones, in words. Pure functions of step reports.

A run does not collapse at once. Before it does, entropy turns, clipping and gradients creep up, or engine and trainer
drift apart; and a run that learns nothing says so in its groups. The thresholds are rules of thumb with their reasons.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from shoal.wire.messages import StepReport

Kind = Literal["no-signal", "entropy-rising", "clip-creeping", "gradient-creeping", "engine-gap", "starving"]

WINDOW = 10
"""Steps that count as "lately"; what came before is compared in windows of the same size."""
HISTORY = 30 * WINDOW
"""Reports worth keeping for these."""


@dataclass(frozen=True, slots=True)
class EarlyWarning:
    kind: Kind
    sentence: str


def early_warnings(reports: Sequence[StepReport]) -> list[EarlyWarning]:
    """What is worth a word after the newest of `reports`, which are in order of version."""
    rules: dict[Kind, Callable[[Sequence[StepReport]], str | None]] = {
        "no-signal": no_signal,
        "entropy-rising": entropy_rising,
        "clip-creeping": clip_creeping,
        "gradient-creeping": gradient_creeping,
        "engine-gap": engine_gap,
        "starving": starving,
    }
    said = ((kind, rule(reports)) for kind, rule in rules.items() if reports)
    return [EarlyWarning(kind, sentence) for kind, sentence in said if sentence is not None]


class Watch:
    """Remembers the reports and says each warning once, until it has been quiet for a step."""

    def __init__(self) -> None:
        self._reports: list[StepReport] = []
        self._standing: set[Kind] = set()

    def after(self, report: StepReport) -> list[EarlyWarning]:
        """The warnings that are new with this report."""
        if self._reports and self._reports[-1].version >= report.version:
            return []
        self._reports = [*self._reports[-HISTORY:], report]
        found = early_warnings(self._reports)
        new = [warning for warning in found if warning.kind not in self._standing]
        self._standing = {warning.kind for warning in found}
        return new


def no_signal(reports: Sequence[StepReport]) -> str | None:
    """Nine of ten groups with equal rewards: the work goes into prompts that teach nothing."""
    lately = reports[-WINDOW // 2 :]
    useful = sum(report.groups for report in lately)
    dropped = sum(report.dropped_groups for report in lately)
    if len(lately) < WINDOW // 2 or dropped < 9 * useful:
        return None
    reward = fmean(report.reward_mean for report in lately)
    share = f"{100 * dropped / (dropped + useful):.0f} % of the groups of the last {len(lately)} steps had all-equal rewards"
    if reward < 0.1:
        return f"{share} and the mean reward is {reward:.3f}: the task is too hard; make it easier, filter the prompts, or raise samples_per_prompt"
    if reward > 0.9:
        return f"{share} and the mean reward is {reward:.3f}: the task is solved; make it harder or stop"
    return f"{share} at a mean reward of {reward:.3f}: prompts are either solved or hopeless; filter them by pass rate"


def entropy_rising(reports: Sequence[StepReport]) -> str | None:
    """Fell to a low, and has come back by a quarter of the fall: the report saw this before each collapse."""
    means = _windows([report.entropy for report in reports])
    if len(means) < 3:
        return None
    low = min(range(len(means)), key=means.__getitem__)
    highest_before, now = max(means[: low + 1]), means[-1]
    fall, rise = highest_before - means[low], now - means[low]
    if fall < 0.1 * highest_before or rise < 0.25 * fall or rise < 0.05:
        return None
    return (
        f"entropy fell from {highest_before:.2f} to {means[low]:.2f} and is back at {now:.2f}: "
        "collapse often follows; lower learning_rate or clip_norm, or raise kl"
    )


def clip_creeping(reports: Sequence[StepReport]) -> str | None:
    creep = _creep([report.clip_fraction for report in reports], floor=0.02)
    if creep is None:
        return None
    return (
        f"the clipped share of tokens crept from {100 * creep[0]:.1f} % to {100 * creep[1]:.1f} %: the policy moves "
        "further in each step than its rollouts allow; lower learning_rate, optimizer_steps or max_lag"
    )


def gradient_creeping(reports: Sequence[StepReport]) -> str | None:
    creep = _creep([report.grad_norm for report in reports], floor=0.0)
    if creep is None:
        return None
    return (
        f"the gradient's norm crept from {creep[0]:.3g} to {creep[1]:.3g}: "
        "lower clip_norm (the report went down to 0.05 to 0.1) or learning_rate"
    )


def engine_gap(reports: Sequence[StepReport]) -> str | None:
    """Only where it was measured on fresh tokens: with lag it is also how far the policy has moved."""
    newest = reports[-1]
    if not newest.gap_fresh_tokens or newest.logprob_gap <= 0.01:
        return None
    return (
        f"engine and trainer differ by {newest.logprob_gap:.3f} in the mean log-prob of fresh tokens (up to "
        f"{newest.logprob_gap_max:.2f}), above 0.01: they compute different things; compare dtype, kernels and "
        'temperature, or set behaviour = "recompute" with a correction'
    )


def starving(reports: Sequence[StepReport]) -> str | None:
    """Medians: one long wait, as at the start, is none of its business."""
    lately = reports[-WINDOW // 2 :]
    waited_s = median(report.wait_s for report in lately)
    trained_s = median(report.train_s for report in lately)
    if len(lately) < WINDOW // 2 or waited_s < 2 * trained_s:
        return None
    on = next((report.waited_on for report in reversed(lately) if report.waited_on), "")
    return (
        f"a step waits {waited_s:.3g} s for rollouts and trains {trained_s:.3g} s (medians of the last {len(lately)}); "
        + (f"it waited for {on}" if on else "more workers would make the run faster")
    )


def _windows(values: Sequence[float]) -> list[float]:
    """Means of windows that end with the newest value; what is left over at the front is not used."""
    first = len(values) % WINDOW
    return [fmean(values[start : start + WINDOW]) for start in range(first, len(values), WINDOW)]


def _creep(values: Sequence[float], floor: float) -> tuple[float, float] | None:
    """(then, now) if three windows in a row rose, the last is twice the lowest so far, and above `floor`.

    The first window is warm-up and does not count.
    """
    means = _windows(values)[1:]
    if len(means) < 3 or not means[-3] < means[-2] < means[-1]:
        return None
    lowest, now = min(means), means[-1]
    return (lowest, now) if now > floor and now >= 2 * lowest else None
