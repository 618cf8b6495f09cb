"""Lanes: threads that each compute a share of the rows on a core of their own, from the first layer to the drawn token.

torch's own threads share every operation instead, and meet after each: a thousand times a step, most of the operations too
small to be shared, and every meeting as late as the busier core. Lanes meet once a step. Each reads all the weights, so
they pay where a lane has rows enough to be busy computing rather than reading.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

START_S = 60.0
"""Threads that have not started by then never will."""
LARGEST_BLOCK_BYTES = 31 << 20
"""Just below what it takes for unusual in any case."""

T = TypeVar("T")


class Lanes:
    """As many as torch has threads where this is made."""

    def __init__(self) -> None:
        self.num = torch.get_num_threads()
        self._pool = one_core_threads(self.num, "lane") if self.num > 1 else None
        _keep_freed_memory()

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """What the jobs give, in their order. They also start in this order, so the longest should come first."""
        if self._pool is None or len(jobs) == 1:  # alone, a job may have all of torch's threads
            return [job() for job in jobs]
        return [done.result() for done in [self._pool.submit(_inferred, job) for job in jobs]]


def one_core_threads(num: int, name: str) -> ThreadPoolExecutor:
    """Threads in which torch uses no further ones. In the calling thread it uses as many as before."""
    mine = torch.get_num_threads()
    pool = ThreadPoolExecutor(num, thread_name_prefix=name)
    all_there = threading.Barrier(num)

    def settle(_: int) -> None:
        all_there.wait(START_S)  # else one thread could take all the places
        torch.get_num_threads()  # a thread's first use takes the number set last, wherever that was: let it be over
        torch.set_num_threads(1)

    list(pool.map(settle, range(num)))
    torch.set_num_threads(mine)  # the last number set anywhere is what threads to come will have
    return pool


def _keep_freed_memory() -> None:
    """The GNU allocator gives a thread's memory back to the system, and asks for it again, step after step, unless it has once
    seen a block of this size come and go: then it takes such for usual."""
    torch.empty(LARGEST_BLOCK_BYTES, dtype=torch.uint8)


@torch.inference_mode()
def _inferred(job: Callable[[], T]) -> T:
    """torch keeps this mode for each thread apart."""
    return job()
