"""Finds tasks by name: built-in ones, those of installed packages in the entry point group `shoal.tasks`, and FILE.py:CLASS."""

import difflib
import functools
import hashlib
import inspect
import json
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from shoal.files import write_bytes_atomically
from shoal.tasks.code_files import CODE_DIGEST, is_code, load_code, pin_code
from shoal.tasks.datasets.data_set import DataSet, Listed, checks_text
from shoal.tasks.datasets.file_options import Options, checked_options, keep_files
from shoal.tasks.datasets.formats import GSM8K, HUMANEVAL, MATH, MBPP, SVAMP
from shoal.tasks.datasets.genesys import GENESYS
from shoal.tasks.datasets.hub_files import with_hub_files
from shoal.tasks.datasets.judged_answers import JudgedAnswers
from shoal.tasks.datasets.question_answer import QuestionAnswer
from shoal.tasks.datasets.row_index import copy_index
from shoal.tasks.procedural import Add, Count, Largest, Sort
from shoal.tasks.task import Task
from shoal.tasks.wrapped_tasks import EachOnce, with_budgets
from shoal.telemetry import Log
from shoal.wire.run_spec import TaskSpec

ENTRY_POINTS = "shoal.tasks"
_PARTS = {
    "problem": "a method problem(self, split, seed) that returns a shoal.tasks.Problem",
    "reward": "a method reward(self, problem, text, num_tokens) that returns a shoal.tasks.Reward",
    "chat": "chat = True if prompts are a user's turns, or chat = False for plain text",
}

Factory = Callable[..., Task]


def _listed(path: str) -> Task:
    """Trains on the problems of a file that `shoal data filter` wrote."""
    return Listed(path=path, make_task=make_task)


def _each(task: str, run: str, chunk: int, count: int = 0, seed: int = 0, **options: Any) -> Task:
    """Poses every problem of another task once, for `shoal data filter` over a swarm."""
    inner = make_task(TaskSpec(name=task, options=options))
    if isinstance(inner, JudgedAnswers | EachOnce):
        raise ValueError(f"each: task {task!r} cannot be filtered over a swarm")
    return EachOnce(task=inner, run=run, chunk=chunk, count=count, seed=seed)


TASKS: dict[str, Factory] = {
    "add": Add,
    "sort": Sort,
    "largest": Largest,
    "count": Count,
    "qa": QuestionAnswer,
    "judge": JudgedAnswers,
    "listed": _listed,
    "each": _each,
    **{
        format.name: functools.partial(DataSet, format=format)
        for format in (GSM8K, SVAMP, MATH, MBPP, HUMANEVAL, GENESYS)
    },
}


def make_task(spec: TaskSpec) -> Task:
    """Returns the task of a spec, the same object for the same spec. Raises ValueError with the known names if unknown.

    Files are read at the first problem, not here: a run file can be checked on a machine without the data.
    """
    return _make(spec.model_dump_json())


@functools.lru_cache(maxsize=64)
def _make(text: str) -> Task:
    spec = TaskSpec.model_validate_json(text)
    options = dict(checked_options(spec))
    factory = find_task(spec.name, str(options.pop(CODE_DIGEST, "")))
    _check_options(spec.name, factory, options)
    try:
        task = factory(**options)
    except TypeError as error:
        raise ValueError(f"task {spec.name!r}: {error}") from None
    _check_parts(spec.name, task)
    if spec.budgets and isinstance(task, JudgedAnswers):
        raise ValueError("task 'judge' takes no budgets: its reward is the judge's score; remove them")
    return with_budgets(task, spec.budgets, spec.budget_alpha) if spec.budgets else task


def _check_parts(name: str, task: Task) -> None:
    """Raises ValueError if the class of a task lacks a part. Does not read a property, which may need the task's files."""
    for part, words in _PARTS.items():
        if not hasattr(type(task), part) and part not in getattr(task, "__dict__", {}):
            raise ValueError(f"task {name!r}: {type(task).__name__} has no `{part}`; add {words}")


def keep_task_files(spec: TaskSpec, folder: Path, *, reports: Path) -> TaskSpec:
    """Copies a task's files into `folder`; returns the spec that names them by digest.

    The spec of a data set also names lists of its unusable rows, so that every machine of the run leaves out the same rows and only
    this one checks gold answers. The rows and their reasons are written to `reports`. Raises ValueError if too many are unusable.
    """
    spec = pin_task(spec)
    task = find_task(spec.name)(**checked_options(spec)) if spec.name in TASKS else None
    task = task.task if isinstance(task, EachOnce) else task
    kept = keep_files(spec, folder)
    if not isinstance(task, DataSet) or task.path.startswith("sha256:"):
        return kept
    _ = task.split_rows  # raises if too many rows are unusable
    options = dict(kept.options)
    for option, index in task.indices.items():
        source, digest = Path(str(spec.options[option])), str(options[option]).removeprefix("sha256:")
        copy_index(source, folder / digest, task.indexed_format())
        text = checks_text(index)
        name = hashlib.sha256(text).hexdigest()
        write_bytes_atomically(folder / name, text)
        options[option.replace("path", "checks_path")] = f"sha256:{name}"
        if index.bad:
            report = reports / f"unusable-rows-{source.stem}.jsonl"
            lines = (
                json.dumps({"file": str(source), "row": number, "reason": reason})
                for number, reason in index.bad.items()
            )
            write_bytes_atomically(report, "".join(f"{line}\n" for line in lines).encode())
            Log("data").warning(
                "unusable rows are left out",
                file=str(source),
                unusable=len(index.bad),
                rows=index.num_rows,
                listed_in=str(report),
            )
    return kept.model_copy(update={"options": options})


def task_origins() -> dict[str, str]:
    """Returns the names of all installed tasks, and where each comes from: `built in`, or a package and its version."""
    found = dict.fromkeys(TASKS, "built in")
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        origin = "a package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        found.setdefault(point.name, origin)
    return found


def pin_task(spec: TaskSpec) -> TaskSpec:
    """Returns the spec for the public terms of a run: with local files, the digests of code files and the versions of packages.

    An adapter to another package has a method `pins`, which returns the options that fix what its problems depend on.
    """
    spec = with_hub_files(pin_code(spec))
    pins = getattr(find_task(spec.name, str(spec.options.get(CODE_DIGEST, ""))), "pins", None)
    return spec if pins is None else spec.model_copy(update={"options": spec.options | pins(spec.options)})


def find_task(name: str, digest: str = "") -> Factory:
    """Returns the class or function that makes the task of this name from its options. Raises ValueError if unknown."""
    if name in TASKS:
        return TASKS[name]
    if is_code(name):
        code: Factory = load_code(name, digest)
        return code
    found = entry_points(group=ENTRY_POINTS)
    if name not in found.names:
        known = sorted(TASKS.keys() | found.names)
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" did you mean {close[0]}?" if close else ""
        if name.endswith(".py"):
            hint = f" write {name}:CLASS, with the class or function in that file;"
        raise ValueError(f"unknown task {name!r};{hint} known: {', '.join(known)}")
    try:
        factory: Factory = found[name].load()
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"task {name!r}: its entry point {found[name].value} cannot be loaded: {error}; correct the entry point in the "
            "package's pyproject.toml and install the package again"
        ) from None
    return factory


def _check_options(name: str, factory: Factory, options: Options) -> None:
    """Raises ValueError for an option that the task needs, and with the known options for one that it does not have."""
    try:
        known = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return
    names = [
        one for one, kind in known.items() if one != "format" or not isinstance(factory, functools.partial)
    ]
    takes_others = any(one.kind is one.VAR_KEYWORD for one in known.values())
    for option in options:
        if option not in names and not takes_others:
            close = difflib.get_close_matches(option, names, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ValueError(
                f"task {name!r} has no option {option!r}; {hint}it has: {', '.join(names) or 'none'}"
            )
    missing = [
        one
        for one, kind in known.items()
        if one not in options
        and kind.default is kind.empty
        and kind.kind not in (kind.VAR_KEYWORD, kind.VAR_POSITIONAL)
    ]
    if missing:
        raise ValueError(
            f"task {name!r} needs {', '.join(missing)}; set it in the run file's options, or with --option {missing[0]}=..."
        )
