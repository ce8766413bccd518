"""One watch for the agents of a whole process: each hears only of its own replicas. Reads; decides nothing.

A real agent watches all replicas by itself. A thousand hollow agents that did so in one process would spend it
on decoding the same documents a thousand times.

A hollow Mac: the real agent on engines that are only times. See the package's docstring for how to use it.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from typing_extensions import override

from machinery.clock import Clock
from machinery.version import version
from nodeagent.agent import Agent, AgentConfig
from nodeagent.dependencies import Dependencies
from nodeagent.hardware.macos import gpu_memory_limit
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
from nodeagent.node.registration import LEASE_TTL_S
from schemas import chips
from schemas.deployment import ModelDeployment
from schemas.meta import Labels
from schemas.node import AdapterReport, ModelGeometry, ModelReport, NodeStatus
from schemas.replica import Replica
from store import codec, keys
from store.informer import Informer
from store.port import Transport

T = TypeVar("T")
_NODE_INDEX = "node"


class SharedCaches:
    """What the agents of one process hear of the store. `run()` it beside them."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._replicas = Informer(
            transport,
            keys.spec_prefix("Replica"),
            lambda item: codec.decode_object(Replica, item),
            clock,
        )
        self._replicas.index(_NODE_INDEX, _concerned_nodes)
        self._replicas.on_change(self._replica_changed)
        self._deployments = Informer(
            transport,
            keys.spec_prefix("ModelDeployment"),
            lambda item: codec.decode_object(ModelDeployment, item),
            clock,
        )
        self._deployments.on_change(self._deployment_changed)
        self.meetings = HollowEpochs()
        """Where the ranks of this process's hollow Macs find each other."""
        self._assigned: dict[str, tuple[str, ...]] = {}
        """The nodes of each replica as they were last heard of, by key."""
        self._replica_handlers: dict[str, Callable[[str], None]] = {}
        self._deployment_handlers: dict[str, Callable[[str], None]] = {}

    async def run(self) -> None:
        """Keep up with the store, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._replicas.run())
            group.create_task(self._deployments.run())

    def replicas_of(self, node: str) -> "NodeCache[Replica]":
        """Return what the node's agent hears of replicas."""
        return NodeCache(
            node,
            lambda: _NodeItems(
                self._replicas.by_index(_NODE_INDEX, node), everybodys=self._replicas.items
            ),
            self._replicas,
            self._replica_handlers,
        )

    def deployments_of(self, node: str) -> "NodeCache[ModelDeployment]":
        """Return what the node's agent hears of deployments: everything."""
        return NodeCache(
            node, lambda: self._deployments.items, self._deployments, self._deployment_handlers
        )

    def _replica_changed(self, key: str) -> None:
        found = self._replicas.items.get(key)
        now = _concerned_nodes(found) if found is not None else ()
        before = self._assigned.pop(key, ())
        if now:
            self._assigned[key] = now
        for node in dict.fromkeys((*before, *now)):
            handler = self._replica_handlers.get(node)
            if handler is not None:
                handler(key)

    def _deployment_changed(self, key: str) -> None:
        for handler in tuple(self._deployment_handlers.values()):
            handler(key)


class NodeCache(Generic[T]):
    """One node's part of a shared cache (`nodeagent.dependencies.ObjectCache`)."""

    def __init__(
        self,
        node: str,
        items: Callable[[], Mapping[str, T]],
        cache: Informer[T],
        handlers: dict[str, Callable[[str], None]],
    ) -> None:
        self._node = node
        self._items = items
        self._cache = cache
        self._handlers = handlers

    @property
    def items(self) -> Mapping[str, T]:
        return self._items()

    @property
    def synced(self) -> bool:
        return self._cache.synced

    def on_change(self, handler: Callable[[str], None]) -> None:
        self._handlers[self._node] = handler

    async def wait_synced(self) -> None:
        await self._cache.wait_synced()

    async def run(self) -> None:
        """Wait to be cancelled; the cache is run by who shares it. A later agent of the node may be there by then."""
        mine = self._handlers.get(self._node)
        if self.synced and mine is not None:
            for key in self.items:  # a cache that is there already tells its news to nobody anew
                mine(key)
        try:
            await asyncio.Event().wait()
        finally:
            if self._handlers.get(self._node) is mine:
                self._handlers.pop(self._node, None)


class _NodeItems(Mapping[str, T]):
    """The objects of one node to go through; asked for by key, everybody's are there."""

    def __init__(self, mine: Mapping[str, T], *, everybodys: Mapping[str, T]) -> None:
        self._mine = mine
        self._everybodys = everybodys

    @override
    def __getitem__(self, key: str) -> T:
        return self._everybodys[key]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._mine)

    @override
    def __len__(self) -> int:
        return len(self._mine)


def _concerned_nodes(replica: Replica) -> tuple[str, ...]:
    """Return the nodes that a replica concerns: those of its ranks, and those that had one."""
    now = (rank.node for rank in replica.spec.ranks)
    return (*now, *(rank.node for rank in replica.spec.leaving))


# Every adapter is there, and is as large as one of rank 16 for all layers of an 8B model.
_ADAPTER_BYTES = 84 * 2**20


@dataclass(slots=True, kw_only=True)
class HollowMachineReader:
    """How a hollow machine is (`nodeagent.hardware.readings.MachineReader`): well, until `now` is changed."""

    now: MachineReading

    async def take(self) -> MachineReading:
        """Return how it is."""
        return self.now


def healthy_reading(status: NodeStatus) -> MachineReading:
    """Return the reading of a machine that lacks nothing."""
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
    """One Mac. Its engines live on while agents come and go: `agent()` is what a start of one is."""

    clock: Clock
    status: NodeStatus
    """Its description, without models."""
    models: Callable[[str], ModelReport]
    """What it says of a model, by the path that a deployment names."""
    pace: Callable[[str], HollowTiming] = field(default=lambda _: HollowTiming())
    lease_s: int = LEASE_TTL_S
    """How long it is taken for alive after its last renewal."""
    engines: HollowEngines = field(init=False)
    health: HollowHealth = field(init=False)
    references: HollowReferences = field(init=False)
    readings: HollowMachineReader = field(init=False)
    _runs: int = 0

    def __post_init__(self) -> None:
        self.engines = HollowEngines(clock=self.clock, pace=self.pace)
        self.health = HollowHealth(engines=self.engines)
        self.references = HollowReferences(engines=self.engines)
        self.readings = HollowMachineReader(now=healthy_reading(self.status))

    @property
    def name(self) -> str:
        return self.status.hostname

    def agent(self, transport: Transport, feed: SharedCaches) -> Agent:
        """Return a new run of the Mac's agent; an earlier one must have been cancelled."""
        self._runs += 1
        self.engines.meetings = feed.meetings
        config = AgentConfig(
            state_dir=HOLLOW_FOLDER,
            models_dir=HOLLOW_FOLDER,
            engine_host=self.status.address,
            first_port=self.engines.first_port,
            session=f"hollow-{self.name}/{self._runs}",
            status=self.status,
            name=self.name,
            casts_to_float32=False,
            lease_s=self.lease_s,
        )
        parts = Dependencies(
            engines=self.engines,
            health=self.health,
            references=self.references,
            report_models=self._report,
            report_adapters=self._report_adapters,
            replicas=feed.replicas_of(self.name),
            deployments=feed.deployments_of(self.name),
            readings=self.readings,
        )
        return Agent(transport, self.clock, config, parts)

    def lose_power(self) -> None:
        """End every engine at once, as a power cut does; its agent must be cancelled as well."""
        for engine in self.engines.running():
            engine.end(-9)

    async def _report(self, paths: set[str]) -> tuple[ModelReport, ...]:
        return tuple(self.models(path) for path in sorted(paths))

    async def _report_adapters(self, paths: set[str]) -> tuple[AdapterReport, ...]:
        return tuple(
            AdapterReport(path=path, weights_bytes=_ADAPTER_BYTES) for path in sorted(paths)
        )


def hollow_status(
    name: str,
    *,
    chip: str = "Apple M4 Pro",
    memory_bytes: int = 48 * 2**30,
    gpu_cores: int | None = None,
    labels: Labels | None = None,
    allocatable_bytes: int | None = None,
) -> NodeStatus:
    """Return the description of an invented Mac; what is left out is as such a Mac was sold."""
    row = chips.find_chip(chip, gpu_cores=gpu_cores, memory_bytes=memory_bytes)
    cores = gpu_cores if gpu_cores is not None else (row.gpu_cores[-1] if row is not None else 0)
    usual_bytes, _ = gpu_memory_limit(memory_bytes, None)
    return NodeStatus(
        uid=f"hollow-{name}",
        hostname=name,
        address="127.0.0.1",
        agent_version=version(),
        os="macOS",
        os_version="26.2",
        machine="hollow",
        chip=chip,
        cpu_cores=row.cpu_cores[-1] if row is not None else 1,
        gpu_cores=cores,
        memory_bytes=memory_bytes,
        allocatable_bytes=usual_bytes if allocatable_bytes is None else allocatable_bytes,
        labels=labels or {},
    )


def models_on_disk(geometries: Mapping[str, ModelGeometry]) -> Callable[[str], ModelReport]:
    """Return what a Mac says that has these models, by path, and no others."""

    def report(path: str) -> ModelReport:
        found = geometries.get(path)
        if found is not None:
            return ModelReport(path=path, geometry=found)
        return ModelReport(path=path, reason="ModelNotFound", message=f"no folder {path} here")

    return report
