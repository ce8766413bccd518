"""An invented fleet at work: the real reconciler and the real agents on hollow engines, in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from machinery.virtual_time import VirtualClock
from manifests import apply as applying
from manifests.load import LoadedObject
from nodeagent.hollow import HollowMac, HollowTiming, SharedCaches, models_on_disk
from reconciler.controller import Controller
from schemas.deployment import ModelDeployment
from schemas.meta import ObjectMeta, find_condition
from schemas.node import ModelGeometry, Node, NodeSpec, NodeStatus, Taint
from schemas.replica import Endpoint, Replica
from store import codec, objects
from store.memory import MemoryTransport

# `--node-grace-period` of fleet-reconciler, if nobody says otherwise.
GRACE_S = 30.0
# What a Mac's disk gives while weights are read, and what an engine's start takes besides.
_DISK_BYTES_PER_S, _START_S = 3_000_000_000, 3.0
# Longer than a lease and the grace period together: what a dead node's end leads to comes after that.
_QUIET_S = 45.0
_LOOK_S = 0.5
_LIMIT_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlace:
    """One replica and where it is."""

    deployment: str
    replica: str
    uid: str
    node: str
    memory_bytes: int
    answers: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingReplicas:
    """A deployment that has fewer replicas than it wants."""

    deployment: str
    missing: int
    wanted: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """The fleet at rest."""

    at_s: float
    """Seconds since the beginning."""
    places: tuple[ReplicaPlace, ...]
    lacks: tuple[MissingReplicas, ...]
    wanted: int
    """How many replicas all deployments want."""
    is_quiet: bool
    """False: it did not come to rest within a day."""


class SimulatedFleet:
    """The fleet. Made by `running`."""

    def __init__(self, group: asyncio.TaskGroup, geometries: Mapping[str, ModelGeometry]) -> None:
        self._group = group
        self._geometries = dict(geometries)
        self.clock = VirtualClock()
        self._store = MemoryTransport(self.clock, expires_by_itself=False)
        self._feed = SharedCaches(self._store, self.clock)
        self._macs: dict[str, HollowMac] = {}
        self._agents: dict[str, asyncio.Task[None]] = {}
        self._served: frozenset[str] = frozenset()
        self._moved_at = 0.0
        controller = Controller(self._store, self.clock, identity="simulated", grace_s=GRACE_S)
        self._tasks = [
            group.create_task(controller.run()),
            group.create_task(self._feed.run()),
            group.create_task(self._expire_leases()),
        ]

    @property
    def machines(self) -> dict[str, NodeStatus]:
        """Return every node that ever joined, by name."""
        return {name: mac.status for name, mac in self._macs.items()}

    async def join(self, status: NodeStatus, taints: Sequence[Taint] = ()) -> None:
        """Have a Mac join the fleet; its taints are there before it is."""
        if taints:
            metadata = ObjectMeta(
                name=status.hostname,
                uid=status.uid,
                generation=1,
                creation_timestamp=self.clock.now(),
            )
            node = Node(metadata=metadata, spec=NodeSpec(taints=tuple(taints)))
            await self._store.commit([codec.unchanged_guard(node)], [codec.put_spec(node)])
        mac = HollowMac(
            clock=self.clock,
            status=status,
            models=models_on_disk(self._geometries),
            pace=self._pace,
        )
        self._macs[mac.name] = mac
        self._agents[mac.name] = self._group.create_task(mac.agent(self._store, self._feed).run())

    def _pace(self, path: str) -> HollowTiming:
        size = self._geometries[path].weights_bytes
        return HollowTiming(load_s=_START_S + size / _DISK_BYTES_PER_S)

    def fail(self, name: str) -> None:
        """Take the power from a Mac."""
        self._agents[name].cancel()
        self._macs[name].lose_power()

    async def apply(self, loaded: Sequence[LoadedObject]) -> None:
        """Declare what is in the manifests, as `fleetctl apply` does. Raises what that raises."""
        await applying.apply(self._store, loaded, self.clock)

    async def rest(self) -> FleetSnapshot:
        """Wait until nothing is written any more and nothing loads; return what there is then."""
        began = self.clock.monotonic()
        written_at, revision = began, 0
        while True:
            await self.clock.sleep(_LOOK_S)
            now, status = self.clock.monotonic(), await self._store.status()
            if status.revision != revision:
                revision, written_at = status.revision, now
                await self._note_served(now)
            is_loading = any(
                engine.health().state == "Loading"
                for mac in self._macs.values()
                for engine in mac.engines.running()
            )
            is_quiet = now - written_at >= _QUIET_S and not is_loading
            if is_quiet or now - began > _LIMIT_S:
                return await self._picture(is_quiet=is_quiet)

    @property
    def moved_at(self) -> float:
        """Return when it last changed which replicas answer, in seconds since the beginning."""
        return self._moved_at

    async def _note_served(self, now: float) -> None:
        served = frozenset(
            e.spec.replica_uid for e in await objects.list_all(self._store, Endpoint)
        )
        if served != self._served:
            self._served, self._moved_at = served, now

    async def _picture(self, *, is_quiet: bool) -> FleetSnapshot:
        replicas = await objects.list_all(self._store, Replica)
        deployments = await objects.list_all(self._store, ModelDeployment)
        return FleetSnapshot(
            at_s=self.clock.monotonic(),
            places=tuple(
                ReplicaPlace(
                    deployment=replica.spec.deployment,
                    replica=replica.name,
                    uid=replica.metadata.uid,
                    node=rank.node,
                    memory_bytes=rank.memory.total_bytes,
                    answers=replica.metadata.uid in self._served,
                )
                for replica in replicas
                for rank in replica.spec.ranks
            ),
            lacks=tuple(
                lack for one in deployments if (lack := _missing_replicas(one)) is not None
            ),
            wanted=sum(one.status.desired_replicas for one in deployments if one.status),
            is_quiet=is_quiet,
        )

    async def _expire_leases(self) -> None:
        while True:  # etcd notices up to half a second late
            await self.clock.sleep(0.5)
            self._store.expire()

    def stop(self) -> None:
        """End everything."""
        for task in (*self._tasks, *self._agents.values()):
            task.cancel()


@asynccontextmanager
async def run_fleet(geometries: Mapping[str, ModelGeometry]) -> AsyncIterator[SimulatedFleet]:
    """Run a fleet without nodes for the length of a block; within `machinery.virtual_time.run`."""
    async with asyncio.TaskGroup() as group:
        world = SimulatedFleet(group, geometries)
        try:
            yield world
        finally:
            world.stop()


def _missing_replicas(deployment: ModelDeployment) -> MissingReplicas | None:
    status = deployment.status
    if status is None:
        return MissingReplicas(
            deployment=deployment.name,
            missing=deployment.spec.replicas,
            wanted=deployment.spec.replicas,
            why="the reconciler has not looked at it",
        )
    missing = status.desired_replicas - status.ready_replicas
    if missing <= 0:
        return None
    found = [find_condition(status.conditions, type_) for type_ in ("Placed", "Available")]
    told = next((one for one in found if one is not None and one.status != "True"), None)
    return MissingReplicas(
        deployment=deployment.name,
        missing=missing,
        wanted=status.desired_replicas,
        why=told.message or told.reason if told is not None else "",
    )
