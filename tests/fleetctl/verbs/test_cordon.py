"""cordon, uncordon, taint and label: output and exit codes as in kubectl."""

import pytest

from schemas.meta import ObjectMeta
from schemas.node import Node
from store import codec, objects
from store.port import Transport
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.reconciler_agents import put_lease, put_node

pytestmark = pytest.mark.timeout(120)


async def joined(
    shared_transport: Transport, *names: str, labels: dict[str, str] | None = None
) -> None:
    """Have nodes that joined, with the specs that the reconciler writes."""
    for name in names:
        meta = ObjectMeta(name=name, uid=f"uid-{name}", generation=1, labels=labels or {})
        puts = [put_node(name), put_lease(name), codec.put_spec(Node(metadata=meta))]
        await shared_transport.commit([], puts)


async def node(shared_transport: Transport, name: str) -> Node:
    found = await objects.get(shared_transport, Node, name)
    assert found is not None
    return found


async def test_cordon_and_uncordon(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await joined(shared_transport, "mac-1", "mac-2", labels={"site": "berlin"})
    done = await shared_fleet.ctl("cordon", "mac-1")
    assert (done.code, done.out, done.err) == (0, "node/mac-1 cordoned\n", "")
    seen = await node(shared_transport, "mac-1")
    assert (seen.spec.unschedulable, seen.metadata.generation) == (True, 2)
    again = await shared_fleet.ctl("cordon", "-l", "site=berlin")
    assert again.out == "node/mac-1 already cordoned\nnode/mac-2 cordoned\n"
    assert (await node(shared_transport, "mac-1")).metadata.generation == 2
    listed = await shared_fleet.ctl("get", "nodes", "mac-1")
    assert "Ready,Cordoned" in listed.out
    back = await shared_fleet.ctl("uncordon", "node/mac-1", "no/mac-2", "mac-1")
    assert back.out == "node/mac-1 uncordoned\nnode/mac-2 uncordoned\n"
    assert (await shared_fleet.ctl("uncordon", "mac-1")).out == "node/mac-1 already uncordoned\n"
    dry = await shared_fleet.ctl("cordon", "mac-1", "--dry-run=client")
    assert dry.out == "node/mac-1 cordoned (dry run)\n"
    assert not (await node(shared_transport, "mac-1")).spec.unschedulable
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
    seen = await node(shared_transport, "fresh")
    assert (seen.metadata.uid, seen.metadata.generation) == ("uid-fresh", 2)
    assert seen.spec.unschedulable


async def test_taint(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await joined(shared_transport, "tin-1", "tin-2")
    done = await shared_fleet.ctl(
        "taint", "tin-1", "owner=anna:NoSchedule", "slow:PreferNoSchedule"
    )
    assert (done.code, done.out) == (0, "node/tin-1 tainted\n")
    twice = await shared_fleet.ctl("taint", "nodes", "tin-1", "owner=ben:NoSchedule")
    assert (twice.code, twice.out) == (1, "")
    assert twice.err == (
        "error: node/tin-1 already has owner=anna:NoSchedule; change the value with --overwrite\n"
    )
    other = await shared_fleet.ctl("taint", "tin-1", "owner=ben:NoSchedule", "--overwrite")
    assert other.out == "node/tin-1 tainted\n"
    both = await shared_fleet.ctl("taint", "tin-1", "new:NoExecute", "slow-")
    assert both.out == "node/tin-1 modified\n"
    seen = await node(shared_transport, "tin-1")
    assert [(t.key, t.value, t.effect) for t in seen.spec.taints] == [
        ("owner", "ben", "NoSchedule"),
        ("new", "", "NoExecute"),
    ]
    assert seen.metadata.generation == 4
    missing = await shared_fleet.ctl("taint", "tin-1", "slow-")
    assert missing.code == 1
    assert missing.err == (
        'error: taint "slow" not found on node/tin-1, which has owner=ben:NoSchedule, new:NoExecute\n'
    )
    # One of several that cannot be done: none is.
    part = await shared_fleet.ctl("taint", "tin-2", "tin-1", "new:NoExecute")
    assert (part.code, part.out) == (1, "")
    assert (await node(shared_transport, "tin-2")).spec.taints == ()
    gone = await shared_fleet.ctl("taint", "tin-1", "owner:NoSchedule-", "new=x:NoExecute-")
    assert gone.out == "node/tin-1 untainted\n"


async def test_label(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await joined(shared_transport, "lab-1", "lab-2", labels={"role": "lab"})
    done = await shared_fleet.ctl("label", "node", "lab-1", "rack=7", "shop.example/floor=2")
    assert (done.code, done.out, done.err) == (0, "node/lab-1 labeled\n", "")
    seen = await node(shared_transport, "lab-1")
    assert seen.metadata.labels == {"role": "lab", "rack": "7", "shop.example/floor": "2"}
    assert seen.metadata.generation == 1  # nothing restarts, nothing rolls
    other = await shared_fleet.ctl("label", "no/lab-1", "rack=8")
    assert (other.code, other.err) == (
        1,
        "error: node/lab-1: 'rack' already has the value 7; change it with --overwrite\n",
    )
    every = await shared_fleet.ctl("label", "nodes", "-l", "role=lab", "rack=8", "--overwrite")
    assert every.out == "node/lab-1 labeled\nnode/lab-2 labeled\n"
    same = await shared_fleet.ctl("label", "node", "lab-1", "rack=8")
    assert same.out == "node/lab-1 not labeled\n"
    off = await shared_fleet.ctl("label", "node", "lab-1", "rack-", "role-", "nobody-", "fleet/os-")
    assert off.out == "node/lab-1 unlabeled\n"
    assert off.err == (
        "label 'nobody' not found on node/lab-1\n"
        "label 'fleet/os' of node/lab-1 is reported by its agent and cannot be removed; set a label with the same key to override "
        "it\n"
    )
    shown = await shared_fleet.ctl("label", "node", "lab-1", "--list")
    assert shown.out == (
        "fleet/chip=Apple-M4\nfleet/node=lab-1\nfleet/os=macOS\nshop.example/floor=2\n"
    )
    pools = "apiVersion: fleet/v1alpha1\nkind: NodePool\nmetadata: {name: p}\nspec: {nodes: [n]}\n"
    await shared_fleet.applied(pools)
    assert (await shared_fleet.ctl("label", "np", "--all", "a=b")).out == "nodepool/p labeled\n"
    listed = await shared_fleet.ctl("label", "nodepools", "p", "--list")
    assert listed.out == "a=b\n"


MISUSED = [
    (("cordon",), 2, "which nodes? Give their names, or -l"),
    (("cordon", "a", "-l", "b=c"), 2, "give the names of nodes, or -l, but not both"),
    (("cordon", "np/a"), 2, "np/a is not a node; write NODE or node/NODE"),
    (("cordon", "mac-1x"), 1, 'error: nodes "mac-1x" not found; did you mean mac-1?\n'),
    (("taint", "mac-1"), 2, "which taint? Give KEY=VALUE:EFFECT"),
    (("taint", "a:NoSchedule"), 2, "which nodes? Give their names, or -l or --all"),
    (("taint", "mac-9", "a:NoSchedule"), 1, 'nodes "mac-9" not found'),
    (("label",), 2, "which objects? Give KIND NAME..."),
    (("label", "node", "mac-1"), 2, "write KEY=VALUE to set a label, KEY- to remove one"),
    (("label", "node", "mac-1", "a=b", "--list"), 2, "or use --list"),
    (("label", "node", "mac-1", "a=b", "a=c"), 2, "a is set twice"),
    (("label", "node", "mac-1", "a=b", "a-"), 2, "a cannot be set and removed at once"),
    (("label", "node", "mac-1", "-a-"), 2, "No such option"),
    (("label", "node", "mac-1", "a=b c"), 2, "'b c' is not a valid value: use at most 63 letters"),
    (("label", "node", "mac-1", "ä=b"), 2, "'ä' is not a valid key: use letters, digits"),
    (("label", "node", "mac-1", "a=b", "c"), 2, "'c' is not a label"),
    (("label", "replicas", "x", "a=b"), 1, "replicas are written by the fleet"),
    (("label", "nodse", "x", "a=b"), 2, "did you mean nodes?"),
    (("label", "rack=7"), 2, "which objects? Give KIND NAME..."),
    (("label", "nodes", "a=b"), 2, "which nodes? Give their names"),
]


@pytest.mark.parametrize(("words", "code", "said"), MISUSED, ids=lambda v: str(v)[:40])
async def test_errors_have_hints(
    shared_fleet: MemoryFleet,
    shared_transport: Transport,
    words: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    await joined(shared_transport, "mac-1")
    done = await shared_fleet.ctl(*words)
    assert done.code == code, done.err
    assert said in done.err
    assert done.out == ""
