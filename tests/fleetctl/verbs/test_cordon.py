"""`fleetctl cordon` and `uncordon`: output and exit codes as in kubectl."""

import pytest

from schemas.node import Node
from store import objects
from store.port import Transport
from tests.support.fleetctl_manifests import (
    join_node,
    read_node,
)
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.reconciler_agents import put_node

pytestmark = pytest.mark.timeout(120)


async def test_cordon_and_uncordon(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await join_node(shared_transport, "mac-1", "mac-2", labels={"site": "berlin"})
    done = await shared_fleet.ctl("cordon", "mac-1")
    assert (done.code, done.out, done.err) == (0, "node/mac-1 cordoned\n", "")
    seen = await read_node(shared_transport, "mac-1")
    assert (seen.spec.unschedulable, seen.metadata.generation) == (True, 2)
    again = await shared_fleet.ctl("cordon", "-l", "site=berlin")
    assert again.out == "node/mac-1 already cordoned\nnode/mac-2 cordoned\n"
    assert (await read_node(shared_transport, "mac-1")).metadata.generation == 2
    listed = await shared_fleet.ctl("get", "nodes", "mac-1")
    assert "Ready,Cordoned" in listed.out
    back = await shared_fleet.ctl("uncordon", "node/mac-1", "no/mac-2", "mac-1")
    assert back.out == "node/mac-1 uncordoned\nnode/mac-2 uncordoned\n"
    assert (await shared_fleet.ctl("uncordon", "mac-1")).out == "node/mac-1 already uncordoned\n"
    dry = await shared_fleet.ctl("cordon", "mac-1", "--dry-run=client")
    assert dry.out == "node/mac-1 cordoned (dry run)\n"
    assert not (await read_node(shared_transport, "mac-1")).spec.unschedulable
    nobody = await shared_fleet.ctl("cordon", "-l", "site=paris")
    assert (nobody.code, nobody.out, nobody.err) == (0, "", "no nodes found\n")


async def test_a_node_without_a_spec_gets_one(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await shared_transport.commit([], [put_node("fresh")])
    same = await shared_fleet.ctl("uncordon", "fresh")
    assert same.out == "node/fresh already uncordoned\n"
    assert await objects.get(shared_transport, Node, "fresh") is None
    assert (await shared_fleet.ctl("cordon", "fresh")).out == "node/fresh cordoned\n"
    seen = await read_node(shared_transport, "fresh")
    assert (seen.metadata.uid, seen.metadata.generation) == ("uid-fresh", 2)
    assert seen.spec.unschedulable


MISUSED = [
    (("cordon",), 2, "which nodes? Give their names, or -l"),
    (("cordon", "a", "-l", "b=c"), 2, "give the names of nodes, or -l or --all, but not both"),
    (("cordon", "np/a"), 2, "nodepools are not nodes; write NAME or node/NAME"),
    (("cordon", "mac-1x"), 1, 'error: nodes "mac-1x" not found; did you mean mac-1?\n'),
]


@pytest.mark.parametrize(("words", "code", "expected"), MISUSED, ids=lambda v: str(v)[:40])
async def test_errors_have_hints(
    shared_fleet: MemoryFleet,
    shared_transport: Transport,
    words: tuple[str, ...],
    code: int,
    expected: str,
) -> None:
    await join_node(shared_transport, "mac-1")
    done = await shared_fleet.ctl(*words)
    assert done.code == code, done.err
    assert expected in done.err
    assert done.out == ""
