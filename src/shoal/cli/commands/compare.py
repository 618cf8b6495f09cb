"""`shoal compare`: the figures of several runs side by side, as a table and as a page with their curves."""

import argparse
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.cli.commands.watch import make_report
from shoal.cli.run.supervise import EXIT_OK
from shoal.cli.run_reader import open_reader
from shoal.cli.ui.values import completed_by_task
from shoal.files import write_bytes_atomically
from shoal.telemetry import printable
from shoal.wire.messages import Evaluation
from shoal.wire.page_data import Snapshot

LATE_SHARE = 0.1
"""Figures of the end of a run are means over this share of its steps."""


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
        write_bytes_atomically(options.out, make_report(to_page(runs, labels, rows)).encode(), durable=False)
        print(f"{options.out}: curves of {len(runs)} runs, opens in any browser")
    return EXIT_OK


def read_run(run: str) -> Snapshot:
    """Returns the state of a run, from its folder or from its coordinator."""
    with open_reader(run) as reader:
        return reader.snapshot()


def distinct(names: Sequence[str], runs: Sequence[str]) -> list[str]:
    """Returns the runs' names; with the folder or URL if two are the same, and with a number if these are too."""
    counts = Counter(names)
    found = [name if counts[name] == 1 else f"{name} ({run})" for name, run in zip(names, runs, strict=True)]
    return [label if found.count(label) == 1 else f"{label} {place + 1}" for place, label in enumerate(found)]


# -- the table ----------------------------------------------------------------------------------------------


def late_mean(name: str, digits: int = 3) -> Callable[[Snapshot], str]:
    """Returns a function that formats the mean of a column over the last steps."""

    def text(run: Snapshot) -> str:
        values = getattr(run.curve, name)
        late = values[-max(1, round(len(values) * LATE_SHARE)) :] if values else ()
        # A KL of zero in every step was not measured: the run has no reference. Zeros elsewhere are figures.
        measured = any(values) if name == "kl" else bool(values)
        return f"{sum(late) / len(late):.{digits}f}" if measured else "-"

    return text


def mean_of(name: str, digits: int = 2) -> Callable[[Snapshot], str]:
    """Returns a function that formats the mean of a column over all steps."""

    def text(run: Snapshot) -> str:
        values = getattr(run.curve, name)
        return f"{sum(values) / len(values):,.{digits}f}" if values else "-"

    return text


def held_out(choose: Callable[[Sequence[Evaluation]], Evaluation]) -> Callable[[Snapshot], str]:
    """Returns a function that formats a held-out reward and its version, for each evaluation if there are several."""

    def text(run: Snapshot) -> str:
        chosen = {task: choose(known) for task, known in completed_by_task(run.evaluations).items()}
        texts = {task: f"{one.reward_mean:.3f} (v{one.version})" for task, one in chosen.items()}
        if len(texts) < 2:
            return next(iter(texts.values()), "-")
        return "\n".join(f"{task} {value}" for task, value in texts.items())

    return text


def _duration(run: Snapshot) -> str:
    started_s = run.terms.started_at_s
    return "-" if started_s is None else f"{(run.now.server_time_s - started_s) / 60:,.1f} min"


def _verdicts(run: Snapshot) -> str:
    families = Counter[str]()
    for one in run.verdicts:
        families[one.code.partition(".")[0]] += one.count
    return f"{families['accepted']}, {families['reject']}, {families['void']}"


FIGURES: dict[str, Callable[[Snapshot], str]] = {
    "task": lambda run: run.terms.task,
    "versions": lambda run: str(run.now.newest_version or 0),
    "time": _duration,
    "held-out reward, first": held_out(lambda known: known[0]),
    "held-out reward, best": held_out(lambda known: max(known, key=lambda one: one.reward_mean)),
    "held-out reward, last": held_out(lambda known: known[-1]),
    "reward, last tenth of steps": late_mean("reward"),
    "answer tokens, last tenth": late_mean("answer_tokens", 1),
    "entropy, last tenth": late_mean("entropy"),
    "KL to version 0, last tenth": late_mean("kl", 4),
    "gradient norm, last tenth": late_mean("grad_norm"),
    "clip share, last tenth": late_mean("clip_fraction", 4),
    "groups without signal": mean_of("dropped_share"),
    "lag, mean": mean_of("lag"),
    "step: train, s": mean_of("train_s"),
    "step: wait, s": mean_of("wait_s"),
    "step: publish, s": mean_of("publish_s"),
    "submission: generate, s": mean_of("generate_s"),
    "submission: check, s": mean_of("check_s"),
    "trainer's tokens per second": mean_of("tokens_per_s", 0),
    "accepted, refused, void": _verdicts,
}
"""The lines of the table: a name, and a function that returns the text for a run."""


def compare_runs(runs: Sequence[Snapshot]) -> list[list[str]]:
    """Returns the lines of the table: a name and one text for each run."""
    return [[name, *(text_of(run) for run in runs)] for name, text_of in FIGURES.items()]


def print_figures(labels: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints the table. Names of runs and tasks come from strangers, so they are printed without markup."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for label in labels:
        table.add_column(Text(printable(label)), justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(text, keep="\n")) for text in row))
    Console(highlight=False).print(table)


# -- the page -----------------------------------------------------------------------------------------------


def to_page(runs: Sequence[Snapshot], labels: Sequence[str], rows: list[list[str]]) -> dict[str, Any]:
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
