"""Table cache: the routing table, kept current from the store, or from the saved state until the store was read.

Static stability: the last state stays in force while the store is unreachable, for however long.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, TypeVar

from gateway.routing.table import EngineEndpoint, RoutingTable
from gateway.state.build_table import (
    EndpointMove,
    TableBuilder,
    TableInputs,
)
from gateway.state.endpoint_filter import EndpointFilter, EngineAccess
from gateway.state.orphan_endpoints import OrphanEndpoint, orphans_of
from gateway.state.persistence import KnownObjects
from gateway.state.staleness import StalenessMonitor
from machinery.clock import NEVER, Clock
from schemas.autoscaling import LoadForecast
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


@dataclass(slots=True)
class _Changes:
    """Changes since the last update of the table."""

    is_all: bool = True
    """True if more changed than the rest says."""
    endpoints: set[str] = field(default_factory=set)
    """Keys of endpoints."""
    replicas: set[str] = field(default_factory=set)
    deployments: set[str] = field(default_factory=set)
    """Deployments with another status."""


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
        self._changes = _Changes()
        self._dirty = asyncio.Event()
        self._changed = asyncio.Event()
        self._orphans: dict[str, OrphanEndpoint] = {}
        self._leased: dict[str, EngineEndpoint] = {}
        self._silent: dict[str, float] = {}
        """Endpoints of the saved state that did not answer, and the time at which they may be tried again."""
        self._seen_serving: set[str] = set()
        """Deployments that had an endpoint, for as long as they exist."""
        self._builder: TableBuilder | None = None
        """The models of the table; None before the store was read."""
        self._inputs = TableInputs(deployments={}, statuses={}, routes={}, leased={})
        self._named_statuses: dict[str, ModelDeploymentStatus] = {}
        self._handlers: list[Callable[[], None]] = []
        self._endpoints = self._informer(keys.ENDPOINT_PREFIX, Endpoint, self._note_endpoint)
        self._deployments = self._informer(keys.spec_prefix("ModelDeployment"), ModelDeployment)
        self._statuses = self._informer(
            keys.status_prefix("ModelDeployment"), ModelDeploymentStatus, self._note_status
        )
        self._routes = self._informer(keys.spec_prefix("ModelRoute"), ModelRoute)
        self._nodes = self._informer(keys.spec_prefix("Node"), Node) if site else None
        self._external_keys = self._informer(keys.EXTERNAL_KEY_PREFIX, ExternalKey)
        self._site = site
        self._filter = EndpointFilter(
            transport, clock, self._note_replica, access or EngineAccess()
        )
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

    def load_forecast(self, deployment: str) -> LoadForecast | None:
        """Return the expected wait for the first replica of a deployment; None if one serves, or it is not known."""
        status = self._named_statuses.get(deployment)
        return None if status is None else status.loading

    def may_be_at_zero(self, deployment: str) -> bool:
        """Return whether autoscaling may leave a deployment without a replica."""
        declared = self._inputs.deployments.get(deployment)
        autoscaling = None if declared is None else declared.spec.autoscaling
        return autoscaling is not None and autoscaling.may_be_at_zero

    def on_change(self, handler: Callable[[], None]) -> None:
        """Call the handler after each change in the store."""
        self._handlers.append(handler)

    def known(self) -> KnownObjects:
        """Return the objects from which the table is built; without refused endpoints."""
        if self._restored is not None:
            return self._restored
        return self._known(self._filter.refused)

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
        self._note_all()

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
            self._orphans[endpoint.replica] = replace(orphan, until_s=-NEVER)
            self._silent[endpoint.replica] = self._clock.monotonic() + _RETRY_S
            self._note_replica(endpoint.replica)

    async def wait_synced(self) -> None:
        """Wait until the store was read."""
        for informer in self._informers:
            await informer.wait_synced()

    async def run(self) -> None:
        """Keep the table current, forever."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers:
                group.create_task(informer.run())
            # Not awaited, as endpoints have a site, too.
            if self._nodes is not None:
                group.create_task(self._nodes.run())
            group.create_task(self._external_keys.run())
            group.create_task(self._filter.run())
            group.create_task(self._rebuild())
            group.create_task(self._notice_sync())
            group.create_task(self._tick())

    async def _notice_sync(self) -> None:
        await self.wait_synced()
        await self._filter.wait_synced()
        self._may_build = True
        self._note_all()  # an empty store sends no change

    async def _rebuild(self) -> None:
        while True:
            self._dirty.clear()
            # A partial read would make known models unknown.
            if self._may_build:
                self._restored = None
                self.staleness.check_watches()
                changes, self._changes = self._changes, _Changes(is_all=False)
                if changes.is_all or self._builder is None:
                    self._update(self._known(), "store")
                else:
                    self._update_some(self._builder, changes)
            elif self._restored is not None:
                self._update(self._restored, "snapshot")
            await self._dirty.wait()

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(_TICK_S)
            now_s = self._clock.monotonic()
            # A silent endpoint is of the saved state, or an orphan that was dropped.
            if self._builder is None and any(s <= now_s for s in self._silent.values()):
                self._note_all()
            for replica, orphan in self._orphans.items():
                if orphan.until_s <= now_s:
                    self._note_replica(replica)
            await self.staleness.listen(now_s)
            await self._filter.confirm(now_s)

    def _update(self, known: KnownObjects, source: TableSource) -> None:
        """Build the whole table."""
        now_s, is_real = self._clock.monotonic(), source == "store"
        self._silent = {name: until_s for name, until_s in self._silent.items() if until_s > now_s}
        self._filter.filter(known.endpoints)
        endpoints = self._filter.used
        serving = {endpoint.deployment for endpoint in endpoints.values()}
        self._seen_serving = (self._seen_serving | serving) & known.deployments.keys()
        self._named_statuses = dict(known.statuses)
        self._inputs = TableInputs(
            deployments=known.deployments,
            statuses=self._named_statuses,
            routes=known.routes,
            leased=endpoints if is_real else {},
            sites=known.sites,
            refused=self._filter.refused,
            seen_serving=self._seen_serving,
            # Never in the saved state: it is a file.
            external_keys=_by_name(self._external_keys.items),
        )
        if not is_real:
            self._leased = {name: t for name, t in endpoints.items() if name not in self._silent}
        orphans = orphans_of(self._orphans, self._leased, self._inputs, now_s)
        if is_real:
            self._log_orphans(orphans.keys() - self._orphans.keys())
        self._orphans, self._leased = orphans, dict(self._inputs.leased)
        gone = [orphan.endpoint for orphan in orphans.values()]
        builder = TableBuilder(self._inputs, gone, site=self._site)
        self._builder = builder if is_real else None
        self._publish(builder, source)

    def _update_some(self, builder: TableBuilder, changes: _Changes) -> None:
        """Build what depends on the changed endpoints, replicas and statuses."""
        replicas = changes.replicas | {key.rpartition("/")[2] for key in changes.endpoints}
        self._filter.update(replicas, changes.endpoints, self._endpoint)
        for name in changes.deployments:
            status = self._statuses.items.get(keys.status_key("ModelDeployment", name))
            if status is None:
                self._named_statuses.pop(name, None)
            else:
                self._named_statuses[name] = status
        used = self._filter.used
        origins = {used[replica].origin for replica in replicas if replica in used}
        replicas |= {
            replica
            for replica, orphan in self._orphans.items()
            if orphan.endpoint.origin in origins
        }
        before = {replica: self._leased[replica] for replica in replicas if replica in self._leased}
        after = {replica: used[replica] for replica in replicas if replica in used}
        known = {
            replica: self._orphans[replica] for replica in replicas if replica in self._orphans
        }
        self._seen_serving |= self._inputs.deployments.keys() & {
            endpoint.deployment for endpoint in after.values()
        }
        self._inputs = replace(self._inputs, leased=used, refused=self._filter.refused)
        orphans = orphans_of(known, before, self._inputs, self._clock.monotonic())
        self._log_orphans(orphans.keys() - known.keys())
        for replica in replicas:
            self._leased.pop(replica, None)
            self._orphans.pop(replica, None)
        self._leased |= after
        self._orphans |= orphans
        builder.change(
            self._inputs,
            leased=_moves(before, after),
            orphans=_moves(_endpoints_of(known), _endpoints_of(orphans)),
            statuses=changes.deployments,
        )
        self._publish(builder, "store")

    def _endpoint(self, key: str) -> tuple[Endpoint, int] | None:
        item = self._endpoints.items.get(key)
        return None if item is None else (item, self._endpoints.version(key))

    def _log_orphans(self, replicas: Iterable[str]) -> None:
        for replica in replicas:
            log.info(
                "endpoint lost its lease; keeping it as a last resort",
                extra={"replica": replica},
            )

    def _publish(self, builder: TableBuilder, source: TableSource) -> None:
        self.table = builder.table()
        self.source = source
        self._changed.set()
        self._changed = asyncio.Event()
        for handler in self._handlers if source == "store" else ():
            handler()

    # Changes in the store

    def _note_all(self, _: str = "") -> None:
        self._changes.is_all = True
        self._dirty.set()

    def _note_endpoint(self, key: str) -> None:
        self._changes.endpoints.add(key)
        self._dirty.set()

    def _note_replica(self, name: str | None) -> None:
        if name is None:
            self._note_all()
            return
        self._changes.replicas.add(name)
        self._dirty.set()

    def _note_status(self, key: str) -> None:
        self._changes.deployments.add(key.rpartition("/")[2])
        self._dirty.set()

    def _informer(
        self, prefix: str, model: type[M], note: Callable[[str], None] | None = None
    ) -> Informer[M]:
        def decode(item: KeyValue) -> M:
            return codec.decode(model, item)

        made = Informer(self._transport, prefix, decode, self._clock)
        made.on_change(note or self._note_all)
        return made


def _by_name(items: Mapping[str, T]) -> dict[str, T]:
    return {key.rpartition("/")[2]: item for key, item in items.items()}


def _endpoints_of(orphans: Mapping[str, OrphanEndpoint]) -> dict[str, EngineEndpoint]:
    return {replica: orphan.endpoint for replica, orphan in orphans.items()}


def _moves(
    before: Mapping[str, EngineEndpoint], after: Mapping[str, EngineEndpoint]
) -> list[EndpointMove]:
    return [(before.get(key), after.get(key)) for key in before.keys() | after.keys()]
