"""Early warnings: sentences about the last steps, as pure functions of their reports.

In the INTELLECT-2 report entropy rises, and clipping and gradients increase slowly, before a run collapses; or engine and trainer
drift apart. A run that learns nothing has groups with equal rewards. The thresholds are rules of thumb: `tiny` gets such warnings
in stable runs too, and they did not foretell its collapses (bench/log/2026-11-19-late-collapse.md).
"""

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Literal

from shoal.wire.messages import StepReport

Kind = Literal["no-signal", "entropy-rising", "clip-creeping", "gradient-creeping", "engine-gap", "starving"]

WINDOW = 10
"""Steps in a window; trends compare the means of windows."""
MAX_CHARS = 300
"""Longest warning in a step's report."""
QUIET_STEPS = 5 * WINDOW
"""Steps after which a warning that holds again is given again. Near its threshold it comes and goes from step to step."""
HISTORY = 30 * WINDOW
"""Reports that are kept for the trends."""


def early_warnings(reports: Sequence[StepReport]) -> dict[Kind, str]:
    """Returns the sentence of each warning that holds after the newest of `reports`, which are in order of version."""
    rules: dict[Kind, Callable[[Sequence[StepReport]], str | None]] = {
        "no-signal": no_signal,
        "entropy-rising": entropy_rising,
        "clip-creeping": clip_creeping,
        "gradient-creeping": gradient_creeping,
        "engine-gap": engine_gap,
        "starving": starving,
    }
    found = {kind: rule(reports) for kind, rule in rules.items() if reports}
    return {kind: sentence for kind, sentence in found.items() if sentence is not None}


class WarningTracker:
    """Keeps the reports and returns each warning once, until it has not held for QUIET_STEPS."""

    def __init__(self) -> None:
        self._reports: list[StepReport] = []
        self._last_held: dict[Kind, int] = {}
        """The version at which each warning held last."""

    def with_warnings(self, report: StepReport) -> StepReport:
        """Returns the report with its new warnings, each as `kind: sentence`."""
        new = tuple(f"{kind}: {sentence}"[:MAX_CHARS] for kind, sentence in self.add(report).items())
        return report.model_copy(update={"warnings": new})

    def add(self, report: StepReport) -> dict[Kind, str]:
        """Returns the warnings that are new with this report."""
        if self._reports and self._reports[-1].version >= report.version:
            return {}
        self._reports = [*self._reports[-HISTORY:], report]
        found = early_warnings(self._reports)
        quiet_since = report.version - QUIET_STEPS
        new = {
            kind: one for kind, one in found.items() if self._last_held.get(kind, -QUIET_STEPS) <= quiet_since
        }
        self._last_held |= dict.fromkeys(found, report.version)
        return new


def no_signal(reports: Sequence[StepReport]) -> str | None:
    """Warns if nine of ten groups have equal rewards: most rollouts then teach nothing."""
    recent = reports[-WINDOW // 2 :]
    useful = sum(report.groups for report in recent)
    dropped = sum(report.dropped_groups for report in recent)
    if len(recent) < WINDOW // 2 or dropped < 9 * useful:
        return None
    # The batch's own reward says nothing here: groups that are solved or too hard are not in it.
    reward = fmean(
        report.reward_mean if report.accepted_reward_mean is None else report.accepted_reward_mean
        for report in recent
    )
    share = f"{100 * dropped / (dropped + useful):.0f} % of the groups of the last {len(recent)} steps had all-equal rewards"
    if reward < 0.1:
        return f"{share} and the mean reward is {reward:.3f}: the task is too hard; make it easier, filter the prompts, or raise samples_per_prompt"
    if reward > 0.9:
        return f"{share} and the mean reward is {reward:.3f}: the task is solved; make it harder or stop"
    return f"{share} at a mean reward of {reward:.3f}: prompts are either solved or too hard; filter them by pass rate"


def entropy_rising(reports: Sequence[StepReport]) -> str | None:
    """Warns if entropy has fallen and risen again by a quarter of the fall: the report saw this before each collapse."""
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
        "the INTELLECT-2 report saw this before a collapse; if the reward falls too, raise kl (0.001) or lower learning_rate"
    )


def clip_creeping(reports: Sequence[StepReport]) -> str | None:
    """Warns if the clipped share of tokens keeps rising."""
    return _creep(
        [100 * report.clip_fraction for report in reports],
        floor=2.0,
        sentence="the clipped share of tokens rose steadily from {:.1f} % to {:.1f} %: the policy moves further in each step than its "
        "rollouts allow; lower learning_rate, optimizer_steps or max_lag",
    )


def gradient_creeping(reports: Sequence[StepReport]) -> str | None:
    """Warns if the gradient's norm keeps rising."""
    return _creep(
        [report.grad_norm for report in reports],
        floor=0.0,
        sentence="the gradient's norm rose steadily from {:.3g} to {:.3g}: if the reward falls too, raise kl (0.001) or lower "
        "learning_rate; the INTELLECT-2 report also lowered clip_norm, to 0.05 to 0.1",
    )


def engine_gap(reports: Sequence[StepReport]) -> str | None:
    """Warns if engine and trainer disagree on fresh tokens. On stale tokens the gap also holds how far the policy moved."""
    newest = reports[-1]
    if not newest.gap_fresh_tokens or newest.logprob_gap <= 0.01:
        return None
    return (
        f"engine and trainer differ by {newest.logprob_gap:.3f} in the mean log-prob of fresh tokens (up to "
        f"{newest.logprob_gap_max:.2f}), above 0.01: they compute different things; compare dtype, kernels and "
        'temperature, or set behaviour = "recompute" with a correction'
    )


def starving(reports: Sequence[StepReport]) -> str | None:
    """Warns if steps wait twice as long as they train. Uses medians, so that one long wait at the start does not count."""
    recent = reports[-WINDOW // 2 :]
    waited_s = median(report.wait_s for report in recent)
    trained_s = median(report.train_s for report in recent)
    if len(recent) < WINDOW // 2 or waited_s < 2 * trained_s:
        return None
    on = next((report.waited_on for report in reversed(recent) if report.waited_on), "")
    if on.startswith("the trainer"):
        return None  # it waited for its own publication, not for rollouts
    remedy = "more validators" if "at the validator" in on else "more workers"
    return (
        f"a step waits {waited_s:.3g} s for rollouts and trains {trained_s:.3g} s (medians of the last {len(recent)}): "
        f"{remedy} would make the run faster" + (f"; the last wait was for {on}" if on else "")
    )


def _windows(values: Sequence[float]) -> list[float]:
    """Returns the means of windows that end with the newest value; an incomplete first window is not used."""
    first = len(values) % WINDOW
    return [fmean(values[start : start + WINDOW]) for start in range(first, len(values), WINDOW)]


def _creep(values: Sequence[float], *, floor: float, sentence: str) -> str | None:
    """Returns the sentence with lowest and newest mean if three windows in a row rose and the newest is twice the lowest and above
    `floor`.

    The first window is warm-up and does not count.
    """
    means = _windows(values)[1:]
    if len(means) < 3 or not means[-3] < means[-2] < means[-1]:
        return None
    lowest, now = min(means), means[-1]
    return sentence.format(lowest, now) if now > floor and now >= 2 * lowest else None
