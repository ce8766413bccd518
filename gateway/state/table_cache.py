"""Table cache: the routing table, kept current from the store, or from the saved state until the store was read.

Static stability: the last state stays in force while the store is unreachable, for however long.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Literal, TypeAlias, TypeVar

from gateway.routing.table import EngineEndpoint, RoutingTable
from gateway.state.build_table import (
    OrphanEndpoint,
    TableInputs,
    build_table,
    orphans_of,
)
from gateway.state.endpoint_filter import EndpointFilter, EngineAccess
from gateway.state.persistence import KnownObjects
from gateway.state.staleness import StalenessMonitor
from machinery.clock import Clock
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from schemas.meta import ApiModel
from schemas.node import Node
from schemas.records import ExternalKey
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
# Only the store reports that an engine is back; while it is unreachable, the engine is tried again
# after this.
_RETRY_S = 30.0


class TableCache:
    """The current table. Run `run()` in a task group."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        *,
        site: str = "",
        access: EngineAccess | None = None,
    ) -> None:
        """`site`: the gateway's own, empty if it has none; `access`: the engines that it can reach."""
        self._transport = transport
        self._clock = clock
        self.table = RoutingTable()
        self.source: TableSource = "none"
        self._restored: KnownObjects | None = None
        """The saved state, in use until the store was read."""
        self._refused: AbstractSet[str] = frozenset()
        """Keys of endpoints that do not count."""
        self._dirty = asyncio.Event()
        self._changed = asyncio.Event()
        self._orphans: dict[str, OrphanEndpoint] = {}
        self._leased: dict[str, EngineEndpoint] = {}
        self._silent: dict[str, float] = {}
        """Endpoints of the saved state that did not answer, and the time at which they may be tried again."""
        self._seen_serving: frozenset[str] = frozenset()
        """Deployments that had an endpoint, for as long as they exist."""
        self._handlers: list[Callable[[], None]] = []
        self._endpoints = self._informer(keys.ENDPOINT_PREFIX, Endpoint)
        self._deployments = self._informer(keys.spec_prefix("ModelDeployment"), ModelDeployment)
        self._statuses = self._informer(
            keys.status_prefix("ModelDeployment"), ModelDeploymentStatus
        )
        self._routes = self._informer(keys.spec_prefix("ModelRoute"), ModelRoute)
        self._nodes = self._informer(keys.spec_prefix("Node"), Node) if site else None
        self._external_keys = self._informer(keys.EXTERNAL_KEY_PREFIX, ExternalKey)
        self._site = site
        self._filter = EndpointFilter(transport, clock, self._dirty.set, access or EngineAccess())
        self._may_build = False
        """True once the store was read."""
        self._informers = (self._endpoints, self._deployments, self._statuses, self._routes)
        self.staleness = StalenessMonitor(transport, clock, self._informers)

    @property
    def is_synced(self) -> bool:
        """True if there is a table, from the store or from the saved state."""
        return self.source != "none"

    @property
    def is_stale(self) -> bool:
        """True if the store has been silent for longer than `staleness.STALE_S`."""
        return self.staleness.is_stale

    def staleness_s(self) -> float | None:
        """Return the seconds since the store's last sign of life; None before the first."""
        return self.staleness.staleness_s()

    @property
    def refusal(self) -> str:
        """Reason why the store refuses this gateway; "" if it does not."""
        return next((informer.refusal for informer in self._informers if informer.refusal), "")

    def on_change(self, handler: Callable[[], None]) -> None:
        """Call the handler after each change in the store."""
        self._handlers.append(handler)

    def known(self) -> KnownObjects:
        """Return the objects from which the table is built; without refused endpoints."""
        if self._restored is not None:
            return self._restored
        return self._known(self._refused)

    def _known(self, refused: AbstractSet[str] = frozenset()) -> KnownObjects:
        """Return the objects in the store, without the endpoints of these keys."""
        return KnownObjects(
            deployments=_by_name(self._deployments.items),
            statuses=_by_name(self._statuses.items),
            routes=_by_name(self._routes.items),
            endpoints={
                key: (endpoint, self._endpoints.version(key))
                for key, endpoint in self._endpoints.items.items()
                if key not in refused
            },
            sites={
                name: node.metadata.labels["site"]
                for name, node in _by_name(self._nodes.items if self._nodes else {}).items()
                if "site" in node.metadata.labels
            },
        )

    def restore(self, known: KnownObjects) -> None:
        """Use the saved state until the store was read. Its endpoints are a last resort, like orphans."""
        self._restored = known
        self._dirty.set()

    async def changed(self, *, within_s: float) -> bool:
        """Wait for the next change of the table; return whether it came in time."""
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def drop_orphan(self, endpoint: EngineEndpoint) -> None:
        """Drop an orphan that did not answer; other endpoints are ignored."""
        orphan = self._orphans.get(endpoint.replica)
        if orphan is not None and orphan.endpoint == endpoint:
            del self._orphans[endpoint.replica]
            self._silent[endpoint.replica] = self._clock.monotonic() + _RETRY_S
            self._dirty.set()

    async def wait_synced(self) -> None:
        """Wait until the store was read."""
        for informer in self._informers:
            await informer.wait_synced()

    async def run(self) -> None:
        """Keep the table current, forever."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers:
                group.create_task(informer.run())
            # Not awaited: a role of an earlier release may not read nodes, and endpoints have a
            # site, too.
            if self._nodes is not None:
                group.create_task(self._nodes.run())
            # Nor this: such a role may not read the keys of external servers.
            group.create_task(self._external_keys.run())
            group.create_task(self._filter.run())
            group.create_task(self._rebuild())
            group.create_task(self._notice_sync())
            group.create_task(self._tick())

    async def _notice_sync(self) -> None:
        await self.wait_synced()
        await self._filter.wait_synced()
        self._may_build = True
        self._dirty.set()  # an empty store sends no change

    async def _rebuild(self) -> None:
        while True:
            self._dirty.clear()
            # A partial read would make known models unknown.
            if self._may_build:
                self._restored = None
                self.staleness.check_watches()
                self._update(self._known(), "store")
            elif self._restored is not None:
                self._update(self._restored, "snapshot")
            await self._dirty.wait()

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(_TICK_S)
            now_s = self._clock.monotonic()
            is_due = [until_s <= now_s for until_s in self._silent.values()]
            if any(is_due) or any(o.until_s <= now_s for o in self._orphans.values()):
                self._dirty.set()
            await self.staleness.listen(now_s)
            await self._filter.confirm(now_s)

    def _update(self, known: KnownObjects, source: TableSource) -> None:
        now_s = self._clock.monotonic()
        self._silent = {name: until_s for name, until_s in self._silent.items() if until_s > now_s}
        filtered, is_real = self._filter.filter(known.endpoints), source == "store"
        endpoints, self._refused = filtered.used, filtered.refused
        serving = {endpoint.deployment for endpoint in endpoints.values()}
        self._seen_serving = (self._seen_serving | serving) & known.deployments.keys()
        seen = TableInputs(
            deployments=known.deployments,
            statuses=known.statuses,
            routes=known.routes,
            leased=endpoints if is_real else {},
            sites=known.sites,
            refused=filtered.refused,
            seen_serving=self._seen_serving,
            # Never in the saved state: it is a file.
            external_keys=_by_name(self._external_keys.items),
        )
        if not is_real:
            self._leased = {name: t for name, t in endpoints.items() if name not in self._silent}
        orphans = orphans_of(self._orphans, self._leased, seen, now_s)
        for replica in orphans.keys() - self._orphans.keys() if is_real else ():
            log.info(
                "endpoint lost its lease; keeping it as a last resort",
                extra={"replica": replica},
            )
        self._orphans, self._leased = orphans, dict(seen.leased)
        gone = [orphan.endpoint for orphan in orphans.values()]
        self.table = build_table(seen, gone, site=self._site)
        self.source = source
        self._changed.set()
        self._changed = asyncio.Event()
        for handler in self._handlers if is_real else ():
            handler()

    def _informer(self, prefix: str, model: type[M]) -> Informer[M]:
        def decode(item: KeyValue) -> M:
            return codec.decode(model, item)

        made = Informer(self._transport, prefix, decode, self._clock)
        made.on_change(lambda _: self._dirty.set())
        return made


def _by_name(items: Mapping[str, T]) -> dict[str, T]:
    return {key.rpartition("/")[2]: item for key, item in items.items()}
