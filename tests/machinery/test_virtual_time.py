"""Virtual time: hours pass at once, in order; threads run in real time; a standstill is an error."""

import asyncio
import time

import pytest

from machinery import virtual_time
from machinery.virtual_time import StalledError, VirtualClock


def test_timers_fire_in_order_at_their_time() -> None:
    clock, seen = VirtualClock(), []

    async def after(seconds: float) -> None:
        await clock.sleep(seconds)
        seen.append((seconds, clock.monotonic()))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for seconds in (3600.0, 0.25, 7.5):
                group.create_task(after(seconds))

    virtual_time.run(main())
    assert [seconds for seconds, _ in seen] == [0.25, 7.5, 3600.0]
    assert [at for _, at in seen] == pytest.approx([0.25, 7.5, 3600.0])


def test_a_thread_is_waited_for_while_timers_stand_still() -> None:
    async def main() -> float:
        async with asyncio.TaskGroup() as group:
            alarm = group.create_task(asyncio.sleep(1000))
            await asyncio.to_thread(time.sleep, 0.05)
            at = asyncio.get_running_loop().time()
            alarm.cancel()
        return at

    assert virtual_time.run(main()) == pytest.approx(0.0, abs=0.001)


def test_nothing_left_to_happen_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StalledError, match="no timer is set"):
        virtual_time.run(main())


def test_the_rest_of_a_rounding_error_passes() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        due = sum([0.1] * 44)  # not quite 4.4
        await asyncio.sleep(4.4)
        for _ in range(1000):
            left = due + 1e-15 - loop.time()
            if left <= 0:
                return
            await asyncio.sleep(left)
        raise AssertionError("it never passes")

    virtual_time.run(main())


def test_work_that_never_ends_is_an_error() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        def again() -> None:
            loop.call_soon(again)

        again()
        await asyncio.sleep(1)

    with pytest.raises(StalledError, match="never ends"):
        virtual_time.run(main())
