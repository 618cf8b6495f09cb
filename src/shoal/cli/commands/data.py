"""`shoal data filter`: keeps the problems that a model solves sometimes. Problems that it always or never solves teach nothing.

OUT                  the rows whose share of right answers is within the band, and the held-out rows of a data set
                     without a test file; written last
OUT.progress.jsonl   a line for each finished problem: the same command continues where it was stopped, and another
                     band needs no new answers
OUT.report.json      the settings, the histogram, the counts
"""

import argparse
import contextlib
import hashlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.commands.sample_answers import (
    DrawSettings,
    PosedProblem,
    answer,
    load_engine,
    load_task,
    make_draw,
    model_folder,
    pose,
    task_spec,
)
from shoal.cli.run.supervise import EXIT_OK
from shoal.cli.ui.progress_bar import progress
from shoal.cli.ui.values import MAX_NEW_TOKENS
from shoal.files import write_bytes_atomically
from shoal.net.waiting import Stopped
from shoal.tasks import Outcome, Task
from shoal.tasks.datasets.data_set import DataSet, listed_row
from shoal.tasks.datasets.file_options import digest_of, is_file_option
from shoal.wire.run_spec import Sampling, TaskSpec

if TYPE_CHECKING:
    from shoal.rollout.engine.api import Engine

BAR = 40


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """The answers to one problem, counted."""

    place: int
    right: int
    unparseable: int
    tokens: int


def filter_problems(options: argparse.Namespace, stop: threading.Event) -> int:
    low, high = options.band
    if low > high:
        raise ValueError(f"--band {low} {high}: give the lower end first")
    if options.budgets:
        raise ValueError(
            "--budgets is not for filtering, which counts right answers only; set budgets in the run file"
        )
    spec = task_spec(options)
    task = load_task(spec)
    posed = pose(task, "train", options.problems, options.seed)
    draw = make_draw(options, options.k, Sampling(max_new_tokens=MAX_NEW_TOKENS))
    with model_folder(options.model) as folder:
        settings = _settings(spec, folder, draw, options)
        with FilterProgress(_beside(options.out, "progress.jsonl"), settings) as finished:
            left = [one for one in posed if one.place not in finished.done]
            if left:
                engine = load_engine(folder, options)
                _answer(engine, spec, left, draw, finished, stop=stop)
            done = finished.done
    kept = [one for one in posed if low <= done[one.place].right / draw.samples <= high]
    rows = [_row(task, one, spec) for one in kept] + _held_out_rows(task)
    _write(options.out, "".join(f"{json.dumps(row)}\n" for row in rows))
    report = _report([done[one.place] for one in posed], len(kept), draw.samples, (low, high))
    report["held_out"] = len(rows) - len(kept)
    _write(_beside(options.out, "report.json"), json.dumps(settings | report, indent=2) + "\n")
    print(format_report(report, options.out))
    return EXIT_OK


def _answer(
    engine: "Engine",
    spec: TaskSpec,
    left: list[PosedProblem],
    draw: DrawSettings,
    finished: "FilterProgress",
    *,
    stop: threading.Event,
) -> None:
    task = load_task(spec)
    with progress("answers", len(left) * draw.samples) as advance, _print_how_to_continue(finished, left):
        for one, answers in answer(engine, task, left, draw, spec=spec, stop=stop, advance=advance):
            outcomes = Counter(given.outcome for given in answers)
            finished.add(
                ProblemResult(
                    one.place,
                    outcomes[Outcome.RIGHT],
                    outcomes[Outcome.UNPARSEABLE],
                    sum(given.num_tokens for given in answers),
                )
            )


@contextlib.contextmanager
def _print_how_to_continue(finished: "FilterProgress", left: list[PosedProblem]) -> Iterator[None]:
    before = len(finished.done)
    try:
        yield
    except Stopped:
        print(
            f"stopped with {len(finished.done)} of {before + len(left)} problems done; the same command continues",
            file=sys.stderr,
        )
        raise


class FilterProgress:
    """The problems that are done, in a file that survives a stop. Raises ValueError for a file with other settings."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.done: dict[int, ProblemResult] = {}
        self._path, head = path, json.dumps({"settings": settings})
        if path.exists():
            self._read(head)
        else:
            _write(path, f"{head}\n")
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> "FilterProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, done: ProblemResult) -> None:
        self.done[done.place] = done
        self._file.write(f"{json.dumps(asdict(done))}\n")
        self._file.flush()

    def _read(self, head: str) -> None:
        text = self._path.read_text(encoding="utf-8")
        complete = text[: text.rfind("\n") + 1]  # a crash may have cut the last line
        first, *lines = complete.splitlines() or [""]
        if first != head:
            raise ValueError(
                f"{self._path} belongs to a filter with other settings; remove it, or choose another --out"
            )
        if complete != text:
            _write(self._path, complete)
        self.done = {done.place: done for done in (ProblemResult(**json.loads(line)) for line in lines)}


def _settings(
    spec: TaskSpec, folder: Path, draw: DrawSettings, options: argparse.Namespace
) -> dict[str, Any]:
    """Returns everything that the answers depend on. Files are represented by their digests."""
    files = {
        name: digest_of(Path(str(value)))
        for name, value in spec.options.items()
        if is_file_option(name) and value
    }
    weights = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        weights.update(digest_of(path).encode())
    return {
        "task": spec.model_dump(mode="json"),
        "files": files,
        "weights": weights.hexdigest(),
        "problems": options.problems,
        "dtype": options.dtype,
        **asdict(draw),
    }


def _row(task: Task, one: PosedProblem, spec: TaskSpec) -> dict[str, Any]:
    """Returns a data set's row unchanged, or a generated problem as a row for the task `listed`."""
    return task.entry("train", one.seed).row if isinstance(task, DataSet) else listed_row(one.problem, spec)


def _held_out_rows(task: Task) -> list[dict[str, Any]]:
    """Returns all rows that the data set holds out by their hash, so that a run on the new file evaluates on the same ones."""
    if not isinstance(task, DataSet) or task.eval_path:
        return []
    return [task.entry("eval", seed).row for seed in range(task.size("eval"))]


def _report(
    done: list[ProblemResult], num_kept: int, samples: int, band: tuple[float, float]
) -> dict[str, Any]:
    rights = Counter(one.right for one in done)
    answers = max(1, len(done) * samples)
    return {
        "band": band,
        "looked_at": len(done),
        "kept": num_kept,
        "histogram": [rights[right] for right in range(samples + 1)],
        "pass_at_1": sum(one.right for one in done) / answers,
        "pass_at_k": sum(one.right > 0 for one in done) / max(1, len(done)),
        "unparseable": sum(one.unparseable for one in done) / answers,
        "tokens": sum(one.tokens for one in done),
    }


def format_report(report: dict[str, Any], out: Path) -> str:
    histogram, (low, high) = report["histogram"], report["band"]
    samples, most = len(histogram) - 1, max(1, *histogram)
    lines = [f"{report['looked_at']} problems, {samples} answers each: how many were right"]
    for right, count in enumerate(histogram):
        kept = "kept" if low <= right / samples <= high else ""
        lines.append(f"  {right:>3} {count:>7} {'#' * round(BAR * count / most):<{BAR}} {kept}".rstrip())
    lines += [
        f"pass@1 {report['pass_at_1']:.2%}, pass@{samples} {report['pass_at_k']:.2%}, unparseable {report['unparseable']:.2%}, {report['tokens']:,} tokens",
        f"kept {report['kept']} with {low:.1%} to {high:.1%} right: {out}",
    ]
    if report["held_out"]:
        lines.append(f"the file also has all {report['held_out']} held-out rows")
    return "\n".join(lines)


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(f"{out.name}.{suffix}")


def _write(path: Path, text: str) -> None:
    write_bytes_atomically(path, text.encode())
