"""Measures data sets: how long 285,000 rows take to load and how much memory, and whether gold answers are graded right.

    python bench/data.py load                     makes synthetic rows of both types; loads them cold, warm, and as a validator does
    python bench/data.py load --parquet           the same as Parquet
    python bench/data.py judge FOLDER             gold and mangled answers of HumanEval, MBPP, GSM8K and MATH in FOLDER

Each load runs in a process of its own, which reports its time, its own processor time and its largest resident memory. Two thirds of the rows are
mathematics, a third of those with answers that math-verify must parse; the others are programs with 10 tests each. Of the answers
that math-verify must parse only --distinct are different, since each takes it milliseconds; the time of one is printed.
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.tasks.datasets.data_set import DataSet
from shoal.tasks.datasets.file_options import with_files_from
from shoal.tasks.datasets.genesys import read_genesys
from shoal.tasks.grading.math_grader import math_grader
from shoal.tasks.grading.pool import Answer, GradingPool
from shoal.tasks.registry import keep_task_files, make_task
from shoal.tasks.task import Outcome, Problem, Task
from shoal.wire.run_spec import TaskSpec

ROWS = 285_000
TEXT_CHARS = 900
"""Length of a question."""
NUM_TESTS = 10


# -- loading ----------------------------------------------------------------------------------------------


def make_rows(count: int, distinct: int) -> Iterator[dict[str, Any]]:
    """Yields rows as the INTELLECT-2 data set has them. One in 200 is unusable."""
    rng = random.Random(1)
    words = ["circle", "integer", "such", "that", "the", "sum", "of", "its", "digits", "is", "prime", "find"]
    for number in range(count):
        text = " ".join(rng.choices(words, k=TEXT_CHARS // 6))
        row = {
            "problem_id": f"row-{number}",
            "prompt": f"Problem {number}: {text}?",
            "metadata": "{}",
            "solve_rate_qwen_r1_distill_7b": rng.randrange(9) / 8,
        }
        if number % 3 == 2:
            yield row | {"task_type": "prime_rl_code", "verification_info": _code(number, rng)}
        else:
            gold = _gold(number, number % distinct, rng)
            yield row | {
                "task_type": "verifiable_math",
                "verification_info": json.dumps({"ground_truth": gold}),
            }


def _gold(number: int, variant: int, rng: random.Random) -> Any:
    a, b = rng.randrange(1, 9999), rng.randrange(2, 9999)
    if number % 200 == 0:
        return ""
    if number % 9 == 0:
        return f"\\left( {variant}, \\frac{{{variant + 2}}}{{7}} \\right)"
    if number % 9 == 3:
        return f"{variant}x^2 + 3x"
    if number % 9 == 6:
        return [f"\\frac{{{a}}}{{{b}}}", a / b]
    return a if number % 2 else str(a)


def _code(number: int, rng: random.Random) -> str:
    calls: list[Any] = [[[rng.randrange(1000) for _ in range(50)], number] for _ in range(NUM_TESTS)]
    if number % 2:
        cases: dict[str, Any] = {"inputs": [" ".join(map(str, call[0])) for call in calls]}
        cases["outputs"] = [f"{sum(call[0])}\n" for call in calls]
    else:
        cases = {"fn_name": "total", "inputs": calls, "outputs": [[sum(call[0]) + number] for call in calls]}
    return json.dumps({"test_cases": json.dumps(cases)})


def write_rows(path: Path, count: int, distinct: int) -> None:
    with path.open("w") as file:
        for row in make_rows(count, distinct):
            file.write(f"{json.dumps(row)}\n")


def write_parquet(path: Path, count: int, distinct: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, writer = make_rows(count, distinct), None
    while batch := [row for _, row in zip(range(5000), rows, strict=False)]:
        table = pa.Table.from_pylist(batch)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def _load_new(spec: TaskSpec) -> dict[str, Any]:
    task = make_task(spec)
    assert isinstance(task, DataSet)
    rng = random.Random(2)
    started_s = time.perf_counter()
    sizes = task.size("train"), task.size("eval")
    loaded_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    for _ in range(1000):
        task.problem("train", rng.getrandbits(63))
    return {"seconds": loaded_s, "sizes": sizes, "problem_ms": time.perf_counter() - started_s}


def _load_before(path: str) -> dict[str, Any]:
    """Reads the file as it was read before the index, with all rows as objects. The check of gold answers is left out."""
    started_s = time.perf_counter()
    entries = []
    for row in [json.loads(line) for line in Path(path).read_bytes().splitlines()]:
        try:
            entries.append((row, read_genesys(row, "chat"), read_genesys(row, "chat").prompt))
        except ValueError:
            continue
    return {"seconds": time.perf_counter() - started_s, "sizes": (len(entries), 0)}


def _time_golds(count: int) -> dict[str, Any]:
    """Measures the check of gold answers by one child process, without its start."""
    golds = [f"\\left( {number}, \\frac{{{number}}}{{7}} \\right)" for number in range(count)]
    math_grader().can_parse(golds[:1])
    started_s = time.perf_counter()
    math_grader().can_parse(golds)
    return {"seconds": time.perf_counter() - started_s, "sizes": (count,)}


def _measured(connection: Any, act: Callable[..., dict[str, Any]], *args: Any) -> None:
    before, started_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = act(*args) | {"cpu_s": time.process_time() - started_s}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    connection.send(
        found | {"peak_mb": peak / 1024, "start_mb": before / 1024, "torch": "torch" in sys.modules}
    )


def measure(name: str, act: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Runs `act` in a fresh process and prints what it took."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measured, args=(theirs, act, *args))
    process.start()
    theirs.close()
    found: dict[str, Any] = ours.recv()
    process.join()
    extra = f", a problem {found['problem_ms']:.2f} ms" if "problem_ms" in found else ""
    print(
        f"{name:<34} {found['seconds']:8.1f} s ({found['cpu_s']:.1f} s of processor time)  peak {found['peak_mb']:7.0f} MB (imports {found['start_mb']:.0f})  "
        f"rows {found['sizes']}{extra}, torch loaded: {found['torch']}",
        flush=True,
    )
    return found


def _keep(spec: TaskSpec, folder: str) -> dict[str, Any]:
    started_s = time.perf_counter()
    kept = keep_task_files(spec, Path(folder), reports=Path(folder).parent)
    Path(folder, "spec.json").write_text(kept.model_dump_json())
    return {"seconds": time.perf_counter() - started_s, "sizes": ()}


def bench_load(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        path = folder / ("rows.parquet" if options.parquet else "rows.jsonl")
        (write_parquet if options.parquet else write_rows)(path, options.rows, options.distinct)
        print(
            f"{options.rows:,} rows, {path.stat().st_size / 1e6:.0f} MB, load average {os.getloadavg()[0]:.1f}"
        )
        measure("gold answers, one process", _time_golds, 200)
        if not options.parquet:
            measure("before: all rows as objects", _load_before, str(path))
        spec = TaskSpec(name="genesys", options={"path": str(path)})
        measure("first load, gold answers checked", _load_new, spec)
        measure("coordinator: files kept by digest", _keep, spec, str(folder / "data"))
        kept = TaskSpec.model_validate_json((folder / "data" / "spec.json").read_text())
        measure("coordinator: load", _load_new, with_files_from(kept, folder / "data"))
        other = folder / "validator"
        other.mkdir()
        for file in (folder / "data").iterdir():
            if len(file.name) == 64:
                os.link(file, other / file.name)
        measure("validator: first load", _load_new, with_files_from(kept, other))
        measure("validator: load", _load_new, with_files_from(kept, other))
        report = next(folder.glob("unusable-rows-*.jsonl"))
        print(f"unusable rows listed: {sum(1 for _ in report.read_text().splitlines()):,}")


# -- judging ----------------------------------------------------------------------------------------------


def bench_judge(options: argparse.Namespace) -> None:
    pool = GradingPool()
    for name, path, limit in (
        ("humaneval", "humaneval.jsonl", None),
        ("mbpp", "mbpp_sanitized.json", None),
        ("gsm8k", "gsm8k_test.jsonl", None),
        ("gsm8k", "gsm8k_train.jsonl", None),
        ("math", "math500_test.jsonl", None),
        ("math", "math_train_5k.jsonl", options.math_rows),
    ):
        task = make_task(TaskSpec(name=name, options={"path": str(options.folder / path)}))
        assert isinstance(task, DataSet)
        started_s = time.monotonic()
        problems = [
            task.problem(split, seed) for split in ("train", "eval") for seed in range(task.size(split))
        ][:limit]
        right = _outcomes(pool, task, problems, lambda problem: [problem.answer])
        wrong = _outcomes(pool, task, problems, _manglers(name))
        print(
            f"{path:<20} {len(problems)} problems: gold {right[Outcome.RIGHT]} of {right.total()} right; mangled "
            f"{wrong[Outcome.RIGHT]} of {wrong.total()} right; unusable rows {list(task.indices['path'].bad)}; "
            f"{time.monotonic() - started_s:.0f} s",
            flush=True,
        )
    pool.close()


def _manglers(name: str) -> Callable[[Problem], list[str]]:
    if name in ("humaneval", "mbpp"):
        return lambda problem: [re.sub(r"\breturn\b", "return 'x' if 1 else", problem.answer)]
    if name == "gsm8k":
        return lambda problem: [f"#### {problem.answer}1", f"\\boxed{{1{problem.answer}}}", ""]

    def mangled(problem: Problem) -> list[str]:
        gold = problem.check
        # Seven times a matrix of zeros is the same matrix.
        longer = f"{gold}7" if "matrix" not in gold else f"{gold}+7"
        return [f"\\boxed{{{gold}+1}}", f"\\boxed{{{longer}}}", gold, ""]

    return mangled


def _outcomes(
    pool: GradingPool, task: Task, problems: list[Problem], answers: Callable[[Problem], list[str]]
) -> Counter[Outcome]:
    rows = [Answer(problem, text, 1) for problem in problems for text in answers(problem)]
    found: Counter[Outcome] = Counter()
    for start in range(0, len(rows), 256):
        part = rows[start : start + 256]
        for answer, reward in zip(part, pool.grade(task, part, limit_s=600), strict=True):
            found[reward.outcome] += 1
            if (reward.outcome is Outcome.RIGHT) != (answer.text == answer.problem.answer):
                print(f"  {reward.outcome.value}: {answer.text[:100]!r} for {answer.problem.answer[:100]!r}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    load = commands.add_parser("load")
    load.add_argument("--rows", type=int, default=ROWS)
    load.add_argument("--distinct", type=int, default=4000, help="different answers for math-verify")
    load.add_argument("--parquet", action="store_true")
    load.add_argument("--dir", help="folder for the rows, about 1.3 GB; the default is the system's")
    judge = commands.add_parser("judge")
    judge.add_argument("folder", type=Path)
    judge.add_argument("--math-rows", type=int, default=None, help="rows of math_train_5k.jsonl to judge")
    options = parser.parse_args()
    (bench_load if options.command == "load" else bench_judge)(options)


if __name__ == "__main__":
    main()
