"""The learned weeks of all deployments: observed by the leader, kept in the store, written once an hour."""

from collections.abc import Callable, Collection
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Final

from machinery.clock import Clock
from reconciler.deployments.demand.gateway_metrics import Demand
from reconciler.nodes import demand_week
from schemas.power import DemandWeek
from store import codec, keys
from store.port import Delete, Guard, Operation, Put, Transport

_HOUR: Final = timedelta(hours=1)
_BATCH: Final = 100


class DemandWeeks:
    """Learns which hours of the week each deployment is used in. Needs leadership to write."""

    def __init__(self, transport: Transport, clock: Clock, fence: Callable[[], Guard]) -> None:
        self._transport, self._clock, self._fence = transport, clock, fence
        self._weeks: dict[str, DemandWeek] = {}
        self._finished: dict[str, int] = {}
        self._used: set[str] = set()
        """Deployments that had a request in this hour."""
        self._hour = clock.now().replace(minute=0, second=0, microsecond=0)
        self._is_whole = False
        """False in the first hour of a leader, of which it has seen a part only."""

    async def read(self) -> None:
        """Read what earlier leaders have learned. Raises StoreError."""
        async with aclosing(self._transport.pages(keys.DEMAND_WEEK_PREFIX)) as pages:
            async for page in pages:
                for item in page.items:
                    name = item.key.removeprefix(keys.DEMAND_WEEK_PREFIX)
                    try:
                        self._weeks[name] = codec.decode(DemandWeek, item)
                    except codec.UndecodableError:
                        continue  # of a newer release: learned anew

    def observe(self, name: str, demand: Demand) -> bool:
        """Take the demand of now; return whether there was a request since the last time."""
        before = self._finished.get(name, demand.finished)
        self._finished[name] = demand.finished
        is_used = demand.requests > 0 or demand.finished != before
        if is_used:
            self._used.add(name)
        return is_used

    def is_expected(self, name: str, now: datetime) -> bool:
        """Return whether requests for the deployment are usual now, or soon."""
        return demand_week.is_expected(self._weeks.get(name, demand_week.EMPTY_WEEK), now)

    async def advance(self, names: Collection[str], now: datetime) -> None:
        """Learn the last hour of the deployments `names` once it is over. Raises StoreError."""
        if now < self._hour + _HOUR:
            return
        hour, observed = demand_week.hour_of_week(self._hour), self._used
        writes: list[Operation] = []
        for name in names:
            if not self._is_whole and name not in observed:
                continue
            week = self._weeks.get(name, demand_week.EMPTY_WEEK)
            self._weeks[name] = demand_week.with_hour(week, hour, is_used=name in observed)
            key = keys.named(keys.DEMAND_WEEK_PREFIX, name)
            writes.append(Put(key=key, value=codec.encode(self._weeks[name])))
        for name in self._weeks.keys() - set(names):
            del self._weeks[name]
            writes.append(Delete(key=keys.named(keys.DEMAND_WEEK_PREFIX, name)))
        self._used, self._is_whole = set(), now < self._hour + 2 * _HOUR
        self._hour = now.replace(minute=0, second=0, microsecond=0)
        for first in range(0, len(writes), _BATCH):
            await self._transport.commit([self._fence()], writes[first : first + _BATCH])
