"""`fleetctl describe`: the sections of each kind."""

import pytest

from machinery.clock import SystemClock
from schemas.deployment import HubReference, ModelSource
from schemas.gitsource import Drift, DriftedField, GitSourceStatus, InventoryEntry
from schemas.meta import ObjectMeta
from schemas.model_snapshot import ModelSnapshot, SnapshotWeights
from schemas.node import ModelReport, NodeLease, WiredLimit
from schemas.pools import NodePool, NodePoolSpec
from schemas.shardgroup import ShardGroupStatus
from store import codec, keys
from store.port import Delete, Put, Transport
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.reconciler_agents import node_status, put_node
from tests.support.world import GEOMETRY, NOW, deployment

pytestmark = pytest.mark.timeout(180)

MANIFESTS = b"""
apiVersion: fleet/v1alpha1
kind: Node
metadata: {name: mac-1, labels: {site: home}}
---
apiVersion: fleet/v1alpha1
kind: Node
metadata: {name: mac-2}
---
apiVersion: fleet/v1alpha1
kind: NodePool
metadata: {name: desk}
spec: {nodes: [mac-1]}
---
apiVersion: fleet/v1alpha1
kind: ShardGroup
metadata: {name: pair}
spec:
  members: [{node: mac-1}, {node: mac-2, addresses: [10.0.0.2]}, {node: mac-9}]
  size: 2
---
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: qwen, annotations: {note: hello}}
spec: {model: {path: none}}
---
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: gone}
spec: {model: {path: none}}
---
apiVersion: fleet/v1alpha1
kind: ModelRoute
metadata: {name: main}
spec:
  model: best
  backends: [{deployment: qwen, weight: 3}, {deployment: gone, weight: 1}]
  rules: [{headers: [{name: x-beta}], backends: [{deployment: qwen}]}]
  fallbacks: [qwen]
---
apiVersion: fleet/v1alpha1
kind: GitSource
metadata: {name: home}
spec: {repository: "https://example.org/fleet.git"}
"""


@pytest.fixture(scope="module")
async def described(shared_fleet: MemoryFleet, shared_transport: Transport) -> MemoryFleet:
    """Return a fleet of declared objects with the statuses that the reconciler and agents would write."""
    done = await shared_fleet.ctl("apply", "-f", "-", stdin=MANIFESTS)
    assert done.code == 0, done.err
    now = SystemClock().now()
    source = GitSourceStatus(
        observed_revision="main@2222",
        applied_revision="main@1111",
        applied_at=now,
        inventory=(InventoryEntry(kind="ModelDeployment", name="qwen"),),
        drift=(
            Drift(
                kind="ModelDeployment",
                name="qwen",
                fields=("spec.replicas", "spec.priority"),
                managers=("fleetctl-scale",),
                values=(DriftedField(path="spec.replicas", wanted="1", actual="3"),),
            ),
            Drift(kind="ModelRoute", name="lost", fields=()),
        ),
    )
    group = ShardGroupStatus(members=3, ready_members=1)
    await shared_transport.commit(
        [],
        [
            Delete(key=keys.spec_key("ModelDeployment", "gone")),
            Put(key=keys.status_key("GitSource", "home"), value=codec.encode(source)),
            Put(key=keys.status_key("ShardGroup", "pair"), value=codec.encode(group)),
            Put(
                key=keys.node_lease_key("mac-1"),
                value=codec.encode(NodeLease(uid="one", session="s")),
            ),
        ],
    )
    return shared_fleet


def part(text: str, title: str) -> list[list[str]]:
    """Return the lines of one section as lists of cells."""
    _, _, rest = text.partition(f"\n{title}:\n")
    lines = []
    for line in rest.splitlines():
        if not line.startswith("  "):
            break
        lines.append([cell.strip() for cell in line.strip().split("   ") if cell.strip()])
    return lines


async def shown(fleet: MemoryFleet, what: str) -> str:
    done = await fleet.ctl("describe", what)
    assert (done.code, done.err) == (0, "")
    return done.out


async def test_a_group(described: MemoryFleet) -> None:
    assert part(await shown(described, "sg/pair"), "Members") == [
        ["NODE", "STATUS", "CHIP", "FOR MODELS", "ROLE", "ADDRESSES"],
        ["mac-1", "Ready", "-", "-", "member", "as reported by its agent"],
        ["mac-2", "NotReady", "-", "-", "member", "10.0.0.2"],
        ["mac-9", "not in the fleet", "-", "-", "spare", "as reported by its agent"],
    ]


async def test_a_route(described: MemoryFleet) -> None:
    assert part(await shown(described, "mr/main"), "Backends") == [
        ["FROM", "BACKEND", "SHARE", "READY", "AVAILABLE"],
        ["backends", "qwen", "75%", "?", "Unknown"],
        ["backends", "gone", "25%", "-", "no such deployment"],
        ["rule 1", "qwen", "100%", "?", "Unknown"],
        ["fallback 1", "qwen", "-", "?", "Unknown"],
    ]


async def test_pools_and_their_nodes(described: MemoryFleet) -> None:
    pool = part(await shown(described, "np/desk"), "Nodes")
    assert [line[:2] for line in pool[1:]] == [["mac-1", "Ready"]]
    done = await described.ctl("describe", "nodes", "mac-1", "mac-2")
    first, second = done.out.split("\n\n\n")
    assert "\nPools: desk\n" in first
    assert "\nPools: <none>\n" in second
    labelled = await described.ctl("describe", "nodes", "-l", "site=home")
    assert labelled.out.count("Kind:") == 1


async def test_a_source(described: MemoryFleet) -> None:
    text = await shown(described, "gs/home")
    assert [line[:2] for line in part(text, "Revisions")[1:]] == [
        ["Newest", "main@2222"],
        ["Applied", "main@1111"],
    ]
    assert part(text, "Drift") == [
        ["OBJECT", "FIELD", "REPOSITORY", "FLEET", "CHANGED BY"],
        ["modeldeployment/qwen", "spec.replicas", "1", "3", "fleetctl-scale"],
        ["modeldeployment/qwen", "spec.priority", "?", "?", "fleetctl-scale"],
        ["modelroute/lost", "<whole object>", "declared", "deleted", "?"],
    ]
    assert part(text, "Inventory")[1:] == [["ModelDeployment", "qwen"]]


async def test_owners_of_fields(described: MemoryFleet, shared_transport: Transport) -> None:
    scaled = await described.ctl("scale", "md/qwen", "--replicas=3")
    assert scaled.code == 0, scaled.err
    text = await shown(described, "md/qwen")
    assert "Annotations:   note=hello" in text
    [title, *owners] = part(text, "Field owners")
    assert title == ["MANAGER", "BY", "AGE", "FIELDS"]
    found = {(line[0], line[1]): line[3] for line in owners}
    assert found["fleetctl", "Apply"] == "the fields of its manifest"
    assert found["fleetctl-scale", "Update"] == "spec.replicas"


async def test_a_whole_kind_and_no_match(described: MemoryFleet) -> None:
    every = await described.ctl("describe", "md")
    assert every.out.count("Kind:") >= 1
    missing = await described.ctl("describe", "md/qwne")
    assert (missing.code, missing.out) == (1, "")
    assert "did you mean qwen?" in missing.err


async def test_the_objects_in_files(described: MemoryFleet) -> None:
    pool = b"apiVersion: fleet/v1alpha1\nkind: NodePool\nmetadata: {name: desk}\nspec: {nodes: [mac-1]}\n"
    done = await described.ctl("describe", "-f", "-", stdin=pool)
    assert (done.code, done.err) == (0, "")
    assert "desk" in done.out.splitlines()[0]
    broken = await described.ctl("describe", "-f", "-", stdin=pool.replace(b"nodes:", b"nods:"))
    assert (broken.code, broken.out) == (1, "")
    assert broken.err.startswith("error: standard input:4:")
    both = await described.ctl("describe", "np/desk", "-f", "-", stdin=pool)
    assert both.code == 2


async def test_a_node_shows_the_requested_and_the_effective_wired_limit(fleet: MemoryFleet) -> None:
    limit = WiredLimit(mebibytes=92_160, set_by="Other")
    status = node_status("mac-1").model_copy(update={"wired_limit": limit})
    pool = NodePool(
        metadata=ObjectMeta(name="studios", uid="u", generation=1),
        spec=NodePoolSpec(nodes=("mac-1",), wired_limit="100Gi"),
    )
    await fleet.store.commit([], [put_node("mac-1", status), codec.put_spec(pool)])
    done = await fleet.ctl("describe", "node", "mac-1")
    assert done.code == 0, done.err
    assert (
        "Wired limit: effective 90.0 GiB, set by a person or another program; requested 100Gi (pool studios)"
        in done.out
    )


async def test_a_hub_model_shows_what_each_node_lacks(fleet: MemoryFleet) -> None:
    source = HubReference(repo="org/tiny", revision="ab" * 20)
    model_deployment = deployment(name="tiny")
    spec = model_deployment.spec.model_copy(update={"model": ModelSource(hub=source)})
    snapshot = ModelSnapshot(
        deployment="tiny",
        uid=model_deployment.metadata.uid,
        source=source,
        commit=source.revision,
        resolved_at=NOW,
        files=3,
        size_bytes=4 << 30,
        config="{}",
        weights=SnapshotWeights(
            total_bytes=0, half_bytes=0, replicated_bytes=0, replicated_half_bytes=0, parameters=0
        ),
    )
    put = Put(key=keys.named(keys.SNAPSHOT_PREFIX, "tiny"), value=codec.encode(snapshot))
    store = fleet.store
    await store.commit(
        [], [codec.put_spec(model_deployment.model_copy(update={"spec": spec})), put]
    )
    for name, missing, problem in (("h-1", 4 << 30, "NoSpace: full"), ("h-2", 0, "")):
        report = ModelReport(
            path=source.folder, geometry=GEOMETRY, missing_bytes=missing, fetch_problem=problem
        )
        status = node_status(name).model_copy(update={"models": (report,)})
        await store.commit([], [put_node(name, status)])
    lines = (await fleet.ctl("describe", "md/tiny")).out.splitlines()
    at = lines.index("Model files (4.0 GiB):")
    assert [line.split() for line in lines[at + 1 : at + 4]] == [
        ["NODE", "MISSING", "PROBLEM"],
        ["h-2", "-"],
        ["h-1", "4.0", "GiB", "NoSpace:", "full"],
    ]
