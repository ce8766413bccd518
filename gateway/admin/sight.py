"""What the admin API looks at. Values and live views; changes nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

from gateway.admin.log import OwnLog
from gateway.admin.nodes import NodeBook
from gateway.carry.loads import Loads
from gateway.carry.names import Names
from gateway.carry.waiting import WaitingRoom
from gateway.known.fleet import KnownFleet
from gateway.record.recorder import Recorder
from gateway.record.series import Sums
from gateway.routing.table import Model, Target
from machinery.clock import Clock

DAY_S = 24 * 3600.0
RECENT_S = 60.0
"""What "now" means for rates: long enough to be steady, short enough to follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One gateway from within."""

    id: str
    known: KnownFleet
    loads: Loads
    room: WaitingRoom
    names: Names
    recorder: Recorder
    nodes: NodeBook
    log: OwnLog
    clock: Clock

    def over(self, duration_s: float) -> Sums:
        """Return what the last so many seconds add up to."""
        return self.recorder.series.over(self.clock.now().timestamp(), duration_s)

    def uptime_s(self) -> float:
        """Return for how long the gateway runs."""
        return max(0.0, self.clock.now().timestamp() - self.recorder.since_s)

    def waiting(self) -> int:
        """Return how many requests wait here, for their turn or for a replica."""
        return sum(self.names.waiting().values()) + sum(self.room.waiting().values())


def targets(model: Model) -> Iterator[tuple[Target, bool]]:
    """Yield who may be asked for the name, and whether its lease is there; some more than once."""
    ruled = (share for rule in model.rules for share in rule.shares)
    for share in (*model.shares, *ruled, *model.fallbacks):
        for target in share.leased:
            yield target, True
        for target in share.orphans:
            yield target, False
