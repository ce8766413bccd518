"""The only reader of time. Everything else takes a Clock, so that tests own time."""

import sys
import time
from datetime import UTC, datetime
from typing import Protocol

# The clock that also counts while the machine sleeps. Linux: clock_gettime(2). macOS: clock_gettime(3)
# has CLOCK_MONOTONIC_RAW go on in sleep, unlike CLOCK_UPTIME_RAW, which is mach_absolute_time(), which
# is what time.monotonic() reads there (python/cpython issue 86273). Read, not run: no Mac slept for it.
if sys.platform == "linux":
    _SLEEPLESS = time.CLOCK_BOOTTIME
else:
    _SLEEPLESS = time.CLOCK_MONOTONIC_RAW


class Clock(Protocol):
    """Wall time for people, monotonic time for deadlines, and waiting."""

    def now(self) -> datetime:
        """Return the wall time, in UTC."""
        ...

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back."""
        ...

    def elapsed(self) -> float:
        """Return seconds on a clock that never goes back and counts while the machine sleeps.

        For what ends elsewhere whether or not we are awake, such as a lease. Not to be compared
        with `monotonic()`.
        """
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        return datetime.now(tz=UTC)

    # The builtin itself: it is asked several times for each request to a gateway.
    monotonic = staticmethod(time.monotonic)

    def elapsed(self) -> float:
        return time.clock_gettime(_SLEEPLESS)

    async def sleep(self, seconds: float) -> None:
        import asyncio  # noqa: PLC0415 - 60 ms for `fleetctl get`, which never waits

        await asyncio.sleep(seconds)
