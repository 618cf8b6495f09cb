"""Judges whether a finished run is as its file expects, and prints its numbers."""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from shoal.cli.run.runfile import RunFile
from shoal.cli.ui.values import best_version, completed_by_task, held_out_means
from shoal.cli.ui.view import count_submissions, name_of, print_plainly, shown_trust
from shoal.wire.ledger import TokenCounts
from shoal.wire.messages import Evaluation, Stats
from shoal.wire.page_data import Sample

SHOWN_CHARACTERS = 160
"""Longest part of a prompt or an answer that is shown in one line."""


class RunVerdict(Enum):
    """The verdict on a finished run. The value is printed in the first line of the summary."""

    GOOD = "as expected"
    FINISHED = "finished; no gain was required (local.expect_gain is not set)"
    NO_GAIN = "held-out reward did not rise by the expected margin"
    LIAR_NOT_EJECTED = "a lying worker was not ejected"
    HONEST_EJECTED = "an honest worker was ejected"


class LocalWorker(NamedTuple):
    """A worker that `shoal run` started."""

    name: str
    lie: str | None
    """How it cheats, or None for an honest one."""

    @property
    def display_name(self) -> str:
        return f"{self.name}, lies: {self.lie}" if self.lie else self.name


def judge_run(file: RunFile, stats: Stats, workers: Mapping[str, LocalWorker]) -> RunVerdict:
    """Returns the verdict on a finished run. `workers` maps node ids to the workers that the run started."""
    liars = {node for node, worker in workers.items() if worker.lie is not None}
    for node in stats.nodes:
        if node.node in liars and node.trust != "banned":
            return RunVerdict.LIAR_NOT_EJECTED
        if node.node not in liars and node.trust == "banned":
            return RunVerdict.HONEST_EJECTED
    if len(liars) < len(file.local.lies):  # a liar that never made its key was never ejected
        return RunVerdict.LIAR_NOT_EJECTED
    ends, expected = held_out(stats), file.local.expect_gain
    gains = [last.reward_mean - first.reward_mean for first, last in ends.values()]
    if expected is not None and (not gains or sum(gains) / len(gains) < expected):
        return RunVerdict.NO_GAIN
    return RunVerdict.GOOD if liars or expected is not None else RunVerdict.FINISHED


def format_sample(sample: Sample) -> str:
    """Returns one answer of a worker beside the right one, in one line."""
    prompt, answer, expected = (
        repr(text if len(text) <= SHOWN_CHARACTERS else f"...{text[-SHOWN_CHARACTERS:]}")
        for text in (sample.prompt, sample.answer, sample.expected)
    )
    right = f", expected {expected}" if sample.expected else ""
    return (
        f"an answer of version {sample.policy_version}: {prompt} -> {answer}{right}, reward {sample.reward:g}"
    )


def held_out(stats: Stats) -> dict[str, tuple[Evaluation, Evaluation]]:
    """Returns the first and the last complete result of each evaluation that has two or more, by its label."""
    done = completed_by_task(stats.evaluations)
    return {task: (results[0], results[-1]) for task, results in done.items() if len(results) >= 2}


def print_summary(
    file: RunFile,
    stats: Stats,
    verdict: RunVerdict,
    folder: Path,
    *,
    plotted: bool,
    names: Mapping[str, str],
    console: Console,
) -> None:
    """Prints verdict, held-out reward, counts and files of a finished run. `names` maps node ids to display names."""
    counts = count_submissions(stats)
    ends = held_out(stats)
    expected = file.local.expect_gain
    expectation = "" if expected is None else f", expected a gain of {expected:.2f}"
    lines = [f"run {file.run.name}: {verdict.value}"]
    for task, (first, last) in ends.items():
        of = f" {task}: pass@1 {last.pass_at_1:.3f}, pass@{last.samples} {last.pass_at_k:.3f}, majority {last.majority:.3f}"
        lines.append(
            f"  held-out reward   {first.reward_mean:.3f} (version {first.version}) -> {last.reward_mean:.3f} (version {last.version})"
            + (of if len(ends) > 1 else "")
            + expectation
        )
    if ends and (means := held_out_means(stats.evaluations)):
        best = best_version(means)
        lines.append(
            f"  best version      {best}, held-out reward {means[best]:.3f}: shoal export {folder} --version best --out FOLDER"
        )
    if not ends:
        lines.append(f"  held-out reward   fewer than two evaluations were completed{expectation}")
    sent = sum(relay.bytes_sent for relay in stats.relays)
    lines += [
        f"  versions          {(stats.newest_version or 0) + 1} published, {stats.trained_groups} groups trained on in {stats.batches} batches",
        f"  filtering         {_filtering(stats)}",
        f"  broadcast         {stats.bytes_published / 1e6:,.1f} MB published, {sent / 1e6:,.1f} MB sent by relays",
        f"  submissions       {counts['accepted']} accepted, {counts['refused']} refused, {counts['void']} void",
    ]
    lines += _arithmetic(file, stats.tokens)
    lines += [
        f"  {name_of(node, names):<40} {shown_trust(node):<12} credit {node.credit:>10,}   accepted {node.accepted}, refused {node.rejected}, void {node.void}"
        for node in stats.nodes
    ]
    picture = folder / "reward.png" if plotted else "none: pip install 'shoal-rl[plot]'"
    lines += [
        f"  files             {folder}: metrics in trainer/metrics.jsonl, ledger in coordinator/, logs in logs/",
        f"  model             {folder / 'model'}: the newest version, for transformers or `shoal chat {folder}`",
        f"  plot              {picture}",
    ]
    print_plainly(console, "\n".join(lines))


def _arithmetic(file: RunFile, tokens: TokenCounts | None) -> list[str]:
    """Returns how the run's arithmetic was divided, in forward passes of one token. Attention over long contexts is left out."""
    if tokens is None or not tokens.trained:
        return []
    passes = file.trainer.passes_per_token
    inference, training = tokens.generated + tokens.checked, passes * tokens.trained
    return [
        f"  output tokens     {tokens.generated:,} generated ({tokens.held_out:,} held out), {tokens.checked:,} checked, "
        f"{tokens.trained:,} trained on, {tokens.dropped:,} dropped, {tokens.unused:,} unused",
        f"  FLOPs             training : inference = 1 : {inference / training:.2f} (a trained token is {passes} forward passes, "
        f"{passes - 3} of them recomputed; a generated and a checked one are 1 each)",
    ]


def _filtering(stats: Stats) -> str:
    """Returns how much generated work online filtering dropped."""
    count, dropped = sum(stats.groups.values()), stats.groups.get("dropped", 0)
    stale = stats.groups.get("stale", 0)
    share = dropped / max(1, count)
    return (
        f"{share:.0%} of rollouts in groups without signal ({dropped} of {count} groups), {stale} groups stale; "
        f"{stats.unparseable:.0%} of answers unparseable"
    )
