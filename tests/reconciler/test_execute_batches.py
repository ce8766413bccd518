"""A plan of many actions: few transactions, and the same store in the end as one by one."""

from collections.abc import Sequence
from contextlib import aclosing

import pytest

from reconciler.actions import Action, CreateReplica, DeleteReplica, MoveReplica
from reconciler.execute import Executor
from schemas.deployment import ModelDeployment
from schemas.meta import Condition, ConditionStatus, ObjectKey, Status
from schemas.replica import RankAssignment, Replica
from store import keys, objects
from store.errors import ConflictError, UnavailableError
from store.port import CreateRevisionGuard
from tests.reconciler.test_execute import CONTENT, ELECTION, World
from tests.support.fleets import PROOF, deployment, replica
from tests.support.store_faults import FaultyTransport


def creates(number: int, *, first: int = 0) -> list[Action]:
    return [
        CreateReplica(
            name=f"qwen-{at}", ranks=(RankAssignment(node="a", memory=PROOF),), content=CONTENT
        )
        for at in range(first, first + number)
    ]


@pytest.fixture
async def world() -> World:
    made = World()
    await made.lead()
    return made


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


async def names(world: World) -> set[str]:
    return {found.name for found in await objects.list_all(world.transport, Replica)}


async def test_many_actions_are_few_transactions(world: World) -> None:
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


async def test_what_is_refused_holds_up_only_what_comes_after_it(world: World) -> None:
    owner = await world.have(deployment())
    await world.have_replica(replica(2).replica)  # the plan does not know of it
    done: list[int] = []
    with pytest.raises(ConflictError):
        await carried_out(world.executor, creates(5), owner, {}, done)
    assert done == [1, 1]
    assert await names(world) == {"qwen-0", "qwen-1", "qwen-2"}


async def test_a_deployment_that_was_edited_gets_nothing(world: World) -> None:
    owner = await world.have(deployment())
    await world.have(deployment(replicas=7))
    with pytest.raises(ConflictError):
        await carried_out(world.executor, creates(5), owner, {})
    assert await names(world) == set()


async def test_a_deposed_leader_assigns_nothing(world: World) -> None:
    owner = await world.have(deployment())
    await world.lose()
    with pytest.raises(ConflictError):
        await carried_out(world.executor, creates(5), owner, {})
    assert await names(world) == set()


@pytest.mark.parametrize("is_applied", [True, False])
async def test_after_a_lost_answer_nothing_is_assigned_until_it_is_counted(
    world: World, is_applied: bool
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


async def test_statuses_are_written_together_where_their_objects_still_are(world: World) -> None:
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
