"""The executor: what the store holds after each action, and what keeps it from writing."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from typing_extensions import override

from reconciler.actions import (
    Action,
    AdoptReplica,
    CreateReplica,
    DeleteReplica,
    MoveReplica,
    OrphanReplica,
    RemoveDeployment,
    RemoveReplica,
    RemoveRevision,
    SaveRevision,
)
from reconciler.execute import Executor
from reconciler.rollout.revisions import content_of, template_hash
from schemas.deployment import ModelDeployment
from schemas.meta import ObjectKey, Status
from schemas.node import Node
from schemas.replica import RankAssignment, Replica
from store import codec, keys, objects
from store.errors import ConflictError
from store.memory import MemoryTransport
from store.port import CreateRevisionGuard, Delete, Guard, Operation, Put
from tests.support.clock import FakeClock
from tests.support.fleets import NOW, PROOF, deployment, replica
from tests.support.reconciler_agents import put_rank

ELECTION = keys.ELECTION_RECONCILER
CONTENT = content_of(deployment())
CREATE = CreateReplica(
    name="qwen-0", ranks=(RankAssignment(node="a", memory=PROOF),), content=CONTENT
)


class World:
    """A store, and a leader that writes to it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.transport = MemoryTransport(self.clock)
        self.epoch = 0
        self.executor = Executor(
            self.transport,
            self.clock,
            lambda: CreateRevisionGuard(key=ELECTION, create_revision=self.epoch),
        )

    async def lead(self) -> None:
        self.epoch = await self.transport.commit([], [Put(key=ELECTION, value=b"me")])
        await self.executor.last_assignment()

    async def lose(self) -> None:
        """Somebody else leads, and we have not heard of it."""
        await self.transport.commit([], [Delete(key=ELECTION)])
        await self.transport.commit([], [Put(key=ELECTION, value=b"another")])

    async def have(self, found: ModelDeployment) -> ModelDeployment:
        await self.transport.commit([], [codec.put_spec(found)])
        there = await objects.get(self.transport, ModelDeployment, found.name)
        assert there is not None
        return there

    async def have_replica(self, found: Replica) -> int:
        put = [codec.put_spec(found), put_rank(found)]
        status = Put(key=keys.status_key("Replica", found.name), value=codec.encode(Status()))
        return await self.transport.commit([], [*put, status])

    async def replica(self) -> Replica | None:
        return await objects.get(self.transport, Replica, "qwen-0")

    async def keys(self) -> set[str]:
        """Return what is in the store beside the election."""
        listing = await self.transport.list(keys.ROOT)
        return {item.key.removeprefix(keys.ROOT) for item in listing.items} - {
            ELECTION.removeprefix(keys.ROOT)
        }


@pytest.fixture
async def world() -> World:
    made = World()
    await made.lead()
    return made


async def test_create(world: World) -> None:
    owner = await world.have(deployment())
    revision = await world.executor.do(CREATE, owner, {})
    made = await world.replica()
    assert made is not None
    assert made.metadata.resource_version == str(revision)
    assert made.metadata.creation_timestamp == NOW
    assert [(o.kind, o.name, o.uid) for o in made.metadata.owner_references] == [
        ("ModelDeployment", "qwen", "uid-qwen")
    ]
    assert made.spec.template == template_hash(owner)
    assert made.spec.served_names == ("qwen",)
    assert (made.spec.context_length, made.spec.concurrency) == (1024, 1)
    assert [(rank.node, rank.memory) for rank in made.spec.ranks] == [("a", PROOF)]


async def test_creating_twice_collides(world: World) -> None:
    owner = await world.have(deployment())
    await world.executor.do(CREATE, owner, {})
    first = await world.replica()
    with pytest.raises(ConflictError):
        await world.executor.do(CREATE, owner, {})
    assert await world.replica() == first


async def test_what_was_planned_without_the_last_assignment_is_not_done(world: World) -> None:
    owner = await world.have(deployment())
    version = await world.have_replica(replica(3).replica)
    another = Executor(
        world.transport,
        world.clock,
        lambda: CreateRevisionGuard(key=ELECTION, create_revision=world.epoch),
    )
    with pytest.raises(ConflictError):  # nobody made sure that its plan counts everything
        await another.do(CREATE, owner, {})
    assert await another.last_assignment() == version
    # A write of ours whose answer was lost is carried out only now.
    late = await world.executor.do(CREATE, owner, {})
    second = CreateReplica(
        name="qwen-1", ranks=(RankAssignment(node="a", memory=PROOF),), content=CONTENT
    )
    with pytest.raises(ConflictError):
        await another.do(second, owner, {})
    assert await another.last_assignment() == late
    assert await another.do(second, owner, {}) > late
    assert await another.last_assignment() > late


async def test_the_lead_outlives_an_assignment(world: World) -> None:
    """The election key is written, and keeps its holder, its lease and its epoch."""
    lease = await world.transport.grant(4)
    put = Put(key=ELECTION, value=b"me", lease=lease)
    await world.transport.commit([], [put])
    another = Executor(
        world.transport,
        world.clock,
        lambda: CreateRevisionGuard(key=ELECTION, create_revision=world.epoch),
    )
    await another.last_assignment()
    revision = await another.do(CREATE, await world.have(deployment()), {})
    now = await world.transport.get(ELECTION)
    assert now is not None
    assert (now.value, now.lease, now.create_revision) == (b"me", lease, world.epoch)
    assert now.mod_revision == revision


async def test_a_name_that_is_used_again_is_another_replica(world: World) -> None:
    owner = await world.have(deployment())
    await world.executor.do(CREATE, owner, {})
    first = await world.replica()
    assert first is not None
    version = int(first.metadata.resource_version)
    await world.executor.do(RemoveReplica(name="qwen-0", version=version), owner, {"qwen-0": first})
    await world.clock.advance(1)
    await world.executor.do(CREATE, owner, {})
    second = await world.replica()
    assert second is not None
    assert second.metadata.uid != first.metadata.uid


async def test_move(world: World) -> None:
    owner = await world.have(deployment())
    old = replica(0).replica
    version = await world.have_replica(old)
    await world.clock.advance(1)
    move = MoveReplica(
        name="qwen-0",
        ranks=(RankAssignment(node="b", memory=PROOF),),
        content=CONTENT,
        version=version,
    )
    await world.executor.do(move, owner, {"qwen-0": old})
    made = await world.replica()
    assert made is not None
    assert made.spec.ranks[0].node == "b"
    assert made.metadata.uid != old.metadata.uid
    # What the lost node's agent said goes with it.
    assert "/rank/a/qwen-0/0" not in await world.keys()


async def test_delete_marks_and_nothing_else(world: World) -> None:
    old = replica(0).replica
    version = await world.have_replica(old)
    action = DeleteReplica(name="qwen-0", because="ScaledDown", version=version)
    await world.executor.do(action, None, {"qwen-0": old})
    made = await world.replica()
    assert made is not None
    assert made.metadata.deletion_timestamp == NOW
    assert made.spec == old.spec
    assert made.metadata.uid == old.metadata.uid
    assert "/rank/a/qwen-0/0" in await world.keys()


async def test_remove_leaves_nothing(world: World) -> None:
    old = replica(0).replica
    version = await world.have_replica(old)
    await world.executor.do(RemoveReplica(name="qwen-0", version=version), None, {"qwen-0": old})
    assert await world.keys() == set()


async def test_remove_deployment_leaves_nothing(world: World) -> None:
    there = await world.have(deployment())
    version = int(there.metadata.resource_version)
    key = ObjectKey("ModelDeployment", "qwen")
    await world.executor.write_status(key, Status(observed_generation=4), version=version)
    assert await world.keys() == {"/spec/ModelDeployment/qwen", "/status/ModelDeployment/qwen"}
    await world.executor.do(RemoveDeployment(name="qwen", version=version), there, {})
    assert await world.keys() == set()


@pytest.mark.parametrize(
    "action",
    [
        CREATE,
        MoveReplica(
            name="qwen-0",
            ranks=(RankAssignment(node="b", memory=PROOF),),
            content=CONTENT,
            version=0,
        ),
        DeleteReplica(name="qwen-0", because="ScaledDown", version=0),
        OrphanReplica(name="qwen-0", version=0),
        AdoptReplica(name="qwen-0", version=0),
        SaveRevision(name="qwen-1234", template="1234", number=1, cause="", version=0),
        RemoveRevision(name="qwen-1234", version=0),
        RemoveReplica(name="qwen-0", version=0),
        RemoveDeployment(name="qwen", version=0),
    ],
    ids=lambda action: type(action).__name__,
)
async def test_who_lost_the_lead_writes_nothing(world: World, action: Action) -> None:
    owner = await world.have(deployment())
    await world.lose()
    before = await world.transport.list(keys.ROOT)
    with pytest.raises(ConflictError):
        await world.executor.do(action, owner, {"qwen-0": replica(0).replica})
    assert await world.transport.list(keys.ROOT) == before


class Recording(MemoryTransport):
    """Remembers the guards of every write."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.guards: list[Sequence[Guard]] = []

    @override
    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        self.guards.append(guards)
        return await super().commit(guards, operations)


async def test_every_write_names_the_fence(world: World) -> None:
    store = world.transport = Recording(world.clock)
    fence = CreateRevisionGuard(key=ELECTION, create_revision=2)
    world.executor = Executor(store, world.clock, lambda: fence)
    await world.lead()
    there = await world.have(deployment())
    version = int(there.metadata.resource_version)
    store.guards.clear()
    await world.executor.do(CREATE, there, {})
    actions: tuple[MoveReplica | DeleteReplica | RemoveReplica, ...] = (
        MoveReplica(
            name="qwen-0",
            ranks=(RankAssignment(node="b", memory=PROOF),),
            content=CONTENT,
            version=0,
        ),
        DeleteReplica(name="qwen-0", because="ScaledDown", version=0),
        RemoveReplica(name="qwen-0", version=0),
    )
    for action in actions:
        made = await world.replica()
        assert made is not None
        current = replace(action, version=int(made.metadata.resource_version))
        await world.executor.do(current, there, {"qwen-0": made})
    key = ObjectKey("ModelDeployment", "qwen")
    await world.executor.write_status(key, Status(), version=version)
    await world.executor.register_node("a", "uid-a")
    await world.executor.do(RemoveDeployment(name="qwen", version=version), there, {})
    assert len(store.guards) == 7
    assert all(fence in guards for guards in store.guards)


async def test_nor_statuses_nor_nodes(world: World) -> None:
    there = await world.have(deployment())
    version = int(there.metadata.resource_version)
    await world.lose()
    with pytest.raises(ConflictError):
        await world.executor.write_status(
            ObjectKey("ModelDeployment", "qwen"), Status(), version=version
        )
    with pytest.raises(ConflictError):
        await world.executor.register_node("a", "uid-a")
    assert await world.keys() == {"/spec/ModelDeployment/qwen"}


@pytest.mark.parametrize("is_move", [False, True])
async def test_an_edit_meanwhile_is_planned_anew(world: World, *, is_move: bool) -> None:
    seen = await world.have(deployment())
    version = await world.have_replica(replica(0).replica) if is_move else 0
    await world.have(deployment(replicas=0))
    action = (
        MoveReplica(
            name="qwen-0",
            ranks=(RankAssignment(node="b", memory=PROOF),),
            content=CONTENT,
            version=version,
        )
        if is_move
        else CREATE
    )
    before = await world.keys()
    with pytest.raises(ConflictError):
        await world.executor.do(action, seen, {"qwen-0": replica(0).replica})
    assert await world.keys() == before


@pytest.mark.parametrize(
    "action",
    [
        MoveReplica(
            name="qwen-0",
            ranks=(RankAssignment(node="b", memory=PROOF),),
            content=CONTENT,
            version=1,
        ),
        DeleteReplica(name="qwen-0", because="ScaledDown", version=1),
        OrphanReplica(name="qwen-0", version=1),
        AdoptReplica(name="qwen-0", version=1),
        RemoveReplica(name="qwen-0", version=1),
    ],
    ids=lambda action: type(action).__name__,
)
async def test_old_news_about_a_replica_is_no_ground_to_act(world: World, action: Action) -> None:
    owner = await world.have(deployment())
    await world.have_replica(replica(0).replica)
    before = await world.transport.list(keys.ROOT)
    with pytest.raises(ConflictError):
        await world.executor.do(action, owner, {"qwen-0": replica(0).replica})
    assert await world.transport.list(keys.ROOT) == before


async def test_no_status_without_its_object(world: World) -> None:
    there = await world.have(deployment())
    version = int(there.metadata.resource_version)
    await world.transport.commit([], [Delete(key=keys.spec_key("ModelDeployment", "qwen"))])
    with pytest.raises(ConflictError):
        await world.executor.write_status(
            ObjectKey("ModelDeployment", "qwen"), Status(), version=version
        )
    assert await world.keys() == set()


async def test_a_node_is_registered_once(world: World) -> None:
    await world.executor.register_node("a", "uid-a")
    made = await objects.get(world.transport, Node, "a")
    assert made is not None
    assert (made.metadata.uid, made.metadata.generation) == ("uid-a", 1)
    assert not made.spec.unschedulable
    with pytest.raises(ConflictError):
        await world.executor.register_node("a", "uid-b")
