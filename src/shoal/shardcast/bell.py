"""A bell: one thread rings, and everybody who waits for something looks again.

Writers are threads, HTTP handlers live in an event loop; both wait here, and a thousand waiting handlers cost no
thread.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable


class Bell:
    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._listeners: dict[asyncio.AbstractEventLoop, set[asyncio.Event]] = {}
        self._silenced = False

    def ring(self) -> None:
        with self._condition:
            self._condition.notify_all()
            for loop, events in self._listeners.items():
                with contextlib.suppress(RuntimeError):  # a loop that was closed under its listeners
                    loop.call_soon_threadsafe(_set_all, tuple(events))

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
        event = asyncio.Event()
        loop = asyncio.get_running_loop()
        give_up_s = time.monotonic() + timeout_s
        if ready():  # most often: no need to disturb the bell
            return True
        with self._condition:
            self._listeners.setdefault(loop, set()).add(event)
        try:
            while not ready():
                left_s = give_up_s - time.monotonic()
                if left_s <= 0 or self._silenced:
                    return False
                await _set_within(event, left_s)
                event.clear()
            return True
        finally:
            with self._condition:
                events = self._listeners[loop]
                events.discard(event)
                if not events:
                    del self._listeners[loop]


def _set_all(events: tuple[asyncio.Event, ...]) -> None:
    for event in events:
        event.set()


async def _set_within(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
