"""Waiting for something while a client waits for us: until its time is up, with signs of life. Chooses nothing."""

import asyncio
from typing import Protocol

from machinery.clock import Clock

# What begins to answer can be refused no more by a status, so not at once; and proxies give up silent connections
# after 30 to 60 s (nginx: proxy_read_timeout 60s; AWS load balancers: 60 s).
QUIET_S = 5.0


class Patience(Protocol):
    """A client that waits for its answer to begin."""

    async def tick(self) -> None:
        """Tell it that it is not forgotten, if there is a way to."""
        ...


class Vigil:
    """One client's waiting, over as many waits as it takes."""

    def __init__(self, clock: Clock, patience: Patience, quiet_s: float) -> None:
        """`quiet_s`: after how long, and how often from then on, the client is told."""
        self._clock = clock
        self._patience = patience
        self._quiet_s = quiet_s
        self._tick_s = clock.monotonic() + quiet_s

    async def wait(self, future: "asyncio.Future[None]", *, until_s: float) -> bool:
        """Wait until the future is done, or the time is up; return whether it is done. Never cancels it."""
        while not future.done():
            now_s = self._clock.monotonic()
            if now_s >= until_s:
                return False
            if now_s >= self._tick_s:
                await self._patience.tick()
                self._tick_s = self._clock.monotonic() + self._quiet_s
                continue
            await asyncio.wait((future,), timeout=min(until_s, self._tick_s) - now_s)
        return True

    async def quietly(self, *, until_s: float) -> float:
        """Give a sign of life if it is time to; return how many seconds may be waited now, at least 0."""
        now_s = self._clock.monotonic()
        if now_s >= self._tick_s:
            await self._patience.tick()
            self._tick_s = self._clock.monotonic() + self._quiet_s
        return max(0.0, min(until_s, self._tick_s) - now_s)
