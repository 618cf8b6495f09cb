"""The display of a running run: a live table at a terminal, a line every few seconds in a log."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.telemetry import printable
from shoal.wire.codes import ACCEPTED, explain_code
from shoal.wire.messages import NodeView, Stats

LINE_EVERY_S, QUIET_LINE_S = 3.0, 60.0
"""Least and most seconds between two lines. The time doubles while no new version appears."""
STALLED_S, STALLED_STEPS = 10.0, 4
"""A run is stalled if no version came for both this many seconds and this many times the usual step."""
BLOCKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 40
BAR_WIDTH = 20


def make_view(names: Mapping[str, str], console: Console) -> "View":
    """Returns a view for the console. `names` maps node ids to display names and may grow while the view is open."""
    return LiveView(names, console) if console.is_terminal else LineView(names, console)


class View:
    """Shows a run's state as it changes, and sentences about events."""

    def __init__(self, names: Mapping[str, str], console: Console) -> None:
        self._names, self._console = names, console
        self._changes, self._pace = ChangeLog(names), Pace()

    def show(self, stats: Stats) -> None:
        """Says what has changed, and shows the state."""
        now_s = time.monotonic()
        self._pace.note(stats, now_s)
        for sentence in self._changes.since_last(stats):
            self.say(sentence)
        self._show_state(stats, now_s)

    def _show_state(self, stats: Stats, now_s: float) -> None:
        raise NotImplementedError

    def say(self, sentence: str) -> None:
        """Prints a sentence with the time. Text without markup: a node chooses some of these words and could garble the terminal."""
        text = Text(f"{time.strftime('%H:%M:%S')} {printable(sentence)}")
        self._console.print(text, soft_wrap=not self._console.is_terminal)

    def close(self) -> None:
        """Ends the display."""


class LineView(View):
    """Prints plain lines, for logs and pipes."""

    def __init__(self, names: Mapping[str, str], console: Console) -> None:
        super().__init__(names, console)
        self._last_s, self._pause_s = float("-inf"), LINE_EVERY_S
        self._version: int | None = None

    def _show_state(self, stats: Stats, now_s: float) -> None:
        if stats.newest_version != self._version:
            self._version, self._pause_s = stats.newest_version, LINE_EVERY_S
        if now_s - self._last_s >= self._pause_s:
            self._last_s, self._pause_s = now_s, min(QUIET_LINE_S, 2 * self._pause_s)
            waits = is_waiting(stats) or self._pace.stalled
            note = f"  ({self._pace.waiting(stats, now_s)})" if waits else ""
            self.say(f"{self._pace.progress(stats)}  {headline(stats)}{note}")


class LiveView(View):
    """Redraws the headline and a table of nodes in place."""

    def __init__(self, names: Mapping[str, str], console: Console) -> None:
        super().__init__(names, console)
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def _show_state(self, stats: Stats, now_s: float) -> None:
        self._live.update(
            Group(
                Text(self._pace.progress(stats), style="bold"),
                Text(f"{headline(stats)}  {sparkline(self._pace.rewards)}"),
                Text(self._pace.waiting(stats, now_s)),
                node_table(stats, self._names, self._console.width),
            )
        )

    def close(self) -> None:
        self._live.stop()


class Pace:
    """Measures how fast versions appear, to estimate when the run ends, and how long it has waited for one thing."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []
        self._waits_for, self._since_s = "", 0.0
        self.rewards: list[float] = []
        self.stalled = False
        """Whether the next version takes much longer than the last ones."""

    def note(self, stats: Stats, now_s: float) -> None:
        """Takes the state of the run at `now_s`."""
        kind = stats.waiting_for.partition(":")[0]
        newest = stats.newest_version
        if newest is not None and (not self._seen or self._seen[-1][1] != newest):
            self._seen.append((now_s, newest))
            self._waits_for = ""
            if stats.latest is not None:
                self.rewards.append(stats.latest.reward_mean)
        if kind != self._waits_for:
            self._waits_for, self._since_s = kind, now_s
        step_s = self.step_s()
        self.stalled = step_s is not None and now_s - self._seen[-1][0] > max(
            STALLED_S, STALLED_STEPS * step_s
        )

    def step_s(self) -> float | None:
        """Returns the mean seconds of the last ten versions that were seen; None before the second one."""
        recent = self._seen[-11:]
        if len(recent) < 2 or recent[-1][1] <= recent[0][1]:
            return None
        return (recent[-1][0] - recent[0][0]) / (recent[-1][1] - recent[0][1])

    def progress(self, stats: Stats) -> str:
        """Returns the versions as a bar, with the time that the rest will take."""
        newest, last = stats.newest_version or 0, stats.last_version
        full = BAR_WIDTH * min(newest, last) // last if last else BAR_WIDTH
        version = "-" if stats.newest_version is None else str(newest)
        step_s = self.step_s()
        left = (
            ""
            if step_s is None or self.stalled or newest >= last
            else f", about {duration(step_s * (last - newest))} left"
        )
        return f"[{'#' * full}{'.' * (BAR_WIDTH - full)}] version {version}/{last}{left}"

    def waiting(self, stats: Stats, now_s: float) -> str:
        """Returns what the run waits for, for how long so far, and how long a version takes."""
        if stats.finished:
            return "the run is finished"
        step_s = self.step_s()
        usual = "" if step_s is None else f"; a version takes about {duration(step_s)}"
        return f"waiting for {stats.waiting_for}, {duration(now_s - self._since_s)} so far{usual}"


def print_plainly(console: Console, text: str) -> None:
    """Prints text without markup: a path may contain brackets."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def shown_trust(node: NodeView) -> str:
    """Returns a node's trust as people read it on the terminal and the page: a banned node is `ejected`."""
    return "ejected" if node.trust == "banned" else node.trust


def explain_verdict(node: NodeView) -> str:
    """Returns the last verdict on a node in words, with its code and detail."""
    return f"{explain_code(node.last_code or '')} [{node.last_code}: {node.last_detail}]"


def duration(seconds: float) -> str:
    """Returns a time in words: `8 s`, `3 min`, `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def sparkline(values: Sequence[float]) -> str:
    """Returns the values as a row of at most SPARKLINE_WIDTH blocks, scaled from the lowest to the highest value."""
    size = -(-len(values) // SPARKLINE_WIDTH) or 1
    means = [sum(values[at : at + size]) / len(values[at : at + size]) for at in range(0, len(values), size)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in means)


class ChangeLog:
    """Finds what changed since the last call: refusals, ejections, held-out results."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._rejected: dict[str, int] = {}
        self._trust: dict[str, str] = {}
        self._evaluated: set[tuple[int, str]] = set()
        self._warned: set[tuple[int | None, str]] = set()
        self._void: dict[str, int] = {}
        self._void_reported: set[str] = set()

    def since_last(self, stats: Stats) -> list[str]:
        """Returns one sentence for each change."""
        sentences = []
        for node in stats.nodes:
            name = name_of(node, self._names)
            code = node.last_code or ""
            if node.rejected > self._rejected.get(node.node, 0) and code.startswith("reject."):
                sentences.append(f"{name} refused: {explain_verdict(node)}")
            if node.trust == "banned" and self._trust.get(node.node) != "banned":
                sentences.append(
                    f"{name} ejected after {node.rejected} refusals; the refused work is not trained on"
                )
            if node.void > self._void.get(node.node, 0) and (reason := self._new_void_reason(node)):
                sentences.append(f"{name}: work is void, and no node is to blame: {reason}")
            self._rejected[node.node], self._void[node.node] = node.rejected, node.void
            self._trust[node.node] = node.trust
        for warning in stats.warnings:
            key = (warning.version, warning.text)
            if warning.source == "trainer" and key not in self._warned:
                self._warned.add(key)
                sentences.append(f"warning, version {warning.version}: {warning.text}")
        for evaluation in stats.evaluations:
            if evaluation.complete and (evaluation.version, evaluation.task) not in self._evaluated:
                self._evaluated.add((evaluation.version, evaluation.task))
                several = len({one.task for one in stats.evaluations}) > 1
                of = f" on {evaluation.task}" if several else ""
                sentences.append(
                    f"held-out reward of version {evaluation.version}{of}: {evaluation.reward_mean:.3f} over {evaluation.rollouts} rollouts"
                )
        return sentences

    def _new_void_reason(self, node: NodeView) -> str:
        """Returns why a node's last work is void, the first time that this reason appears; else an empty text."""
        if not node.last_code or not node.last_code.startswith("void."):
            return ""
        reason = explain_verdict(node)
        kind = re.sub(r"[0-9a-f]{6,}|\d+", "", reason)
        if kind in self._void_reported:
            return ""
        self._void_reported.add(kind)
        return reason


def headline(stats: Stats) -> str:
    """Returns the state of the run in one line."""
    step = stats.latest
    learned = "no step yet"
    if step is not None:
        accepted = (
            f" (all {step.accepted_rollouts} accepted: {step.accepted_reward_mean:.3f})"
            if step.accepted_reward_mean is not None and step.accepted_rollouts
            else ""
        )
        learned = (
            f"reward {step.reward_mean:.3f}{accepted}  train {step.tokens_per_s:,.0f} tok/s"
            f"  lag {step.lag_mean:.1f} (max {step.lag_max})"
        )
    counts = count_submissions(stats)
    return (
        f"{learned}  generate {stats.generation_tokens_per_s:,.0f} tok/s"
        f"  accepted {counts['accepted']}  refused {counts['refused']}  void {counts['void']}"
    )


def is_waiting(stats: Stats) -> bool:
    """Returns whether a line should say what the run waits for: before the first step, and when a role is missing."""
    missing = stats.waiting_for.startswith(("workers", "relays", "a validator"))
    return stats.latest is None or missing


def count_submissions(stats: Stats) -> dict[str, int]:
    """Returns the number of accepted, refused and void submissions."""
    counts = {"accepted": 0, "refused": 0, "void": 0}
    for code, number in stats.submissions.items():
        kind = "accepted" if code == ACCEPTED else "refused" if code.startswith("reject.") else "void"
        counts[kind] += number
    return counts


def node_table(stats: Stats, names: Mapping[str, str], width: int) -> Table:
    """Returns a table of nodes with the columns that fit into `width`; less important columns are left out."""
    table = Table(box=None, pad_edge=False)
    shown = [column for column in COLUMNS if width >= column.from_width]
    for column in shown:
        table.add_column(column.title, justify=column.justify, no_wrap=width < WIDE)
    for node in stats.nodes:
        table.add_row(*(Text(printable(column.cell(node, names))) for column in shown))
    return table


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the node table."""

    title: str
    justify: Literal["left", "right"]
    from_width: int
    """Least width of the terminal, in characters, at which the column is shown."""
    cell: Callable[[NodeView, Mapping[str, str]], str]


WIDE = 100
COLUMNS = (
    Column("worker", "left", 0, lambda node, names: name_of(node, names)),
    Column("trust", "left", 0, lambda node, names: shown_trust(node)),
    Column(
        "state",
        "left",
        WIDE,
        lambda node, names: f"{node.liveness}, {node.phase}" if node.phase else node.liveness,
    ),
    Column(
        "version",
        "right",
        0,
        lambda node, names: "-" if node.policy_version is None else str(node.policy_version),
    ),
    Column("tok/s", "right", 70, lambda node, names: f"{node.tokens_per_s:,.0f}"),
    Column("accepted", "right", 0, lambda node, names: str(node.accepted)),
    Column("refused", "right", 0, lambda node, names: str(node.rejected)),
    Column("void", "right", 80, lambda node, names: str(node.void)),
    Column("credit", "right", 80, lambda node, names: f"{node.credit:,}"),
    Column(
        "last verdict",
        "left",
        WIDE,
        lambda node, names: "" if node.last_code is None else explain_code(node.last_code),
    ),
)


def name_of(node: NodeView, names: Mapping[str, str]) -> str:
    """Returns the display name and short id of a node, or only the short id of a node without a name."""
    short = node.node[:8]
    name = names.get(node.node, node.name)
    return f"{name} ({short})" if name else short
