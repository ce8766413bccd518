"""A simulated fleet: the real reconciler and agents with hollow engines, in virtual time."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from machinery.virtual_time import VirtualClock
from manifests import apply as applying
from manifests.load import LoadedObject
from nodeagent.hollow import HollowMac, HollowTiming, SharedCaches, models_on_disk
from reconciler.controller import Controller
from reconciler.deployments import snapshot as fleet_snapshot
from schemas.deployment import ModelDeployment
from schemas.meta import ENDED_BECAUSE, ObjectMeta, find_condition
from schemas.node import ModelGeometry, Node, NodeSpec, NodeStatus, Taint
from schemas.replica import Endpoint, Replica
from store import codec, keys, objects
from store.memory import MemoryTransport

# The default of fleet-reconciler's `--node-grace-period`.
GRACE_S = 30.0
# Read speed of a Mac's SSD while weights load, and the rest of an engine's start.
_DISK_BYTES_PER_S, _START_S = 3_000_000_000, 3.0
# Longer than a lease plus the grace period, so that all consequences of a dead node are included.
_QUIET_S = 45.0
_POLL_S = 0.5
_LIMIT_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlace:
    """A replica and its node."""

    deployment: str
    replica: str
    uid: str
    node: str
    memory_bytes: int
    is_serving: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingReplicas:
    """A deployment with fewer ready replicas than desired."""

    deployment: str
    missing: int
    wanted: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUsage:
    """A Mac and its memory for models."""

    name: str
    chip: str
    offered_bytes: int
    """Memory for models, including what pools reserve."""
    reserved_bytes: int
    is_ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """State of the fleet when nothing changes any more."""

    at_s: float
    """Seconds since the start of the simulation."""
    nodes: tuple[NodeUsage, ...]
    """All Macs that ever joined, by name."""
    places: tuple[ReplicaPlace, ...]
    causes: Mapping[str, str]
    """Causes of the ends of replicas, by their uid: a reason in one word, and a message."""
    missing: tuple[MissingReplicas, ...]
    wanted: int
    """Desired replicas of all deployments."""
    is_quiet: bool
    """False if the fleet still changed after a simulated day."""


class SimulatedFleet:
    """The simulated fleet; created by `run_fleet`."""

    def __init__(self, group: asyncio.TaskGroup, geometries: Mapping[str, ModelGeometry]) -> None:
        self._group = group
        self._geometries = dict(geometries)
        self.clock = VirtualClock()
        self.store = MemoryTransport(self.clock, expires_by_itself=False)
        self._feed = SharedCaches(self.store, self.clock)
        self._macs: dict[str, HollowMac] = {}
        self._agents: dict[str, asyncio.Task[None]] = {}
        self._served: frozenset[str] = frozenset()
        self._moved_at = 0.0
        self._causes: dict[str, str] = {}
        controller = Controller(self.store, self.clock, identity="simulated", grace_s=GRACE_S)
        self._tasks = [
            group.create_task(controller.run()),
            group.create_task(self._feed.run()),
            group.create_task(self._expire_leases()),
            group.create_task(self._note_causes()),
        ]

    async def join(self, status: NodeStatus, taints: Sequence[Taint] = ()) -> None:
        """Add a Mac to the fleet; its taints exist before it joins."""
        if taints:
            metadata = ObjectMeta(
                name=status.hostname,
                uid=status.uid,
                generation=1,
                creation_timestamp=self.clock.now(),
            )
            node = Node(metadata=metadata, spec=NodeSpec(taints=tuple(taints)))
            await self.store.commit([codec.unchanged_guard(node)], [codec.put_spec(node)])
        mac = HollowMac(
            clock=self.clock,
            status=status,
            models=models_on_disk(self._geometries),
            pace=self._pace,
        )
        self._macs[mac.name] = mac
        self._agents[mac.name] = self._group.create_task(mac.agent(self.store, self._feed).run())

    def _pace(self, path: str) -> HollowTiming:
        size = self._geometries[path].weights_bytes
        return HollowTiming(load_s=_START_S + size / _DISK_BYTES_PER_S)

    def fail(self, name: str) -> None:
        """Cut the power of a Mac."""
        self._agents[name].cancel()
        self._macs[name].lose_power()

    async def apply(self, loaded: Sequence[LoadedObject]) -> None:
        """Apply the manifests as `fleetctl apply` does, with the same exceptions."""
        await applying.apply(self.store, loaded, self.clock)

    async def rest(self) -> FleetSnapshot:
        """Wait until the store is unchanged for 45 s and no engine loads; return the state."""
        began = self.clock.monotonic()
        written_at, revision = began, 0
        while True:
            await self.clock.sleep(_POLL_S)
            now, status = self.clock.monotonic(), await self.store.status()
            if status.revision != revision:
                revision, written_at = status.revision, now
                served = frozenset(
                    e.spec.replica_uid for e in await objects.list_all(self.store, Endpoint)
                )
                if served != self._served:
                    self._served, self._moved_at = served, now
            is_loading = any(
                engine.health().state == "Loading"
                for mac in self._macs.values()
                for engine in mac.engines.running()
            )
            is_quiet = now - written_at >= _QUIET_S and not is_loading
            if is_quiet or now - began > _LIMIT_S:
                replicas = await objects.list_all(self.store, Replica)
                deployments = await objects.list_all(self.store, ModelDeployment)
                table = (await fleet_snapshot.take(self.store, self.clock)).table()
                return FleetSnapshot(
                    at_s=self.clock.monotonic(),
                    nodes=tuple(
                        NodeUsage(
                            name=node.name,
                            chip=node.chip,
                            offered_bytes=node.allocatable_bytes + node.reserved_bytes,
                            reserved_bytes=node.reserved_bytes,
                            is_ready=node.is_ready,
                        )
                        for node in sorted(table.nodes, key=lambda node: natural_key(node.name))
                    ),
                    causes=dict(self._causes),
                    places=tuple(
                        ReplicaPlace(
                            deployment=replica.spec.deployment,
                            replica=replica.name,
                            uid=replica.metadata.uid,
                            node=rank.node,
                            memory_bytes=rank.memory.total_bytes,
                            is_serving=replica.metadata.uid in self._served,
                        )
                        for replica in replicas
                        for rank in replica.spec.ranks
                    ),
                    missing=tuple(
                        missing
                        for deployment in deployments
                        if (missing := _missing_replicas(deployment)) is not None
                    ),
                    wanted=sum(
                        deployment.status.desired_replicas
                        for deployment in deployments
                        if deployment.status
                    ),
                    is_quiet=is_quiet,
                )

    @property
    def moved_at(self) -> float:
        """Return when the set of serving replicas last changed, in seconds since the start."""
        return self._moved_at

    async def _note_causes(self) -> None:
        """Note why replicas drain: afterwards they are gone, with their annotations."""
        prefix = keys.spec_prefix("Replica")
        async for batch in self.store.watch(prefix, after_revision=0):
            for change in batch.changes:
                if change.now is None:
                    continue
                replica = codec.decode_object(Replica, change.now)
                cause = replica.metadata.annotations.get(ENDED_BECAUSE, "")
                if cause:
                    self._causes[replica.metadata.uid] = cause

    async def _expire_leases(self) -> None:
        while True:  # etcd expires leases up to half a second late
            await self.clock.sleep(0.5)
            self.store.expire()

    def stop(self) -> None:
        """Stop all tasks."""
        for task in (*self._tasks, *self._agents.values()):
            task.cancel()


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that puts mini-2 before mini-10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((int(part[:18]), "") if part.isdigit() else (-1, part) for part in parts)


@asynccontextmanager
async def run_fleet(geometries: Mapping[str, ModelGeometry]) -> AsyncIterator[SimulatedFleet]:
    """Run an empty fleet for the length of the block; use it within `machinery.virtual_time.run`."""
    async with asyncio.TaskGroup() as group:
        fleet = SimulatedFleet(group, geometries)
        try:
            yield fleet
        finally:
            fleet.stop()


def _missing_replicas(deployment: ModelDeployment) -> MissingReplicas | None:
    status = deployment.status
    if status is None:
        return MissingReplicas(
            deployment=deployment.name,
            missing=deployment.spec.replicas,
            wanted=deployment.spec.replicas,
            why="the reconciler has not observed it yet",
        )
    missing = status.desired_replicas - status.ready_replicas
    if missing <= 0:
        return None
    conditions = [find_condition(status.conditions, type_) for type_ in ("Placed", "Available")]
    failed = next(
        (
            condition
            for condition in conditions
            if condition is not None and condition.status != "True"
        ),
        None,
    )
    return MissingReplicas(
        deployment=deployment.name,
        missing=missing,
        wanted=status.desired_replicas,
        why=failed.message or failed.reason if failed is not None else "",
    )
