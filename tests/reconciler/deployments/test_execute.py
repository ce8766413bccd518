"""The executor: the store after each action, guards that prevent a write, and batches of a large plan."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest
from typing_extensions import override

from reconciler.deployments.actions import (
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
from reconciler.deployments.execute import Executor
from reconciler.deployments.rollout.revisions import content_of, template_hash
from schemas.deployment import ModelDeployment
from schemas.meta import Condition, ConditionStatus, ObjectKey, Status
from schemas.replica import RankAssignment, Replica
from store import keys, objects
from store.errors import ConflictError, UnavailableError
from store.memory import MemoryTransport
from store.port import CreateRevisionGuard, Delete, Guard, Operation, Put
from tests.support.clock import FakeClock
from tests.support.reconciler_agents import put_node
from tests.support.reconciler_store import ELECTION, LeaderStore, do
from tests.support.store_faults import FaultyTransport
from tests.support.world import NOW, PROOF, deployment, replica

CONTENT = content_of(deployment())
CREATE = CreateReplica(
    name="qwen-0", ranks=(RankAssignment(node="a", memory=PROOF),), content=CONTENT
)


@pytest.fixture
async def world() -> LeaderStore:
    made = LeaderStore()
    await made.lead()
    return made


async def test_create(world: LeaderStore) -> None:
    owner = await world.have(deployment())
    revision = await do(world.executor, CREATE, owner, {})
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


async def test_creating_twice_collides(world: LeaderStore) -> None:
    owner = await world.have(deployment())
    await do(world.executor, CREATE, owner, {})
    first = await world.replica()
    with pytest.raises(ConflictError):
        await do(world.executor, CREATE, owner, {})
    assert await world.replica() == first


async def test_a_plan_without_the_last_assignment_is_refused(world: LeaderStore) -> None:
    owner = await world.have(deployment())
    version = await world.have_replica(replica(3).replica)
    another = Executor(
        world.transport,
        world.clock,
        lambda: CreateRevisionGuard(key=ELECTION, create_revision=world.epoch),
    )
    with pytest.raises(ConflictError):  # last_assignment() was not called before
        await do(another, CREATE, owner, {})
    assert await another.last_assignment() == version
    # A write whose answer was lost is carried out only now.
    late = await do(world.executor, CREATE, owner, {})
    second = CreateReplica(
        name="qwen-1", ranks=(RankAssignment(node="a", memory=PROOF),), content=CONTENT
    )
    with pytest.raises(ConflictError):
        await do(another, second, owner, {})
    assert await another.last_assignment() == late
    assert await do(another, second, owner, {}) > late
    assert await another.last_assignment() > late


async def test_the_lead_outlives_an_assignment(world: LeaderStore) -> None:
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
    revision = await do(another, CREATE, await world.have(deployment()), {})
    now = await world.transport.get(ELECTION)
    assert now is not None
    assert (now.value, now.lease, now.create_revision) == (b"me", lease, world.epoch)
    assert now.mod_revision == revision


async def test_a_reused_name_is_a_new_replica(world: LeaderStore) -> None:
    owner = await world.have(deployment())
    await do(world.executor, CREATE, owner, {})
    first = await world.replica()
    assert first is not None
    version = int(first.metadata.resource_version)
    await do(
        world.executor, RemoveReplica(name="qwen-0", version=version), owner, {"qwen-0": first}
    )
    await world.clock.advance(1)
    await do(world.executor, CREATE, owner, {})
    second = await world.replica()
    assert second is not None
    assert second.metadata.uid != first.metadata.uid


async def test_move(world: LeaderStore) -> None:
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
    await do(world.executor, move, owner, {"qwen-0": old})
    made = await world.replica()
    assert made is not None
    assert made.spec.ranks[0].node == "b"
    assert made.metadata.uid != old.metadata.uid
    # The report of the lost node's agent is removed, too.
    assert "/rank/a/qwen-0/0" not in await world.keys()


async def test_delete_only_marks_the_replica(world: LeaderStore) -> None:
    old = replica(0).replica
    version = await world.have_replica(old)
    action = DeleteReplica(name="qwen-0", because="ScaledDown", version=version)
    await do(world.executor, action, None, {"qwen-0": old})
    made = await world.replica()
    assert made is not None
    assert made.metadata.deletion_timestamp == NOW
    assert made.spec == old.spec
    assert made.metadata.uid == old.metadata.uid
    assert "/rank/a/qwen-0/0" in await world.keys()


async def test_remove_leaves_nothing(world: LeaderStore) -> None:
    old = replica(0).replica
    version = await world.have_replica(old)
    await do(world.executor, RemoveReplica(name="qwen-0", version=version), None, {"qwen-0": old})
    assert await world.keys() == set()


async def test_remove_deployment_leaves_nothing(world: LeaderStore) -> None:
    there = await world.have(deployment())
    version = int(there.metadata.resource_version)
    key = ObjectKey("ModelDeployment", "qwen")
    await world.executor.write_status(key, Status(observed_generation=4), version=version)
    assert await world.keys() == {"/spec/ModelDeployment/qwen", "/status/ModelDeployment/qwen"}
    await do(world.executor, RemoveDeployment(name="qwen", version=version), there, {})
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
async def test_a_deposed_leader_writes_nothing(world: LeaderStore, action: Action) -> None:
    owner = await world.have(deployment())
    await world.lose()
    before = await world.transport.list(keys.ROOT)
    with pytest.raises(ConflictError):
        await do(world.executor, action, owner, {"qwen-0": replica(0).replica})
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


async def test_every_write_names_the_fence(world: LeaderStore) -> None:
    store = world.transport = Recording(world.clock)
    fence = CreateRevisionGuard(key=ELECTION, create_revision=2)
    world.executor = Executor(store, world.clock, lambda: fence)
    await world.lead()
    there = await world.have(deployment())
    version = int(there.metadata.resource_version)
    store.guards.clear()
    await do(world.executor, CREATE, there, {})
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
        await do(world.executor, current, there, {"qwen-0": made})
    key = ObjectKey("ModelDeployment", "qwen")
    await world.executor.write_status(key, Status(), version=version)
    await world.executor.commit([], [put_node("a")])
    await do(world.executor, RemoveDeployment(name="qwen", version=version), there, {})
    assert len(store.guards) == 7
    assert all(fence in guards for guards in store.guards)


async def test_nor_statuses_nor_nodes(world: LeaderStore) -> None:
    there = await world.have(deployment())
    version = int(there.metadata.resource_version)
    await world.lose()
    with pytest.raises(ConflictError):
        await world.executor.write_status(
            ObjectKey("ModelDeployment", "qwen"), Status(), version=version
        )
    with pytest.raises(ConflictError):
        await world.executor.commit([], [put_node("a")])
    assert await world.keys() == {"/spec/ModelDeployment/qwen"}


@pytest.mark.parametrize("is_move", [False, True])
async def test_a_concurrent_edit_is_planned_again(world: LeaderStore, *, is_move: bool) -> None:
    model_deployment = await world.have(deployment())
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
        await do(world.executor, action, model_deployment, {"qwen-0": replica(0).replica})
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
async def test_an_outdated_replica_version_is_refused(world: LeaderStore, action: Action) -> None:
    owner = await world.have(deployment())
    await world.have_replica(replica(0).replica)
    before = await world.transport.list(keys.ROOT)
    with pytest.raises(ConflictError):
        await do(world.executor, action, owner, {"qwen-0": replica(0).replica})
    assert await world.transport.list(keys.ROOT) == before


async def test_no_status_without_its_object(world: LeaderStore) -> None:
    there = await world.have(deployment())
    version = int(there.metadata.resource_version)
    await world.transport.commit([], [Delete(key=keys.spec_key("ModelDeployment", "qwen"))])
    with pytest.raises(ConflictError):
        await world.executor.write_status(
            ObjectKey("ModelDeployment", "qwen"), Status(), version=version
        )
    assert await world.keys() == set()


def creates(number: int, *, first: int = 0) -> list[Action]:
    return [
        CreateReplica(
            name=f"qwen-{at}", ranks=(RankAssignment(node="a", memory=PROOF),), content=CONTENT
        )
        for at in range(first, first + number)
    ]


async def carried_out(
    executor: Executor,
    actions: Sequence[Action],
    owner: ModelDeployment,
    replicas: dict[str, Replica],
    found: list[int] | None = None,
) -> list[int]:
    """Return how many actions were done at once, in turn; in `found` they are also after an error."""
    found = [] if found is None else found
    async with aclosing(executor.do_all(actions, owner, replicas)) as steps:
        async for done, _ in steps:
            found.append(len(done))
    return found


async def names(world: LeaderStore) -> set[str]:
    return {found.name for found in await objects.list_all(world.transport, Replica)}


async def test_many_actions_are_few_transactions(world: LeaderStore) -> None:
    owner = await world.have(deployment())
    old = replica(1000, on="lost").replica
    version = await world.have_replica(old)
    ending = replica(1001).replica
    actions = [
        DeleteReplica(
            name=ending.name, because="Outdated", version=await world.have_replica(ending)
        ),
        MoveReplica(
            name=old.name,
            ranks=(RankAssignment(node="a", memory=PROOF),),
            content=CONTENT,
            version=version,
        ),
        *creates(100),
    ]
    before = (await world.transport.status()).revision
    await world.executor.last_assignment()
    done = await carried_out(world.executor, actions, owner, {old.name: old, ending.name: ending})
    assert sum(done) == len(actions)
    assert len(done) == 2
    assert (await world.transport.status()).revision == before + 2
    assert len(await names(world)) == 102
    uids = {found.metadata.uid for found in await objects.list_all(world.transport, Replica)}
    assert len(uids) == 102
    moved = await objects.get(world.transport, Replica, old.name)
    assert moved is not None
    assert moved.spec.ranks[0].node == "a"
    assert await world.transport.get(keys.rank_key("lost", old.name, 0)) is None


async def test_a_refused_write_stops_only_later_writes(world: LeaderStore) -> None:
    owner = await world.have(deployment())
    await world.have_replica(replica(2).replica)  # the plan does not know of it
    done: list[int] = []
    with pytest.raises(ConflictError):
        await carried_out(world.executor, creates(5), owner, {}, done)
    assert done == [1, 1]
    assert await names(world) == {"qwen-0", "qwen-1", "qwen-2"}


async def test_an_edited_deployment_gets_no_replicas(world: LeaderStore) -> None:
    owner = await world.have(deployment())
    await world.have(deployment(replicas=7))
    with pytest.raises(ConflictError):
        await carried_out(world.executor, creates(5), owner, {})
    assert await names(world) == set()


async def test_a_deposed_leader_assigns_nothing(world: LeaderStore) -> None:
    owner = await world.have(deployment())
    await world.lose()
    with pytest.raises(ConflictError):
        await carried_out(world.executor, creates(5), owner, {})
    assert await names(world) == set()


@pytest.mark.parametrize("is_applied", [True, False])
async def test_after_a_lost_answer_nothing_is_assigned_before_a_reread(
    world: LeaderStore, is_applied: bool
) -> None:
    owner = await world.have(deployment())
    faulty = FaultyTransport(world.transport)
    executor = Executor(
        faulty, world.clock, lambda: CreateRevisionGuard(key=ELECTION, create_revision=world.epoch)
    )
    before = await executor.last_assignment()
    faulty.answers_to_lose, faulty.commits_to_lose = int(is_applied), int(not is_applied)
    with pytest.raises(UnavailableError):
        await carried_out(executor, creates(100), owner, {})
    assert len(await names(world)) == (62 if is_applied else 0)
    with pytest.raises(ConflictError):
        await carried_out(executor, creates(3, first=200), owner, {})
    counted = await executor.last_assignment()
    assert (counted > before) is is_applied
    left = creates(38, first=62) if is_applied else creates(100)
    assert sum(await carried_out(executor, left, owner, {})) == len(left)
    assert len(await names(world)) == 100


async def test_statuses_are_written_together_where_their_objects_still_are(
    world: LeaderStore,
) -> None:
    versions = [await world.have_replica(replica(at).replica) for at in range(3)]
    ready = Condition(type="Ready", status=ConditionStatus.TRUE, reason="Test", message="so it is")
    news = [
        (ObjectKey("Replica", f"qwen-{at}"), Status(conditions=(ready,)), version)
        for at, version in enumerate(versions)
    ]
    before = (await world.transport.status()).revision
    await world.executor.write_statuses(news)
    assert (await world.transport.status()).revision == before + 1
    changed = [*news[:1], (*news[1][:2], news[1][2] - 1), *news[2:]]
    with pytest.raises(ConflictError):
        await world.executor.write_statuses(changed)
    await world.executor.write_statuses([])
    assert (await world.transport.status()).revision == before + 2
