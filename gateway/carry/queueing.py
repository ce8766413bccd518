"""Who is let through to a name's engines, and who waits for whom: first come, first served. Pure; told the time.

Waiting here costs an engine nothing, and whoever comes first is served first whichever engine has room first.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from gateway.carry.policy import Lines

# Ends of the last minute tell the pace; more of them than this tell no more.
_WINDOW_S = 60.0
_MOST_ENDS = 1024
LEAST_RETRY_S, MOST_RETRY_S = 1, 60


@dataclass(slots=True, eq=False)
class Place:
    """One request's place."""

    entered_s: float
    is_through: bool = False
    """Whether it was let through."""
    is_left: bool = False


@dataclass(slots=True)
class Queue:
    """Those who were let through, and those who wait. `lines` None: everybody is let through."""

    lines: Lines | None
    running: int = 0
    _waiting: OrderedDict[Place, None] = field(default_factory=OrderedDict)
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_ENDS))
    _busy_since_s: float = 0.0

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def enter(self, now_s: float) -> Place | None:
        """Give a request a place; None if none is left."""
        place = Place(now_s)
        if not self._waiting and self._has_room():
            if not self.running:
                # The time without work says nothing of the pace.
                self._ends.clear()
                self._busy_since_s = now_s
            self._pass(place)
            return place
        if self.lines is not None and len(self._waiting) >= self.lines.depth:
            return None
        self._waiting[place] = None
        return place

    def leave(self, place: Place, now_s: float) -> list[Place]:
        """Take back a place, whether it waited or was let through; return who is let through now."""
        if place.is_left:
            return []
        place.is_left = True
        if place.is_through:
            self.running -= 1
            self._ends.append(now_s)
        else:
            del self._waiting[place]
        return self._fill()

    def change(self, lines: Lines | None) -> list[Place]:
        """Go by other numbers; return who is let through now. Nobody who waits is sent away."""
        self.lines = lines
        return self._fill()

    def retry_after_s(self, now_s: float) -> int:
        """Return when there is likely to be a place for one more, in whole seconds from 1 to 60."""
        since_s = max(self._busy_since_s, now_s - _WINDOW_S)
        while self._ends and self._ends[0] < since_s:
            self._ends.popleft()
        if len(self._ends) == _MOST_ENDS:
            since_s = self._ends[0]
        wait_s = (len(self._waiting) + 1) * (now_s - since_s) / max(1, len(self._ends))
        return min(MOST_RETRY_S, max(LEAST_RETRY_S, math.ceil(wait_s)))

    def _has_room(self) -> bool:
        return self.lines is None or self.running < self.lines.concurrency

    def _pass(self, place: Place) -> None:
        place.is_through = True
        self.running += 1

    def _fill(self) -> list[Place]:
        passed = []
        while self._waiting and self._has_room():
            place, _ = self._waiting.popitem(last=False)
            self._pass(place)
            passed.append(place)
        return passed
