"""A token bucket that may go into debt. Pure: the time arrives as an argument."""

import math


class Bucket:
    """So much a minute, all of it at once if nothing was taken for a minute.

    What is taken is known only afterwards where it is tokens, so the level may be below zero: then nothing
    may be taken until it has filled up again. Over any time of `t` seconds at most `capacity + per_minute / 60 * t`
    is begun to be taken.
    """

    __slots__ = ("_at_s", "_level", "_per_minute", "capacity")

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.capacity = 0.0
        """Never below 1: a share of a small number still lets a request through now and then."""
        self._level = math.inf
        self._at_s = now_s
        self.resize(per_minute, now_s)

    def resize(self, per_minute: float, now_s: float) -> None:
        """Fill it at another rate from now on; what is in it stays, as far as it has room."""
        if self.capacity:
            self.level(now_s)
        self.capacity = max(1.0, per_minute)
        self._per_minute = per_minute
        self._level = min(self._level, self.capacity)

    def level(self, now_s: float) -> float:
        """Return how much is in it now."""
        passed_s = now_s - self._at_s
        if passed_s > 0:
            self._at_s = now_s
            self._level = min(self.capacity, self._level + passed_s * self._per_minute / 60.0)
        return self._level

    def take(self, amount: float) -> None:
        """Take so much out of it, if need be more than there is."""
        self._level -= amount

    def wait_s(self, wanted: float) -> float:
        """Return after how long there will be that much, counted from when its level was asked for last."""
        return max(0.0, wanted - self._level) * 60.0 / self._per_minute

    def full_s(self) -> float:
        """Return after how long it will be full, counted as above."""
        return self.wait_s(self.capacity)
