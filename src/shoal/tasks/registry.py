"""Finds tasks by name: built-in ones, and those of installed packages in the entry point group `shoal.tasks`."""

import difflib
import functools
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points

from shoal.tasks.datasets.data_set import DataSet, Format, Listed
from shoal.tasks.datasets.file_options import Options, checked_options
from shoal.tasks.datasets.formats import GENESYS, GSM8K, HUMANEVAL, MATH, MBPP, SVAMP
from shoal.tasks.length_budget import with_budgets
from shoal.tasks.procedural import Add, Count, Largest, Sort
from shoal.tasks.task import Task
from shoal.wire.run_spec import TaskSpec

ENTRY_POINTS = "shoal.tasks"

Factory = Callable[..., Task]


def _data_set(format: Format) -> Factory:
    return functools.partial(DataSet, format=format)


TASKS: dict[str, Factory] = {
    "add": Add,
    "sort": Sort,
    "largest": Largest,
    "count": Count,
    "listed": lambda path: Listed(path=path, make_task=make_task),
    **{format.name: _data_set(format) for format in (GSM8K, SVAMP, MATH, MBPP, HUMANEVAL, GENESYS)},
}


def make_task(spec: TaskSpec) -> Task:
    """Returns the task of a spec, the same object for the same spec. Raises ValueError with the known names if unknown.

    Files are read at the first problem, not here: a run file can be checked on a machine without the data.
    """
    return _make(spec.model_dump_json())


@functools.lru_cache(maxsize=8)
def _make(text: str) -> Task:
    spec = TaskSpec.model_validate_json(text)
    factory = _find(spec.name)
    options = checked_options(spec)
    _check_options(spec.name, factory, options)
    try:
        task = factory(**options)
    except TypeError as error:
        raise ValueError(f"task {spec.name!r}: {error}") from None
    return with_budgets(task, spec.budgets, spec.budget_alpha) if spec.budgets else task


def _find(name: str) -> Factory:
    if name in TASKS:
        return TASKS[name]
    found = entry_points(group=ENTRY_POINTS)
    if name not in found.names:
        raise ValueError(f"unknown task {name!r}; known: {sorted(TASKS.keys() | found.names)}")
    try:
        factory: Factory = found[name].load()
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"task {name!r}: its entry point {found[name].value} cannot be loaded: {error}; correct the entry point in the "
            "package's pyproject.toml and install the package again"
        ) from None
    return factory


def _check_options(name: str, factory: Factory, options: Options) -> None:
    """Raises ValueError with the known options for one that the task does not have."""
    try:
        known = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return
    names = [
        one for one, kind in known.items() if one != "format" or not isinstance(factory, functools.partial)
    ]
    for option in options:
        if option not in names:
            close = difflib.get_close_matches(option, names, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ValueError(
                f"task {name!r} has no option {option!r}; {hint}it has: {', '.join(names) or 'none'}"
            )
