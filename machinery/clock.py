"""The only reader of time. All other code takes a `Clock`, so that tests control time."""

import math
import sys
import time
from datetime import UTC, datetime
from typing import Final, Protocol

NEVER: Final = math.inf
"""A time that no clock reaches: the deadline of anything without one."""

# The clock that also counts while the machine sleeps. Linux: clock_gettime(2). macOS: clock_gettime(3) says that
# CLOCK_MONOTONIC_RAW continues in sleep. time.monotonic() there is mach_absolute_time(), like CLOCK_UPTIME_RAW, which
# does not (python/cpython issue 86273). Taken from the manuals; not tested on a Mac.
if sys.platform == "linux":
    _BOOT_CLOCK = time.CLOCK_BOOTTIME
else:
    _BOOT_CLOCK = time.CLOCK_MONOTONIC_RAW


class Clock(Protocol):
    """Wall time for people, monotonic time for deadlines, and sleep."""

    def now(self) -> datetime:
        """Return the wall time in UTC."""
        ...

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back."""
        ...

    def elapsed(self) -> float:
        """Return seconds on a clock that never goes back and also counts while the machine sleeps.

        For deadlines that another machine keeps, such as a lease. Not comparable with `monotonic()`.
        """
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for so many seconds."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        return datetime.now(tz=UTC)

    # The builtin itself: a gateway calls it several times for each request.
    monotonic = staticmethod(time.monotonic)

    def elapsed(self) -> float:
        return time.clock_gettime(_BOOT_CLOCK)

    async def sleep(self, seconds: float) -> None:
        import asyncio  # noqa: PLC0415 - 60 ms for `fleetctl get`, which never waits

        await asyncio.sleep(seconds)
