"""The leader's regular checks of cables, in virtual time: due ones run, one at a time, and never beside a replica."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest

from machinery.clock import Clock
from reconciler.listers.caches import make_caches
from reconciler.listers.lister import Lister
from reconciler.services.fabric.checker import FabricChecker
from schemas.event import Event
from schemas.fabrictest import MIB, FabricFigures, FabricRank, FabricTest
from schemas.meta import ObjectMeta
from schemas.replica import Replica
from schemas.shardgroup import FabricPolicy, GroupMember, ShardGroup, ShardGroupSpec
from store import codec, keys, objects
from store.memory import MemoryTransport
from store.port import Delete, ModRevisionGuard, Put
from tests.support.clock import FakeClock
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.reconciler_world import following, leading, on
from tests.support.world import condition_of

INTERVAL_S = 600.0


def shard_group(name: str, members: str, clock: Clock) -> ShardGroup:
    return ShardGroup(
        metadata=ObjectMeta(
            name=name, uid=f"uid-{name}", generation=1, creation_timestamp=clock.now()
        ),
        spec=ShardGroupSpec(
            members=tuple(GroupMember(node=member) for member in members),
            fabric=FabricPolicy(check_interval="10m"),
        ),
    )


class FakeCables:
    """The agents of all Macs, as far as tests of cables go: they report figures of a given speed, or nothing."""

    def __init__(self, store: MemoryTransport) -> None:
        self.store = store
        self.gb_per_second: float | None = 8.0
        self.started: list[str] = []
        """The groups whose test was seen, in order."""
        self.most_at_once = 0

    async def run(self) -> None:
        """Answer tests forever."""
        seen: set[str] = set()
        while True:
            items = (await self.store.list(keys.FABRIC_TEST_PREFIX)).items
            self.most_at_once = max(self.most_at_once, len(items))
            for item in items:
                test = codec.decode_object(FabricTest, item)
                if test.metadata.uid not in seen:
                    seen.add(test.metadata.uid)
                    self.started.append(test.name)
                    await self._answer(test)
            await asyncio.sleep(0)  # virtual time stands still meanwhile

    async def _answer(self, test: FabricTest) -> None:
        size = 64 * MIB
        if self.gb_per_second is None:
            return
        took_us = size / self.gb_per_second / 1e3
        for rank, seat in enumerate(test.spec.seats):
            report = FabricRank(
                test_uid=test.metadata.uid,
                rank=rank,
                node=seat.node,
                state="Done",
                figures=(FabricFigures(size=size, times_us=(took_us,)),),
            )
            key = keys.fabric_rank_key(seat.node, test.name)
            await self.store.commit([], [Put(key=key, value=codec.encode(report))])


class World:
    """A store, agents that hold their lease, and virtual time."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryTransport(self.clock, expires_by_itself=False)
        self.cables = FakeCables(self.store)

    async def join(self, names: Iterable[str]) -> None:
        for name in names:
            status = node_status(name).model_copy(update={"address": f"169.254.0.{ord(name)}"})
            await self.store.commit([], [put_node(name, status), put_lease(name)])

    async def apply(self, *groups: ShardGroup) -> None:
        await self.store.commit([], [codec.put_spec(group) for group in groups])

    async def group(self, name: str) -> ShardGroup:
        obj = await objects.get(self.store, ShardGroup, name)
        assert obj is not None
        return obj

    async def speeds(self, name: str) -> list[float | None]:
        group = await self.group(name)
        checks = () if group.status is None else group.status.fabric_checks
        return [check.gb_per_second for check in checks]

    async def reason(self, name: str) -> tuple[str, str]:
        """Return reason and message of the condition."""
        group = await self.group(name)
        assert group.status is not None
        return condition_of(group.status, "FabricHealthy")[1:]

    async def reasons_of_events(self) -> list[str]:
        return [event.spec.reason for event in await objects.list_all(self.store, Event)]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    found = World()
    async with asyncio.TaskGroup() as group:
        answering = group.create_task(found.cables.run())
        yield found
        answering.cancel()


async def test_due_checks_run_once_in_an_interval_also_after_a_change_of_leader(
    world: World,
) -> None:
    await world.join("ab")
    await world.apply(shard_group("pair", "ab", world.clock))
    async with leading(world.store, clock=world.clock):
        await world.clock.advance(INTERVAL_S / 2)
        assert await world.speeds("pair") == [8.0]
    async with leading(world.store, clock=world.clock):
        await world.clock.advance(INTERVAL_S / 4)
        assert await world.speeds("pair") == [8.0]
        await world.clock.advance(INTERVAL_S)
    assert await world.speeds("pair") == [8.0, 8.0]
    assert not (await world.store.list(keys.FABRIC_TEST_PREFIX)).items


@pytest.mark.ci
async def test_a_fall_in_speed_is_a_condition_and_one_event(world: World) -> None:
    await world.join("ab")
    await world.apply(shard_group("pair", "ab", world.clock))
    async with leading(world.store, clock=world.clock):
        await world.clock.advance(2.5 * INTERVAL_S)
        assert await world.speeds("pair") == [8.0, 8.0, 8.0]
        world.cables.gb_per_second = 2.0
        await world.clock.advance(1.1 * INTERVAL_S)
        assert (await world.reason("pair"))[0] == "SlowerThanUsual"
        assert (await world.reasons_of_events()).count("SlowerThanUsual") == 1
        world.cables.gb_per_second = 8.0
        await world.clock.advance(1.2 * INTERVAL_S)
    assert (await world.reason("pair"))[0] == "Measured"


async def test_groups_are_checked_one_after_another(world: World) -> None:
    await world.join("abcdef")
    groups = [shard_group(pair, pair, world.clock) for pair in ("ab", "cd", "ef")]
    await world.apply(*groups)
    await world.clock.advance(INTERVAL_S)  # all are due when the leader comes
    async with leading(world.store, clock=world.clock):
        await world.clock.advance(60)
    assert sorted(world.cables.started) == ["ab", "cd", "ef"]
    assert world.cables.most_at_once == 1


def placed_on(name: str, *nodes: str) -> Replica:
    """Return a replica whose ranks form the group."""
    return on("".join(nodes), group=name).replica


@asynccontextmanager
async def checking(world: World) -> AsyncIterator[set[str]]:
    """Run the checker without a reconciler, which would end replicas that no deployment asks for.

    Yields the names of groups whose view changed.
    """
    caches, changed = make_caches(world.store, world.clock), set[str]()
    checker = FabricChecker(
        Lister(caches),
        world.store,
        world.clock,
        fence=lambda: ModRevisionGuard(key="/election", mod_revision=0),
        on_change=lambda key: changed.add(key.name),
    )
    async with following(caches), asyncio.TaskGroup() as group:
        task = group.create_task(checker.run())
        yield changed
        task.cancel()


async def test_a_group_in_use_is_not_checked_until_it_is_free(world: World) -> None:
    await world.join("ab")
    serving = placed_on("pair", "a", "b")
    await world.store.commit([], [codec.put_spec(serving)])
    await world.apply(shard_group("pair", "ab", world.clock))
    async with checking(world) as changed:
        await world.clock.advance(2 * INTERVAL_S)
        assert (world.cables.started, changed) == ([], {"pair"})
        await world.store.commit([], [Delete(key=keys.spec_key("Replica", serving.name))])
        await world.clock.advance(60)
    assert world.cables.started == ["pair"]


async def test_a_replica_that_is_placed_on_the_same_macs_ends_the_check(world: World) -> None:
    await world.join("ab")
    world.cables.gb_per_second = None  # it would not finish
    await world.apply(shard_group("pair", "ab", world.clock))
    await world.clock.advance(INTERVAL_S)
    async with checking(world) as changed:
        await world.clock.advance(6)
        assert len((await world.store.list(keys.FABRIC_TEST_PREFIX)).items) == 1
        await world.store.commit([], [codec.put_spec(placed_on("other", "a", "b"))])
        await world.clock.advance(1)
        assert not (await world.store.list(keys.FABRIC_TEST_PREFIX)).items
        assert changed == set()


async def test_a_check_that_hangs_is_recorded_as_failed(world: World) -> None:
    await world.join("ab")
    world.cables.gb_per_second = None
    await world.apply(shard_group("pair", "ab", world.clock))
    async with leading(world.store, clock=world.clock):
        await world.clock.advance(INTERVAL_S / 2)
        reason, message = await world.reason("pair")
    assert reason == "TestBrokeOff"
    assert "did not start it" in message
