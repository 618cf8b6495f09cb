"""The desk: requests that change something, one after the other, by one thread; those that wait together are committed
together and answered together.

Threads that compete for the one writer's place spend more on waking each other than on the work. With one thread the event loop
reads and checks signatures while the desk works, and a busy desk finds many requests waiting: one commit for all of them.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.swarm.coordinator.database import Database

T = TypeVar("T")
GROUP_SIZE = 64
"""Requests that are committed together, at most: whoever is first waits for the last."""

_Errand = tuple[Callable[[], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]
_Outcome = tuple["asyncio.Future[Any]", Any, BaseException | None]


class Desk:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._errands: queue.SimpleQueue[_Errand | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def do(self, act: Callable[[], T]) -> T:
        """What `act` answers, once all it did is on disk; what it raises, once that is undone."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="desk", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._errands.put((act, future, loop))
        return await future

    def close(self) -> None:
        """Finish what waits, then end."""
        if self._thread is not None:
            self._errands.put(None)
            self._thread.join(10.0)
            self._thread = None

    def _work(self) -> None:
        while (first := self._errands.get()) is not None:
            group, last = self._take(first)
            outcomes = self._act_on(group)
            # Everybody at this desk comes from one server, so from one loop.
            loop = group[0][2]
            if not loop.is_closed():
                loop.call_soon_threadsafe(_answer, outcomes)
            if last:
                return

    def _take(self, first: _Errand) -> tuple[list[_Errand], bool]:
        """All that wait, and whether the desk closes after them."""
        group = [first]
        while len(group) < GROUP_SIZE:
            try:
                errand = self._errands.get_nowait()
            except queue.Empty:
                break
            if errand is None:
                return group, True
            group.append(errand)
        return group, False

    def _act_on(self, group: list[_Errand]) -> list[_Outcome]:
        outcomes: list[_Outcome] = []
        try:
            with self._database.group():
                for act, future, _ in group:
                    try:
                        outcomes.append((future, act(), None))
                    except Exception as error:  # noqa: BLE001 - it is raised again where it was asked for
                        outcomes.append((future, None, error))
        except Exception as error:  # noqa: BLE001 - the commit failed: then nothing of all this happened
            return [(future, None, error) for _, future, _ in group]
        return outcomes


def _answer(outcomes: list[_Outcome]) -> None:
    for future, result, error in outcomes:
        if future.done():  # whoever asked has hung up
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
