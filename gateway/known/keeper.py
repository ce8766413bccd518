"""Keeps the routing table like the store. The only part of the gateway that talks to the store.

Static stability: what was learned stays in force while the store is away, for as long as that takes.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import TypeVar

from gateway.known.tabulate import Orphan, Seen, orphans_of, tabulate, target_of
from gateway.routing.table import Table, Target
from machinery.clock import Clock
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from schemas.meta import ApiModel
from schemas.replica import Endpoint
from schemas.route import ModelRoute
from store import codec, keys
from store.cache.informer import Informer
from store.port import KeyValue, Transport

T = TypeVar("T")
M = TypeVar("M", bound=ApiModel)
log = logging.getLogger(__name__)

# How often orphans are looked over; their time is counted in minutes.
_TICK_S = 5.0


class TableKeeper:
    """The table as of now. Run `run()` in a task group."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._clock = clock
        self.table = Table()
        self.is_synced = False
        self._dirty = asyncio.Event()
        self._changed = asyncio.Event()
        self._orphans: dict[str, Orphan] = {}
        self._leased: dict[str, Target] = {}
        self._deaf: set[str] = set()

        def informer(prefix: str, model: type[M]) -> Informer[M]:
            def decode(item: KeyValue) -> M:
                return codec.decode(model, item)

            made = Informer(transport, prefix, decode, clock)
            made.on_change(lambda _: self._dirty.set())
            return made

        self._endpoints = informer(keys.ENDPOINT_PREFIX, Endpoint)
        self._deployments = informer(keys.spec_prefix("ModelDeployment"), ModelDeployment)
        self._statuses = informer(keys.status_prefix("ModelDeployment"), ModelDeploymentStatus)
        self._routes = informer(keys.spec_prefix("ModelRoute"), ModelRoute)

    def staleness_s(self) -> float | None:
        """Return the seconds since the store was last heard; None before the first time."""
        heard = [informer.staleness_s() for informer in self._informers()]
        known = [seconds for seconds in heard if seconds is not None]
        return max(known) if len(known) == len(heard) else None

    async def changed(self, *, within_s: float) -> bool:
        """Wait for the next change of the table; return whether there was one in time."""
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def drop_orphan(self, target: Target) -> None:
        """Forget the engine if it is an orphan: it did not answer."""
        orphan = self._orphans.get(target.replica)
        if orphan is not None and orphan.target == target:
            del self._orphans[target.replica]
            self._dirty.set()

    async def run(self) -> None:
        """Keep the table like the store, for ever."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers():
                group.create_task(informer.run())
            group.create_task(self._rebuild())
            group.create_task(self._tick())

    async def _rebuild(self) -> None:
        # Half a picture would turn known models into unknown ones.
        for informer in self._informers():
            await informer.wait_synced()
        while True:
            self._dirty.clear()
            self._look()
            self.is_synced = True
            self._changed.set()
            self._changed = asyncio.Event()
            await self._dirty.wait()

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(_TICK_S)
            now_s = self._clock.monotonic()
            if any(orphan.until_s <= now_s for orphan in self._orphans.values()):
                self._dirty.set()

    def _look(self) -> None:
        seen = Seen(
            deployments=_by_name(self._deployments.items),
            statuses=_by_name(self._statuses.items),
            routes=_by_name(self._routes.items),
            leased=self._targets(),
        )
        orphans = orphans_of(self._orphans, self._leased, seen, self._clock.monotonic())
        for replica in orphans.keys() - self._orphans.keys():
            log.info(
                "an endpoint lost its lease; keeping it as a last resort",
                extra={"replica": replica},
            )
        self._orphans, self._leased = orphans, dict(seen.leased)
        self.table = tabulate(seen, [orphan.target for orphan in orphans.values()])

    def _targets(self) -> dict[str, Target]:
        found: dict[str, Target] = {}
        for key, endpoint in self._endpoints.items.items():
            target = target_of(endpoint, self._endpoints.version(key))
            if target is not None:
                before = found.get(target.replica)
                # Of a replica that just moved, the node it left may not have withdrawn its own yet.
                if before is None or before.version < target.version:
                    found[target.replica] = target
            elif key not in self._deaf:
                self._deaf.add(key)
                log.error(
                    "an endpoint's url is not http://host:port; it gets no requests",
                    extra={"key": key},
                )
        return found

    def _informers(
        self,
    ) -> tuple[
        Informer[Endpoint]
        | Informer[ModelDeployment]
        | Informer[ModelDeploymentStatus]
        | Informer[ModelRoute],
        ...,
    ]:
        return (self._endpoints, self._deployments, self._statuses, self._routes)


def _by_name(items: Mapping[str, T]) -> dict[str, T]:
    return {key.rpartition("/")[2]: item for key, item in items.items()}
