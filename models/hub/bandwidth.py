"""A limit on the bytes a second that several streams receive together."""

import asyncio

from machinery.clock import Clock


class BandwidthLimit:
    """A token bucket of bytes. The rate may change at any time, such as while an engine serves requests."""

    def __init__(self, clock: Clock, *, bytes_per_s: float | None = None) -> None:
        """`bytes_per_s` is None for no limit. The burst is one second's worth.

        Raises:
            ValueError: the rate is not above 0; to stop a fetch, cancel it.

        """
        self._clock = clock
        self._rate = _checked(bytes_per_s)
        self._left = bytes_per_s or 0.0
        self._at = clock.monotonic()
        self._turn = asyncio.Lock()

    @property
    def bytes_per_s(self) -> float | None:
        """Return the rate of all streams; None for no limit."""
        return self._rate

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Change the rate of all streams.

        Raises:
            ValueError: the rate is not above 0.

        """
        rate = _checked(bytes_per_s)
        self._refill()
        self._rate = rate
        self._left = min(self._left, bytes_per_s or 0.0)

    async def take(self, count: int) -> None:
        """Wait until `count` bytes may have been received. Streams take turns, so that each gets its share."""
        if self._rate is None:
            return
        async with self._turn:
            self._refill()
            self._left -= count
            while self._left < 0 and self._rate is not None:
                # At most a second, so that a raised rate is noticed.
                await self._clock.sleep(min(1.0, -self._left / self._rate))
                self._refill()

    def _refill(self) -> None:
        now = self._clock.monotonic()
        if self._rate is not None:
            self._left = min(self._rate, self._left + (now - self._at) * self._rate)
        self._at = now


def _checked(bytes_per_s: float | None) -> float | None:
    if bytes_per_s is not None and bytes_per_s <= 0:
        raise ValueError(f"{bytes_per_s} bytes a second is no rate; expected more than 0, or None")
    return bytes_per_s
