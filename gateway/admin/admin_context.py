"""Data sources of the admin API: the fleet's nodes, and live views of one gateway."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Generic, TypeVar

from gateway.forwarding.admission import Activator
from gateway.forwarding.model_state import ModelStates
from gateway.forwarding.on_demand import OnDemandModels
from gateway.forwarding.router import LoadTracker
from gateway.routing.table import EngineEndpoint, ServedModel
from gateway.state.fleet_state import FleetState
from gateway.telemetry.recorder import RequestRecorder
from gateway.telemetry.time_series import IntervalSums
from identity.log_access import LogAccess
from identity.metrics_access import MetricsAccess
from machinery.clock import Clock
from schemas.meta import ApiModel
from schemas.node import NodeStatus
from schemas.replica import Replica
from store import codec, keys
from store.errors import StoreError
from store.port import KeyValue, Transport

M = TypeVar("M", bound=ApiModel)
log = logging.getLogger(__name__)

# A dashboard polls every two seconds, and several may be open. A thousand node statuses are some
# megabytes.
_FRESH_S = 5.0
# Decoding this many takes about 3 ms; requests to models are served in between.
_DECODED_AT_ONCE = 20
_LONGEST_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeList:
    """All nodes at one moment."""

    statuses: Mapping[str, NodeStatus] = field(default_factory=lambda: MappingProxyType({}))
    alive: frozenset[str] = frozenset()
    """Nodes whose agents renew their leases."""
    memory: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """The proven memory of each deployment's replicas, in bytes."""
    error: str = ""
    """The reason why the list is not current; empty if it is."""


class _Documents(Generic[M]):
    """Lists the objects below a prefix, and decodes those that changed."""

    def __init__(self, transport: Transport, clock: Clock, kind: type[M], prefix: str) -> None:
        self._transport, self._clock, self._kind, self._prefix = transport, clock, kind, prefix
        self._decoded: dict[str, tuple[int, M | None]] = {}

    async def list(self) -> dict[str, M]:
        """Return the objects by name, without those that cannot be decoded. Raises StoreError."""
        listing = await self._transport.list(self._prefix)
        decoded: dict[str, tuple[int, M | None]] = {}
        fresh = 0
        for item in listing.items:
            _, name = keys.kind_and_name(item.key)
            known = self._decoded.get(name)
            if known is None or known[0] != item.mod_revision:
                known = (item.mod_revision, self._decode(item))
                fresh += 1
                if fresh % _DECODED_AT_ONCE == 0:
                    await self._clock.sleep(0)
            decoded[name] = known
        self._decoded = decoded
        return {name: one for name, (_, one) in decoded.items() if one is not None}

    def _decode(self, item: KeyValue) -> M | None:
        try:
            return codec.decode(self._kind, item)
        except codec.UndecodableError as error:
            log.warning("cannot decode an object", extra={"key": item.key, "why": str(error)})
            return None


class NodeCache:
    """Lists nodes and the proven memory of replicas at most every few seconds, however many requests ask.

    No informer: a thousand agents report often, and routing does not need their reports.
    """

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._transport = transport
        self._clock = clock
        self._lock = asyncio.Lock()
        self._list = NodeList(error="not read yet")
        self._read_s = float("-inf")
        self._statuses = _Documents(transport, clock, NodeStatus, keys.status_prefix("Node"))
        self._replicas = _Documents(transport, clock, Replica, keys.spec_prefix("Replica"))

    async def nodes(self) -> NodeList:
        """Return the nodes; the last known ones if the store does not answer."""
        async with self._lock:
            if self._clock.monotonic() - self._read_s > _FRESH_S:
                self._list = await self._read()
                self._read_s = self._clock.monotonic()
            return self._list

    async def _read(self) -> NodeList:
        try:
            async with asyncio.timeout(_LONGEST_S):
                leases = await self._transport.list(keys.NODE_LEASE_PREFIX)
                statuses, replicas = await self._statuses.list(), await self._replicas.list()
        except (StoreError, TimeoutError) as error:
            why = str(error) or f"the store did not answer within {_LONGEST_S:g} s"
            return replace(self._list, error=why)
        memory = Counter[str]()
        for replica in replicas.values():
            ranks = replica.spec.ranks
            memory[replica.spec.deployment] += sum(rank.memory.total_bytes for rank in ranks)
        alive = (item.key.removeprefix(keys.NODE_LEASE_PREFIX) for item in leases.items)
        return NodeList(statuses=statuses, alive=frozenset(alive), memory=memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminContext:
    """One gateway, as the admin API reads it."""

    id: str
    metrics_access: MetricsAccess
    fleet_state: FleetState
    load_tracker: LoadTracker
    activator: Activator
    on_demand: OnDemandModels
    model_states: ModelStates
    recorder: RequestRecorder
    nodes: NodeCache
    log: LogAccess
    clock: Clock

    def over(self, duration_s: float) -> IntervalSums:
        """Return the sums over the last `duration_s` seconds."""
        return self.recorder.series.over(self.clock.now().timestamp(), duration_s)

    def uptime_s(self) -> float:
        """Return the seconds since the gateway started."""
        return max(0.0, self.clock.now().timestamp() - self.recorder.since_s)

    def waiting(self) -> dict[str, int]:
        """Return the number of requests that wait for a slot or a replica, by model."""
        models = Counter(self.model_states.waiting()) + Counter(self.activator.waiting())
        return dict(sorted(models.items()))


def endpoints_of(model: ServedModel) -> Iterator[tuple[EngineEndpoint, bool]]:
    """Yield each endpoint of the model and whether it is leased; an endpoint may occur more than once."""
    for backend in model.all_backends():
        for endpoint in backend.leased:
            yield endpoint, True
        for endpoint in backend.orphans:
            yield endpoint, False


def queue_counts(context: AdminContext) -> dict[str, object]:
    """Return the waiting requests by model, and those at engines by deployment."""
    waiting, running = context.waiting(), context.load_tracker.by_deployment()
    return {
        "queueDepth": sum(waiting.values()),
        "active": context.load_tracker.total(),
        "waitingByModel": waiting,
        "activeByDeployment": {name: count for name, count in sorted(running.items()) if count},
    }
