"""Pools in the table of nodes: who belongs to one, and what it leaves for models."""

import pytest

from fleetctl.objects.node_pools import read_node_pools
from manifests.trees import object_tree
from schemas.meta import ObjectMeta
from schemas.node import Node, NodeSpec
from schemas.pools import NodePool, NodePoolSpec, NodeSelector, ReservedResources, in_pool
from store import codec, keys
from store.port import Put
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.reconciler_agents import node_status, put_lease, put_node

SELECTORS = {
    "memory": NodeSelector(min_memory="16Gi"),
    "chip": NodeSelector(chips=("Apple M1",)),
    "system": NodeSelector(match_labels={"fleet/os": "macOS", "team": "a"}),
    "node": NodeSelector(match_labels={"fleet/node": "mac-2"}),
    "all": NodeSelector(),
}


def pools() -> list[NodePool]:
    named = NodePoolSpec(nodes=("mac-3",), reserved=ReservedResources(memory="6Gi"))
    big = NodePoolSpec(
        selector=SELECTORS["memory"], reserved=ReservedResources(memory="5Gi", disk="1Gi")
    )
    return [
        NodePool(metadata=ObjectMeta(name="named"), spec=named),
        NodePool(metadata=ObjectMeta(name="big"), spec=big),
        *(
            NodePool(metadata=ObjectMeta(name=name), spec=NodePoolSpec(selector=selector))
            for name, selector in SELECTORS.items()
        ),
    ]


def nodes() -> list[Node]:
    labels = {"mac-1": {"team": "a"}, "mac-2": {}, "mac-3": {"team": "b"}, "mac-4": {"team": "a"}}
    chips = {"mac-1": "Apple M1"}
    return [
        Node(
            metadata=ObjectMeta(name=name, labels=own),
            spec=NodeSpec(),
            status=None
            if name == "mac-4"
            else node_status(
                name, memory_gib=16 if name == "mac-2" else 8, chip=chips.get(name, "Apple M4")
            ),
        )
        for name, own in labels.items()
    ]


@pytest.fixture
async def fleet(shared_fleet: MemoryFleet) -> MemoryFleet:
    puts = [put_node(node.name, node.status) for node in nodes() if node.status is not None]
    specs = [
        Put(
            key=keys.spec_key(api_object.kind, api_object.name),
            value=codec.encode(api_object.model_copy(update={"status": None})),
        )
        for api_object in (*nodes(), *pools())
    ]
    await shared_fleet.store.commit([], [*puts, *specs, put_lease("mac-2")])
    return shared_fleet


async def test_nodes_belong_to_the_pools_that_place_on_them(fleet: MemoryFleet) -> None:
    node_pools = await read_node_pools(fleet.store, [object_tree(one) for one in nodes()])
    for node in nodes():
        expected = sorted(pool.name for pool in pools() if in_pool(pool, node))
        assert list(node_pools[node.name].names) == expected
    assert node_pools["mac-2"].names == ("all", "big", "memory", "node")


async def test_the_table_shows_pools_and_what_they_leave_for_models(fleet: MemoryFleet) -> None:
    done = await fleet.ctl("get", "nodes", "-o", "wide")
    titles, *lines = done.out.splitlines()
    at = titles.index("FOR MODELS"), titles.index("POOLS")
    cells = [[line[place:].split("   ")[0] for place in at] for line in lines]
    assert cells == [
        ["8.0 GiB", "all,chip,system"],
        ["11.0 GiB", "all,big,memory,node"],
        ["2.0 GiB", "all,named"],
        ["<unknown>", "-"],
    ]
    narrow = (await fleet.ctl("get", "nodes")).out
    assert "11.0 GiB" in narrow
    assert "POOLS" not in narrow
    described = (await fleet.ctl("describe", "nodepool/big")).out
    assert "11.0 GiB" in described
