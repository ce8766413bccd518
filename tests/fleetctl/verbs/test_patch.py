"""patch, scale and annotate: output, exit codes and errors."""

import json
from pathlib import Path

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.verbs.patch import PatchRequest
from manifests.yaml import nodes, parser
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from store import codec, keys, objects
from store.port import Put, Transport
from tests.support.fleetctl_manifests import DEPLOYMENT
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.manifests_texts import read

pytestmark = pytest.mark.timeout(120)


async def applied(shared_fleet: MemoryFleet, *names: str) -> None:
    await shared_fleet.applied("---\n".join(DEPLOYMENT.replace("NAME", name) for name in names))


async def there(shared_transport: Transport, name: str) -> ModelDeployment:
    found = await objects.get(shared_transport, ModelDeployment, name)
    assert found is not None
    return found


async def test_patch(
    shared_fleet: MemoryFleet, shared_transport: Transport, tmp_path: Path
) -> None:
    await applied(shared_fleet, "patched")
    done = await shared_fleet.ctl("patch", "md", "patched", "-p", '{"spec": {"concurrency": 8}}')
    assert (done.code, done.out, done.err) == (0, "modeldeployment/patched patched\n", "")
    again = await shared_fleet.ctl("patch", "md/patched", "-p", "spec: {concurrency: 8}")
    assert again.out == "modeldeployment/patched patched (no change)\n"
    seen = await there(shared_transport, "patched")
    assert (seen.spec.concurrency, seen.metadata.generation) == (8, 2)
    assert [(e.manager, e.fields) for e in seen.metadata.managed_fields[1:]] == [
        ("fleetctl-patch", ("spec.concurrency",))
    ]
    file = tmp_path / "patch.yaml"
    file.write_text("metadata: {labels: {a: b}}\nspec: {concurrency: null, servedNames: [slow]}\n")
    for flags, said in (
        (("--dry-run=client",), "patched (dry run)"),
        (("--dry-run=server",), "patched (server dry run)"),
        ((), "patched"),
    ):
        done = await shared_fleet.ctl("patch", "md/patched", "--patch-file", str(file), *flags)
        assert done.out == f"modeldeployment/patched {said}\n"
    seen = await there(shared_transport, "patched")
    assert (seen.spec.concurrency, seen.spec.served_names) == (4, ("slow",))
    assert (seen.metadata.labels, seen.metadata.generation) == ({"a": "b"}, 3)


async def test_bytes_that_are_not_utf8(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await applied(shared_fleet, "bytes")
    before = await there(shared_transport, "bytes")
    made = ("create", "md", "no-text", "--dry-run=client")
    for words, told in (
        (("annotate", "md", "bytes", "x=caf\udce9"), r"x: not UTF-8 at 'caf\udce9'"),
        ((*made, "--model=\udcff"), r"--model: not UTF-8 at '\udcff'"),
        ((*made, "--model=m", "--annotation=a=\udcff"), r"--annotation: not UTF-8 at '\udcff'"),
        ((*made, "--model=m", "--served-name=\udcff"), r"--served-name: not UTF-8 at '\udcff'"),
    ):
        done = await shared_fleet.ctl(*words)
        assert (done.code, done.out) == (2, "")
        assert told in " ".join(done.err.split())
    assert await there(shared_transport, "bytes") == before


async def test_json_patch(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await applied(shared_fleet, "jp-1", "jp-2")
    version = (await there(shared_transport, "jp-1")).metadata.resource_version
    operations = [
        {"op": "test", "path": "/metadata/resourceVersion", "value": version},
        {"op": "add", "path": "/spec/servedNames/-", "value": "quick"},
        {"op": "move", "from": "/spec/servedNames/0", "path": "/spec/servedNames/1"},
    ]
    words = ("--type=json", "-p", json.dumps(operations))
    done = await shared_fleet.ctl("patch", "md/jp-1", *words)
    assert done.out == "modeldeployment/jp-1 patched\n"
    assert (await there(shared_transport, "jp-1")).spec.served_names == ("quick", "fast")
    later = await shared_fleet.ctl("patch", "md/jp-1", *words)
    assert later.code == 1
    assert "operation 1 (test /metadata/resourceVersion): the value is" in later.err
    # One of several that cannot be done: none is.
    part = '[{"op": "remove", "path": "/spec/servedNames/1"}]'
    both = await shared_fleet.ctl("patch", "md/jp-1", "md/jp-2", "--type=json", "-p", part)
    assert (both.code, both.out) == (1, "")
    assert both.err.startswith("error: modeldeployment/jp-2: operation 1 (remove /spec/served")
    assert (await there(shared_transport, "jp-1")).metadata.generation == 2
    shown = await shared_fleet.ctl("patch", "md/jp-2", "-p", "spec: {priority: 3}", "-o", "yaml")
    assert "  priority: 3\n" in shown.out
    assert "managedFields" not in shown.out


NOT_PATCHED = [
    ("spec: {concurency: 8}",
     "nothing was changed:\nmodeldeployment/still, as patched: ModelDeployment/still: spec.concurency: "
     "unknown field. Did you mean concurrency?"),
    ("metadata: {uid: x}",
     "modeldeployment/still, as patched: metadata.uid is written by the fleet; remove it"),
    ("metadata: {managedFields: []}", "metadata.managedFields is written by the fleet"),
    ("status: {replicas: 2}", "still, as patched: status is written by the fleet; remove it"),
    ("metadata: {name: x}", "metadata.name cannot be changed; it is still. Create another object"),
    ("kind: NodePool", "kind cannot be changed; it is ModelDeployment"),
    ("metadata: {resourceVersion: '1'}", "resourceVersion is 1, but the object has"),
    ("metadata: {annotations: {fleet/restarted-at: x}}", "annotation fleet/restarted-at is written by the fleet"),
    ("metadata: null", "is not an object; metadata and spec are required"),
]  # fmt: skip


@pytest.mark.parametrize(("patch", "said"), NOT_PATCHED, ids=lambda v: str(v)[:30])
def test_fields_that_patches_may_not_change(patch: str, said: str) -> None:
    [item] = read(DEPLOYMENT.replace("NAME", "still"))
    metadata = item.obj.metadata.model_copy(update={"uid": "u", "resource_version": "7"})
    now = item.obj.model_copy(update={"metadata": metadata})
    [root] = parser.parse(patch, "--patch").documents
    with pytest.raises(FleetctlError) as caught:
        PatchRequest(nodes.plain_value(root), "merge").edit(now)
    assert said in caught.value.message


PATCHED_BADLY = [
    ("spec: {placement: {pools: [gone]}}",
     "error: nothing was changed:\nmodeldeployment/still, as patched: ModelDeployment/still: "
     "spec.placement.pools[0]: there is no NodePool gone. Create it first, or apply its manifest together with this "
     "one\n"),
    ("[1]", "error: --patch: a merge patch is a mapping, such as spec: {...}; --type=json takes a list of operations\n"),
    ("{", "error: --patch:1:2: is not YAML:"),
    ("a: 1\n---\nb: 2", "error: --patch: holds 2 documents; give one document\n"),
    ("", "error: --patch: holds no document; give one document\n"),
]  # fmt: skip


async def test_invalid_patches_are_errors(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await applied(shared_fleet, "still")
    before = await there(shared_transport, "still")
    for patch, said in PATCHED_BADLY:
        done = await shared_fleet.ctl("patch", "md/still", "-p", patch)
        assert (done.code, done.out) == (1, "")
        assert said in done.err
    assert await there(shared_transport, "still") == before


async def test_scale(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await applied(shared_fleet, "sc-1", "sc-2")
    done = await shared_fleet.ctl("scale", "--replicas=4", "md/sc-1", "md/sc-2")
    assert done.out == "modeldeployment/sc-1 scaled\nmodeldeployment/sc-2 scaled\n"
    again = await shared_fleet.ctl("scale", "--replicas=4", "md", "sc-1")
    assert again.out == "modeldeployment/sc-1 scaled (no change)\n"
    other = await shared_fleet.ctl("scale", "--current-replicas=3", "--replicas=5", "md", "sc-1")
    assert (other.code, other.err) == (
        1,
        "error: modeldeployment/sc-1: expected 3 replicas, but spec.replicas is 4; nothing was changed\n",
    )
    dry = await shared_fleet.ctl(
        "scale", "--replicas=0", "md/sc-1", "--dry-run=client", "-o", "name"
    )
    assert dry.out == "modeldeployment/sc-1\n"
    seen = await there(shared_transport, "sc-1")
    assert (seen.spec.replicas, seen.metadata.generation) == (4, 2)
    assert seen.metadata.managed_fields[-1].manager == "fleetctl-scale"
    # A manifest that is applied again does not undo it.
    kept = await shared_fleet.ctl(
        "apply", "-f", "-", stdin=DEPLOYMENT.replace("NAME", "sc-1").encode()
    )
    assert "spec.replicas stays 4, set by fleetctl-scale; the manifest says 2" in kept.err
    assert (await there(shared_transport, "sc-1")).spec.replicas == 4
    file = DEPLOYMENT.replace("NAME", "sc-2").encode()
    assert (await shared_fleet.ctl("scale", "--replicas=1", "-f", "-", stdin=file)).code == 0
    assert (await there(shared_transport, "sc-2")).spec.replicas == 1


async def test_scale_waits(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await applied(shared_fleet, "slow")
    await say(shared_transport, "slow", ready=1)
    late = await shared_fleet.ctl("scale", "--replicas=2", "md/slow", "--timeout=200ms")
    assert (late.code, late.out) == (1, "modeldeployment/slow scaled (no change)\n")
    assert late.err == (
        "error: timed out after 0.2 s: modeldeployment/slow has 1 of 2 replicas ready, and 2 placed. The new number "
        "stays set; `fleetctl describe modeldeployment/slow` shows details\n"
    )
    await say(shared_transport, "slow", ready=2)
    done = await shared_fleet.ctl("scale", "--replicas=2", "md/slow", "--timeout=30s")
    assert (done.code, done.err) == (0, "")


async def say(shared_transport: Transport, name: str, *, ready: int) -> None:
    """Write what a reconciler would: two replicas are placed."""
    generation = (await there(shared_transport, name)).metadata.generation
    status = ModelDeploymentStatus(observed_generation=generation, replicas=2, ready_replicas=ready)
    put = Put(key=keys.status_key("ModelDeployment", name), value=codec.encode(status))
    await shared_transport.commit([], [put])


async def test_autoscaled_deployments_are_not_scaled(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await applied(shared_fleet, "auto", "hand")
    bounds = ("patch", "md/auto", "-p", "spec: {autoscaling: {maxReplicas: 3}}")
    assert (await shared_fleet.ctl(*bounds)).code == 0
    done = await shared_fleet.ctl("scale", "--replicas=5", "md/hand", "md/auto")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "error: modeldeployment/auto is autoscaled between 1 and 3 replicas; "
        "nothing was changed. Change the bounds: fleetctl patch modeldeployment/auto -p "
        """'{"spec": {"autoscaling": {"minReplicas": 5, "maxReplicas": 5}}}'; """
        "or end autoscaling, then scale: fleetctl patch modeldeployment/auto -p "
        """'{"spec": {"autoscaling": null}}'\n"""
    )
    assert (await there(shared_transport, "hand")).spec.replicas == 2


async def test_annotate(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await applied(shared_fleet, "noted")
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
    seen = await there(shared_transport, "noted")
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
    (("patch", "md", "x"), 2, "give the patch with -p or --patch-file"),
    (("patch", "md", "-p", "a: 1"), 2, "which modeldeployments? Give their names"),
    (("patch", "md/x", "-p", "a: 1", "--type=strategic"), 2, "--type=strategic is not supported"),
    (("patch", "rep/x", "-p", "a: 1"), 1, "replicas are written by the fleet; patch one of"),
    (("patch", "md/x", "--patch-file", "/nowhere"), 1, "/nowhere: does not exist"),
    (("scale", "md/x"), 2, "Missing option '--replicas'"),
    (("scale", "--replicas=-1", "md/x"), 2, "-1 is not in the range"),
    (("scale", "--replicas=1"), 2, "which objects? Give KIND NAME..., KIND/NAME... or -f FILE"),
    (("scale", "--replicas=1", "np/x"), 1, "nodepools have no replicas; scale modeldeployments"),
    (("scale", "--replicas=1", "md", "-l", "a=b", "-R"), 2, "-R applies to the folders of -f"),
    (("scale", "--replicas=1", "md/x", "y"), 2, "write KIND NAME NAME..., or KIND/NAME KIND/NAME..."),
    (("annotate", "md/x"), 2, "write KEY=VALUE to set an annotation, KEY- to remove one"),
    (("annotate", "md/x", "fleet/a=b"), 1, 'modeldeployments "x" not found'),
    (("annotate", "md/x", "--list", "--dry-run=client"), 2, "--list only reads; remove --dry-run"),
    (("annotate", "md/x", "a b=c"), 2, "'a b' is not a valid key: use letters, digits"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "said"), MISUSED, ids=lambda v: str(v)[:40])
async def test_errors_have_hints(
    shared_fleet: MemoryFleet, words: tuple[str, ...], code: int, said: str
) -> None:
    done = await shared_fleet.ctl(*words)
    assert (done.code, done.out) == (code, ""), done.err
    assert said in done.err
