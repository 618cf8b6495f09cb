"""The bell: whoever has what it waits for goes on, nobody else is woken, and no ring is lost."""

import asyncio
import threading
import time

from shoal.shardcast.notify import Bell

PATIENCE_S = 60.0


def test_only_those_who_can_go_on_are_woken() -> None:
    bell, here, looks = Bell(), set[int](), {1: 0, 2: 0}

    def ready(number: int) -> bool:
        looks[number] += 1
        return number in here

    async def both() -> tuple[bool, bool]:
        first = asyncio.create_task(bell.wait_async(lambda: ready(1), PATIENCE_S))
        second = asyncio.create_task(bell.wait_async(lambda: ready(2), PATIENCE_S))
        await asyncio.sleep(0)
        here.add(1)
        bell.ring()
        assert await first
        assert not second.done()
        asked = looks[2]
        await asyncio.sleep(0)
        assert looks[2] == asked, "the loop has looked for it; it did not look itself"
        here.add(2)
        bell.ring()
        return await first, await second

    assert asyncio.run(both()) == (True, True)


def test_rings_of_another_thread_are_not_lost() -> None:
    """As a relay's shards come, many rings are one look; the last of them must be among those seen."""
    bell, count, most = Bell(), 0, 2000

    def write() -> None:
        nonlocal count
        for _ in range(most):
            count += 1
            bell.ring()
            if count % 100 == 0:
                time.sleep(0.001)

    async def follow() -> int:
        seen = 0
        thread = threading.Thread(target=write)
        thread.start()
        while seen < most:
            assert await bell.wait_async(lambda: count > seen, PATIENCE_S)  # noqa: B023 - awaited here
            seen = count
        thread.join()
        return seen

    assert asyncio.run(follow()) == most


def test_a_wait_ends_in_time_and_when_the_owner_leaves() -> None:
    bell = Bell()
    assert not asyncio.run(bell.wait_async(lambda: False, 0.01))
    assert not bell.wait(lambda: False, 0.01)

    async def left() -> bool:
        waiting = asyncio.create_task(bell.wait_async(lambda: False, PATIENCE_S))
        await asyncio.sleep(0)
        bell.silence()
        return await waiting

    assert not asyncio.run(left())
