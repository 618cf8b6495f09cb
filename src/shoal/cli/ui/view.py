"""The display of a running run: a live table at a terminal, a line every few seconds in a log."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.telemetry import printable
from shoal.wire.codes import ACCEPTED, explain_code
from shoal.wire.messages import NodeView, Stats

LINE_EVERY_S = 3.0


class View(Protocol):
    """Shows a run's state as it changes, and sentences about events."""

    def show(self, stats: Stats) -> None: ...

    def say(self, sentence: str) -> None: ...

    def close(self) -> None: ...


def make_view(names: Mapping[str, str], console: Console) -> View:
    """Returns a view for the console. `names` maps node ids to display names and may grow while the view is open."""
    return LiveView(names, console) if console.is_terminal else LineView(names, console)


class LineView:
    """Prints plain lines, for logs and pipes."""

    def __init__(self, names: Mapping[str, str], console: Console) -> None:
        self._console = console
        self._last_s = float("-inf")
        self._changes = ChangeLog(names)

    def show(self, stats: Stats) -> None:
        for sentence in self._changes.since_last(stats):
            self.say(sentence)
        if time.monotonic() - self._last_s >= LINE_EVERY_S:
            self._last_s = time.monotonic()
            self.say(headline(stats) + waiting_note(stats))

    def say(self, sentence: str) -> None:
        self._console.print(
            f"{time.strftime('%H:%M:%S')} {printable(sentence)}", markup=False, soft_wrap=True
        )

    def close(self) -> None:
        pass


class LiveView:
    """Redraws the headline and a table of nodes in place."""

    def __init__(self, names: Mapping[str, str], console: Console) -> None:
        self._names = names
        self._changes = ChangeLog(names)
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def show(self, stats: Stats) -> None:
        for sentence in self._changes.since_last(stats):
            self.say(sentence)
        # Text without markup or control characters: a node chooses some of these words and could garble the terminal.
        self._live.update(
            Group(
                Text(headline(stats), style="bold"),
                Text(f"waiting for {stats.waiting_for}"),
                node_table(stats, self._names, self._live.console.width),
            )
        )

    def say(self, sentence: str) -> None:
        self._live.console.print(Text(f"{time.strftime('%H:%M:%S')} {printable(sentence)}"))

    def close(self) -> None:
        self._live.stop()


class ChangeLog:
    """Finds what changed since the last call: refusals, ejections, held-out results."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._rejected: dict[str, int] = {}
        self._trust: dict[str, str] = {}
        self._evaluated: set[int] = set()

    def since_last(self, stats: Stats) -> list[str]:
        """Returns one sentence for each change."""
        sentences = []
        for node in stats.nodes:
            name = name_of(node, self._names)
            if (
                node.rejected > self._rejected.get(node.node, 0)
                and node.last_code
                and node.last_code.startswith("reject.")
            ):
                sentences.append(
                    f"{name} refused: {explain_code(node.last_code)} [{node.last_code}: {node.last_detail}]"
                )
            if node.trust == "banned" and self._trust.get(node.node) != "banned":
                sentences.append(
                    f"{name} ejected after {node.rejected} refusals; the refused work is not trained on"
                )
            self._rejected[node.node] = node.rejected
            self._trust[node.node] = node.trust
        for evaluation in stats.evaluations:
            if evaluation.complete and evaluation.version not in self._evaluated:
                self._evaluated.add(evaluation.version)
                sentences.append(
                    f"held-out reward of version {evaluation.version}: {evaluation.reward_mean:.3f} over {evaluation.rollouts} rollouts"
                )
        return sentences


def headline(stats: Stats) -> str:
    """Returns the state of the run in one line."""
    version = "-" if stats.newest_version is None else str(stats.newest_version)
    step = stats.latest
    learned = (
        f"reward {step.reward_mean:.3f}  train {step.tokens_per_s:,.0f} tok/s  lag {step.lag_mean:.1f} (max {step.lag_max})"
        if step
        else "no step yet"
    )
    counts = count_submissions(stats)
    return (
        f"version {version}/{stats.last_version}  {learned}  generate {stats.generation_tokens_per_s:,.0f} tok/s"
        f"  accepted {counts['accepted']}  refused {counts['refused']}  void {counts['void']}"
    )


def waiting_note(stats: Stats) -> str:
    """Returns what the run waits for, before the first step and when a role is missing; else nothing."""
    missing = stats.waiting_for.startswith(("workers", "relays", "a validator"))
    return f"  (waiting for {stats.waiting_for})" if stats.latest is None or missing else ""


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
    Column("trust", "left", 0, lambda node, names: node.trust),
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
    return f"{names[node.node]} ({short})" if node.node in names else short
