"""`fleetctl label` and `annotate`: output, exit codes and errors."""

import pytest

from store.port import Transport
from tests.support.fleetctl_manifests import (
    apply_deployments,
    join_node,
    read_deployment,
    read_node,
)
from tests.support.fleetctl_runner import MemoryFleet

pytestmark = pytest.mark.timeout(120)


async def test_label(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await join_node(shared_transport, "lab-1", "lab-2", labels={"role": "lab"})
    done = await shared_fleet.ctl("label", "node", "lab-1", "rack=7", "shop.example/floor=2")
    assert (done.code, done.out, done.err) == (0, "node/lab-1 labeled\n", "")
    seen = await read_node(shared_transport, "lab-1")
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


async def test_annotate(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await apply_deployments(shared_fleet, "noted")
    words = ("annotate", "md/noted", "kubernetes.io/change-cause=more, and longer", "owner=anna")
    done = await shared_fleet.ctl(*words)
    assert (done.code, done.out, done.err) == (0, "modeldeployment/noted annotated\n", "")
    assert (await shared_fleet.ctl(*words)).out == "modeldeployment/noted not annotated\n"
    other = await shared_fleet.ctl("annotate", "md", "noted", "owner=ben")
    assert (other.code, other.err) == (
        1,
        "error: modeldeployment/noted: 'owner' already has the value anna; change it with --overwrite\n",
    )
    off = await shared_fleet.ctl("annotate", "md", "noted", "owner-", "nobody-")
    assert (off.out, off.err) == (
        "modeldeployment/noted annotated\n",
        "annotation 'nobody' not found on modeldeployment/noted\n",
    )
    shown = await shared_fleet.ctl("annotate", "md", "noted", "--list")
    assert shown.out == "kubernetes.io/change-cause=more, and longer\n"
    seen = await read_deployment(shared_transport, "noted")
    assert seen.metadata.generation == 1
    version = seen.metadata.resource_version
    late = await shared_fleet.ctl("annotate", "md/noted", "a=b", "--resource-version=1")
    assert late.err == (
        f"error: modeldeployment/noted was changed: its resourceVersion is {version}, not 1. Read it again; "
        "nothing was changed\n"
    )
    known = await shared_fleet.ctl("label", "md/noted", "a=b", f"--resource-version={version}")
    assert known.out == "modeldeployment/noted labeled\n"


MISUSED = [
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
    (("annotate", "md/x"), 2, "write KEY=VALUE to set an annotation, KEY- to remove one"),
    (("annotate", "md/x", "fleet/a=b"), 1, 'modeldeployments "x" not found'),
    (("annotate", "md/x", "--list", "--dry-run=client"), 2, "--list only reads; remove --dry-run"),
    (("annotate", "md/x", "a b=c"), 2, "'a b' is not a valid key: use letters, digits"),
]  # fmt: skip


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
