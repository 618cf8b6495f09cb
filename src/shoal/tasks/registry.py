"""Tasks by name."""

from collections.abc import Callable

from shoal.tasks.arithmetic import Add
from shoal.tasks.sorting import Sort
from shoal.tasks.task import Task
from shoal.wire.run import TaskSpec

TASKS: dict[str, Callable[..., Task]] = {"add": Add, "sort": Sort}


def make_task(spec: TaskSpec) -> Task:
    """The task a spec names, or a ValueError that names the known ones."""
    if spec.name not in TASKS:
        raise ValueError(f"unknown task {spec.name!r}; known: {sorted(TASKS)}")
    try:
        return TASKS[spec.name](**spec.options)
    except TypeError as error:
        raise ValueError(f"task {spec.name!r}: {error}") from None
