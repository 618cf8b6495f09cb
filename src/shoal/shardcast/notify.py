"""A bell: one thread rings, and everybody who waits for something looks again.

Writers are threads, HTTP handlers live in an event loop; both wait here, and a thousand waiting handlers cost no
thread. A loop looks for its handlers, once for all that rang meanwhile, and wakes only those who have what they wait for.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class _Listener:
    ready: Callable[[], bool]
    called: "asyncio.Future[None]"


class Bell:
    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._listeners: dict[asyncio.AbstractEventLoop, set[_Listener]] = {}
        self._told: set[asyncio.AbstractEventLoop] = set()
        """Loops that will look anyway."""
        self._silenced = False

    def ring(self) -> None:
        with self._condition:
            self._condition.notify_all()
            for loop in self._listeners.keys() - self._told:
                with contextlib.suppress(RuntimeError):  # a loop that was closed under its listeners
                    loop.call_soon_threadsafe(self._look, loop)
                    self._told.add(loop)

    def silence(self) -> None:
        """End every wait, now and later: the owner is leaving."""
        self._silenced = True
        self.ring()

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Whether `ready` came true in time. For threads. `ready` must not ring."""
        with self._condition:
            return self._condition.wait_for(lambda: self._silenced or ready(), timeout_s) and ready()

    async def wait_async(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Whether `ready` came true in time. For event loops."""
        if ready():  # most often: no need to disturb the bell
            return True
        loop = asyncio.get_running_loop()
        listener = _Listener(ready, loop.create_future())
        with self._condition:
            self._listeners.setdefault(loop, set()).add(listener)
        # A future and a timer, not asyncio.timeout: a relay waits here for every shard, and those cost a third.
        timer = loop.call_later(timeout_s, _call, listener)
        try:
            if not (ready() or self._silenced):
                await listener.called
            return ready()
        finally:
            timer.cancel()
            with self._condition:
                listeners = self._listeners[loop]
                listeners.discard(listener)
                if not listeners:
                    del self._listeners[loop]

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the loop. Who rings from here on has it look once more."""
        with self._condition:
            self._told.discard(loop)
            listeners = tuple(self._listeners.get(loop, ()))
        for listener in listeners:
            if self._silenced or listener.ready():
                _call(listener)


def _call(listener: _Listener) -> None:
    if not listener.called.done():
        listener.called.set_result(None)
