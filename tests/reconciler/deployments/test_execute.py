"""The executor: the store after each action, guards that prevent a write, and batches of a large plan."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
from reconciler.deployments.execute import (
    Executor,
    GuardedWrite,
    merge_writes,
    split_into_batches,
)
from reconciler.deployments.rollout.revisions import content_of, template_hash
from schemas.deployment import ModelDeployment
from schemas.meta import ObjectKey, Status
from schemas.replica import RankAssignment, Replica
from store import keys, objects
from store.errors import ConflictError, UnavailableError
from store.memory import MemoryTransport
from store.port import (
    MAX_OPERATIONS,
    CreateRevisionGuard,
    Delete,
    Guard,
    ModRevisionGuard,
    Operation,
    Put,
)
from tests.support.clock import FakeClock
from tests.support.reconciler_agents import put_node
from tests.support.reconciler_world import ELECTION, LeaderStore, do
from tests.support.store_faults import FaultyTransport
from tests.support.world import NOW, PROOF, condition, deployment, replica

CONTENT = content_of(deployment())
QWEN = ObjectKey("ModelDeployment", "qwen")
OLD = replica(0).replica


def create(number: int = 0) -> CreateReplica:
    rank = RankAssignment(node="a", memory=PROOF)
    return CreateReplica(name=f"qwen-{number}", ranks=(rank,), content=CONTENT)


def move(version: int = 0, *, name: str = "qwen-0", to: str = "b") -> MoveReplica:
    rank = RankAssignment(node=to, memory=PROOF)
    return MoveReplica(name=name, ranks=(rank,), content=CONTENT, version=version)


def delete(version: int = 0, *, because: str = "ScaledDown") -> DeleteReplica:
    return DeleteReplica(name="qwen-0", because=because, version=version)


def version_of(obj: ModelDeployment | Replica) -> int:
    return int(obj.metadata.resource_version)


@pytest.fixture
async def world() -> LeaderStore:
    made = LeaderStore()
    await made.lead()
    return made


async def test_create(world: LeaderStore) -> None:
    owner = await world.have(deployment())
    revision = await do(world.executor, create(), owner, {})
    made = await world.replica()
    assert made.metadata.resource_version == str(revision)
    assert made.metadata.creation_timestamp == NOW
    assert [(o.kind, o.name, o.uid) for o in made.metadata.owner_references] == [
        ("ModelDeployment", "qwen", "uid-qwen")
    ]
    assert made.spec.template == template_hash(owner)
    assert made.spec.served_names == ("qwen",)
    assert (made.spec.context_length, made.spec.concurrency) == (1024, 1)
    assert [(rank.node, rank.memory) for rank in made.spec.ranks] == [("a", PROOF)]
    with pytest.raises(ConflictError):
        await do(world.executor, create(), owner, {})
    assert await world.replica() == made


async def test_a_plan_without_the_last_assignment_is_refused(world: LeaderStore) -> None:
    owner = await world.have(deployment())
    version = await world.have_replica(replica(3).replica)
    another = world.new_executor()
    with pytest.raises(ConflictError):  # last_assignment() was not called before
        await do(another, create(), owner, {})
    assert await another.last_assignment() == version
    # A write whose answer was lost is carried out only now.
    late = await do(world.executor, create(), owner, {})
    with pytest.raises(ConflictError):
        await do(another, create(1), owner, {})
    assert await another.last_assignment() == late
    assert await do(another, create(1), owner, {}) > late
    assert await another.last_assignment() > late


async def test_the_lead_outlives_an_assignment(world: LeaderStore) -> None:
    """The election key is written, and keeps its holder, its lease and its epoch."""
    lease = await world.transport.grant(4)
    await world.transport.commit([], [Put(key=ELECTION, value=b"me", lease=lease)])
    another = world.new_executor()
    await another.last_assignment()
    revision = await do(another, create(), await world.have(deployment()), {})
    now = await world.transport.get(ELECTION)
    assert now is not None
    assert (now.value, now.lease, now.create_revision) == (b"me", lease, world.epoch)
    assert now.mod_revision == revision


async def test_a_reused_name_is_a_new_replica(world: LeaderStore) -> None:
    owner = await world.have(deployment())
    await do(world.executor, create(), owner, {})
    first = await world.replica()
    remove = RemoveReplica(name="qwen-0", version=version_of(first))
    await do(world.executor, remove, owner, {"qwen-0": first})
    await world.clock.advance(1)
    await do(world.executor, create(), owner, {})
    assert (await world.replica()).metadata.uid != first.metadata.uid


async def test_a_move_makes_a_new_replica_and_removes_the_report(world: LeaderStore) -> None:
    owner, version = await world.have(deployment()), await world.have_replica(OLD)
    await world.clock.advance(1)
    await do(world.executor, move(version), owner, {"qwen-0": OLD})
    made = await world.replica()
    assert made.spec.ranks[0].node == "b"
    assert made.metadata.uid != OLD.metadata.uid
    assert "/rank/a/qwen-0/0" not in await world.keys()


async def test_delete_only_marks_the_replica_and_remove_leaves_nothing(world: LeaderStore) -> None:
    version = await world.have_replica(OLD)
    version = await do(world.executor, delete(version), None, {"qwen-0": OLD})
    made = await world.replica()
    assert made.metadata.deletion_timestamp == NOW
    assert (made.spec, made.metadata.uid) == (OLD.spec, OLD.metadata.uid)
    assert "/rank/a/qwen-0/0" in await world.keys()
    await do(world.executor, RemoveReplica(name="qwen-0", version=version), None, {"qwen-0": made})
    assert await world.keys() == set()


async def test_remove_deployment_leaves_nothing(world: LeaderStore) -> None:
    there = await world.have(deployment())
    version = version_of(there)
    await world.executor.write_status(QWEN, Status(observed_generation=4), version=version)
    assert await world.keys() == {"/spec/ModelDeployment/qwen", "/status/ModelDeployment/qwen"}
    await do(world.executor, RemoveDeployment(name="qwen", version=version), there, {})
    assert await world.keys() == set()


CHANGES: dict[str, Callable[[int], Action]] = {
    "Move": move,
    "Delete": delete,
    "Orphan": lambda version: OrphanReplica(name="qwen-0", version=version),
    "Adopt": lambda version: AdoptReplica(name="qwen-0", version=version),
    "Remove": lambda version: RemoveReplica(name="qwen-0", version=version),
}
OTHERS: dict[str, Action] = {
    "Create": create(),
    "SaveRevision": SaveRevision(name="qwen-1234", template="1234", number=1, cause="", version=0),
    "RemoveRevision": RemoveRevision(name="qwen-1234", version=0),
    "RemoveDeployment": RemoveDeployment(name="qwen", version=0),
}


async def refuse(
    world: LeaderStore, actions: Sequence[Action], owner: ModelDeployment | None
) -> None:
    """Expect that the actions are refused, and that they write nothing."""
    before = await world.transport.list(keys.ROOT)
    with pytest.raises(ConflictError):
        await carried_out(world.executor, actions, owner, {"qwen-0": OLD})
    assert await world.transport.list(keys.ROOT) == before


async def carried_out(
    executor: Executor,
    actions: Sequence[Action],
    owner: ModelDeployment | None,
    replicas: dict[str, Replica],
    sizes: list[int] | None = None,
) -> list[int]:
    """Return how many actions were done at once, in turn; `sizes` has them also after an error."""
    sizes = [] if sizes is None else sizes
    async with aclosing(executor.do_all(actions, owner, replicas)) as steps:
        async for done, _ in steps:
            sizes.append(len(done))
    return sizes


@pytest.mark.parametrize("name", [*OTHERS, *CHANGES])
async def test_a_deposed_leader_writes_nothing(world: LeaderStore, name: str) -> None:
    owner = await world.have(deployment())
    await world.lose()
    await refuse(world, [OTHERS[name] if name in OTHERS else CHANGES[name](0)], owner)


async def test_a_deposed_leader_writes_no_statuses_and_nodes_either(world: LeaderStore) -> None:
    there = await world.have(deployment())
    await world.lose()
    with pytest.raises(ConflictError):
        await world.executor.write_status(QWEN, Status(), version=version_of(there))
    with pytest.raises(ConflictError):
        await world.executor.commit([], [put_node("a")])
    assert await world.keys() == {"/spec/ModelDeployment/qwen"}


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
    store.guards.clear()
    await do(world.executor, create(), there, {})
    for name in ("Move", "Delete", "Remove"):
        made = await world.replica()
        await do(world.executor, CHANGES[name](version_of(made)), there, {"qwen-0": made})
    await world.executor.write_status(QWEN, Status(), version=version_of(there))
    await world.executor.commit([], [put_node("a")])
    remove = RemoveDeployment(name="qwen", version=version_of(there))
    await do(world.executor, remove, there, {})
    assert len(store.guards) == 7
    assert all(fence in guards for guards in store.guards)


@pytest.mark.parametrize("is_move", [False, True])
async def test_a_concurrent_edit_is_planned_again(world: LeaderStore, is_move: bool) -> None:
    owner = await world.have(deployment())
    version = await world.have_replica(OLD) if is_move else 0
    await world.have(deployment(replicas=7))
    actions = [move(version)] if is_move else [create(at) for at in range(5)]
    await refuse(world, actions, owner)


@pytest.mark.parametrize("name", CHANGES)
async def test_an_outdated_replica_version_is_refused(world: LeaderStore, name: str) -> None:
    owner = await world.have(deployment())
    await world.have_replica(OLD)
    await refuse(world, [CHANGES[name](1)], owner)


async def test_no_status_without_its_object(world: LeaderStore) -> None:
    there = await world.have(deployment())
    await world.transport.commit([], [Delete(key=keys.spec_key("ModelDeployment", "qwen"))])
    with pytest.raises(ConflictError):
        await world.executor.write_status(QWEN, Status(), version=version_of(there))
    assert await world.keys() == set()


async def test_many_actions_are_few_transactions(world: LeaderStore) -> None:
    owner = await world.have(deployment())
    lost, ending = replica(1000, on="lost").replica, replica(1001).replica
    version, last = await world.have_replica(lost), await world.have_replica(ending)
    actions: list[Action] = [
        replace(delete(last, because="Outdated"), name=ending.name),
        move(version, name=lost.name, to="a"),
        *map(create, range(100)),
    ]
    before = (await world.transport.status()).revision
    await world.executor.last_assignment()
    views = {lost.name: lost, ending.name: ending}
    done = await carried_out(world.executor, actions, owner, views)
    assert (sum(done), len(done)) == (len(actions), 2)
    assert (await world.transport.status()).revision == before + 2
    replicas = await objects.list_all(world.transport, Replica)
    assert len(replicas) == len({made.metadata.uid for made in replicas}) == 102
    assert (await world.replica(lost.name)).spec.ranks[0].node == "a"
    assert await world.transport.get(keys.rank_key("lost", lost.name, 0)) is None


async def test_a_refused_write_stops_only_later_writes(world: LeaderStore) -> None:
    owner = await world.have(deployment())
    await world.have_replica(replica(2).replica)  # the plan does not know of it
    done: list[int] = []
    with pytest.raises(ConflictError):
        await carried_out(world.executor, [*map(create, range(5))], owner, {}, done)
    assert done == [1, 1]
    assert await world.names() == {"qwen-0", "qwen-1", "qwen-2"}


@pytest.mark.parametrize("is_applied", [True, False])
async def test_after_a_lost_answer_nothing_is_assigned_before_a_reread(
    world: LeaderStore, is_applied: bool
) -> None:
    owner = await world.have(deployment())
    faulty = FaultyTransport(world.transport)
    executor = world.new_executor(faulty)
    before = await executor.last_assignment()
    faulty.answers_to_lose, faulty.commits_to_lose = int(is_applied), int(not is_applied)
    with pytest.raises(UnavailableError):
        await carried_out(executor, [*map(create, range(100))], owner, {})
    assert len(await world.names()) == (62 if is_applied else 0)
    with pytest.raises(ConflictError):
        await carried_out(executor, [*map(create, range(200, 203))], owner, {})
    assert (await executor.last_assignment() > before) is is_applied
    remaining = [*map(create, range(62 if is_applied else 0, 100))]
    assert sum(await carried_out(executor, remaining, owner, {})) == len(remaining)
    assert len(await world.names()) == 100


async def test_statuses_are_written_together_where_their_objects_still_are(
    world: LeaderStore,
) -> None:
    versions = [await world.have_replica(replica(at).replica) for at in range(3)]
    status = Status(conditions=(condition(),))
    statuses = [
        (ObjectKey("Replica", f"qwen-{at}"), status, version) for at, version in enumerate(versions)
    ]
    before = (await world.transport.status()).revision
    await world.executor.write_statuses(statuses)
    assert (await world.transport.status()).revision == before + 1
    changed = [*statuses[:1], (*statuses[1][:2], statuses[1][2] - 1), *statuses[2:]]
    with pytest.raises(ConflictError):
        await world.executor.write_statuses(changed)
    await world.executor.write_statuses([])
    assert (await world.transport.status()).revision == before + 2


OWNER = ModRevisionGuard(key="owner", mod_revision=7)


def write(number: int, *, size: int = 1, stale: int = 0) -> GuardedWrite:
    return GuardedWrite(
        guards=(OWNER, ModRevisionGuard(key=f"k{number}", mod_revision=0)),
        operations=(
            Put(key=f"k{number}", value=b"x" * size),
            *(Delete(key=f"old/{number}/{at}") for at in range(stale)),
        ),
    )


WRITES = st.lists(
    st.builds(
        write, st.integers(0, 30), size=st.sampled_from([1, 400_000]), stale=st.integers(0, 3)
    ),
    max_size=40,
)


@given(WRITES, st.integers(1, 4))
def test_they_hold_everything_and_fit(writes: list[GuardedWrite], shared: int) -> None:
    found = list(split_into_batches(writes, shared=shared))
    assert [guarded_write for batch in found for guarded_write in batch] == writes
    for batch in found:
        guards, operations = merge_writes(batch)
        assert len(guards) + len(operations) + shared <= MAX_OPERATIONS
        assert len({operation.key for operation in operations}) == len(operations)
        assert (
            sum(len(operation.value) for operation in operations if isinstance(operation, Put))
            <= 2**20
        )


def test_sixty_replicas_are_one_transaction() -> None:
    assert [
        len(batch) for batch in split_into_batches([write(n) for n in range(100)], shared=4)
    ] == [61, 39]


def test_an_oversized_write_is_a_batch_of_its_own() -> None:
    big = write(1, size=2**21)
    assert list(split_into_batches([write(0), big, write(2)], shared=1)) == [
        (write(0),),
        (big,),
        (write(2),),
    ]
