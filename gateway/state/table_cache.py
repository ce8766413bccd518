"""Keeps the routing table like the store, or like what was kept of it until the store is heard.

Static stability: what was learned stays in force while the store is away, for as long as that takes.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, TypeVar

from gateway.routing.table import EngineEndpoint, RoutingTable
from gateway.state.build_table import (
    OrphanEndpoint,
    TableInputs,
    build_table,
    endpoint_of,
    orphans_of,
)
from gateway.state.persistence import KnownObjects
from gateway.state.staleness import StalenessMonitor
from machinery.clock import Clock
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from schemas.meta import ApiModel
from schemas.node import Node
from schemas.replica import Endpoint
from schemas.route import ModelRoute
from store import codec, keys
from store.informer import Informer
from store.port import KeyValue, Transport

T = TypeVar("T")
M = TypeVar("M", bound=ApiModel)
TableSource: TypeAlias = Literal["none", "snapshot", "store"]
log = logging.getLogger(__name__)

_TICK_S = 1.0
# Nobody but the store can say that an engine is back; while it is away we look ourselves.
_RETRY_S = 30.0


class TableCache:
    """The table as of now. Run `run()` in a task group."""

    def __init__(self, transport: Transport, clock: Clock, *, site: str = "") -> None:
        """`site`: where this gateway is; empty if nobody said."""
        self._transport = transport
        self._clock = clock
        self.table = RoutingTable()
        self.source: TableSource = "none"
        self._supposed: KnownObjects | None = None
        """What is gone by instead of the store, until that is heard."""
        self._dirty = asyncio.Event()
        self._changed = asyncio.Event()
        self._orphans: dict[str, OrphanEndpoint] = {}
        self._leased: dict[str, EngineEndpoint] = {}
        self._silent: dict[str, float] = {}
        """Engines of a snapshot that did not answer, and until when they are not asked."""
        self._deaf: set[str] = set()
        self._handlers: list[Callable[[], None]] = []
        self._endpoints = self._informer(keys.ENDPOINT_PREFIX, Endpoint)
        self._deployments = self._informer(keys.spec_prefix("ModelDeployment"), ModelDeployment)
        self._statuses = self._informer(
            keys.status_prefix("ModelDeployment"), ModelDeploymentStatus
        )
        self._routes = self._informer(keys.spec_prefix("ModelRoute"), ModelRoute)
        self._nodes = self._informer(keys.spec_prefix("Node"), Node) if site else None
        self._site = site
        self._informers = (self._endpoints, self._deployments, self._statuses, self._routes)
        self._hearing = StalenessMonitor(transport, clock, self._informers)

    @property
    def is_synced(self) -> bool:
        """Whether there is a table to go by, from the store or from what was kept of it."""
        return self.source != "none"

    @property
    def is_stale(self) -> bool:
        """Whether the store was not heard for longer than `hearing.STALE_S`."""
        return self._hearing.is_stale

    def staleness_s(self) -> float | None:
        """Return the seconds since the store was last heard, also by asking it; None before the first time."""
        return self._hearing.staleness_s()

    def on_news(self, handler: Callable[[], None]) -> None:
        """Have the handler called after each change that the store told of."""
        self._handlers.append(handler)

    def known(self) -> KnownObjects:
        """Return what the table is made of."""
        if self._supposed is not None:
            return self._supposed
        return KnownObjects(
            deployments=_by_name(self._deployments.items),
            statuses=_by_name(self._statuses.items),
            routes=_by_name(self._routes.items),
            endpoints={
                key: (endpoint, self._endpoints.version(key))
                for key, endpoint in self._endpoints.items.items()
            },
            sites={
                name: node.metadata.labels["site"]
                for name, node in _by_name(self._nodes.items if self._nodes else {}).items()
                if "site" in node.metadata.labels
            },
        )

    def suppose(self, known: KnownObjects) -> None:
        """Go by this until the store is heard. Its endpoints are a last resort, as orphans are."""
        self._supposed = known
        self._dirty.set()

    async def changed(self, *, within_s: float) -> bool:
        """Wait for the next change of the table; return whether there was one in time."""
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def drop_orphan(self, target: EngineEndpoint) -> None:
        """Forget the engine if it is an orphan: it did not answer."""
        orphan = self._orphans.get(target.replica)
        if orphan is not None and orphan.target == target:
            del self._orphans[target.replica]
            self._silent[target.replica] = self._clock.monotonic() + _RETRY_S
            self._dirty.set()

    async def wait_synced(self) -> None:
        """Wait until the store was read."""
        for informer in self._informers:
            await informer.wait_synced()

    async def run(self) -> None:
        """Keep the table like the store, for ever."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers:
                group.create_task(informer.run())
            # Not waited for: a role of an earlier release may not read nodes, whose agents told the site, too.
            if self._nodes is not None:
                group.create_task(self._nodes.run())
            group.create_task(self._rebuild())
            group.create_task(self._notice_sync())
            group.create_task(self._tick())

    async def _notice_sync(self) -> None:
        await self.wait_synced()
        self._dirty.set()  # what is empty changes nothing

    async def _rebuild(self) -> None:
        while True:
            self._dirty.clear()
            # Half a picture would turn known models into unknown ones.
            if all(informer.synced for informer in self._informers):
                self._supposed = None
                self._hearing.look()
                self._look(self.known(), "store")
            elif self._supposed is not None:
                self._look(self.known(), "snapshot")
            await self._dirty.wait()

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(_TICK_S)
            now_s = self._clock.monotonic()
            is_due = [until_s <= now_s for until_s in self._silent.values()]
            if any(is_due) or any(o.until_s <= now_s for o in self._orphans.values()):
                self._dirty.set()
            await self._hearing.listen(now_s)

    def _look(self, known: KnownObjects, source: TableSource) -> None:
        now_s = self._clock.monotonic()
        self._silent = {name: until_s for name, until_s in self._silent.items() if until_s > now_s}
        targets = self._targets(known.endpoints)
        is_real = source == "store"
        seen = TableInputs(
            deployments=known.deployments,
            statuses=known.statuses,
            routes=known.routes,
            leased=targets if is_real else {},
            sites=known.sites,
        )
        if not is_real:
            self._leased = {name: t for name, t in targets.items() if name not in self._silent}
        orphans = orphans_of(self._orphans, self._leased, seen, now_s)
        for replica in orphans.keys() - self._orphans.keys() if is_real else ():
            log.info(
                "an endpoint lost its lease; keeping it as a last resort",
                extra={"replica": replica},
            )
        self._orphans, self._leased = orphans, dict(seen.leased)
        gone = [orphan.target for orphan in orphans.values()]
        self.table = build_table(seen, gone, site=self._site)
        self.source = source
        self._changed.set()
        self._changed = asyncio.Event()
        for handler in self._handlers if is_real else ():
            handler()

    def _targets(self, endpoints: Mapping[str, tuple[Endpoint, int]]) -> dict[str, EngineEndpoint]:
        found: dict[str, EngineEndpoint] = {}
        for key, (endpoint, version) in endpoints.items():
            target = endpoint_of(endpoint, version)
            # Agents may write below their own node only, so the key says who wrote it.
            is_own = key == keys.endpoint_key(endpoint.spec.node, endpoint.name)
            if target is not None and is_own:
                before = found.get(target.replica)
                # Of a replica that just moved, the node it left may not have withdrawn its own yet.
                if before is None or before.version < target.version:
                    found[target.replica] = target
            elif key not in self._deaf:
                self._deaf.add(key)
                why = "its url is not http://host:port" if is_own else "it speaks for another"
                log.error("an endpoint gets no requests", extra={"key": key, "why": why})
        return found

    def _informer(self, prefix: str, model: type[M]) -> Informer[M]:
        def decode(item: KeyValue) -> M:
            return codec.decode(model, item)

        made = Informer(self._transport, prefix, decode, self._clock)
        made.on_change(lambda _: self._dirty.set())
        return made


def _by_name(items: Mapping[str, T]) -> dict[str, T]:
    return {key.rpartition("/")[2]: item for key, item in items.items()}
