"""Node liveness: since when nodes are away, which are lost, and which come and go too often. Time is an argument."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from machinery.clock import Clock
from reconciler.listers.lister import Lister
from schemas.meta import Condition

NODE_GRACE_S: Final = 30.0
"""Default of `--node-grace-period`: a node that is away for longer is lost, and its replicas are placed elsewhere."""
# A reboot for an update often takes two. Later returns are a loose cable, or a Mac that falls asleep.
_FREE_RETURNS: Final = 2
_FIRST_HOLD_S: Final = 30.0
_LONGEST_HOLD_S: Final = 900.0
# A node that stayed for this long starts again with no returns.
_FORGIVEN_S: Final = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flapping:
    """A node that is held back for a while, because it came back too often."""

    returns: int
    until: float
    """End of the hold, in monotonic seconds."""
    until_at: datetime
    """The same in wall time, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The time of one reconcile, and the state of nodes that only the leader's memory holds."""

    time: datetime
    flapping: Mapping[str, Flapping] = field(default_factory=dict)
    """Nodes that are held back for flapping."""
    lost: frozenset[str] = frozenset()
    """Nodes whose grace period is over."""
    asleep: frozenset[str] = frozenset()
    """Nodes that went away after they said that they sleep, and were not given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Return:
    """The last return of a node."""

    number: int
    """The number of returns in a row, this one included."""
    at: float

    @property
    def hold_s(self) -> float:
        beyond = self.number - _FREE_RETURNS
        # 2 ** 1000 overflows a float.
        return min(_LONGEST_HOLD_S, _FIRST_HOLD_S * 2 ** min(beyond - 1, 10)) if beyond > 0 else 0.0

    @property
    def until(self) -> float:
        return self.at + self.hold_s


class NodeLiveness:
    """Remembers when each node's lease was first missed, and how often the node came back.

    Kept in memory on purpose: a new leader has not seen how long a node has been away, so it grants the whole grace
    period again; and it has not seen the node flap.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._away_since: dict[str, float] = {}
        self._returns: dict[str, _Return] = {}
        self._flapping: dict[str, Flapping] = {}
        self._unwakeable: set[str] = set()
        self.sleep_conditions: dict[str, Condition] = {}
        """The condition Asleep of the Macs that may sleep; the leader keeps it (services/power.py)."""

    def update(
        self,
        expected: Iterable[str],
        ready: set[str],
        now: float,
        *,
        announced: AbstractSet[str] = frozenset(),
    ) -> frozenset[str]:
        """Record which nodes are ready at `now` (monotonic seconds); return the nodes that came or went.

        `announced` are those that said that they sleep: they have no grace period, and their return is none.
        """
        expected = set(expected)
        self._unwakeable &= expected - ready
        away = expected - ready - (announced - self._unwakeable)
        for name in self._returns.keys() - expected:
            del self._returns[name]
        for name in away - self._away_since.keys():
            last = self._returns.get(name)
            if last is not None and last.at + _FORGIVEN_S <= now:
                del self._returns[name]
        for name in self._away_since.keys() & expected & ready:
            before = self._returns.get(name)
            self._returns[name] = _Return(number=before.number + 1 if before else 1, at=now)
        changed = frozenset(away ^ self._away_since.keys())
        self._away_since = {name: self._away_since.get(name, now) for name in away}
        return changed

    def asleep(self, lister: Lister) -> frozenset[str]:
        """Return the nodes that sleep, as far as they were not given up."""
        announced = lister.announced_asleep() - self._unwakeable
        return frozenset(name for name in announced if not lister.is_ready(name))

    def give_up(self, name: str, now: float) -> None:
        """Count a node as lost that sleeps and could not be woken, until it is back."""
        self._unwakeable.add(name)
        self._away_since[name] = now - self._grace_s

    def given_up(self) -> frozenset[str]:
        """Return the nodes that could not be woken, and are not back."""
        return frozenset(self._unwakeable)

    def forgive(self, name: str) -> None:
        """Count a node that was given up as asleep again, so that it is woken once more."""
        self._unwakeable.discard(name)
        self._away_since.pop(name, None)

    def now(self, lister: Lister, clock: Clock) -> Now:
        """Return the time with the state of nodes that depends on it."""
        now, wall = clock.monotonic(), clock.now()
        # A node that is back is not lost, even if its return is not recorded yet.
        lost = frozenset(name for name in self.lost(now) if not lister.is_ready(name))
        asleep = self.asleep(lister)
        return Now(time=wall, flapping=self.flapping(now, wall), lost=lost, asleep=asleep)

    def lost(self, now: float) -> frozenset[str]:
        """Return the nodes that have been away for the whole grace period."""
        # The same sum as in requeue_after_s: a difference rounds differently, and the requeue would come too early.
        return frozenset(n for n, since in self._away_since.items() if since + self._grace_s <= now)

    def requeue_after_s(self, nodes: Iterable[str], now: float) -> float | None:
        """Return the seconds until the next grace period of one of `nodes` ends; None if none is running."""
        ends = [self._away_since[n] + self._grace_s for n in nodes if n in self._away_since]
        return min((end - now for end in ends if end > now), default=None)

    def next_release_s(self, now: float) -> float | None:
        """Return the seconds until the next hold for flapping ends; None if there is none."""
        return min(
            (one.until - now for one in self._returns.values() if one.until > now), default=None
        )

    def flapping(self, now: float, wall: datetime) -> Mapping[str, Flapping]:
        """Return the nodes that are held back; `wall` is the wall time of `now`.

        Returns the same values until a hold changes, so that rounding does not change messages every second.
        """
        held = {name: last for name, last in self._returns.items() if last.until > now}
        self._flapping = {
            name: found
            if (found := self._flapping.get(name)) is not None and found.until == last.until
            else Flapping(
                returns=last.number,
                until=last.until,
                until_at=wall + timedelta(seconds=last.until - now),
            )
            for name, last in held.items()
        }
        return self._flapping
