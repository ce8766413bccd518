"""How many requests may be repeated: a part of those that came in lately, and a few. Pure; told the time.

Without it every failure doubles the load on what is left, which fails the more: a retry storm.
"""

from dataclasses import dataclass, field

WINDOW_S = 10
# For fleets with a request a minute, of which a fifth is nothing.
FLOOR = 10


@dataclass(slots=True)
class Budget:
    """One name's, counted in whole seconds of the last ten."""

    percent: float
    floor: int = FLOOR
    """What may be repeated in any ten seconds, however few requests there are."""
    _second: int = 0
    _asked: list[int] = field(default_factory=lambda: [0] * WINDOW_S)
    _spent: list[int] = field(default_factory=lambda: [0] * WINDOW_S)
    _asked_sum: int = 0
    _spent_sum: int = 0

    def asked(self, now_s: float) -> None:
        """Count a request."""
        second = int(now_s)
        if second != self._second:
            self._turn(second)
        self._asked[second % WINDOW_S] += 1
        self._asked_sum += 1

    def spend(self, now_s: float) -> bool:
        """Take a repetition out of it; return False if there is none left."""
        second = int(now_s)
        if second != self._second:
            self._turn(second)
        if self._spent_sum >= self.floor + self._asked_sum * self.percent // 100:
            return False
        self._spent[second % WINDOW_S] += 1
        self._spent_sum += 1
        return True

    def _turn(self, second: int) -> None:
        """Forget the seconds that are ten seconds old by now."""
        for old in range(max(self._second + 1, second - WINDOW_S + 1), second + 1):
            place = old % WINDOW_S
            self._asked_sum -= self._asked[place]
            self._spent_sum -= self._spent[place]
            self._asked[place] = self._spent[place] = 0
        self._second = max(second, self._second)
