"""`shoal tasks` lists the tasks that are installed; `shoal tasks show NAME` prints problems with a right and a wrong answer."""

import argparse
import functools
import textwrap
import threading
from typing import Any

from shoal.cli.commands.sample_answers import grade_answers, load_task, pose, posed_split, task_spec
from shoal.cli.run.supervise import EXIT_OK
from shoal.cli.ui.progress_bar import progress
from shoal.tasks import Problem, Task
from shoal.tasks.grading.pool import Answer
from shoal.tasks.registry import find_task, task_origins
from shoal.telemetry import printable

SHOWN = 3
"""Problems that `show` prints."""
WIDTH = 100
LONGEST = 1500
"""Characters of a prompt or an answer that are printed."""


def list_tasks(options: argparse.Namespace, stop: threading.Event) -> int:
    rows = [(name, origin, _description(name)) for name, origin in task_origins().items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, origin, words in rows:
        print(f"{name:<{widths[0]}}  {origin:<{widths[1]}}  {words}")
    print("\nA task in a file of your own is FILE.py:CLASS. shoal tasks show NAME prints problems of a task.")
    return EXIT_OK


def show_task(options: argparse.Namespace, stop: threading.Event) -> int:
    spec = task_spec(options)
    factory: Any = find_task(spec.name)
    if not spec.options and hasattr(factory, "environments"):
        with progress(f"loading {spec.name}"):
            names = factory.environments()
        print(textwrap.fill(", ".join(names), WIDTH))
        print(f"\n{len(names)} environments; choose one with --option {factory.selects}=NAME")
        return EXIT_OK
    task = load_task(spec)
    posed = [one.problem for one in pose(task, posed_split(task), SHOWN, options.seed)]
    for number, problem in enumerate(posed, start=1):
        print(f"{number}. {_short(problem.prompt)}")
        if problem.answer:
            _print_answer("right", task, problem, problem.answer)
        else:
            print("   right answer  unknown: the task only checks answers")
        others = [other.answer for other in posed if other.answer not in ("", problem.answer)]
        _print_answer("wrong", task, problem, [*others, "I do not know."][0])
        print()
    return EXIT_OK


def _print_answer(kind: str, task: Task, problem: Problem, answer: str) -> None:
    (reward,) = grade_answers(task, [Answer(problem, answer, problem.budget or 1)])
    print(f"   {kind} answer  {_short(answer)}\n         reward  {reward.value:g} ({reward.outcome.value})")


def _short(text: str) -> str:
    cut = text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text):,} characters)"
    return textwrap.indent(printable(cut, keep="\n\t"), " " * 17).strip()


def _description(name: str) -> str:
    """Returns one line about a task: what it does, how many environments it has, or why it cannot be used."""
    try:
        factory: Any = find_task(name)
        count = len(factory.environments()) if hasattr(factory, "environments") else 0
    except ValueError as error:
        return str(error)
    # A data set's function says what its format is.
    described = factory.keywords["format"].read if isinstance(factory, functools.partial) else factory
    words: str = (described.__doc__ or "").strip().partition("\n")[0]
    return f"{words} {count} environments." if count else words
