"""Views of nodes and deployments from the store, through real caches."""

from collections.abc import AsyncIterator

import pytest

from reconciler.deployments import observe
from reconciler.deployments.observe import DeploymentView
from reconciler.event_handlers import deployment_name_of
from reconciler.nodes.liveness import Now
from reconciler.nodes.node_views import NodeViewCache
from reconciler.placement.inputs import NodeView
from reconciler.placement.table import NodeTable
from schemas.meta import ObjectKey, ObjectMeta
from schemas.node import MetalDevice, Node, NodeSpec, Taint
from schemas.placement import AntiAffinity, Placement
from schemas.pools import NodeSelector, ReservedResources
from schemas.shardgroup import ShardGroup, ShardGroupSpec
from store import codec, keys
from store.port import Delete, Operation, Put
from tests.support.reconciler_agents import node_status, put_endpoint, put_lease, put_node, put_rank
from tests.support.reconciler_world import CachedStore, cached_store, pool
from tests.support.world import GIB, NOW, deployment, replica, with_metadata

LOOKED = Now(time=NOW)


@pytest.fixture
async def world() -> AsyncIterator[CachedStore]:
    async with cached_store() as store:
        yield store


def look(world: CachedStore, name: str = "qwen", now: Now = LOOKED) -> DeploymentView:
    return observe.observe(world.fleet, name, now, table=NodeTable(()))


def nodes_of(world: CachedStore) -> tuple[NodeView, ...]:
    """Return every node as placement sees it."""
    return NodeViewCache().refresh(world.fleet, LOOKED).nodes


async def test_nodes_and_leases(world: CachedStore) -> None:
    await world.write(put_node("a"), put_node("b"), put_lease("b"), put_lease("unknown"))
    assert world.fleet.node_names() == ["a", "b"]
    assert [(view.name, view.is_ready) for view in nodes_of(world)] == [
        ("a", False),
        ("b", True),
    ]
    await world.write(Delete(key=keys.node_lease_key("b")))
    assert not any(view.is_ready for view in nodes_of(world))


async def test_labels_and_cordon(world: CachedStore) -> None:
    metadata = ObjectMeta(name="a", labels={"rack": "1", "fleet/os": "mine"})
    await world.have(Node(metadata=metadata, spec=NodeSpec(unschedulable=True)))
    await world.write(put_node("a"))
    (view,) = nodes_of(world)
    assert view.is_cordoned
    own = {"fleet/node": "a", "fleet/chip": "Apple-M4"}
    assert view.labels == {**own, "fleet/os": "mine", "rack": "1"}


async def test_the_largest_reservation_counts(world: CachedStore) -> None:
    await world.write(put_node("a"), put_node("b"))
    await world.have(
        pool("small", nodes=("a",), reserved=ReservedResources(memory="1Gi")),
        pool("large", nodes=("a", "gone"), reserved=ReservedResources(memory="3Gi")),
        pool("none", nodes=("b",)),
    )
    seen = {view.name: (view.allocatable_bytes, view.pools) for view in nodes_of(world)}
    assert seen == {
        "a": (5 * GIB, frozenset({"small", "large"})),
        "b": (8 * GIB, frozenset({"none"})),
    }


async def test_selectors(world: CachedStore) -> None:
    big = node_status("b", memory_gib=16, chip="Apple M2 Ultra")
    await world.write(put_node("a"), put_node("b", big))
    for selector, members in (
        (NodeSelector(), ["a", "b"]),
        (NodeSelector(chips=("Apple M4", "Apple M3")), ["a"]),
        (NodeSelector(min_memory="16Gi"), ["b"]),
        (NodeSelector(min_memory="16.1Gi"), []),
        (NodeSelector(match_labels={"fleet/chip": "Apple-M2-Ultra"}), ["b"]),
        (NodeSelector(match_labels={"rack": "1"}), []),
        (NodeSelector(chips=("Apple M4",), min_memory="16Gi"), []),
    ):
        assert world.fleet.pool_members(pool("p", selector=selector)) == members, selector
    assert world.fleet.pool_members(pool("p")) == []


async def test_whatever_is_assigned_takes_memory(world: CachedStore) -> None:
    await world.write(put_node("a"), put_node("b"))
    await world.have(
        replica(0).replica,
        replica(1, is_deleting=True).replica,
        replica(0, of=deployment(name="other")).replica,
        replica(2, on="b").replica,
    )
    seen = {view.name: (view.used_bytes, dict(view.replicas)) for view in nodes_of(world)}
    assert seen == {"a": (3 * GIB, {"qwen": 2, "other": 1}), "b": (GIB, {"qwen": 1})}
    assert world.fleet.expected_nodes() == {"a", "b"}


async def test_a_deleted_node_is_expected_while_it_has_work(world: CachedStore) -> None:
    await world.have(replica(0, on="deleted").replica)
    assert world.fleet.expected_nodes() == {"deleted"}
    assert world.fleet.node_names() == []


async def test_a_replica_as_the_planner_sees_it(world: CachedStore) -> None:
    owner, mine = deployment(), replica(0).replica
    await world.have(owner, mine)
    await world.write(put_rank(mine, holds=False), put_lease("a"))
    (view,) = look(world).replicas
    assert view.is_owned
    assert [view.is_ready, view.is_stopped, view.is_node_lost] == [False] * 3
    assert view.problem == "so it is"
    await world.write(put_endpoint(mine), put_rank(mine))
    lost = Now(time=NOW, lost=frozenset({"a"}))
    (view,) = look(world, "qwen", lost).replicas
    assert (view.is_ready, view.is_node_lost, view.problem) == (True, True, "")
    item = await world.transport.get(keys.spec_key("Replica", "qwen-0"))
    assert item is not None
    assert view.version == item.mod_revision
    await world.write(put_rank(mine, "Stopped"))
    (view,) = look(world).replicas
    assert view.is_stopped


async def test_words_about_an_earlier_replica_are_void(world: CachedStore) -> None:
    old = replica(0).replica
    await world.have(deployment(), with_metadata(old, uid="new"))
    await world.write(put_endpoint(old), put_rank(old, "Stopped"))
    (view,) = look(world).replicas
    assert (view.is_ready, view.is_stopped) == (False, False)
    # Nor is a deployment of the same name the owner.
    await world.have(with_metadata(deployment(), uid="second"))
    (view,) = look(world).replicas
    assert not view.is_owned


async def test_the_cached_nodes_equal_fresh_ones(world: CachedStore) -> None:
    """Each change shows, what did not change is the very same, and nothing depends on the memory."""
    memory = NodeViewCache()
    taint = Taint(key="owner", effect="NoSchedule")
    group = ShardGroupSpec.model_validate(
        {"members": ({"node": "a"}, {"node": "c"}), "reservation": "Exclusive"}
    )
    changes: list[list[Operation]] = [
        [put_node("a"), put_node("b"), put_lease("a")],
        [codec.put_spec(deployment(replicas=2)), codec.put_spec(replica(0).replica)],
        [codec.put_spec(replica(1, on="b").replica)],
        [codec.put_spec(deployment(replicas=2, priority=3))],
        [codec.put_spec(replica(0, is_deleting=True).replica)],
        [
            codec.put_spec(
                pool("lab", nodes=("a",), reserved=ReservedResources(memory="1Gi"), priority=3)
            )
        ],
        [codec.put_spec(Node(metadata=ObjectMeta(name="a"), spec=NodeSpec(taints=(taint,))))],
        [codec.put_spec(ShardGroup(metadata=ObjectMeta(name="pair"), spec=group))],
        [put_lease("b"), put_node("c")],
        [put_node("b", node_status("b", memory_gib=16))],
        [Delete(key=keys.spec_key("Replica", "qwen-1")), Delete(key=keys.node_lease_key("a"))],
        [Delete(key=keys.status_key("Node", "a"))],
    ]
    before = memory.refresh(world.fleet, LOOKED)
    for operations in changes:
        await world.write(*operations)
        table = memory.refresh(world.fleet, LOOKED)
        assert table.nodes == nodes_of(world)
        assert table.nodes != before.nodes
        assert memory.refresh(world.fleet, LOOKED) is table
        before = table


async def test_hardware_taints_and_pool_priority(world: CachedStore) -> None:
    taint = Taint(key="owner", effect="NoSchedule")
    await world.have(
        Node(metadata=ObjectMeta(name="a"), spec=NodeSpec(taints=(taint,))),
        pool("low", nodes=("a",), priority=5),
        pool("high", nodes=("a",), priority=50),
    )
    odd = node_status("b", chip="Intel Xeon")
    # The measured bandwidth of a listed chip, from before it was listed, does not count.
    measured = {"metal_device": MetalDevice(copy_gbps=250.5)}
    known = node_status("a", chip="Apple M4 Max").model_copy(update=measured)
    newer = node_status("c", chip="Apple M9").model_copy(update=measured)
    await world.write(put_node("a", known), put_node("b", odd), put_node("c", newer))
    a, b, c = nodes_of(world)
    assert (a.chip, a.gpu_cores, a.memory_bytes) == ("Apple M4 Max", 10, 8 * GIB)
    assert (a.bandwidth_gbps, a.taints, a.pool_priority) == (410, (taint,), 50)
    assert (b.bandwidth_gbps, b.taints, b.pool_priority) == (0, (), 0)
    assert c.bandwidth_gbps == 250.5


async def test_allocations_have_priority_and_version(world: CachedStore) -> None:
    ending = replica(1, is_deleting=True).replica
    await world.have(deployment(replicas=2, priority=7), replica(0).replica, ending)
    await world.write(put_node("a"))
    (view,) = nodes_of(world)
    assert [(t.replica, t.deployment, t.priority, t.is_ending) for t in view.allocations] == [
        ("qwen-0", "qwen", 7, False),
        ("qwen-1", "qwen", 7, True),
    ]
    version = world.fleet.spec_version(ObjectKey("Replica", "qwen-0"))
    assert view.allocations[0].version == version > 0
    assert (view.used_bytes, view.ending_bytes, view.replicas) == (2 * GIB, GIB, {"qwen": 2})


async def test_keeping_apart_holds_for_both_sides(world: CachedStore) -> None:
    by_name = Placement(anti_affinity=AntiAffinity(deployments=("b",)))
    by_label = Placement(anti_affinity=AntiAffinity(match_labels={"team": "x"}))
    teammate = with_metadata(deployment(name="d"), labels={"team": "x"})
    await world.have(
        deployment(name="a", placement=by_name),
        deployment(name="b"),
        deployment(name="c", placement=by_label),
        teammate,
        deployment(name="e", placement=Placement(anti_affinity=AntiAffinity())),
    )
    found = {name: look(world, name).apart_from for name in "abcde"}
    assert found == {"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c"}, "e": frozenset()}


async def test_rivals_are_deployments_of_a_higher_priority_with_missing_replicas(
    world: CachedStore,
) -> None:
    await world.have(
        deployment(replicas=9),
        deployment(name="above", priority=1, replicas=3),
        deployment(name="highest", priority=2, replicas=1),
        deployment(name="has-all", priority=2, replicas=1),
        deployment(name="going", priority=2, replicas=1, is_deleting=True),
        deployment(name="below", priority=-1, replicas=1),
        replica(0, of=deployment(name="has-all")).replica,
        replica(0, of=deployment(name="above")).replica,
        replica(1, of=deployment(name="above"), is_deleting=True).replica,
    )
    view = look(world)
    found = [(rival.request.name, rival.missing) for rival in view.rivals]
    assert found == [("highest", 1), ("above", 2)]
    view = look(world, "highest")
    assert view.rivals == ()


async def test_a_replica_on_a_lost_node_is_missing_for_others(world: CachedStore) -> None:
    """It preempts room elsewhere; the victim's deployment must not take that room back first."""
    above = deployment(name="above", priority=1, replicas=1)
    await world.have(deployment(), above, replica(0, of=above, on="a").replica)
    assert look(world).rivals == ()
    lost = Now(time=NOW, lost=frozenset({"a"}))
    (rival,) = look(world, "qwen", lost).rivals
    assert (rival.request.name, rival.missing) == ("above", 1)


async def test_unplaced_deployments(world: CachedStore) -> None:
    await world.have(
        deployment(replicas=2),
        deployment(replicas=1, name="other"),
        deployment(replicas=0, name="none"),
        replica(0).replica,
    )
    assert world.fleet.unplaced_deployments() == {"qwen", "other"}


@pytest.mark.parametrize("value", [b"", b"{}", b"\xff", b'{"kind":"ModelDeployment","future":1}'])
async def test_an_undecodable_object_keeps_its_last_good_value(
    world: CachedStore, value: bytes
) -> None:
    key = ObjectKey("ModelDeployment", "qwen")
    await world.have(deployment(replicas=3))
    assert world.fleet.is_readable(key)
    await world.write(Put(key=keys.spec_key(*key), value=value))
    assert not world.fleet.is_readable(key)
    assert world.fleet.unplaced_deployments() == {"qwen"}
    await world.have(deployment(replicas=0))
    assert world.fleet.is_readable(key)
    assert world.fleet.unplaced_deployments() == set()


async def test_foreign_keys_below_the_prefixes_are_ignored(world: CachedStore) -> None:
    prefixes = (keys.RANK_PREFIX, keys.ENDPOINT_PREFIX, keys.NODE_LEASE_PREFIX)
    stray = [
        *(f"{keys.SPEC_PREFIX}{name}" for name in ("stray", "Unheard/of", "/")),
        *(f"{keys.STATUS_PREFIX}{name}" for name in ("stray", "Unheard/of", "Event/x")),
        *(f"{prefix}x" for prefix in prefixes),
    ]
    await world.write(*(Put(key=key, value=b"hello") for key in stray), put_node("a"))
    await world.have(deployment())
    assert world.fleet.node_names() == ["a"]
    assert world.fleet.unplaced_deployments() == {"qwen"}


@pytest.mark.parametrize(
    ("name", "wanted"), [("qwen-0", "qwen"), ("a-1-12", "a-1"), ("odd", ""), ("x.y-3", "x.y")]
)
def test_deployment_of(name: str, wanted: str) -> None:
    assert deployment_name_of(name) == wanted
