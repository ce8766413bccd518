"""Rate limits of requests: a token bucket, and one for each source with a total."""

import math
from collections import OrderedDict

from machinery.clock import Clock

# Sources that are remembered. One that is forgotten has its burst again, and still shares the total.
_MOST_SOURCES = 4096


class RateLimit:
    """A token bucket: a burst, and a rate after it."""

    def __init__(self, clock: Clock, *, burst: float, per_s: float) -> None:
        self._clock = clock
        self._burst = burst
        self._per_s = per_s
        self._left = burst
        self._at = clock.monotonic()

    def take(self) -> bool:
        """Take a token; return whether there was one."""
        self._refill()
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    @property
    def wait_s(self) -> float:
        """The seconds until there is a token."""
        self._refill()
        return max(0.0, (1.0 - self._left) / self._per_s)

    def _refill(self) -> None:
        now = self._clock.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now


class SourceRateLimit:
    """So many requests a minute from each source, and so many from all together."""

    def __init__(self, clock: Clock, *, per_minute: int, total_per_minute: int) -> None:
        self._clock = clock
        self._per_minute = per_minute
        self._total = RateLimit(clock, burst=total_per_minute, per_s=total_per_minute / 60)
        self._sources: OrderedDict[str, RateLimit] = OrderedDict()

    def take(self, source: str) -> int:
        """Count a request; return 0 if it may go on, else the whole seconds to wait.

        A source that is over its own limit takes nothing from the total.
        """
        limit = self._sources.pop(source, None)
        if limit is None:
            limit = RateLimit(self._clock, burst=self._per_minute, per_s=self._per_minute / 60)
            if len(self._sources) >= _MOST_SOURCES:
                self._sources.popitem(last=False)
        self._sources[source] = limit
        if limit.take() and self._total.take():
            return 0
        return max(1, math.ceil(max(limit.wait_s, self._total.wait_s)))
