"""A sweep: `shoal run FILE --set KEY=1,2,3` runs the file once for each value, one run after another, and compares them."""

import argparse
import json
import sys
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shoal.cli.run.local import default_folder, run
from shoal.cli.run.overrides import combinations
from shoal.cli.run.runfile import load_run_file
from shoal.cli.run.supervise import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, RunFailed
from shoal.cli.run_folder import RunFolder
from shoal.cli.ui.values import best_version, held_out_means
from shoal.files import write_bytes_atomically
from shoal.net.waiting import DeadlinePassed

MAX_NAME = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """The result of one run of a sweep."""

    settings: str
    folder: str
    first: float | None = None
    """Held-out reward of the first evaluation; None if there is none."""
    last: float | None = None
    best: float | None = None
    best_version: int | None = None
    reward: float | None = None
    """Mean reward of the last step's batch."""
    failure: str = ""


def sweep(options: argparse.Namespace, stop: threading.Event) -> int:
    """Runs every combination, prints a table and writes it as JSON. The exit code is 0 if every run ended as its file expects."""
    runs = combinations(options.set)
    # All of them now: a mistake in the last value must not be found after hours of the first runs.
    file, *_ = [load_run_file(options.file, overrides=settings) for settings in runs]
    rows: list[SweepRow] = []
    codes: set[int] = set()
    for number, settings in enumerate(runs, start=1):
        one = plan_run(options, file.run.name, number, settings)
        print(f"run {number} of {len(runs)}: {' '.join(settings)}", flush=True)
        failure = ""
        try:
            codes.add(run(one, stop))
        except (RunFailed, DeadlinePassed, ValueError) as error:
            print(f"shoal: {error}", file=sys.stderr)
            failure = str(error)
            codes.add(EXIT_FAILED)
        if stop.is_set():
            print(f"stopped; continue with --resume: {len(runs) - number} runs have not begun")
            return EXIT_INTERRUPTED
        if not options.dry_run:
            rows.append(read_row(one.dir, " ".join(settings), failure))
    if rows:
        print(format_rows(rows))
        out = (options.dir or default_folder(file)).with_name(f"{file.run.name}-sweep.json")
        text = json.dumps([asdict(row) for row in rows], indent=1)
        write_bytes_atomically(out, text.encode(), durable=False)
        print(f"  as JSON           {out}")
    return EXIT_OK if codes <= {EXIT_OK} else EXIT_FAILED


def plan_run(
    options: argparse.Namespace, name: str, number: int, settings: tuple[str, ...]
) -> argparse.Namespace:
    """Returns the options of one run of the sweep: its own name, folder and settings."""
    suffix = f"-{number}"
    own = f"{name[: MAX_NAME - len(suffix)]}{suffix}"
    folder = options.dir / str(number) if options.dir else Path("out") / own
    changed = {"set": [*settings, f'run.name="{own}"'], "dir": folder}
    if options.resume and not folder.exists():
        changed["resume"] = False  # an earlier sweep stopped before this run
    return argparse.Namespace(**(vars(options) | changed))


def read_row(folder: Path, settings: str, failure: str) -> SweepRow:
    """Reads the figures of a run that has ended."""
    row = SweepRow(settings=settings, folder=str(folder), failure=failure)
    try:
        with RunFolder(folder) as found:
            history = found.history()
    except ValueError as error:
        return replace(row, failure=failure or str(error))
    means = held_out_means(history.evaluations)
    best = best_version(means) if means else None
    return replace(
        row,
        first=means[min(means)] if means else None,
        last=means[max(means)] if means else None,
        best=None if best is None else means[best],
        best_version=best,
        reward=history.steps[-1].reward_mean if history.steps else None,
    )


def format_rows(rows: list[SweepRow]) -> str:
    """Returns the table of a sweep, the best run first."""
    width = max(len(row.settings) for row in rows)
    lines = [f"{'settings':<{width}}  held-out: first   last    best (version)   last step   files"]
    for row in sorted(rows, key=lambda row: -1.0 if row.best is None else row.best, reverse=True):
        best = "-" if row.best is None else f"{row.best:.3f} ({row.best_version})"
        lines.append(
            f"{row.settings:<{width}}  {_shown(row.first):>15}  {_shown(row.last):>5}  {best:>16}  {_shown(row.reward):>10}   "
            f"{row.folder}" + (f"   FAILED: {row.failure}" if row.failure else "")
        )
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
