"""`shoal data filter`: keeps the problems that a model solves sometimes. Problems that it always or never solves teach nothing.

OUT                  the rows whose share of right answers is within the band, and the held-out rows of a data set
                     without a test file; written last
OUT.progress.jsonl   a line for each finished problem: the same command continues where it was stopped, and another
                     band needs no new answers
OUT.report.json      the settings, the histogram, the counts

Over a swarm: --run-file writes the run file of a run that does not train. It evaluates the model on every problem once (tasks/wrapped_tasks.py), with
all checks of any run. --coordinator reads the rewards of that run from its ledger. The coordinator stores the progress.
"""

import argparse
import hashlib
import json
import re
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.commands.audit import fetch_ledger, read_events
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
from shoal.cli.public_api import PublicApi
from shoal.cli.run.overrides import to_toml
from shoal.cli.run.runfile import load_run_file
from shoal.cli.run.supervise import EXIT_OK
from shoal.cli.run_folder import RunFolder
from shoal.cli.ui.progress_bar import progress
from shoal.cli.ui.values import MAX_NEW_TOKENS, is_url
from shoal.files import write_bytes_atomically
from shoal.net.waiting import Stopped
from shoal.swarm.coordinator.rules.planning import chunk_prompts
from shoal.tasks import Finite, Outcome, Task
from shoal.tasks.datasets.data_set import DataSet, listed_row
from shoal.tasks.datasets.file_options import digest_of, is_file_option
from shoal.tasks.registry import pin_task
from shoal.tasks.task import RIGHT
from shoal.tasks.task_errors import pose_problem
from shoal.tasks.wrapped_tasks import choose_problems
from shoal.wire.codes import ACCEPTED
from shoal.wire.ledger import LedgerEvent, LedgerHead
from shoal.wire.messages import Info
from shoal.wire.record import Sealed
from shoal.wire.run_spec import EvalSpec, RunSpec, Sampling, TaskSpec

if TYPE_CHECKING:
    from shoal.rollout.engine.api import Engine

BAR = 40
DEFAULT_K = 8
PROMPTS_PER_LEASE = 8
LABEL = "filter"
"""Label of the evaluation in a run file for a swarm."""
POLL_S = 2.0


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
    if options.run_file is not None:
        return write_run_file(options, spec)
    if options.out is None:
        raise ValueError("name the file for the problems that are kept: --out FILE.jsonl")
    task = load_task(spec)
    if options.coordinator is not None:
        return _filter_by_run(options, spec, task, stop)
    if options.model is None:
        raise ValueError("name the model that answers: --model MODEL, or --coordinator RUN for a swarm")
    posed = pose(task, "train", options.problems, options.seed)
    draw = make_draw(options, options.k or DEFAULT_K, Sampling(max_new_tokens=MAX_NEW_TOKENS))
    with model_folder(options.model) as folder:
        settings = _settings(spec, folder, draw, options)
        with FilterProgress(_beside(options.out, "progress.jsonl"), settings) as finished:
            left = [one for one in posed if one.place not in finished.done]
            if left:
                engine = load_engine(folder, options)
                _answer(engine, spec, left, draw, finished, stop=stop)
            done = finished.done
    results = [(one, done[one.place]) for one in posed]
    _write_kept(options, spec, task, results, settings, draw.samples)
    return EXIT_OK


def _write_kept(
    options: argparse.Namespace,
    spec: TaskSpec,
    task: Task,
    results: "list[tuple[PosedProblem, ProblemResult]]",
    settings: dict[str, Any],
    samples: int,
    totals: Mapping[str, float] | None = None,
) -> None:
    """Writes the problems within the band and the report, and prints it. `totals` replace sums over the results."""
    low, high = options.band
    kept = [one for one, done in results if low <= done.right / samples <= high]
    # Another machine must grade the problems of `listed` by the same code and package versions.
    pinned = spec if isinstance(task, DataSet) else pin_task(spec)
    rows = [
        task.entry("train", one.seed).row if isinstance(task, DataSet) else listed_row(one.problem, pinned)
        for one in kept
    ]
    rows += _held_out_rows(task)
    _write(options.out, "".join(f"{json.dumps(row)}\n" for row in rows))
    report = _report([done for _, done in results], len(kept), samples, (low, high)) | dict(totals or {})
    report["held_out"] = len(rows) - len(kept)
    _write(_beside(options.out, "report.json"), json.dumps(settings | report, indent=2) + "\n")
    print(format_report(report, options.out))


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
    total = len(finished.done) + len(left)
    try:
        with progress("answers", len(left) * draw.samples) as advance:
            for one, answers in answer(engine, task, left, draw, spec=spec, stop=stop, advance=advance):
                outcomes = Counter(given.outcome for given in answers)
                right, unparseable = outcomes[Outcome.RIGHT], outcomes[Outcome.UNPARSEABLE]
                tokens = sum(given.num_tokens for given in answers)
                finished.add(ProblemResult(one.place, right, unparseable, tokens))
    except Stopped:
        print(
            f"stopped with {len(finished.done)} of {total} problems done; the same command continues",
            file=sys.stderr,
        )
        raise


# -- over a swarm -------------------------------------------------------------------------------------------


def write_run_file(options: argparse.Namespace, spec: TaskSpec) -> int:
    """Writes the run file of a run that answers every problem and does not train."""
    if options.model is None:
        raise ValueError("name the model that answers: --model MODEL")
    task = load_task(spec)
    if not isinstance(task, Finite):
        raise ValueError(
            f"task {spec.name!r} generates problems without end; a swarm filters tasks that read a file"
        )
    count = len(choose_problems(task.size("train"), options.problems, options.seed))
    if not count:
        pose_problem(task, "train", 0)  # raises an error that says why there are none
    draw = make_draw(options, options.k or DEFAULT_K, Sampling(max_new_tokens=MAX_NEW_TOKENS))
    name = f"filter-{re.sub('[^a-z0-9]+', '-', spec.name.lower())}"[:40].strip("-")
    trained_samples = max(2, draw.samples)  # no run may train on groups of one
    chunk = chunk_prompts(PROMPTS_PER_LEASE, trained_samples=trained_samples, samples=draw.samples)
    each = {"task": spec.name, **spec.options, "run": name, "chunk": chunk}
    each |= {"count": options.problems or 0, "seed": options.seed}
    given = "".join(f" --option {shlex.quote(f'{name}={value}')}" for name, value in spec.options.items())
    given = given.replace("\n", "\n# ")  # every line of a comment needs its mark
    text = f"""# Answers {count} problems {draw.samples} times each and does not train. When it runs, or when it is finished:
# shoal data filter --task {spec.name}{given} --coordinator RUN --out KEPT.jsonl

[run]
name = {to_toml(name)}
model = {to_toml(options.model)}
compute_dtype = {to_toml(options.dtype)}
last_version = 0

[task]
name = {to_toml(spec.name)}
options = {to_toml(spec.options)}

[[eval]]
label = {to_toml(LABEL)}
prompts = {count}
samples = {draw.samples}
[eval.task]
name = "each"
options = {to_toml(each)}

[sampling]
temperature = {draw.temperature}
max_new_tokens = {draw.max_new_tokens}
samples_per_prompt = {trained_samples}

[trainer]
row_tokens = {draw.max_new_tokens + 8192}
rows_per_micro_batch = 1

[coordinator]
prompts_per_lease = {PROMPTS_PER_LEASE}
"""
    _write(options.run_file, text)
    load_run_file(options.run_file)  # raises for what a run file cannot have
    print(
        f"{options.run_file}: {count} problems, {draw.samples} answers each; start it with shoal run {options.run_file}"
    )
    return EXIT_OK


def _filter_by_run(options: argparse.Namespace, spec: TaskSpec, task: Task, stop: threading.Event) -> int:
    """Writes the problems that the model of a filter run solves sometimes, after all of them are answered."""
    run: str = options.coordinator
    if is_url(run):
        with PublicApi(run) as api:
            info = api.read("/v1/info", Info)
            one = _check_run(options, spec, info.spec)
            _wait_for_answers(api, one, stop)
            events = fetch_ledger(api, info.run_key, stop)
        terms = info.spec
    else:
        with RunFolder(Path(run)) as folder:
            terms, events = folder.spec, list(folder.events())
        one = _check_run(options, spec, terms)
    each = one.task.options
    assert isinstance(task, Finite)
    chosen = choose_problems(task.size("train"), int(each["count"]) or None, int(each["seed"]))
    answered = answered_chunks(events)
    wanted = -(-one.prompts // int(each["chunk"]))
    if len(chosen) != one.prompts or not answered.keys() >= set(range(wanted)):
        raise ValueError(
            f"{run} has the answers of {len(answered)} of {wanted} chunks to {one.prompts} problems, the file has {len(chosen)}; "
            "continue the run (shoal run FILE.toml --resume) until it is finished"
        )
    results = []
    for place, number in enumerate(chosen):
        chunk, index = divmod(place, int(each["chunk"]))
        rewards = answered[chunk]["rewards"][index * one.samples : (index + 1) * one.samples]
        right = sum(reward >= RIGHT.value for reward in rewards)
        posed = PosedProblem(place, number, pose_problem(task, "train", number))
        results.append((posed, ProblemResult(place, right, 0, 0)))
    # Verdicts count these for a whole lease, not for each problem.
    unparseable = sum(int(body["evidence"].get("unparseable", 0)) for body in answered.values())
    totals = {
        "unparseable": unparseable / (one.prompts * one.samples),
        "tokens": sum(int(body["output_tokens"]) for body in answered.values()),
    }
    settings = {"task": one.task.model_dump(mode="json"), "run": terms.run, "samples": one.samples}
    _write_kept(options, spec, task, results, settings, one.samples, totals)
    return EXIT_OK


def _check_run(options: argparse.Namespace, spec: TaskSpec, terms: RunSpec) -> EvalSpec:
    """Returns the evaluation of a filter run. Raises ValueError if the run is no filter of this task and these files."""
    found = next((one for one in terms.evals if one.task.name == "each"), None)
    if found is None:
        raise ValueError(
            f"run {terms.run!r} is not a filter; write its run file with shoal data filter --run-file FILE.toml"
        )
    own: dict[str, Any] = {"task": spec.name} | {
        name: f"sha256:{digest_of(Path(str(value)))}" if is_file_option(name) and value else value
        for name, value in spec.options.items()
    }
    added = {"run", "chunk", "count", "seed", "checks_path", "eval_checks_path"}
    theirs = {name: value for name, value in found.task.options.items() if name not in added}
    for name in sorted(own.keys() | theirs.keys()):
        if own.get(name) != theirs.get(name):
            raise ValueError(
                f"run {terms.run!r} filters with {name} = {theirs.get(name)!r}, here it is {own.get(name)!r}; give the options and "
                "files of the run"
            )
    if options.k not in (None, found.samples):
        raise ValueError(f"--k {options.k}: run {terms.run!r} has {found.samples} answers to each problem")
    return found


def answered_chunks(events: Iterable[LedgerEvent]) -> dict[int, dict[str, Any]]:
    """Returns the first accepted verdict on each chunk of the filter, by the number of the chunk."""
    chunks: dict[str, int] = {}
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        body = event.body
        if event.type == "lease.issued" and body["purpose"] == "eval" and body["task"] == LABEL:
            chunks[body["lease_id"]] = body["chunk"]
        elif event.type == "verdict.given" and body["code"] == ACCEPTED and body["lease_id"] in chunks:
            found.setdefault(chunks[body["lease_id"]], body)
    return found


def _wait_for_answers(api: PublicApi, one: EvalSpec, stop: threading.Event) -> None:
    """Waits until every chunk has an accepted answer. Raises Stopped."""
    wanted = -(-one.prompts // int(one.task.options["chunk"]))
    events: list[LedgerEvent] = []
    before = 0
    with progress("chunks answered", wanted) as advance:
        while True:
            head = Sealed[LedgerHead].parse(api.get("/v1/ledger/head")).body.seq
            events += read_events(api, len(events) + 1, head, stop)
            done = len(answered_chunks(events))
            advance(done - before)
            before = done
            if done >= wanted:
                return
            if stop.wait(POLL_S):
                raise Stopped(f"stopped with {done} of {wanted} chunks answered; the same command continues")


class FilterProgress(AbstractContextManager["FilterProgress"]):
    """The problems that are done, in a file that survives a stop. Raises ValueError for a file with other settings."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.done: dict[int, ProblemResult] = {}
        self._path, head = path, json.dumps({"settings": settings})
        if path.exists():
            self._read(head)
        else:
            _write(path, f"{head}\n")
        self._file = path.open("a", encoding="utf-8")

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
