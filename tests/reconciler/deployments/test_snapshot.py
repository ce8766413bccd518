"""The snapshot of a fleet, open to supposed objects, and the groups that can serve a model."""

from dataclasses import replace
from datetime import UTC, datetime

from machinery.clock import SystemClock
from reconciler.deployments import snapshot
from reconciler.deployments.model_fit import fit_group, fit_nodes
from reconciler.deployments.placer import PreemptingAssignment
from reconciler.placement.inputs import PlacementRequest, request_for
from schemas.deployment import ModelDeployment
from schemas.meta import ObjectMeta
from schemas.node import ModelReport, Node, NodeLifeStatus, NodeSpec
from schemas.shardgroup import GroupMember, ShardGroup, ShardGroupSpec
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Delete, Put
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.reconciler_world import BIG, group, mac, sharded
from tests.support.world import condition, deployment, proof, replica

CLOCK = SystemClock()


def node(name: str, *, is_cordoned: bool = False) -> Node:
    return Node(metadata=ObjectMeta(name=name), spec=NodeSpec(unschedulable=is_cordoned))


async def store_of(*deployments: ModelDeployment) -> MemoryTransport:
    transport = MemoryTransport(CLOCK)
    objects = (*deployments, node("a"), node("b", is_cordoned=True))
    puts = [codec.put_spec(obj) for obj in objects]
    await transport.commit([], [*puts, put_node("a"), put_node("b"), put_lease("a")])
    return transport


async def test_a_snapshot_reads_the_store_and_writes_nothing() -> None:
    low = deployment(name="low", replicas=2)
    transport = await store_of(low)
    there = replica(0, of=low, on="a").replica
    await transport.commit([], [codec.put_spec(there)])
    before = (await transport.status()).revision
    fleet = await snapshot.take(transport, CLOCK)
    assert [model_deployment.name for model_deployment in fleet.deployments()] == ["low"]
    table = fleet.table()
    assert {view.name: (view.is_ready, view.is_cordoned) for view in table.nodes} == {
        "a": (True, False),
        "b": (False, True),
    }
    outlook = fleet.outlook("low", table)
    assert [view.name for view in outlook.observed.replicas] == ["low-0"]
    assert [(n.node, n.fits) for n in outlook.nodes] == [
        ("a", True),
        ("b", False),
    ]
    assert outlook.line == "1/2 nodes fit: 1 NotReady"
    assert fleet.unreadable() == []
    assert (await transport.status()).revision == before


async def test_supposed_objects_count_as_written() -> None:
    fleet = await snapshot.take(await store_of(), CLOCK)
    assert fleet.table().nodes[0].is_cordoned is False
    fleet.suppose([node("a", is_cordoned=True), deployment(name="new")])
    assert fleet.table().nodes[0].is_cordoned is True
    assert fleet.outlook("new", fleet.table()).line == "0/2 nodes fit: 1 cordoned, 1 NotReady"
    fleet.suppose([node("a")])
    assert fleet.outlook("new", fleet.table()).nodes[0].fits


async def test_higher_priorities_place_before_and_lower_ones_are_preempted() -> None:
    high = deployment(name="high", priority=9, memory="3Gi")
    mid, low = deployment(name="mid", priority=5), deployment(name="low")
    transport = await store_of(high, mid, low)
    there = replica(0, of=low, on="a", memory=proof(4)).replica
    await transport.commit([], [codec.put_spec(there)])
    fleet = await snapshot.take(transport, CLOCK)
    outlook = fleet.outlook("mid", fleet.table())
    assert isinstance(outlook.outcome, PreemptingAssignment)
    assert outlook.line == (
        "0/2 nodes fit: 1 short of memory (need 2.8 GiB, best has 1.0 GiB), 1 NotReady; preempts low-0 on "
        "a, which frees 4.0 GiB"
    )


async def test_a_node_that_comes_and_goes_is_held_back_here_too() -> None:
    transport = await store_of(deployment(name="one"))
    flapping = condition("Flapping", "CameBackTooOften", "it came back")
    value = codec.encode(NodeLifeStatus(conditions=(flapping,)))
    await transport.commit([], [Put(key=keys.node_life_key("a"), value=value)])
    fleet = await snapshot.take(transport, CLOCK)
    assert fleet.outlook("one", fleet.table()).line == (
        "0/2 nodes fit: 1 held back (it came back), 1 NotReady"
    )


async def test_undecodable_keys_are_named() -> None:
    transport = await store_of()
    key = keys.spec_key("ModelDeployment", "broken")
    await transport.commit([], [Put(key=key, value=b"{}")])
    fleet = await snapshot.take(transport, CLOCK)
    assert fleet.unreadable() == [key]
    assert replace(fleet, now=datetime(2026, 1, 1, tzinfo=UTC)).deployments() == []


async def test_a_group_explains_the_rank_of_each_node() -> None:
    transport = MemoryTransport(CLOCK)
    pair = ShardGroup(
        metadata=ObjectMeta(name="pair"),
        spec=ShardGroupSpec(members=(GroupMember(node="b"), GroupMember(node="a"))),
    )
    reports = (ModelReport(path="qwen", geometry=BIG),)
    puts = [codec.put_spec(one) for one in (pair, sharded())]
    for name in "abc":
        made = node_status(name, memory_gib=10)
        status = made.model_copy(update={"models": reports, "address": f"169.254.0.{ord(name)}"})
        puts += [put_node(name, status), put_lease(name)]
    await transport.commit([], puts)
    fleet = await snapshot.take(transport, CLOCK)
    outlook = fleet.outlook("qwen", fleet.table())
    assert [(n.node, n.fits) for n in outlook.nodes] == [
        ("b", True),
        ("a", True),
        ("c", False),
    ]
    assert outlook.line == "2/3 nodes fit: 1 no members of the ShardGroup"
    assert all(explanation.memory is not None for explanation in outlook.nodes if explanation.fits)
    await transport.commit([], [Delete(key=keys.node_lease_key("a"))])
    fleet = await snapshot.take(transport, CLOCK)
    outlook = fleet.outlook("qwen", fleet.table())
    assert outlook.line == "ShardGroup pair: 1/2 members fit, 2 are needed at once: 1 NotReady"
    refused = {
        explanation.node: explanation.refusal.reason
        for explanation in outlook.nodes
        if explanation.refusal is not None
    }
    assert refused == {"a": "NodeNotReady", "c": "NotInGroup"}


def with_load(request: PlacementRequest, **load: int) -> PlacementRequest:
    return replace(request, spec=request.spec.model_copy(update=load))


def test_a_group_serves_what_no_member_serves_and_its_limit_is_the_last_that_fits() -> None:
    request, macs = request_for(deployment()), {name: mac(name) for name in "ab"}
    assert all(node.refusal is not None for node in fit_nodes(request, list(macs.values())))
    fit = fit_group(request, group(), macs)
    assert (fit.refusal, fit.nodes) == (None, ("a", "b"))
    most = fit.limits.highest_concurrency
    assert 1 <= most < 1024
    assert fit_group(with_load(request, concurrency=most), group(), macs).refusal is None
    beyond = fit_group(with_load(request, concurrency=most + 1), group(), macs)
    assert beyond.refusal is not None
    assert beyond.refusal.reason == "InsufficientMemory"


def test_a_group_names_the_member_that_keeps_it_from_forming() -> None:
    macs = {"a": mac("a"), "b": mac("b", is_ready=False)}
    why = fit_group(request_for(deployment()), group(), macs).refusal
    assert why is not None
    assert (why.reason, why.message.split(":")[0]) == ("NodeNotReady", "b")
