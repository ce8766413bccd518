"""The cached nodes equal a fresh read after every change, in any order.

Also without a write: time passes, nodes flap, nodes share a machine.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.deployments.placer import Placer
from reconciler.listers.caches import ChangeJournal
from reconciler.listers.lister import Lister
from reconciler.nodes.liveness import Flapping, Now
from reconciler.nodes.node_views import NodeViewCache
from reconciler.placement.inputs import request_for
from reconciler.placement.table import NodeTable
from schemas.meta import ApiObject, ObjectMeta
from schemas.node import Node, NodeSpec, NodeStatus, Taint
from schemas.pools import ReservedResources
from schemas.replica import RankStatus, Replica
from schemas.shardgroup import GroupMember, ShardGroup, ShardGroupSpec
from store import codec, keys
from store.port import Delete, Operation, Put
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.reconciler_world import CachedStore, cached_store, pool
from tests.support.sampling import samples
from tests.support.world import GIB, NOW, deployment, replica

NODES = ("a", "b", "c")
MODELS = ("qwen", "llama")
POLICIES = ({"mains_only": True}, {"quiet_hours": ({"start": "20:00", "end": "07:00"},)})


def spec_of(dice: random.Random) -> ApiObject:
    """Return an object of a kind that placement depends on."""
    node = dice.choice(NODES)
    taint = Taint(key="owner", effect="NoSchedule")
    owner = deployment(name=dice.choice(MODELS), priority=dice.randrange(2))
    reserved = ReservedResources(memory=dice.choice(("1Gi", "2Gi")))
    members = tuple(GroupMember(node=name) for name in dice.sample(NODES, 2))
    return dice.choice(
        (
            Node(
                metadata=ObjectMeta(name=node, labels={"rack": dice.choice("12")}),
                spec=NodeSpec(unschedulable=dice.random() < 0.5, taints=(taint,)),
            ),
            owner,
            replica(dice.randrange(3), on=node, of=owner).replica,
            replica(dice.randrange(3), on=node, of=owner, is_deleting=True).replica,
            pool("lab", nodes=(node,), reserved=reserved),
            pool("desk", nodes=(node,), policy=dice.choice(POLICIES)),
            ShardGroup(
                metadata=ObjectMeta(name="pair"),
                spec=ShardGroupSpec(
                    members=members, reservation=dice.choice(("Exclusive", "Shared"))
                ),
            ),
        )
    )


def machine_of(dice: random.Random, node: str) -> NodeStatus:
    """Return a node that may be the same machine as another, and may be on battery."""
    said = {
        "hardware_uuid": dice.choice(("", "m", "n")),
        "is_part": dice.random() < 0.3,
        "power": dice.choice(("Mains", "Battery")),
    }
    return node_status(node).model_copy(update=said)


def put_peak(dice: random.Random, node: str) -> Put:
    """Return a report of what a replica's engine took; some speak of an earlier replica."""
    name, ordinal = dice.choice(MODELS), dice.randrange(3)
    uid = dice.choice((f"uid-{name}-{ordinal}", "another"))
    status = RankStatus(replica_uid=uid, node=node, peak_bytes=dice.randrange(4) * GIB)
    return Put(key=keys.rank_key(node, f"{name}-{ordinal}", 0), value=codec.encode(status))


def moment_of(dice: random.Random) -> Now:
    """Return any time of the day, with any nodes that are held back."""
    flap = Flapping(returns=3, until=0.0, until_at=NOW)
    return Now(
        time=NOW + timedelta(hours=dice.randrange(24)),
        flapping={name: flap for name in NODES if dice.random() < 0.2},
    )


def change_of(dice: random.Random) -> Operation:
    """Return a random write: a new object, a change, or a deletion."""
    node = dice.choice(NODES)
    put: Put = dice.choice(
        (
            put_node(node, node_status(node, memory_gib=dice.choice((8, 16)))),
            put_node(node, node_status(node, model=dice.choice(MODELS))),
            put_node(node, machine_of(dice, node)),
            put_peak(dice, node),
            put_lease(node),
            codec.put_spec(spec_of(dice)),
            codec.put_spec(spec_of(dice)),
            codec.put_spec(spec_of(dice)),
            Put(key=keys.status_key("Replica", "qwen-0"), value=b"{}"),
            Put(key=keys.spec_key("Replica", "qwen-0"), value=b"not to be read"),
        )
    )
    return Delete(key=put.key) if dice.random() < 0.25 else put


def in_order(table: NodeTable) -> object:
    """Return everything that placement reads of a table, and what it decides."""
    columns = [table.allocatable, table.used, table.promised, table.ending]
    placer = Placer(table)
    wants = [request_for(deployment(name=name, path=path)) for name in MODELS for path in MODELS]
    outcomes = [placer.claim(want) for want in wants]
    return table.nodes, table.rows, table.counts, [c.tolist() for c in columns], outcomes


async def check(seed: int, *, looks: float, limit: int) -> None:
    dice, journal = random.Random(seed), ChangeJournal(limit)
    async with cached_store() as store:
        caches = store.caches
        for informer in (caches.specs, caches.statuses, caches.leases, caches.ranks):
            informer.on_change(journal.note)
        fleet = Lister(replace(caches, changed=journal))
        cache, moment = NodeViewCache(), moment_of(dice)
        for _ in range(25):
            change = change_of(dice)
            if isinstance(change, Delete) and await store.transport.get(change.key) is None:
                continue
            await store.write(change)
            if dice.random() < looks:
                moment = moment_of(dice) if dice.random() < 0.4 else moment
                table = cache.refresh(fleet, moment)
                assert in_order(table) == in_order(NodeViewCache().refresh(fleet, moment))
                assert cache.refresh(fleet, moment) is table


@pytest.mark.parametrize("limit", [3, 1000], ids=["forgetful", "mindful"])
@settings(max_examples=samples(12))
@given(st.integers(0, 2**32), st.sampled_from([0.3, 1.0]))
def test_the_cache_equals_a_fresh_read(limit: int, seed: int, looks: float) -> None:
    """Forgetful: the journal is too short, so everything is read again and again."""
    asyncio.run(check(seed, looks=looks, limit=limit))


@given(st.integers(1, 5), st.lists(st.sampled_from("abcdefgh"), max_size=12), st.integers(0, 12))
def test_a_journal_returns_changed_keys_or_none_if_it_dropped_some(
    limit: int, changes: list[str], at: int
) -> None:
    journal = ChangeJournal(limit)
    first, place = journal.since(None)
    assert first is None
    for number, key in enumerate(changes):
        if number == at:
            _, place = journal.since(place)
        journal.note(key)
    missed = changes[at:] if at < len(changes) else changes
    found, after = journal.since(place)
    assert found == (None if len(missed) > limit else set(missed))
    assert journal.since(after) == (set(), after)


@pytest.fixture
async def store() -> AsyncIterator[CachedStore]:
    async with cached_store() as made:
        yield made


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
    store: CachedStore, memory: NodeViewCache, moment: Now, *operations: Operation
) -> dict[str, list[str]]:
    """Return the holds of each node after these changes, equal to those of a fresh read."""
    if operations:
        await store.write(*operations)
    table = memory.refresh(store.fleet, moment)
    assert table.nodes == NodeViewCache("1.0.0").refresh(store.fleet, moment).nodes
    assert memory.refresh(store.fleet, moment) is table
    return {node.name: [hold.reason for hold in node.holds] for node in table.nodes if node.holds}


async def test_doubles(store: CachedStore) -> None:
    memory, moment = NodeViewCache("1.0.0"), Now(time=NOW)
    old, young = registered("b", NOW), registered("a", NOW + timedelta(days=1))
    double = {"a": ["DuplicateHardware"]}
    both = (machine("a", "M"), machine("b", "M"))
    assert await reasons(store, memory, moment, old, young, *both) == double
    assert await reasons(store, memory, moment, machine("b", "N")) == {}
    assert await reasons(store, memory, moment, machine("b", "M", is_part=True)) == double
    assert await reasons(store, memory, moment, machine("a", "M", is_part=True)) == {}
    assert await reasons(store, memory, moment, machine("b", "M")) == double
    # The first node keeps its replicas; a node that registers again is young.
    again = registered("b", NOW + timedelta(days=2))
    assert await reasons(store, memory, moment, again) == {"b": ["DuplicateHardware"]}
    gone = Delete(key=keys.status_key("Node", "a"))
    assert await reasons(store, memory, moment, gone) == {}


async def test_time_passes(store: CachedStore) -> None:
    memory, night = NodeViewCache("1.0.0"), {"start": "22:00", "end": "07:00"}
    desk = pool("desk", nodes=("a",), policy={"quiet_hours": (night,)})
    await store.have(desk)
    await store.write(put_node("a"), put_node("b"))
    noon = Now(time=NOW.replace(hour=12))
    assert await reasons(store, memory, noon) == {}
    assert memory.next_change_s(noon) == 10 * 3600
    evening = Now(time=NOW.replace(hour=22))
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


async def test_a_flapping_node_is_held_back_and_released(store: CachedStore) -> None:
    memory = NodeViewCache("1.0.0")
    await store.write(put_node("a"), put_node("b"))
    flap = Flapping(returns=3, until=30.0, until_at=NOW)
    assert await reasons(store, memory, Now(time=NOW, flapping={"b": flap})) == {
        "b": ["NodeFlapping"]
    }
    assert await reasons(store, memory, Now(time=NOW)) == {}


async def test_a_peak_above_the_proof_counts(store: CachedStore) -> None:
    memory, moment, mine = NodeViewCache(), Now(time=NOW), replica(0).replica
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
        (node,) = memory.refresh(store.fleet, moment).nodes
        assert node.used_bytes == used
        assert node == NodeViewCache().refresh(store.fleet, moment).nodes[0]
