"""Since when nodes are away, and which come and go too often. Pure but for its own memory; time is an argument."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

# A reboot for an update often takes two; what comes after is a loose cable, or a Mac that falls asleep.
_FREE_RETURNS: Final = 2
_FIRST_HOLD_S: Final = 30.0
_LONGEST_HOLD_S: Final = 900.0
# A node that stayed for so long has made up for everything.
_FORGIVEN_S: Final = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flapping:
    """A node that is held back for a while, because it came back again and again."""

    returns: int
    until: float
    """When that ends, in monotonic seconds."""
    until_at: datetime
    """The same on the wall's clock, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Return:
    """The last time that a node came back, and the how manieth in a row that was."""

    number: int
    at: float

    @property
    def hold_s(self) -> float:
        beyond = self.number - _FREE_RETURNS
        # 2 ** 1000 does not fit into a float.
        return min(_LONGEST_HOLD_S, _FIRST_HOLD_S * 2 ** min(beyond - 1, 10)) if beyond > 0 else 0.0

    @property
    def until(self) -> float:
        return self.at + self.hold_s


class NodeLiveness:
    """Remembers when each node's lease was first missed, and how often it came back.

    Kept in memory on purpose: a reconciler that just started has not seen how long a node has been
    away, and gives it the whole grace period; nor has it seen it come and go.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._away_since: dict[str, float] = {}
        self._returns: dict[str, _Return] = {}
        self._flaps: dict[str, Flapping] = {}

    def look(self, known: Iterable[str], ready: set[str], now: float) -> frozenset[str]:
        """Take note of who is there and who is not, at `now` (monotonic seconds); return who came or went."""
        known = set(known)
        away = known - ready
        for name in self._returns.keys() - known:
            del self._returns[name]
        for name in away - self._away_since.keys():
            last = self._returns.get(name)
            if last is not None and last.at + _FORGIVEN_S <= now:
                del self._returns[name]
        for name in (self._away_since.keys() - away) & known:
            before = self._returns.get(name)
            self._returns[name] = _Return(number=before.number + 1 if before else 1, at=now)
        changed = frozenset(away ^ self._away_since.keys())
        self._away_since = {name: self._away_since.get(name, now) for name in away}
        return changed

    def lost(self, now: float) -> frozenset[str]:
        """Return the nodes that have been away for the whole grace period."""
        # The same sum as below: a difference rounds differently, and nobody would look again.
        return frozenset(n for n, since in self._away_since.items() if since + self._grace_s <= now)

    def requeue_after_s(self, nodes: Iterable[str], now: float) -> float | None:
        """Return when the next grace period of one of `nodes` ends; None if none is running."""
        ends = [self._away_since[n] + self._grace_s for n in nodes if n in self._away_since]
        return min((end - now for end in ends if end > now), default=None)

    def next_release_s(self, now: float) -> float | None:
        """Return when the next node is held back no more; None if none is."""
        return min(
            (one.until - now for one in self._returns.values() if one.until > now), default=None
        )

    def flapping(self, now: float, wall: datetime) -> Mapping[str, Flapping]:
        """Return the nodes that are held back; `wall` is what `now` is on the wall's clock.

        The same values until something changes: what people read must not change by a second's rounding.
        """
        held = {name: last for name, last in self._returns.items() if last.until > now}
        self._flaps = {
            name: found
            if (found := self._flaps.get(name)) is not None and found.until == last.until
            else Flapping(
                returns=last.number,
                until=last.until,
                until_at=wall + timedelta(seconds=last.until - now),
            )
            for name, last in held.items()
        }
        return self._flaps
