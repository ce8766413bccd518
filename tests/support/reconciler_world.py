"""Worlds for tests of the reconciler: plans in a few characters, groups, stores with caches, and a leader's writes."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from machinery.clock import Clock, SystemClock
from models.hub.hub_settings import HubSettings
from reconciler.controller import Controller, OutboundSettings
from reconciler.deployments.actions import (
    Action,
    AdoptReplica,
    CreateReplica,
    DeleteReplica,
    EndPreload,
    MoveReplica,
    OrphanReplica,
    PreemptReplica,
    ReformReplica,
    ReleaseRanks,
    RemoveDeployment,
    RemoveReplica,
    RemoveRevision,
    SaveRevision,
    StartPreload,
    StartRanks,
)
from reconciler.deployments.events import DeploymentEvents
from reconciler.deployments.execute import Executor
from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.deployments.placer import place_replica
from reconciler.deployments.plan import plan
from reconciler.groups.epochs import Epoch
from reconciler.groups.group_view import GroupView
from reconciler.listers.caches import Caches, make_caches
from reconciler.listers.lister import Lister
from reconciler.placement.inputs import Allocation, NodeView, PlacementRequest
from reconciler.placement.refusals import Unschedulable
from reconciler.placement.table import NodeTable
from reconciler.services.gitops.credentials import GitSettings
from schemas.deployment import ModelDeployment
from schemas.event import Event, EventSpec
from schemas.formation import Formation
from schemas.meta import ApiObject, ObjectMeta, Status
from schemas.node import ModelReport, SplitOptions
from schemas.pools import NodePool, NodePoolSpec
from schemas.replica import RankAssignment, Replica
from schemas.shardgroup import ShardGroupSpec
from store import codec, keys, objects
from store.events import EventRecorder
from store.memory import MemoryTransport
from store.port import CreateRevisionGuard, Delete, Operation, Put, Transport
from tests.support.clock import FakeClock
from tests.support.reconciler_agents import FakeAgent, node_status, put_rank
from tests.support.world import (
    GEOMETRY,
    GIB,
    NOW,
    deployment,
    node,
    observed,
    proof,
    replica,
    with_spec,
)

_SIGNS = {
    OrphanReplica: "o",
    AdoptReplica: "a",
    ReleaseRanks: "f",
    StartRanks: "s",
    RemoveReplica: "x",
    RemoveDeployment: "X",
}


def short(action: Action) -> str:
    """Return an action in a few characters."""
    match action:
        case CreateReplica(name=name, ranks=ranks):
            return f"+{name}@{','.join(rank.node for rank in ranks)}"
        case MoveReplica(name=name, ranks=ranks):
            return f">{name}@{','.join(rank.node for rank in ranks)}"
        case ReformReplica(name=name, ranks=ranks, form=form):
            back = f"/{form.fallback}" if form.fallback else ""
            return f"~{name}@{','.join(rank.node for rank in ranks)}{back}"
        case DeleteReplica(name=name, because=because):
            return f"-{name} {because}"
        case PreemptReplica(name=name, by=by):
            return f"!{name} for {by}"
        case StartPreload(node=node):
            return f"p@{node}"
        case EndPreload(node=node):
            return f"xp@{node}"
        case SaveRevision(number=number):
            return f"r{number}"
        case RemoveRevision(name=name):
            return f"xr {name}"
        case _:
            return f"{_SIGNS[type(action)]}{action.name}"


def planned(view: DeploymentView) -> list[str]:
    """Return the actions of the plan, each in a few characters."""
    return [short(action) for action in plan(view).actions]


def unplaced(wanted: PlacementRequest, *nodes: NodeView) -> Unschedulable:
    """Return why a request that must fit nowhere does not."""
    verdict = place_replica(wanted, nodes)
    assert isinstance(verdict, Unschedulable)
    return verdict


# 14 GiB in one piece, 16 layers; half of it is 7 GiB of weights, and some 1.7 GiB besides.
LAYER = 14 * GIB // 16
SPLIT = SplitOptions(
    tensor=(2, 4), is_pipelined=True, layer_bytes=(LAYER,) * 16, basis="llama, 8 heads, 8 KV heads"
)
BIG = GEOMETRY.model_copy(update={"weights_bytes": 14 * GIB, "splitting": SPLIT})
_SMALL_SPLIT = SPLIT.model_copy(update={"layer_bytes": (4 * GIB // 16,) * 16})
SMALL = BIG.model_copy(update={"weights_bytes": 4 * GIB, "splitting": _SMALL_SPLIT})


def mac(name: str, memory_gib: float = 10, **fields: Any) -> NodeView:
    """Return a Mac that has a model too large for it, and a smaller one."""
    models = {"qwen": BIG, "qwen-4bit": SMALL}
    reports = {path: ModelReport(path=path, geometry=shape) for path, shape in models.items()}
    fields = {"models": reports, "memory_bytes": int(memory_gib * GIB), **fields}
    return node(name, memory_gib=memory_gib, **fields)


def group(members: str = "ab", *, name: str = "pair", **spec: object) -> GroupView:
    """Return a group of the Macs with these letters, which are listed or found by a selector."""
    if "selector" not in spec:
        spec["members"] = [{"node": member} for member in members]
    machines = {
        member: node_status(member).model_copy(update={"address": f"169.254.0.{ord(member)}"})
        for member in members
    }
    return GroupView(
        name=name,
        spec=ShardGroupSpec.model_validate_json(json.dumps(spec)),
        members=tuple(members),
        machines=machines,
    )


def sharded(sharding: str = "pair", **fields: Any) -> ModelDeployment:
    return deployment(sharding=sharding, **fields)


def on(
    nodes: str,
    *,
    of: ModelDeployment | None = None,
    ordinal: int = 0,
    epoch: Epoch | None = None,
    share_gib: float = 9,
    **formation: object,
) -> ReplicaView:
    """Return a replica with a rank on each of these Macs."""
    is_ready = epoch is None or not epoch.over
    view = replica(ordinal, on=nodes[0], of=of or sharded(), is_ready=is_ready)
    ranks = tuple(RankAssignment(node=name, memory=proof(share_gib)) for name in nodes)
    formed = Formation(group="pair", formed_at=NOW).model_copy(update=formation)
    made = with_spec(view.replica, ranks=ranks, formation=formed)
    return replace(view, replica=made, epoch=epoch or Epoch(is_steady=True))


def seen(
    wanted: ModelDeployment | None,
    replicas: Sequence[ReplicaView] = (),
    nodes: Sequence[NodeView] = (),
    groups: Sequence[GroupView] = (),
) -> DeploymentView:
    """Return the situation with what the replicas hold counted on their nodes, as observing does."""
    view = observed(wanted, tuple(replicas), tuple(nodes))
    return counted(replace(view, groups=tuple(groups)))


def counted(situation: DeploymentView) -> DeploymentView:
    """Return the situation with every replica's ranks as tenants of their nodes."""
    table = housing(situation.table.nodes, situation.replicas, situation.name)
    return replace(situation, table=table)


def housing(
    nodes: Sequence[NodeView], replicas: Sequence[ReplicaView], name: str = "", priority: int = 0
) -> NodeTable:
    """Return the nodes with these replicas as tenants, in place of those of the deployment `name`."""
    views = []
    for view in nodes:
        others = [allocation for allocation in view.allocations if allocation.deployment != name]
        ours = [_allocation(replica_view, view.name, priority) for replica_view in replicas]
        there = (*others, *(allocation for allocation in ours if allocation is not None))
        counts = Counter(allocation.deployment for allocation in there)
        used = sum(allocation.bytes for allocation in there)
        views.append(replace(view, allocations=there, used_bytes=used, replicas=dict(counts)))
    return NodeTable(tuple(views))


def _allocation(view: ReplicaView, name: str, priority: int) -> Allocation | None:
    spec = view.replica.spec
    sizes = [rank.memory.total_bytes for rank in spec.ranks if rank.node == name]
    sizes += [rank.memory_bytes for rank in spec.leaving if rank.node == name]
    if not sizes:
        return None
    return Allocation(
        replica=view.name,
        deployment=spec.deployment,
        bytes=max(sizes),
        priority=priority,
        version=view.version,
        is_ending=view.is_deleting,
        nodes=tuple(sorted({r.node for r in spec.ranks} | {r.node for r in spec.leaving})),
    )


async def replica_events(
    statuses: Sequence[Status], view: ReplicaView | None = None, old: Status | None = None
) -> list[EventSpec]:
    """Return the events of a replica with these statuses in turn."""
    clock = FakeClock()
    transport = MemoryTransport(clock)
    recorder = EventRecorder(transport, clock, source="reconciler")
    events = DeploymentEvents(Lister(make_caches(transport, clock)), recorder)
    view = view or replica(0)
    for new in statuses:
        situation = observed(deployment(), (view,))
        await events.record_replica_status(view, situation, old, new)
        old = new
    return [event.spec for event in await objects.list_all(transport, Event)]


@asynccontextmanager
async def leading(
    store: Transport,
    *agents: FakeAgent,
    clock: Clock | None = None,
    grace_s: float = 30.0,
    git: GitSettings | None = None,
    hubs: HubSettings | None = None,
) -> AsyncIterator[dict[str, asyncio.Task[None]]]:
    """Run a controller and agents for the length of a block, and crash them then; yield their tasks by name."""
    controller = Controller(
        store,
        clock or SystemClock(),
        identity="test",
        grace_s=grace_s,
        git=git,
        outbound=OutboundSettings(hubs=hubs or HubSettings()),
    )
    async with asyncio.TaskGroup() as group:
        tasks = {"controller": group.create_task(controller.run())}
        tasks |= {agent.name: group.create_task(agent.run()) for agent in agents}
        try:
            yield tasks
        finally:
            for task in tasks.values():
                task.cancel()


@asynccontextmanager
async def following(caches: Caches) -> AsyncIterator[None]:
    """Run all informers for the length of a block."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(informer.run()) for informer in caches.all()]
        async with asyncio.timeout(30):
            for informer in caches.all():
                await informer.wait_synced()
        yield
        for task in running:
            task.cancel()


class CachedStore:
    """A store, and the caches of it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.transport = MemoryTransport(self.clock)
        self.caches = make_caches(self.transport, self.clock)
        self.fleet = Lister(self.caches)

    async def write(self, *operations: Operation) -> None:
        """Write, and wait until the caches show it."""
        await self.catch_up(await self.transport.commit([], operations), operations)

    async def catch_up(self, revision: int, operations: Sequence[Operation]) -> None:
        informers = (
            (keys.SPEC_PREFIX, self.caches.specs.reached),
            (keys.STATUS_PREFIX, self.caches.statuses.reached),
            (keys.RANK_PREFIX, self.caches.ranks.reached),
            (keys.NODE_LEASE_PREFIX, self.caches.leases.reached),
            (keys.ENDPOINT_PREFIX, self.caches.endpoints.reached),
        )
        async with asyncio.timeout(30):
            for prefix, reached in informers:
                if any(operation.key.startswith(prefix) for operation in operations):
                    await reached(revision)

    async def have(self, *objects: ApiObject) -> None:
        await self.write(*(codec.put_spec(obj) for obj in objects))


@asynccontextmanager
async def cached_store() -> AsyncIterator[CachedStore]:
    store = CachedStore()
    async with following(store.caches):
        yield store


def pool(name: str, **spec: object) -> NodePool:
    return NodePool(metadata=ObjectMeta(name=name), spec=NodePoolSpec.model_validate(spec))


ELECTION = keys.ELECTION_RECONCILER


class LeaderStore:
    """A store, and a leader that writes to it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.transport = MemoryTransport(self.clock)
        self.epoch = 0
        self.executor = self.new_executor()

    def new_executor(self, transport: Transport | None = None) -> Executor:
        return Executor(
            transport or self.transport,
            self.clock,
            lambda: CreateRevisionGuard(key=ELECTION, create_revision=self.epoch),
        )

    async def lead(self) -> None:
        self.epoch = await self.transport.commit([], [Put(key=ELECTION, value=b"me")])
        await self.executor.last_assignment()

    async def lose(self) -> None:
        """Let another process lead, without notice to this one."""
        await self.transport.commit([], [Delete(key=ELECTION)])
        await self.transport.commit([], [Put(key=ELECTION, value=b"another")])

    async def have(self, obj: ModelDeployment) -> ModelDeployment:
        await self.transport.commit([], [codec.put_spec(obj)])
        stored = await objects.get(self.transport, ModelDeployment, obj.name)
        assert stored is not None
        return stored

    async def have_replica(self, obj: Replica) -> int:
        put = [codec.put_spec(obj), put_rank(obj)]
        status = Put(key=keys.status_key("Replica", obj.name), value=codec.encode(Status()))
        return await self.transport.commit([], [*put, status])

    async def replica(self, name: str = "qwen-0") -> Replica:
        stored = await objects.get(self.transport, Replica, name)
        assert stored is not None
        return stored

    async def names(self) -> set[str]:
        return {obj.name for obj in await objects.list_all(self.transport, Replica)}

    async def keys(self) -> set[str]:
        """Return all keys of the store except the election."""
        listing = await self.transport.list(keys.ROOT)
        return {item.key.removeprefix(keys.ROOT) for item in listing.items} - {
            ELECTION.removeprefix(keys.ROOT)
        }


async def do(
    executor: Executor,
    action: Action,
    deployment: ModelDeployment | None,
    replicas: Mapping[str, Replica],
) -> int:
    """Execute one action; return the revision of the write."""
    async with aclosing(executor.do_all([action], deployment, replicas)) as batches:
        return [revision async for _, revision in batches][-1]
