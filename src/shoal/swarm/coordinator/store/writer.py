"""The desk: requests that change something, one after the other, by one thread; those that wait together are committed
together and answered together.

Threads that compete for the one writer's place spend more on waking each other than on the work. With one thread the event loop
reads and checks signatures while the desk works, and whatever has come meanwhile is handed over in one piece: one waking and
one commit for all of it.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.swarm.coordinator.store.database import Database
from shoal.swarm.coordinator.store.turn import Spoiled, Turn
from shoal.wire.codes import Rejected

T = TypeVar("T")
GROUP_SIZE = 64
"""Requests that are committed together, at most: whoever is first waits for the last."""

BUSY = 4
"""After a group of so many, more are on their way: a turn costs as much as ten requests in it, so the next waits a moment for them."""
MOMENT_S = 0.004
ENOUGH = 32

_Errand = tuple[Callable[[], Any], Any, "asyncio.Future[Any]"]
_Group = tuple[list[_Errand], asyncio.AbstractEventLoop]
_Outcome = tuple["asyncio.Future[Any]", Any, BaseException | None]


class Desk:
    """`do` belongs to one event loop: what waits, and whether the thread is busy, only that loop touches."""

    def __init__(self, database: Database, prepare: Callable[[Turn, list[Any]], None] | None = None) -> None:
        """`prepare` gets what the errands of a turn have told `do` ahead, before the first of them is done."""
        self._database, self._prepare = database, prepare
        self._waiting: list[_Errand] = []
        self._busy = False
        self._last_size = 0
        self._moment: asyncio.TimerHandle | None = None
        self._groups: queue.SimpleQueue[_Group | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def do(self, act: Callable[[], T], ahead: Any = None) -> T:
        """What `act` answers, once all it did is on disk; what it raises, once that is undone."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._waiting.append((act, ahead, future))
        if not self._busy:
            self._busy = True
            self._gather(loop)
        elif self._moment is not None and len(self._waiting) >= ENOUGH:
            self._hand_over(loop)
        return await future

    def close(self) -> None:
        """Finish what was handed over, then end."""
        if self._thread is not None:
            self._groups.put(None)
            self._thread.join(10.0)
            self._thread = None

    def _gather(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._last_size < BUSY:
            # Not at once: what else has arrived in this turn of the loop comes along.
            loop.call_soon(self._hand_over, loop)
        elif len(self._waiting) < ENOUGH:
            self._moment = loop.call_later(MOMENT_S, self._hand_over, loop)
        else:
            self._hand_over(loop)

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._moment is not None:
            self._moment.cancel()
            self._moment = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="desk", daemon=True)
            self._thread.start()
        group, self._waiting = self._waiting[:GROUP_SIZE], self._waiting[GROUP_SIZE:]
        self._last_size = len(group)
        self._groups.put((group, loop))

    def _work(self) -> None:
        while (handed := self._groups.get()) is not None:
            group, loop = handed
            outcomes = self._act_on(group)
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._answer, loop, outcomes)

    def _act_on(self, group: list[_Errand]) -> list[_Outcome]:
        try:
            try:
                return self._act_together(group, careful=False)
            except Spoiled:
                return self._act_together(group, careful=True)
        except Exception as error:  # noqa: BLE001 - the commit failed: then nothing of all this happened
            return [(future, None, error) for _, _, future in group]

    def _act_together(self, group: list[_Errand], *, careful: bool) -> list[_Outcome]:
        outcomes: list[_Outcome] = []
        with self._database.group(careful=careful) as turn:
            told = [ahead for _, ahead, _ in group if ahead is not None]
            if told and self._prepare is not None:
                self._prepare(turn, told)
            for act, _, future in group:
                try:
                    outcomes.append((future, act(), None))
                except Rejected as error:
                    outcomes.append((future, None, error))
                except Exception as error:  # raised again where it was asked for
                    if not careful:
                        raise Spoiled from error
                    outcomes.append((future, None, error))
        return outcomes

    def _answer(self, loop: asyncio.AbstractEventLoop, outcomes: list[_Outcome]) -> None:
        if self._waiting:
            self._gather(loop)
        else:
            self._busy = False
        for future, result, error in outcomes:
            if future.done():  # whoever asked has hung up
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
