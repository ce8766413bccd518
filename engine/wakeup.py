"""Wakeup of the one task that waits for something. Event loop only."""

import asyncio
import math
from dataclasses import dataclass

# uvloop counts in milliseconds, so a timer may expire so much early.
_EARLY_S = 0.001


@dataclass(slots=True, eq=False)
class Wakeup:
    """Wakes the task that waits, at the latest after a timeout.

    A stream waits for each of its tokens. So the timer stays where it is when a wait ends, and is set again only when it
    expires: `asyncio.timeout` would set and cancel one for each token.
    """

    _waiter: asyncio.Future[bool] | None = None
    _until_s: float = math.inf
    """The end of the present wait, by the loop's clock."""
    _timer: asyncio.TimerHandle | None = None
    _expires_s: float = math.inf
    """The time of the timer; infinite without one."""

    def notify(self) -> None:
        """Wake the task. Without one this has no effect."""
        self._wake(notified=True)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the next `notify`; return False if it does not come in time. One task at a time."""
        loop = asyncio.get_running_loop()
        self._waiter, self._until_s = loop.create_future(), math.inf
        if timeout_s is not None:
            self._until_s = loop.time() + timeout_s
            if self._until_s < self._expires_s:
                self._set_timer(loop)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """End the timer: there is no further wait. May be called again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._expires_s = None, math.inf

    def _wake(self, *, notified: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(notified)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self.close()
        self._timer, self._expires_s = loop.call_at(self._until_s, self._expire), self._until_s

    def _expire(self) -> None:
        self.close()
        if self._waiter is None or self._until_s == math.inf:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._until_s - _EARLY_S:
            self._set_timer(loop)
        else:
            self._wake(notified=False)
