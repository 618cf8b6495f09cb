"""Grades the answers of a submission in parallel, under a clock of its own.

Each thread of the pool has its own fork server for programs and its own child process for mathematics, so the work itself is done
by as many processes as there are cores; the threads only wait for them. A row has its own limits (program_grader.py,
math_grader.py). The clock of a submission limits all rows together: rows that have not begun when it runs out are dropped, and the
at most one row per thread that is being graded ends by its own limit. So a submission delays the next one by no more than that.
"""

import functools
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from shoal.tasks.task import CannotGrade, Problem, Reward, Task
from shoal.tasks.task_errors import grade_answer

ROW_S = 60.0
"""Seconds of wall-clock time that a row may take on average before a submission's grading is given up."""
POLL_S = 0.5
"""Seconds between two looks at `stop`."""


class GradingTimeout(CannotGrade):
    """The rows of a submission were not graded within the time for them."""


class GradingStopped(CannotGrade):
    """The caller's `stop` was set before all rows were graded."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One row to grade."""

    problem: Problem
    text: str
    num_tokens: int
    thinks: bool = False
    """Whether the model's chat template makes it think first."""


class GradingPool:
    """Threads that grade answers, as many as there are cores unless told otherwise."""

    def __init__(self, workers: int = 0) -> None:
        self.workers = workers or len(os.sched_getaffinity(0))
        self._executor = ThreadPoolExecutor(self.workers, thread_name_prefix="grading")

    def grade(
        self,
        task: Task,
        answers: Sequence[Answer],
        *,
        limit_s: float | None = None,
        stop: threading.Event | None = None,
    ) -> list[Reward]:
        """Returns the reward of each answer, in order.

        `limit_s` is the submission's clock; without it, every row may take ROW_S. Raises GradingTimeout when it runs out,
        GradingStopped if `stop` is set, and CannotGrade if a row could not be graded.
        """
        limit_s = limit_s or ROW_S * -(-len(answers) // self.workers)
        give_up_s = time.monotonic() + limit_s
        futures = [
            self._executor.submit(
                grade_answer, task, one.problem, one.text, one.num_tokens, thinks=one.thinks
            )
            for one in answers
        ]
        try:
            while not self._all_done(futures, min(POLL_S, give_up_s - time.monotonic())):
                if stop is not None and stop.is_set():
                    raise GradingStopped("stopped between two answers")
                if time.monotonic() >= give_up_s:
                    raise GradingTimeout(f"{len(answers)} answers were not graded within {limit_s:.0f} s")
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Waits for the rows that are being graded, and ends the threads and their processes."""
        self._executor.shutdown(cancel_futures=True)

    def _all_done(self, futures: list[Future[Reward]], timeout_s: float) -> bool:
        """Waits; returns whether all rows are graded. Raises what the grading of a row raised."""
        done, waiting = wait(futures, timeout=max(0.0, timeout_s), return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return not waiting


@functools.cache
def grading_pool() -> GradingPool:
    """Returns the pool of this process."""
    return GradingPool()
