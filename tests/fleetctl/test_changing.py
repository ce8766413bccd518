"""patch, scale and annotate on a real store: output, exit codes and refusals as kubectl's."""

import json
from pathlib import Path

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.verbs.patch import PatchRequest
from manifests.yaml import nodes, parser
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from store import codec, keys, objects
from store.port import Put, Transport
from tests.fleetctl.test_rollout import MANIFEST
from tests.support.fleet import Fleet
from tests.support.manifests_texts import read

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]


async def applied(shared: Fleet, *names: str) -> None:
    await shared.applied("---\n".join(MANIFEST.replace("NAME", name) for name in names))


async def there(transport: Transport, name: str) -> ModelDeployment:
    found = await objects.get(transport, ModelDeployment, name)
    assert found is not None
    return found


async def test_patch(shared: Fleet, transport: Transport, tmp_path: Path) -> None:
    await applied(shared, "patched")
    done = await shared.ctl("patch", "md", "patched", "-p", '{"spec": {"concurrency": 8}}')
    assert (done.code, done.out, done.err) == (0, "modeldeployment/patched patched\n", "")
    again = await shared.ctl("patch", "md/patched", "-p", "spec: {concurrency: 8}")
    assert again.out == "modeldeployment/patched patched (no change)\n"
    seen = await there(transport, "patched")
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
        done = await shared.ctl("patch", "md/patched", "--patch-file", str(file), *flags)
        assert done.out == f"modeldeployment/patched {said}\n"
    seen = await there(transport, "patched")
    assert (seen.spec.concurrency, seen.spec.served_names) == (4, ("slow",))
    assert (seen.metadata.labels, seen.metadata.generation) == ({"a": "b"}, 3)


async def test_bytes_that_are_no_text(shared: Fleet, transport: Transport) -> None:
    await applied(shared, "bytes")
    before = await there(transport, "bytes")
    made = ("create", "md", "no-text", "--dry-run=client")
    for words, told in (
        (("annotate", "md", "bytes", "x=caf\udce9"), r"x: not UTF-8 at 'caf\udce9'"),
        ((*made, "--model=\udcff"), r"--model: not UTF-8 at '\udcff'"),
        ((*made, "--model=m", "--annotation=a=\udcff"), r"--annotation: not UTF-8 at '\udcff'"),
        ((*made, "--model=m", "--served-name=\udcff"), r"--served-name: not UTF-8 at '\udcff'"),
    ):
        done = await shared.ctl(*words)
        assert (done.code, done.out) == (2, "")
        assert told in " ".join(done.err.split())
    assert await there(transport, "bytes") == before


async def test_json_patch(shared: Fleet, transport: Transport) -> None:
    await applied(shared, "jp-1", "jp-2")
    version = (await there(transport, "jp-1")).metadata.resource_version
    operations = [
        {"op": "test", "path": "/metadata/resourceVersion", "value": version},
        {"op": "add", "path": "/spec/servedNames/-", "value": "quick"},
        {"op": "move", "from": "/spec/servedNames/0", "path": "/spec/servedNames/1"},
    ]
    words = ("--type=json", "-p", json.dumps(operations))
    done = await shared.ctl("patch", "md/jp-1", *words)
    assert done.out == "modeldeployment/jp-1 patched\n"
    assert (await there(transport, "jp-1")).spec.served_names == ("quick", "fast")
    later = await shared.ctl("patch", "md/jp-1", *words)
    assert later.code == 1
    assert "operation 1 (test /metadata/resourceVersion): it is" in later.err
    # One of several that cannot be done: none is.
    part = '[{"op": "remove", "path": "/spec/servedNames/1"}]'
    both = await shared.ctl("patch", "md/jp-1", "md/jp-2", "--type=json", "-p", part)
    assert (both.code, both.out) == (1, "")
    assert both.err.startswith("error: modeldeployment/jp-2: operation 1 (remove /spec/served")
    assert (await there(transport, "jp-1")).metadata.generation == 2
    shown = await shared.ctl("patch", "md/jp-2", "-p", "spec: {priority: 3}", "-o", "yaml")
    assert "  priority: 3\n" in shown.out
    assert "managedFields" not in shown.out


NOT_PATCHED = [
    ("spec: {concurency: 8}",
     "nothing was changed:\nmodeldeployment/still, as patched: ModelDeployment/still: spec.concurency: "
     "unknown field. Did you mean concurrency?"),
    ("metadata: {uid: x}",
     "modeldeployment/still, as patched: metadata.uid is written by the fleet; leave it out"),
    ("metadata: {managedFields: []}", "metadata.managedFields is written by the fleet"),
    ("status: {replicas: 2}", "still, as patched: status is written by the fleet; leave it out"),
    ("metadata: {name: x}", "metadata.name cannot change; it is still. Create another object"),
    ("kind: NodePool", "kind cannot change; it is ModelDeployment"),
    ("metadata: {resourceVersion: '1'}", "it is made for resourceVersion 1, and the object has"),
    ("metadata: {annotations: {fleet/restarted-at: x}}", "the annotation fleet/restarted-at is written by the fleet"),
    ("metadata: null", "leaves no object; it must have metadata and spec"),
]  # fmt: skip


@pytest.mark.parametrize(("patch", "said"), NOT_PATCHED, ids=lambda v: str(v)[:30])
def test_what_no_patch_may_do(patch: str, said: str) -> None:
    [item] = read(MANIFEST.replace("NAME", "still"))
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
    ("a: 1\n---\nb: 2", "error: --patch: holds 2 documents; a patch is one\n"),
    ("", "error: --patch: holds no document; a patch is one\n"),
]  # fmt: skip


async def test_what_is_no_patch(shared: Fleet, transport: Transport) -> None:
    await applied(shared, "still")
    before = await there(transport, "still")
    for patch, said in PATCHED_BADLY:
        done = await shared.ctl("patch", "md/still", "-p", patch)
        assert (done.code, done.out) == (1, "")
        assert said in done.err
    assert await there(transport, "still") == before


async def test_scale(shared: Fleet, transport: Transport) -> None:
    await applied(shared, "sc-1", "sc-2")
    done = await shared.ctl("scale", "--replicas=4", "md/sc-1", "md/sc-2")
    assert done.out == "modeldeployment/sc-1 scaled\nmodeldeployment/sc-2 scaled\n"
    again = await shared.ctl("scale", "--replicas=4", "md", "sc-1")
    assert again.out == "modeldeployment/sc-1 scaled (no change)\n"
    other = await shared.ctl("scale", "--current-replicas=3", "--replicas=5", "md", "sc-1")
    assert (other.code, other.err) == (
        1,
        "error: modeldeployment/sc-1: expected 3 replicas, and 4 are asked for now; nothing was changed\n",
    )
    dry = await shared.ctl("scale", "--replicas=0", "md/sc-1", "--dry-run=client", "-o", "name")
    assert dry.out == "modeldeployment/sc-1\n"
    seen = await there(transport, "sc-1")
    assert (seen.spec.replicas, seen.metadata.generation) == (4, 2)
    assert seen.metadata.managed_fields[-1].manager == "fleetctl-scale"
    # A manifest that is applied again does not undo it.
    kept = await shared.ctl("apply", "-f", "-", stdin=MANIFEST.replace("NAME", "sc-1").encode())
    assert "spec.replicas stays 4, set by fleetctl-scale; the manifest says 2" in kept.err
    assert (await there(transport, "sc-1")).spec.replicas == 4
    file = MANIFEST.replace("NAME", "sc-2").encode()
    assert (await shared.ctl("scale", "--replicas=1", "-f", "-", stdin=file)).code == 0
    assert (await there(transport, "sc-2")).spec.replicas == 1


async def test_scale_waits(shared: Fleet, transport: Transport) -> None:
    await applied(shared, "slow")
    await say(transport, "slow", ready=1)
    late = await shared.ctl("scale", "--replicas=2", "md/slow", "--timeout=200ms")
    assert (late.code, late.out) == (1, "modeldeployment/slow scaled (no change)\n")
    assert late.err == (
        "error: timed out after 0.2 s: modeldeployment/slow has 1 of 2 replicas ready, 2 are placed. What was asked "
        "for stays; `fleetctl describe modeldeployment/slow` says more\n"
    )
    await say(transport, "slow", ready=2)
    done = await shared.ctl("scale", "--replicas=2", "md/slow", "--timeout=30s")
    assert (done.code, done.err) == (0, "")


async def say(transport: Transport, name: str, *, ready: int) -> None:
    """Write what a reconciler would: two replicas are placed."""
    generation = (await there(transport, name)).metadata.generation
    status = ModelDeploymentStatus(observed_generation=generation, replicas=2, ready_replicas=ready)
    put = Put(key=keys.status_key("ModelDeployment", name), value=codec.encode(status))
    await transport.commit([], [put])


async def test_what_scales_itself_is_not_scaled(shared: Fleet, transport: Transport) -> None:
    await applied(shared, "auto", "hand")
    bounds = ("patch", "md/auto", "-p", "spec: {autoscaling: {maxReplicas: 3}}")
    assert (await shared.ctl(*bounds)).code == 0
    done = await shared.ctl("scale", "--replicas=5", "md/hand", "md/auto")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "error: modeldeployment/auto has spec.autoscaling, which decides the number of its replicas, between 1 and 3; "
        "nothing was changed. Move the bounds: fleetctl patch modeldeployment/auto -p "
        """'{"spec": {"autoscaling": {"minReplicas": 5, "maxReplicas": 5}}}'; """
        "or end it and scale then: fleetctl patch modeldeployment/auto -p "
        """'{"spec": {"autoscaling": null}}'\n"""
    )
    assert (await there(transport, "hand")).spec.replicas == 2


async def test_annotate(shared: Fleet, transport: Transport) -> None:
    await applied(shared, "noted")
    words = ("annotate", "md/noted", "kubernetes.io/change-cause=more, and longer", "owner=anna")
    done = await shared.ctl(*words)
    assert (done.code, done.out, done.err) == (0, "modeldeployment/noted annotated\n", "")
    assert (await shared.ctl(*words)).out == "modeldeployment/noted not annotated\n"
    other = await shared.ctl("annotate", "md", "noted", "owner=ben")
    assert (other.code, other.err) == (
        1,
        "error: modeldeployment/noted: 'owner' already has a value (anna); give --overwrite to change it\n",
    )
    off = await shared.ctl("annotate", "md", "noted", "owner-", "nobody-")
    assert (off.out, off.err) == (
        "modeldeployment/noted annotated\n",
        "annotation 'nobody' not found on modeldeployment/noted\n",
    )
    shown = await shared.ctl("annotate", "md", "noted", "--list")
    assert shown.out == "kubernetes.io/change-cause=more, and longer\n"
    seen = await there(transport, "noted")
    assert seen.metadata.generation == 1
    version = seen.metadata.resource_version
    late = await shared.ctl("annotate", "md/noted", "a=b", "--resource-version=1")
    assert late.err == (
        f"error: modeldeployment/noted was changed: its resourceVersion is {version}, not 1. Look at it again; "
        "nothing was changed\n"
    )
    known = await shared.ctl("label", "md/noted", "a=b", f"--resource-version={version}")
    assert known.out == "modeldeployment/noted labeled\n"


MISUSED = [
    (("patch", "md", "x"), 2, "give the patch with -p or --patch-file"),
    (("patch", "md", "-p", "a: 1"), 2, "which modeldeployments? Name them"),
    (("patch", "md/x", "-p", "a: 1", "--type=strategic"), 2, "--type=strategic: there is none here"),
    (("patch", "rep/x", "-p", "a: 1"), 1, "replicas are written by the fleet; patch one of"),
    (("patch", "md/x", "--patch-file", "/nowhere"), 1, "/nowhere: does not exist"),
    (("scale", "md/x"), 2, "Missing option '--replicas'"),
    (("scale", "--replicas=-1", "md/x"), 2, "-1 is not in the range"),
    (("scale", "--replicas=1"), 2, "say which objects: KIND NAME..., KIND/NAME... or -f FILE"),
    (("scale", "--replicas=1", "np/x"), 1, "nodepools have no replicas; scale modeldeployments"),
    (("scale", "--replicas=1", "md", "-l", "a=b", "-R"), 2, "-R is about the folders that -f names"),
    (("scale", "--replicas=1", "md/x", "y"), 2, "write KIND NAME NAME..., or KIND/NAME KIND/NAME..."),
    (("annotate", "md/x"), 2, "write KEY=VALUE to set an annotation, KEY- to take one away"),
    (("annotate", "md/x", "fleet/a=b"), 1, 'modeldeployments "x" not found'),
    (("annotate", "md/x", "--list", "--dry-run=client"), 2, "--list only looks; leave out --dry-run"),
    (("annotate", "md/x", "a b=c"), 2, "'a b' is no key: letters, digits"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "said"), MISUSED, ids=lambda v: str(v)[:40])
async def test_refusals_teach(shared: Fleet, words: tuple[str, ...], code: int, said: str) -> None:
    done = await shared.ctl(*words)
    assert (done.code, done.out) == (code, ""), done.err
    assert said in done.err
