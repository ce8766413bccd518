"""Clocks that tests own."""

import asyncio
from datetime import UTC, datetime, timedelta

from typing_extensions import override

from machinery.clock import SystemClock


class FakeClock:
    """Time stands still until `advance()`; sleepers wake when their time has come."""

    def __init__(self) -> None:
        self._elapsed = 0.0
        self._asleep_s = 0.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self._elapsed)

    def monotonic(self) -> float:
        return self._elapsed

    def elapsed(self) -> float:
        return self._elapsed + self._asleep_s

    def doze(self, seconds: float) -> None:
        """Let the machine sleep: only `elapsed()` goes on."""
        self._asleep_s += seconds

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._sleepers.append((self._elapsed + seconds, woken))
        await woken.wait()

    async def advance(self, seconds: float) -> None:
        """Let time pass, waking who sleeps, in small steps so that they can sleep again."""
        target = self._elapsed + seconds
        while True:
            await _settle()
            due = [when for when, _ in self._sleepers if when <= target]
            if not due:
                break
            self._elapsed = max(self._elapsed, min(due))
            ready = [s for s in self._sleepers if s[0] <= self._elapsed]
            self._sleepers = [s for s in self._sleepers if s[0] > self._elapsed]
            for _, woken in ready:
                woken.set()
        self._elapsed = target
        await _settle()


class HastyClock(SystemClock):
    """The machine's clocks, but every sleep is over at once."""

    @override
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class HurriedClock(SystemClock):
    """The machine's clocks, but who sleeps is woken soon: for giving up after many pauses."""

    @override
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 100)


class SkippingClock(SystemClock):
    """The machine's clocks, but a sleep skips its time: for code that waits for other things as well."""

    def __init__(self) -> None:
        self._skipped_s = 0.0
        self.sleeps: list[float] = []
        self.monotonic = self._monotonic

    def _monotonic(self) -> float:
        return SystemClock.monotonic() + self._skipped_s

    @override
    async def sleep(self, seconds: float) -> None:
        self._skipped_s += seconds
        self.sleeps.append(seconds)
        await asyncio.sleep(0.001)


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
