"""Since when nodes are away. Pure but for its own memory; time arrives as an argument."""

from collections.abc import Iterable


class NodeLife:
    """Remembers when each node's lease was first missed.

    Kept in memory on purpose: a reconciler that just started has not seen how long a node has been
    away, and gives it the whole grace period.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._away_since: dict[str, float] = {}

    def look(self, known: Iterable[str], ready: set[str], now: float) -> None:
        """Take note of who is there and who is not, at `now` (monotonic seconds)."""
        away = {name for name in known if name not in ready}
        self._away_since = {name: self._away_since.get(name, now) for name in away}

    def lost(self, now: float) -> frozenset[str]:
        """Return the nodes that have been away for the whole grace period."""
        # The same sum as below: a difference rounds differently, and nobody would look again.
        return frozenset(n for n, since in self._away_since.items() if since + self._grace_s <= now)

    def next_look_s(self, nodes: Iterable[str], now: float) -> float | None:
        """Return when the next grace period of one of `nodes` ends; None if none is running."""
        ends = [self._away_since[n] + self._grace_s for n in nodes if n in self._away_since]
        return min((end - now for end in ends if end > now), default=None)
