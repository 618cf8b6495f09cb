"""`shoal compare`: the figures of several runs side by side, as a table and as a page with their curves."""

import argparse
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.commands.watch import make_report
from shoal.cli.run.supervise import EXIT_OK
from shoal.cli.ui.values import Commands, is_url, url_or_folder
from shoal.telemetry import printable

if TYPE_CHECKING:
    from shoal.wire.messages import Evaluation
    from shoal.wire.page_data import Snapshot

LATE_SHARE = 0.1
"""Figures of the end of a run are means over this share of its steps."""


def add_compare(commands: Commands) -> None:
    parser = commands.add_parser(
        "compare",
        help="compare runs: a table, and a page with their curves",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        type=url_or_folder,
        help="a run's folder, or a coordinator's URL; two or more",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write the curves into one HTML file")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.set_defaults(action=compare)


def compare(options: argparse.Namespace, stop: threading.Event) -> int:
    if len(options.runs) < 2:
        raise ValueError(f"one run given, {options.runs[0]}; give two or more to compare")
    runs = [read_run(run) for run in options.runs]
    labels = distinct([run.terms.run for run in runs], options.runs)
    rows = compare_runs(runs)
    if options.json:
        found = {label: {name: values[place] for name, *values in rows} for place, label in enumerate(labels)}
        print(json.dumps(found))
    else:
        print_figures(labels, rows)
    if options.out:
        from shoal.files import write_bytes_atomically

        write_bytes_atomically(options.out, make_report(to_page(runs, labels, rows)).encode(), durable=False)
        print(f"{options.out}: curves of {len(runs)} runs, opens in any browser")
    return EXIT_OK


def read_run(run: str) -> "Snapshot":
    """Returns the state of a run, from its folder or from its coordinator."""
    from shoal.cli.public_api import PublicApi
    from shoal.wire.page_data import Snapshot

    if is_url(run):
        with PublicApi(run) as api:
            return api.read("/v1/page", Snapshot)
    from shoal.cli.run_folder import RunFolder
    from shoal.swarm.coordinator.views.page_snapshot import take_snapshot

    with RunFolder(Path(run)) as folder:
        return take_snapshot(folder.db, folder.terms_at_end())


def distinct(names: Sequence[str], runs: Sequence[str]) -> list[str]:
    """Returns the runs' names; with the folder or URL if two are the same, and with a number if these are too."""
    counts = Counter(names)
    found = [name if counts[name] == 1 else f"{name} ({run})" for name, run in zip(names, runs, strict=True)]
    return [label if found.count(label) == 1 else f"{label} {place + 1}" for place, label in enumerate(found)]


# -- the table ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: a name, and the text for a run."""

    name: str
    of: "Callable[[Snapshot], str]"


def late_mean(name: str, digits: int = 3) -> "Callable[[Snapshot], str]":
    """Returns a function that formats the mean of a column over the last steps."""

    def text(run: "Snapshot") -> str:
        values = getattr(run.curve, name)
        late = values[-max(1, round(len(values) * LATE_SHARE)) :] if values else ()
        # A KL of zero in every step was not measured: the run has no reference. Zeros elsewhere are figures.
        measured = any(values) if name == "kl" else bool(values)
        return f"{sum(late) / len(late):.{digits}f}" if measured else "-"

    return text


def mean_of(name: str, digits: int = 2) -> "Callable[[Snapshot], str]":
    """Returns a function that formats the mean of a column over all steps."""

    def text(run: "Snapshot") -> str:
        values = getattr(run.curve, name)
        return f"{sum(values) / len(values):,.{digits}f}" if values else "-"

    return text


def held_out(choose: "Callable[[Sequence[Evaluation]], Evaluation]") -> "Callable[[Snapshot], str]":
    """Returns a function that formats a held-out reward and its version, for each evaluation if there are several."""

    def text(run: "Snapshot") -> str:
        kinds: dict[str, list[Evaluation]] = {}
        for one in run.evaluations:
            if one.complete:
                kinds.setdefault(one.task, []).append(one)
        chosen = {task: choose(known) for task, known in kinds.items()}
        texts = {task: f"{one.reward_mean:.3f} (v{one.version})" for task, one in chosen.items()}
        if len(texts) < 2:
            return next(iter(texts.values()), "-")
        return "\n".join(f"{task} {value}" for task, value in texts.items())

    return text


def _best(evaluations: "Sequence[Evaluation]") -> "Evaluation":
    return max(evaluations, key=lambda one: one.reward_mean)


def _duration(run: "Snapshot") -> str:
    started_s = run.terms.started_at_s
    last_s = run.now.server_time_s
    return "-" if started_s is None else f"{(last_s - started_s) / 60:,.1f} min"


def _verdicts(run: "Snapshot") -> str:
    families = Counter[str]()
    for one in run.verdicts:
        families[one.code.partition(".")[0]] += one.count
    return f"{families['accepted']}, {families['reject']}, {families['void']}"


FIGURES = (
    Figure("task", lambda run: run.terms.task),
    Figure("versions", lambda run: str(run.now.newest_version or 0)),
    Figure("time", _duration),
    Figure("held-out reward, first", held_out(lambda known: known[0])),
    Figure("held-out reward, best", held_out(_best)),
    Figure("held-out reward, last", held_out(lambda known: known[-1])),
    Figure("reward, last tenth of steps", late_mean("reward")),
    Figure("answer tokens, last tenth", late_mean("answer_tokens", 1)),
    Figure("entropy, last tenth", late_mean("entropy")),
    Figure("KL to version 0, last tenth", late_mean("kl", 4)),
    Figure("gradient norm, last tenth", late_mean("grad_norm")),
    Figure("clip share, last tenth", late_mean("clip_fraction", 4)),
    Figure("groups without signal", mean_of("dropped_share")),
    Figure("lag, mean", mean_of("lag")),
    Figure("step: train, s", mean_of("train_s")),
    Figure("step: wait, s", mean_of("wait_s")),
    Figure("step: publish, s", mean_of("publish_s")),
    Figure("submission: generate, s", mean_of("generate_s")),
    Figure("submission: check, s", mean_of("check_s")),
    Figure("trainer's tokens per second", mean_of("tokens_per_s", 0)),
    Figure("accepted, refused, void", _verdicts),
)


def compare_runs(runs: "Sequence[Snapshot]") -> list[list[str]]:
    """Returns the lines of the table: a name and one text for each run."""
    return [[figure.name, *(figure.of(run) for run in runs)] for figure in FIGURES]


def print_figures(labels: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints the table. Names of runs and tasks come from strangers, so they are printed without markup."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for label in labels:
        table.add_column(Text(printable(label)), justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(text, keep="\n")) for text in row))
    Console(highlight=False).print(table)


# -- the page -----------------------------------------------------------------------------------------------


def to_page(runs: "Sequence[Snapshot]", labels: Sequence[str], rows: list[list[str]]) -> dict[str, Any]:
    """Returns the data of the page with all curves."""

    return {
        "table": rows,
        "compare": [
            {
                "label": label,
                "task": run.terms.task,
                "curve": run.curve.model_dump(mode="json"),
                "evaluations": [one.model_dump(mode="json") for one in run.evaluations],
            }
            for run, label in zip(runs, labels, strict=True)
        ],
    }
