"""Threads of the CPU step: one per core, each with its share of the rows."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from typing import TypeVar

import torch

MIN_ROWS = 4
"""Rows that a thread has at least; with fewer rows, fewer threads are used."""
START_S = 60.0
"""Seconds that threads may take to start."""
LARGEST_BLOCK_BYTES = 31 << 20
"""Just under glibc's largest M_MMAP_THRESHOLD (32 MiB)."""

T = TypeVar("T")


def split_rows(num_rows: int, num_threads: int) -> list[range]:
    """Divides slots 0 .. num_rows-1 evenly among threads, with at least MIN_ROWS for each."""
    return divide(num_rows, max(1, min(num_threads, num_rows // MIN_ROWS)))


def divide(num_rows: int, num_shares: int) -> list[range]:
    """Divides 0 .. num_rows-1 into ranges of nearly the same length."""
    bounds = [num_rows * at // num_shares for at in range(num_shares + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


class CoreThreads:
    """Threads that each compute a share of the rows on one core, from the first layer to the drawn token.

    torch's own threads divide every operation instead and synchronise after each one: a thousand times a step, most of
    the operations too small to be divided. These threads synchronise once a step. Each reads all the weights, so they
    pay off where each has enough rows to be limited by computing rather than by reading.
    """

    def __init__(self) -> None:
        """Starts as many threads as torch uses in the calling thread."""
        self.num = torch.get_num_threads()
        self._pool = single_core_pool(self.num, "core") if self.num > 1 else None
        # Makes the GNU allocator keep freed memory, by freeing one large block. Without it each thread's memory is returned to the
        # system and requested again in every step.
        torch.empty(LARGEST_BLOCK_BYTES, dtype=torch.uint8)

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Runs the jobs and returns their results in order. Jobs start in this order, so put the longest first.

        Raises the error of a job after all have ended: the caller starts again, and none may still write then.
        """
        if self._pool is None or len(jobs) == 1:  # a single job may use all of torch's threads
            return [job() for job in jobs]
        started = [self._pool.submit(_in_inference_mode, job) for job in jobs]
        wait(started)
        return [job.result() for job in started]


@torch.inference_mode()
def _in_inference_mode(job: Callable[[], T]) -> T:
    """Runs a job in inference mode, which torch sets for each thread separately."""
    return job()


def single_core_pool(num: int, name: str) -> ThreadPoolExecutor:
    """Starts threads in which torch uses no further threads. The calling thread keeps its own setting."""
    mine = torch.get_num_threads()
    pool = ThreadPoolExecutor(num, thread_name_prefix=name)
    all_started = threading.Barrier(num)

    def initialise(_: int) -> None:
        all_started.wait(START_S)  # otherwise one thread could run several of these calls
        torch.get_num_threads()  # a thread's first use reads the number set last in any thread; do that before setting it
        torch.set_num_threads(1)

    list(pool.map(initialise, range(num)))
    torch.set_num_threads(mine)  # threads started later use the number that was set last
    return pool
