"""`shoal data check`: lists the unusable rows of a data set, and writes the rows that remain. It needs no model.

OUT                   the rows to train on that are left after all filters, and the held-out rows of a data set without a test file
OUT.unusable.jsonl    the rows that are left out because they are unusable or asked elsewhere, with the reasons
"""

import argparse
import dataclasses
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from shoal.cli.commands.sample_answers import load_task, task_spec
from shoal.cli.run.supervise import EXIT_FAILED, EXIT_OK
from shoal.cli.ui.progress_bar import progress
from shoal.files import write_atomically
from shoal.net.waiting import Stopped
from shoal.tasks import CannotGrade, Outcome, Split, make_task
from shoal.tasks.datasets.data_set import DataSet
from shoal.tasks.datasets.judged_answers import JudgedAnswers
from shoal.tasks.datasets.overlap import QuestionSet
from shoal.tasks.grading.pool import Answer, grading_pool
from shoal.wire.run_spec import TaskSpec

SHOWN = 20
GOLD_ROWS = 256
"""Gold answers that are graded together."""
GOLD_S = 3600.0


def check_data(options: argparse.Namespace, stop: threading.Event) -> int:
    spec = task_spec(options)
    found = load_task(spec)
    if not isinstance(found, DataSet):
        raise ValueError(
            f"task {spec.name!r} does not read a data set; `shoal data check` is for those that do"
        )
    task = dataclasses.replace(found, max_bad_share=1.0)
    with progress(f"reading {task.path}"):
        index, sizes = task.indices["path"], (task.size("train"), task.size("eval"))
    left_out = dict(index.bad)
    others = _questions(options.against)
    kept: list[int] = []
    held_out = list(range(sizes[1]))
    with progress("rows", sizes[0]) as advance:
        for seed in range(sizes[0]):
            if stop.is_set():
                raise Stopped("stopped while reading rows")
            entry = task.entry("train", seed)
            if others is not None and others.is_asked_in(entry.question):
                left_out[entry.number] = "asked in a data set of --against"
            else:
                kept.append(seed)
            advance(1)
    if options.gold:
        wrong = _wrong_golds(task, "train", kept, stop)
        left_out |= dict(wrong.values())
        kept = [seed for seed in kept if seed not in wrong]
        if not task.eval_path:  # rows of a test file have other numbers; check it with path = the test file
            wrong = _wrong_golds(task, "eval", held_out, stop)
            left_out |= dict(wrong.values())
            held_out = [seed for seed in held_out if seed not in wrong]
    report = {
        "file": task.path,
        "rows": index.num_rows,
        "unusable": len(index.bad),
        "task_types": {
            name: int((index.kinds == place).sum()) for place, name in enumerate(index.kind_names) if name
        },
        "not_trained_on": task.split_rows.left_out,
        "train": len(kept),
        "eval": len(held_out),
        "left_out": {str(number): left_out[number] for number in sorted(left_out)},
    }
    if options.out is not None:
        _write(options.out, task, kept, held_out, left_out)
    print(json.dumps(report) if options.json else _format(report, options.out))
    # A run would refuse the file.
    refused = len(index.bad) > found.max_bad_share * index.num_rows
    return EXIT_FAILED if refused else EXIT_OK


def _questions(against: list[tuple[str, Any]]) -> QuestionSet | None:
    """Returns the questions of other data sets, or None if there are none."""
    asked: list[str] = []
    for name, path in against:
        other = make_task(TaskSpec(name=name, options={"path": str(path)}))
        if not isinstance(other, DataSet):
            raise ValueError(f"--against {name}={path}: task {name!r} does not read a data set")
        asked += [
            other.entry(split, seed).question
            for split in ("train", "eval")
            for seed in range(other.size(split))
        ]
    return QuestionSet(asked) if against else None


def _wrong_golds(
    task: DataSet, split: Split, seeds: list[int], stop: threading.Event
) -> dict[int, tuple[int, str]]:
    """Returns the seeds of rows whose own answer is not graded right, with row number and reason. Rows without one are skipped."""
    wrong: dict[int, tuple[int, str]] = {}
    if isinstance(task, JudgedAnswers):
        return wrong  # a judge model scores answers; there are no right ones
    with progress("gold answers", len(seeds)) as advance:
        for start in range(0, len(seeds), GOLD_ROWS):
            part = [(seed, task.entry(split, seed)) for seed in seeds[start : start + GOLD_ROWS]]
            given = [
                (seed, one) for seed, one in part if one.problem.answer.strip("`\n ") not in ("", "python")
            ]
            try:
                answers = [Answer(one.problem, one.problem.answer, 1) for _, one in given]
                rewards = grading_pool().grade(task, answers, limit_s=GOLD_S, stop=stop)
            except CannotGrade as error:
                if stop.is_set():
                    raise Stopped("stopped while grading") from None
                raise ValueError(f"gold answers could not be graded: {error}") from None
            for (seed, one), reward in zip(given, rewards, strict=True):
                if reward.outcome is not Outcome.RIGHT:
                    reason = f"its own answer is {reward.outcome.value}: a test may be wrong or never end"
                    wrong[seed] = one.number, reason
            advance(len(part))
    return wrong


def _write(out: Path, task: DataSet, kept: list[int], held_out: list[int], left_out: dict[int, str]) -> None:
    with write_atomically(out) as file:
        for seed in kept:
            file.write(json.dumps(task.entry("train", seed).row).encode() + b"\n")
        for seed in [] if task.eval_path else held_out:
            file.write(json.dumps(task.entry("eval", seed).row).encode() + b"\n")
    with write_atomically(out.with_name(f"{out.name}.unusable.jsonl")) as file:
        for number in sorted(left_out):
            line = {"file": task.path, "row": number, "reason": left_out[number]}
            file.write(json.dumps(line).encode() + b"\n")


def _format(report: dict[str, Any], out: Path | None) -> str:
    lines = [
        f"{report['file']}: {report['rows']} rows, {report['unusable']} unusable",
        *(f"  {count:>9} {name}" for name, count in report["task_types"].items()),
        *(f"  {count:>9} not trained on: {reason}" for reason, count in report["not_trained_on"].items()),
        f"  {report['train']:>9} to train on",
        f"  {report['eval']:>9} held out",
    ]
    left_out = report["left_out"]
    kinds = Counter(reason.partition(":")[0][:80] for reason in left_out.values())
    lines += [f"{count} rows: {reason}" for reason, count in kinds.most_common(10)]
    lines += [f"row {number}: {reason}" for number, reason in list(left_out.items())[:SHOWN]]
    if len(left_out) > SHOWN:
        lines.append(f"and {len(left_out) - SHOWN} more; --out FILE or --json lists them all")
    if out is not None:
        lines.append(f"written: {out}, {out}.unusable.jsonl")
    return "\n".join(lines)
