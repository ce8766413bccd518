"""Nodes that change though nothing is written about them: time passes, they come and go, others are the same machine."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta

import pytest

from reconciler.nodes.liveness import Flapping
from reconciler.nodes.node_views import NodeViewCache, Now
from schemas.meta import ObjectMeta
from schemas.node import Node
from schemas.replica import RankStatus, Replica
from store import codec, keys
from store.port import Delete, Operation, Put
from tests.reconciler.test_fleet import World, pool
from tests.support.fleets import GIB, NOW, replica
from tests.support.reconciler_agents import node_status, put_node


@pytest.fixture
async def store() -> AsyncIterator[World]:
    made = World()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(informer.run()) for informer in made.caches.all()]
        async with asyncio.timeout(30):
            for informer in made.caches.all():
                await informer.wait_synced()
        yield made
        for task in tasks:
            task.cancel()


def machine(name: str, uuid: str, *, is_part: bool = False) -> Put:
    said = {"hardware_uuid": uuid, "is_part": is_part}
    return put_node(name, node_status(name).model_copy(update=said))


def registered(name: str, at: datetime) -> Put:
    return codec.put_spec(Node(metadata=ObjectMeta(name=name, creation_timestamp=at)))


def peak(of: Replica, size: int, *, uid: str = "") -> Put:
    node = of.spec.ranks[0].node
    status = RankStatus(replica_uid=uid or of.metadata.uid, node=node, peak_bytes=size)
    return Put(key=keys.rank_key(node, of.name, 0), value=codec.encode(status))


async def reasons(
    store: World, memory: NodeViewCache, moment: Now, *operations: Operation
) -> dict[str, list[str]]:
    """Return what holds each node back after these changes, as a look at everything finds it too."""
    if operations:
        await store.write(*operations)
    table = memory.look(store.fleet, moment)
    assert table.nodes == NodeViewCache("1.0.0").look(store.fleet, moment).nodes
    assert memory.look(store.fleet, moment) is table
    return {node.name: [hold.reason for hold in node.holds] for node in table.nodes if node.holds}


async def test_doubles(store: World) -> None:
    memory, moment = NodeViewCache("1.0.0"), Now(now=NOW)
    old, young = registered("b", NOW), registered("a", NOW + timedelta(days=1))
    double = {"a": ["DuplicateHardware"]}
    both = (machine("a", "M"), machine("b", "M"))
    assert await reasons(store, memory, moment, old, young, *both) == double
    assert await reasons(store, memory, moment, machine("b", "N")) == {}
    assert await reasons(store, memory, moment, machine("b", "M", is_part=True)) == double
    assert await reasons(store, memory, moment, machine("a", "M", is_part=True)) == {}
    assert await reasons(store, memory, moment, machine("b", "M")) == double
    # Whoever was there first keeps what it has, and being registered again is being young.
    again = registered("b", NOW + timedelta(days=2))
    assert await reasons(store, memory, moment, again) == {"b": ["DuplicateHardware"]}
    gone = Delete(key=keys.status_key("Node", "a"))
    assert await reasons(store, memory, moment, gone) == {}


async def test_time_passes(store: World) -> None:
    memory, night = NodeViewCache("1.0.0"), {"start": "22:00", "end": "07:00"}
    desk = pool("desk", nodes=("a",), policy={"quiet_hours": (night,)})
    await store.have(desk)
    await store.write(put_node("a"), put_node("b"))
    noon = Now(now=NOW.replace(hour=12))
    assert await reasons(store, memory, noon) == {}
    assert memory.next_change_s(noon) == 10 * 3600
    evening = Now(now=NOW.replace(hour=22))
    assert await reasons(store, memory, evening) == {"a": ["NodeWithheld"]}
    assert memory.next_change_s(evening) == 9 * 3600
    # A clock that is put back; a pool that lets go; one that takes another node.
    assert await reasons(store, memory, noon) == {}
    assert await reasons(store, memory, evening) == {"a": ["NodeWithheld"]}
    other = pool("desk", nodes=("b",), policy={"quiet_hours": (night,)})
    found = await reasons(store, memory, evening, codec.put_spec(other))
    assert found == {"b": ["NodeWithheld"]}
    free = codec.put_spec(pool("desk", nodes=("b",)))
    assert await reasons(store, memory, evening, free) == {}
    assert memory.next_change_s(evening) is None


async def test_who_comes_and_goes_is_held_back_and_released(store: World) -> None:
    memory = NodeViewCache("1.0.0")
    await store.write(put_node("a"), put_node("b"))
    flap = Flapping(returns=3, until=30.0, until_at=NOW)
    assert await reasons(store, memory, Now(now=NOW, flapping={"b": flap})) == {
        "b": ["NodeFlapping"]
    }
    assert await reasons(store, memory, Now(now=NOW)) == {}


async def test_what_was_measured_counts_where_it_is_more(store: World) -> None:
    memory, moment, mine = NodeViewCache(), Now(now=NOW), replica(0).replica
    await store.have(mine)
    await store.write(put_node("a"))
    reports: list[tuple[Operation, int]] = [
        (peak(mine, GIB // 2), GIB),
        (peak(mine, 3 * GIB), 3 * GIB),
        (peak(mine, 3 * GIB, uid="an-earlier-one"), GIB),
        (peak(mine, 2 * GIB), 2 * GIB),
        (Delete(key=keys.rank_key("a", mine.name, 0)), GIB),
    ]
    for report, used in reports:
        await store.write(report)
        (node,) = memory.look(store.fleet, moment).nodes
        assert node.used_bytes == used
        assert node == NodeViewCache().look(store.fleet, moment).nodes[0]
