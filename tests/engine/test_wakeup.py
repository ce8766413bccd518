"""Wakeup of a waiting task, on the loop that engines use and on asyncio's own."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import pytest
import uvloop

from engine.wakeup import Wakeup

Run: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    chosen: Run = request.param
    return chosen


def test_a_notice_wakes_the_task_before_its_timeout(run: Run) -> None:
    async def main() -> None:
        wakeup, loop = Wakeup(), asyncio.get_running_loop()
        for timeout_s in (None, 600, 300, 600):
            loop.call_soon(wakeup.notify)
            assert await wakeup.wait(timeout_s)
        wakeup.close()

    run(main())


def test_a_notice_that_nothing_waits_for_is_lost(run: Run) -> None:
    async def main() -> None:
        wakeup = Wakeup()
        wakeup.notify()
        assert not await wakeup.wait(0.01)

    run(main())


def test_each_wait_has_its_own_timeout(run: Run) -> None:
    """A later wait may end before the timer of an earlier one, or long after it."""

    async def main() -> None:
        wakeup, loop = Wakeup(), asyncio.get_running_loop()
        loop.call_soon(wakeup.notify)
        assert await wakeup.wait(600)
        for timeout_s in (0.02, 0, 0.05):
            began_s = loop.time()
            assert not await wakeup.wait(timeout_s)
            assert loop.time() - began_s >= timeout_s - 0.002
        loop.call_later(0.002, wakeup.notify)
        assert await wakeup.wait(0.3)
        began_s = loop.time()
        assert not await wakeup.wait(0.5)  # the timer of the wait before expires during this one
        assert loop.time() - began_s >= 0.498

    run(main())


def test_a_wait_without_a_timeout_outlives_the_timer_of_the_one_before(run: Run) -> None:
    async def main() -> None:
        wakeup, loop = Wakeup(), asyncio.get_running_loop()
        loop.call_soon(wakeup.notify)
        assert await wakeup.wait(0.3)
        loop.call_later(0.5, wakeup.notify)
        assert await wakeup.wait()

    run(main())


def test_a_cancelled_wait_leaves_nothing(run: Run) -> None:
    async def main() -> None:
        wakeup = Wakeup()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(wakeup.wait(0.01))
            await asyncio.sleep(0)
            waiting.cancel()
        assert not await Wakeup().wait(0.05)  # after the timer of the first
        asyncio.get_running_loop().call_soon(wakeup.notify)
        assert await wakeup.wait(600)
        wakeup.close()

    run(main())
