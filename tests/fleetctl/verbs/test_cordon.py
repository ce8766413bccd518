"""`fleetctl cordon` of a node that has no spec yet."""

import pytest

from schemas.node import Node
from store import objects
from store.port import Transport
from tests.support.fleetctl_manifests import (
    read_node,
)
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.reconciler_agents import put_node

pytestmark = pytest.mark.timeout(120)


async def test_a_node_without_a_spec_gets_one(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await shared_transport.commit([], [put_node("fresh")])
    same = await shared_fleet.ctl("uncordon", "fresh")
    assert same.out == "node/fresh already uncordoned\n"
    assert await objects.get(shared_transport, Node, "fresh") is None
    assert (await shared_fleet.ctl("cordon", "fresh")).out == "node/fresh cordoned\n"
    node = await read_node(shared_transport, "fresh")
    assert (node.metadata.uid, node.metadata.generation) == ("uid-fresh", 2)
    assert node.spec.unschedulable
