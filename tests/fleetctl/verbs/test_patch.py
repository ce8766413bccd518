"""`fleetctl patch`: output, exit codes and errors."""

import json
from pathlib import Path

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import writer
from fleetctl.verbs.patch import patched
from manifests.yaml import nodes, parser
from store.port import Transport
from tests.support.fleetctl_manifests import (
    DEPLOYMENT,
    apply_deployments,
    read_deployment,
)
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.manifests_texts import read

pytestmark = pytest.mark.timeout(120)


async def test_patch(
    shared_fleet: MemoryFleet, shared_transport: Transport, tmp_path: Path
) -> None:
    await apply_deployments(shared_fleet, "patched")
    done = await shared_fleet.ctl("patch", "md", "patched", "-p", '{"spec": {"concurrency": 8}}')
    assert (done.code, done.out, done.err) == (0, "modeldeployment/patched patched\n", "")
    again = await shared_fleet.ctl("patch", "md/patched", "-p", "spec: {concurrency: 8}")
    assert again.out == "modeldeployment/patched patched (no change)\n"
    seen = await read_deployment(shared_transport, "patched")
    assert (seen.spec.concurrency, seen.metadata.generation) == (8, 2)
    assert [(e.manager, e.fields) for e in seen.metadata.managed_fields[1:]] == [
        ("fleetctl-patch", ("spec.concurrency",))
    ]
    file = tmp_path / "patch.yaml"
    file.write_text("metadata: {labels: {a: b}}\nspec: {concurrency: null, servedNames: [slow]}\n")
    for flags, expected in (
        (("--dry-run=client",), "patched (dry run)"),
        (("--dry-run=server",), "patched (server dry run)"),
        ((), "patched"),
    ):
        done = await shared_fleet.ctl("patch", "md/patched", "--patch-file", str(file), *flags)
        assert done.out == f"modeldeployment/patched {expected}\n"
    seen = await read_deployment(shared_transport, "patched")
    assert (seen.spec.concurrency, seen.spec.served_names) == ("Auto", ("slow",))
    assert (seen.metadata.labels, seen.metadata.generation) == ({"a": "b"}, 3)


async def test_bytes_that_are_not_utf8(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await apply_deployments(shared_fleet, "bytes")
    before = await read_deployment(shared_transport, "bytes")
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
    assert await read_deployment(shared_transport, "bytes") == before


async def test_json_patch(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await apply_deployments(shared_fleet, "jp-1", "jp-2")
    version = (await read_deployment(shared_transport, "jp-1")).metadata.resource_version
    operations = [
        {"op": "test", "path": "/metadata/resourceVersion", "value": version},
        {"op": "add", "path": "/spec/servedNames/-", "value": "quick"},
        {"op": "move", "from": "/spec/servedNames/0", "path": "/spec/servedNames/1"},
    ]
    words = ("--type=json", "-p", json.dumps(operations))
    done = await shared_fleet.ctl("patch", "md/jp-1", *words)
    assert done.out == "modeldeployment/jp-1 patched\n"
    assert (await read_deployment(shared_transport, "jp-1")).spec.served_names == ("quick", "fast")
    later = await shared_fleet.ctl("patch", "md/jp-1", *words)
    assert later.code == 1
    assert "operation 1 (test /metadata/resourceVersion): the value is" in later.err
    # If one of several changes is invalid, none is written.
    part = '[{"op": "remove", "path": "/spec/servedNames/1"}]'
    both = await shared_fleet.ctl("patch", "md/jp-1", "md/jp-2", "--type=json", "-p", part)
    assert (both.code, both.out) == (1, "")
    assert both.err.startswith("error: modeldeployment/jp-2: operation 1 (remove /spec/served")
    assert (await read_deployment(shared_transport, "jp-1")).metadata.generation == 2
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


@pytest.mark.parametrize(("patch", "expected"), NOT_PATCHED, ids=lambda v: str(v)[:30])
def test_fields_that_patches_may_not_change(patch: str, expected: str) -> None:
    [item] = read(DEPLOYMENT.replace("NAME", "still"))
    metadata = item.obj.metadata.model_copy(update={"uid": "u", "resource_version": "7"})
    now = item.obj.model_copy(update={"metadata": metadata})
    [root] = parser.parse(patch, "--patch").documents
    with pytest.raises(FleetctlError) as caught:
        writer.merge_onto(now, patched(now, nodes.plain_value(root), "merge").obj)
    assert expected in caught.value.message


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
    await apply_deployments(shared_fleet, "still")
    before = await read_deployment(shared_transport, "still")
    for patch, expected in PATCHED_BADLY:
        done = await shared_fleet.ctl("patch", "md/still", "-p", patch)
        assert (done.code, done.out) == (1, "")
        assert expected in done.err
    assert await read_deployment(shared_transport, "still") == before


MISUSED = [
    (("patch", "md", "x"), 2, "give the patch with -p or --patch-file"),
    (("patch", "md", "-p", "a: 1"), 2, "which modeldeployments? Give their names"),
    (("patch", "md/x", "-p", "a: 1", "--type=strategic"), 2, "--type=strategic is not supported"),
    (("patch", "rep/x", "-p", "a: 1"), 1, "replicas are written by the fleet; patch one of"),
    (("patch", "md/x", "--patch-file", "/nowhere"), 1, "/nowhere: does not exist"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "expected"), MISUSED, ids=lambda v: str(v)[:40])
async def test_errors_have_hints(
    shared_fleet: MemoryFleet, words: tuple[str, ...], code: int, expected: str
) -> None:
    done = await shared_fleet.ctl(*words)
    assert (done.code, done.out) == (code, ""), done.err
    assert expected in done.err
