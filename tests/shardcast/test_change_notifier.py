"""ChangeNotifier: wakes only waiters whose condition holds, and loses no notification."""

import asyncio
import threading
import time

from shoal.shardcast.store import ChangeNotifier

TIMEOUT_S = 60.0


def test_only_waiters_whose_condition_holds_are_woken() -> None:
    notifier, here, looks = ChangeNotifier(), set[int](), {1: 0, 2: 0}

    def ready(number: int) -> bool:
        looks[number] += 1
        return number in here

    async def both() -> tuple[bool, bool]:
        first = asyncio.create_task(notifier.wait_async(lambda: ready(1), TIMEOUT_S))
        second = asyncio.create_task(notifier.wait_async(lambda: ready(2), TIMEOUT_S))
        await asyncio.sleep(0)
        here.add(1)
        notifier.notify()
        assert await first
        assert not second.done()
        asked = looks[2]
        await asyncio.sleep(0)
        assert looks[2] == asked, "the loop tested the condition; the waiter was not woken"
        here.add(2)
        notifier.notify()
        return await first, await second

    assert asyncio.run(both()) == (True, True)


def test_notifications_of_another_thread_are_not_lost() -> None:
    """Many notifications cause one test of the conditions; the last notification must not be missed."""
    notifier, count, most = ChangeNotifier(), 0, 2000

    def write() -> None:
        nonlocal count
        for _ in range(most):
            count += 1
            notifier.notify()
            if count % 100 == 0:
                time.sleep(0.001)

    async def follow() -> int:
        seen = 0
        thread = threading.Thread(target=write)
        thread.start()
        while seen < most:
            assert await notifier.wait_async(lambda: count > seen, TIMEOUT_S)  # noqa: B023 - awaited here
            seen = count
        thread.join()
        return seen

    assert asyncio.run(follow()) == most


def test_a_wait_ends_at_its_timeout_and_on_close() -> None:
    notifier = ChangeNotifier()
    assert not asyncio.run(notifier.wait_async(lambda: False, 0.01))
    assert not notifier.wait(lambda: False, 0.01)

    async def left() -> bool:
        waiting = asyncio.create_task(notifier.wait_async(lambda: False, TIMEOUT_S))
        await asyncio.sleep(0)
        notifier.close()
        return await waiting

    assert not asyncio.run(left())
