"""A bell: one thread rings, and everybody who waits for something looks again.

Writers are threads, HTTP handlers live in an event loop; both wait here, and a thousand waiting handlers cost no
thread. A loop looks for its handlers, once for all that rang meanwhile, and wakes only those who have what they wait for.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class _Listener:
    ready: Callable[[], bool]
    called: asyncio.Event = field(default_factory=asyncio.Event)


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
        loop, listener = asyncio.get_running_loop(), _Listener(ready)
        give_up_s = time.monotonic() + timeout_s
        with self._condition:
            self._listeners.setdefault(loop, set()).add(listener)
        try:
            while not ready():
                left_s = give_up_s - time.monotonic()
                if left_s <= 0 or self._silenced:
                    return False
                await _set_within(listener.called, left_s)
                listener.called.clear()
            return True
        finally:
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
                listener.called.set()


async def _set_within(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
