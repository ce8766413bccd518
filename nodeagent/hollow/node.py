"""A hollow Mac: the real agent with simulated engines, and the caches that the agents of one process share.

A real agent watches the uses of models by itself. A thousand hollow agents in one process would decode the same documents a
thousand times; so they share the cache. Where one store in memory serves a simulated fleet, they share that of replicas,
too, and each sees the events of its own.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from typing_extensions import override

from machinery.clock import Clock
from nodeagent.agent import Agent
from nodeagent.dependencies import AgentConfig, Dependencies
from nodeagent.engines.addresses import EngineAddresses
from nodeagent.hardware.machine_sleep import MachineSleeper
from nodeagent.hardware.readings import (
    DiskReading,
    HeatReading,
    MachineReading,
    MemoryPressure,
    MemoryReading,
    RebootReading,
)
from nodeagent.hollow.engines import (
    HOLLOW_FOLDER,
    HollowEngines,
    HollowEpochs,
    HollowHealth,
    HollowReferences,
    HollowTiming,
)
from nodeagent.kept_copies import CacheView, ObjectCache
from nodeagent.model_uses import ModelUses
from nodeagent.replicas.node_replicas import NodeReplicas
from schemas.model_use import ModelUse
from schemas.node import AdapterReport, ModelGeometry, ModelReport, NodeStatus
from schemas.power import WakePacket
from schemas.replica import Replica, concerned_nodes
from store import codec, keys
from store.informer import Informer
from store.leases import LEASE_TTL_S
from store.port import Transport

T = TypeVar("T")
_NODE_INDEX = "node"


class SharedCaches:
    """The caches of replicas and of the uses of models that the agents of one process share. Run `run()` beside them."""

    def __init__(self, transport: Transport, clock: Clock, *, shares_replicas: bool = True) -> None:
        """`shares_replicas`: False if each agent watches its replicas by itself, as on a real Mac."""
        self._shares_replicas, self._clock = shares_replicas, clock
        self._replicas = Informer(
            transport,
            keys.spec_prefix("Replica"),
            lambda item: codec.decode_object(Replica, item),
            clock,
        )
        self._replicas.index(_NODE_INDEX, concerned_nodes)
        self._replicas.on_change(self._replica_changed)
        self._uses = ModelUses(transport, clock)
        self._uses.on_change(self._use_changed)
        self.epochs = HollowEpochs()
        """The epochs in which the ranks of this process find each other."""
        self._assigned: dict[str, tuple[str, ...]] = {}
        """The nodes of each replica at its last event, by key."""
        self._replica_handlers: dict[str, Callable[[str], None]] = {}
        self._use_handlers: dict[str, Callable[[str], None]] = {}

    async def run(self) -> None:
        """Watch the store, forever."""
        async with asyncio.TaskGroup() as group:
            if self._shares_replicas:
                group.create_task(self._replicas.run())
            group.create_task(self._uses.run())

    def replicas_of(self, node: str, transport: Transport) -> ObjectCache[Replica]:
        """Return the node's cache of replicas; it reads with `transport` if it is not shared."""
        if not self._shares_replicas:
            return NodeReplicas(transport, self._clock, node)
        return NodeCache(
            node,
            lambda: _NodeItems(
                self._replicas.by_index(_NODE_INDEX, node), all_items=self._replicas.items
            ),
            self._replicas,
            self._replica_handlers,
        )

    def uses_of(self, node: str) -> "NodeCache[ModelUse]":
        """Return the node's cache of the uses of models, which has all of them."""
        return NodeCache(node, lambda: self._uses.items, self._uses, self._use_handlers)

    def _replica_changed(self, key: str) -> None:
        item = self._replicas.items.get(key)
        now = concerned_nodes(item) if item is not None else ()
        before = self._assigned.pop(key, ())
        if now:
            self._assigned[key] = now
        for node in dict.fromkeys((*before, *now)):
            handler = self._replica_handlers.get(node)
            if handler is not None:
                handler(key)

    def _use_changed(self, key: str) -> None:
        for handler in tuple(self._use_handlers.values()):
            handler(key)


class NodeCache(CacheView[T]):
    """One node's part of a shared cache (`nodeagent.kept_copies.ObjectCache`)."""

    def __init__(
        self,
        node: str,
        items: Callable[[], Mapping[str, T]],
        cache: ObjectCache[T],
        handlers: dict[str, Callable[[str], None]],
    ) -> None:
        super().__init__(cache)
        self._node = node
        self._items = items
        self._handlers_by_node = handlers

    @property
    def items(self) -> Mapping[str, T]:
        return self._items()

    @override
    def on_change(self, handler: Callable[[str], None]) -> None:
        self._handlers_by_node[self._node] = handler

    async def run(self) -> None:
        """Wait to be cancelled: SharedCaches runs the cache. A later agent of the node may have replaced the handler."""
        mine = self._handlers_by_node.get(self._node)
        if self.synced and mine is not None:
            for key in self.items:  # a cache that is synced already sends no events for its items
                mine(key)
        try:
            await asyncio.Event().wait()
        finally:
            if self._handlers_by_node.get(self._node) is mine:
                self._handlers_by_node.pop(self._node, None)


class _NodeItems(Mapping[str, T]):
    """A mapping that iterates over one node's objects and looks keys up among all."""

    def __init__(self, mine: Mapping[str, T], *, all_items: Mapping[str, T]) -> None:
        self._mine = mine
        self._all_items = all_items

    @override
    def __getitem__(self, key: str) -> T:
        return self._all_items[key]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._mine)

    @override
    def __len__(self) -> int:
        return len(self._mine)


# Every adapter exists, with the size of one of rank 16 for all layers of an 8B model.
_ADAPTER_BYTES = 84 * 2**20


@dataclass(slots=True, kw_only=True)
class HollowMachineReader:
    """The readings of a hollow machine (`MachineReader`): healthy, until `now` is changed."""

    now: MachineReading

    async def take(self) -> MachineReading:
        """Return the current reading."""
        return self.now


def healthy_reading(status: NodeStatus) -> MachineReading:
    """Return the reading of a healthy machine."""
    return MachineReading(
        memory=MemoryReading(
            total_bytes=status.memory_bytes,
            available_bytes=status.memory_bytes // 2,
            level=MemoryPressure.NORMAL,
        ),
        disk=DiskReading(total_bytes=2**40, free_bytes=2**39),
        heat=HeatReading(),
        reboot=RebootReading(),
        power="Mains",
    )


@dataclass(slots=True, kw_only=True)
class HollowMac:
    """One simulated Mac. Its engines outlive its agents; each call of `agent()` is a start of the agent."""

    clock: Clock
    status: NodeStatus
    """Its status, without models."""
    models: Callable[[str], ModelReport]
    """From a model's path to its report."""
    pace: Callable[[str], HollowTiming] = field(default=lambda _: HollowTiming())
    lease_s: int = LEASE_TTL_S
    """The lifetime of its lease in seconds."""
    sleeper: MachineSleeper | None = None
    """Its sleep; None: it cannot be put to sleep."""
    send_packets: Callable[[Sequence[WakePacket]], None] = field(default=lambda _: None)
    """Sends magic packets; nothing by default."""
    has_store_password: bool = False
    """True if its process has a password for the store."""
    engines: HollowEngines = field(init=False)
    health: HollowHealth = field(init=False)
    references: HollowReferences = field(init=False)
    readings: HollowMachineReader = field(init=False)
    _runs: int = 0

    def __post_init__(self) -> None:
        self.engines = HollowEngines(clock=self.clock, pace=self.pace, host=self.status.address)
        self.health = HollowHealth(engines=self.engines)
        self.references = HollowReferences(engines=self.engines)
        self.readings = HollowMachineReader(now=healthy_reading(self.status))

    @property
    def name(self) -> str:
        return self.status.hostname

    def agent(self, transport: Transport, caches: SharedCaches) -> Agent:
        """Return a new run of the Mac's agent; the earlier one must have been cancelled."""
        self._runs += 1
        self.engines.epochs = caches.epochs
        config = AgentConfig(
            state_dir=HOLLOW_FOLDER,
            models_dir=HOLLOW_FOLDER,
            addresses=EngineAddresses(host=self.engines.host, first=self.engines.first_port),
            session=f"hollow-{self.name}/{self._runs}",
            status=self.status,
            name=self.name,
            casts_to_float32=False,
            lease_s=self.lease_s,
            has_store_password=self.has_store_password,
        )
        return Agent(transport, self.clock, config, self.dependencies(transport, caches))

    def dependencies(self, transport: Transport, caches: SharedCaches) -> Dependencies:
        """Return the simulated dependencies of the Mac's agent."""
        return Dependencies(
            engines=self.engines,
            health=self.health,
            references=self.references,
            report_models=self._report,
            report_adapters=self._report_adapters,
            replicas=caches.replicas_of(self.name, transport),
            uses=caches.uses_of(self.name),
            readings=self.readings,
            sleeper=self.sleeper,
            send_packets=self.send_packets,
        )

    def lose_power(self) -> None:
        """End every engine at once, as a power failure does; the caller cancels the agent."""
        for engine in self.engines.running():
            engine.end(-9)

    async def _report(self, paths: set[str]) -> tuple[ModelReport, ...]:
        return tuple(self.models(path) for path in sorted(paths))

    async def _report_adapters(self, paths: set[str]) -> tuple[AdapterReport, ...]:
        return tuple(
            AdapterReport(path=path, weights_bytes=_ADAPTER_BYTES) for path in sorted(paths)
        )


def models_on_disk(geometries: Mapping[str, ModelGeometry]) -> Callable[[str], ModelReport]:
    """Return the model reports of a Mac that has only these models, by path."""

    def report(path: str) -> ModelReport:
        geometry = geometries.get(path)
        if geometry is not None:
            return ModelReport(path=path, geometry=geometry)
        return ModelReport(path=path, reason="ModelNotFound", message=f"no folder {path} here")

    return report
