"""How a run ended, in numbers, and whether that is what its file expects."""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from rich.console import Console

from shoal.cli.run.runfile import RunFile
from shoal.cli.ui.view import name_of, tally
from shoal.wire.messages import Evaluation, Stats


class Outcome(Enum):
    GOOD = "as expected"
    NO_GAIN = "held-out reward did not rise by the expected margin"
    LIAR_AT_LARGE = "a liar was not ejected"
    HONEST_EJECTED = "an honest worker was ejected"


def held_out(stats: Stats) -> tuple[Evaluation, Evaluation] | None:
    """First and last complete evaluation."""
    done = [evaluation for evaluation in stats.evaluations if evaluation.complete]
    return (done[0], done[-1]) if len(done) >= 2 else None


def judge_run(file: RunFile, stats: Stats, names: Mapping[str, str]) -> Outcome:
    for node in stats.nodes:
        lies = ", lies: " in names.get(node.node, "")
        if lies and node.trust != "banned":
            return Outcome.LIAR_AT_LARGE
        if not lies and node.trust == "banned":
            return Outcome.HONEST_EJECTED
    if sum(", lies: " in name for name in names.values()) < len(file.local.lies):
        return Outcome.LIAR_AT_LARGE
    ends, expected = held_out(stats), file.local.expect_gain
    if expected is not None and (ends is None or ends[1].reward_mean - ends[0].reward_mean < expected):
        return Outcome.NO_GAIN
    return Outcome.GOOD


def print_summary(
    file: RunFile,
    stats: Stats,
    outcome: Outcome,
    folder: Path,
    *,
    plotted: bool,
    names: Mapping[str, str],
    console: Console,
) -> None:
    counts = tally(stats)
    ends = held_out(stats)
    lines = [f"run {file.run.name}: {outcome.value}"]
    if ends:
        lines.append(
            f"  held-out reward   {ends[0].reward_mean:.3f} (version {ends[0].version}) -> {ends[1].reward_mean:.3f} (version {ends[1].version})"
            + _expectation(file)
        )
    else:
        lines.append(f"  held-out reward   fewer than two evaluations were completed{_expectation(file)}")
    sent = sum(relay.bytes_sent for relay in stats.relays)
    lines += [
        f"  versions          {(stats.newest_version or 0) + 1} published, {stats.trained_groups} groups trained on in {stats.batches} batches",
        f"  filtering         {_filtering(stats)}",
        f"  broadcast         {stats.bytes_published / 1e6:,.1f} MB published, {sent / 1e6:,.1f} MB sent by relays",
        f"  submissions       {counts['accepted']} accepted, {counts['refused']} refused, {counts['void']} void",
    ]
    for node in stats.nodes:
        lines.append(
            f"  {name_of(node, names):<40} {node.trust:<12} credit {node.credit:>10,}   accepted {node.accepted}, refused {node.rejected}, void {node.void}"
        )
    lines.append(
        f"  files             {folder}: metrics in trainer/metrics.jsonl, ledger in coordinator/, logs in logs/"
    )
    lines.append(
        f"  plot              {folder / 'reward.png'}"
        if plotted
        else "  plot              none: pip install 'shoal-rl[plot]'"
    )
    print_plainly(console, "\n".join(lines))


def _filtering(stats: Stats) -> str:
    """What online filtering cost: inference whose groups taught nothing."""
    count, dropped = sum(stats.groups.values()), stats.groups.get("dropped", 0)
    stale = stats.groups.get("stale", 0)
    share = dropped / max(1, count)
    return (
        f"{share:.0%} of rollouts in groups without signal ({dropped} of {count} groups), {stale} groups stale; "
        f"{stats.unparseable:.0%} of answers unparseable"
    )


def print_plainly(console: Console, text: str) -> None:
    """As it is: paths may hold anything, brackets included."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _expectation(file: RunFile) -> str:
    expected = file.local.expect_gain
    return "" if expected is None else f", expected a gain of {expected:.2f}"
