"""The writer: one thread executes all requests that write. Requests that wait together are committed together.

Threads that compete for the write lock spend more time on waking each other than on the work. With one thread, the event loop
reads requests and checks signatures while the thread writes, and passes on all requests that arrived meanwhile as one group:
one wake-up and one commit for all of them.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.swarm.coordinator.store.database import Database, RedoGroup, WriteGroup
from shoal.wire.codes import Rejected

T = TypeVar("T")
GROUP_SIZE = 64
"""Most requests that are committed together: the first of them waits for the last."""

BUSY_SIZE = 4
"""After a group of this size more requests are on their way. A group costs as much as ten requests in it, so the next one waits
for them for GATHER_S, or until GATHERED_SIZE requests have come."""
GATHER_S = 0.004
GATHERED_SIZE = 32

_Request = tuple[Callable[[WriteGroup], Any], "asyncio.Future[Any]"]
_Result = tuple["asyncio.Future[Any]", Any, BaseException | None]


class Writer:
    """Executes requests in its own thread. `run` must always be called from the same event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[_Request] = []
        self._busy = False
        self._last_size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._groups: queue.SimpleQueue[tuple[list[_Request], asyncio.AbstractEventLoop] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    async def run(self, act: Callable[[WriteGroup], T]) -> T:
        """Returns what `act` returned, after its changes are on disk; raises what it raised, after they are undone.

        `act` runs again, in another group, if the group must be redone.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._waiting.append((act, future))
        if not self._busy:
            self._busy = True
            self._gather(loop)
        elif self._timer is not None and len(self._waiting) >= GATHERED_SIZE:
            self._start_group(loop)
        return await future

    def close(self) -> None:
        """Finishes the groups that were started, then ends the thread."""
        if self._thread is not None:
            self._groups.put(None)
            self._thread.join(10.0)
            self._thread = None

    def _gather(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._last_size < BUSY_SIZE:
            # Not at once: other requests that arrived in this iteration of the event loop join the group.
            loop.call_soon(self._start_group, loop)
        elif len(self._waiting) < GATHERED_SIZE:
            self._timer = loop.call_later(GATHER_S, self._start_group, loop)
        else:
            self._start_group(loop)

    def _start_group(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
            self._thread.start()
        requests, self._waiting = self._waiting[:GROUP_SIZE], self._waiting[GROUP_SIZE:]
        self._last_size = len(requests)
        self._groups.put((requests, loop))

    def _work(self) -> None:
        while (started := self._groups.get()) is not None:
            requests, loop = started
            results = self._execute(requests)
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._answer, loop, results)

    def _execute(self, requests: list[_Request]) -> list[_Result]:
        try:
            try:
                return self._execute_group(requests, savepoints=False)
            except RedoGroup:
                return self._execute_group(requests, savepoints=True)
        except Exception as error:  # noqa: BLE001 - the commit failed, so every request of the group failed
            return [(future, None, error) for _, future in requests]

    def _execute_group(self, requests: list[_Request], *, savepoints: bool) -> list[_Result]:
        results: list[_Result] = []
        with self._database.group(savepoints=savepoints) as group:
            for act, future in requests:
                try:
                    results.append((future, act(group), None))
                except Rejected as error:
                    results.append((future, None, error))
                except Exception as error:  # raised again in `run`
                    if not savepoints:
                        raise RedoGroup from error
                    results.append((future, None, error))
        return results

    def _answer(self, loop: asyncio.AbstractEventLoop, results: list[_Result]) -> None:
        if self._waiting:
            self._gather(loop)
        else:
            self._busy = False
        for future, result, error in results:
            if future.done():  # the client disconnected
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
