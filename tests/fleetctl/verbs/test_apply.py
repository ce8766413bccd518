"""`fleetctl apply` and `diff` with other writers: what is kept, refused and pruned."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from manifests import apply_sets
from schemas.deployment import ModelDeployment
from schemas.node import LocalModel
from store import keys, objects
from store.port import Put, Transport
from tests.support.fleet import Done, Fleet, fleetctl
from tests.support.fleetctl_manifests import deployment_manifest, pool_manifest
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.reconciler_agents import node_status, put_node
from tests.support.waiting import until_async

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180)]

NOTHING_THERE = "http://127.0.0.1:1"


async def run_verb(fleet: MemoryFleet, verb: str, text: str, *flags: str) -> Done:
    return await fleet.ctl(verb, "-f", "-", *flags, stdin=text.encode())


async def scaled(fleet: MemoryFleet, name: str, count: int) -> None:
    """Change the number of replicas as another writer does."""
    done = await fleet.ctl("scale", f"md/{name}", f"--replicas={count}")
    assert done.code == 0, done.err


async def replicas(fleet: MemoryFleet, name: str) -> int:
    done = await fleet.ctl("get", f"md/{name}", "-o", "json")
    found: int = json.loads(done.out)["spec"]["replicas"]
    return found


async def test_changes_of_others_stay_with_a_warning(shared_fleet: MemoryFleet) -> None:
    await shared_fleet.applied(deployment_manifest("kept"))
    await scaled(shared_fleet, "kept", 5)
    again = await run_verb(shared_fleet, "apply", deployment_manifest("kept"))
    assert (again.code, again.out) == (0, "modeldeployment/kept unchanged\n")
    assert again.err == (
        "warning: modeldeployment/kept: spec.replicas stays 5, set by fleetctl-scale; the manifest says 2. "
        "Use --force-conflicts to overwrite it\n"
    )
    differs = await run_verb(shared_fleet, "diff", deployment_manifest("kept"))
    assert (differs.code, differs.out, differs.err) == (0, "", again.err)
    assert await replicas(shared_fleet, "kept") == 5
    forced = await run_verb(shared_fleet, "apply", deployment_manifest("kept"), "--force-conflicts")
    assert (forced.out, forced.err) == ("modeldeployment/kept configured\n", "")
    assert await replicas(shared_fleet, "kept") == 2


async def test_output_of_get_is_applied_without_a_change(shared_fleet: MemoryFleet) -> None:
    await shared_fleet.applied(deployment_manifest("printed"))
    await scaled(shared_fleet, "printed", 5)
    get = ("get", "md/printed", "-o", "yaml")
    printed, owners = (
        (await shared_fleet.ctl(*get)).out,
        await shared_fleet.ctl(*get, "--show-managed-fields"),
    )
    again = await run_verb(shared_fleet, "apply", printed)
    assert (again.code, again.out, again.err) == (0, "modeldeployment/printed unchanged\n", "")
    assert (await shared_fleet.ctl(*get, "--show-managed-fields")).out == owners.out
    edited = await run_verb(
        shared_fleet, "apply", printed.replace("minAvailable: 0", "minAvailable: 1")
    )
    assert edited.out == "modeldeployment/printed configured\n"
    assert (
        "unchanged"
        in (await run_verb(shared_fleet, "apply", (await shared_fleet.ctl(*get)).out)).out
    )


async def test_a_conflict_names_its_owner_and_writes_nothing(
    shared_fleet: MemoryFleet,
) -> None:
    await shared_fleet.applied(deployment_manifest("torn"))
    await scaled(shared_fleet, "torn", 5)
    text = pool_manifest("never") + deployment_manifest("torn", replicas=3)
    refused = await run_verb(shared_fleet, "apply", text)
    told = (
        "standard input:12:13: ModelDeployment/torn: spec.replicas: is 5, set by fleetctl-scale; the manifest says "
        "3. To use the manifest's value, give --force-conflicts; to keep the current one, remove the field from the manifest\n"
    )
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == f"error: nothing was written:\n{told}"
    assert (await shared_fleet.ctl("get", "np/never")).code == 1
    differs = await run_verb(shared_fleet, "diff", text)
    assert (differs.code, differs.err) == (2, f"error: {told}")
    forced = await run_verb(shared_fleet, "diff", text, "--force-conflicts")
    assert forced.code == 1
    assert "-  replicas: 5\n+  replicas: 3\n" in forced.out


async def test_labels_outside_of_the_manifest_stay(shared_fleet: MemoryFleet) -> None:
    await shared_fleet.applied(deployment_manifest("named"))
    done = await shared_fleet.ctl("label", "md/named", "owner=kim")
    assert done.code == 0, done.err
    again = await run_verb(shared_fleet, "apply", deployment_manifest("named", labels="team: b"))
    assert (again.out, again.err) == ("modeldeployment/named configured\n", "")
    tree = json.loads((await shared_fleet.ctl("get", "md/named", "-o", "json")).out)
    assert tree["metadata"]["labels"] == {"owner": "kim", "team": "b"}


async def test_conflicts_between_field_managers(shared_fleet: MemoryFleet) -> None:
    await shared_fleet.applied(deployment_manifest("two"))
    flag = "--field-manager=ci"
    same = await run_verb(shared_fleet, "apply", deployment_manifest("two"), flag)
    assert same.out == "modeldeployment/two configured\n"
    other = await run_verb(shared_fleet, "apply", deployment_manifest("two", replicas=4), flag)
    assert other.code == 1
    assert "spec.replicas: is 2, set by fleetctl; the manifest says 4" in other.err


async def test_prune_deletes_removed_objects(shared_fleet: MemoryFleet) -> None:
    flags = ("--applyset=lab", "--prune")
    first = await run_verb(
        shared_fleet, "apply", pool_manifest("lab-a") + pool_manifest("lab-b"), *flags
    )
    assert first.out == "nodepool/lab-a created\nnodepool/lab-b created\n", first.err
    differs = await run_verb(shared_fleet, "diff", pool_manifest("lab-b"), *flags)
    assert differs.code == 1
    assert differs.out == "NodePool/lab-a would be deleted\n"
    full = await run_verb(shared_fleet, "diff", pool_manifest("lab-b"), *flags, "-o", "json")
    assert "--- NodePool/lab-a (now)\\n+++ /dev/null\\n@@ -1," in full.out
    dry = await run_verb(shared_fleet, "apply", pool_manifest("lab-b"), *flags, "--dry-run=server")
    assert dry.out == (
        "nodepool/lab-b unchanged (server dry run)\nnodepool/lab-a pruned (server dry run)\n"
    )
    only = await run_verb(
        shared_fleet, "apply", pool_manifest("lab-b"), *flags, "--prune-allowlist=md"
    )
    assert only.out == "nodepool/lab-b unchanged\n"
    done = await run_verb(shared_fleet, "apply", pool_manifest("lab-b"), *flags)
    assert done.out == "nodepool/lab-b unchanged\nnodepool/lab-a pruned\n"
    assert (await shared_fleet.ctl("get", "np/lab-a")).code == 1


async def test_an_object_belongs_to_one_set(shared_fleet: MemoryFleet) -> None:
    await run_verb(shared_fleet, "apply", pool_manifest("one"), "--applyset=mine")
    refused = await run_verb(shared_fleet, "apply", pool_manifest("one"), "--applyset=yours")
    assert refused.code == 1
    assert "belongs to the apply set mine; the apply set yours cannot have it too" in refused.err


async def test_objects_in_use_are_not_pruned(shared_fleet: MemoryFleet) -> None:
    flags = ("--applyset=used", "--prune")
    await run_verb(shared_fleet, "apply", pool_manifest("used-a"), *flags)
    await shared_fleet.applied(deployment_manifest("user") + "  placement: {pools: [used-a]}\n")
    done = await run_verb(shared_fleet, "apply", pool_manifest("used-b"), *flags)
    assert (done.code, done.out) == (1, "nodepool/used-b created\n")
    assert done.err == (
        "error: all objects were written; pruning failed: NodePool/used-a is used by ModelDeployment/user. "
        "Change or delete it first. Not pruned: NodePool/used-a. Applying again is safe, and tries again\n"
    )


async def test_output_formats(shared_fleet: MemoryFleet) -> None:
    named = await run_verb(shared_fleet, "apply", pool_manifest("form"), "-o", "name")
    assert named.out == "nodepool/form\n"
    tree = json.loads(
        (await run_verb(shared_fleet, "apply", pool_manifest("form"), "-o", "json")).out
    )
    assert tree["metadata"]["generation"] == 1
    assert "managedFields" not in tree["metadata"]


async def test_apply_with_a_label_selector(shared_fleet: MemoryFleet) -> None:
    text = deployment_manifest("some-a", labels="x: y") + deployment_manifest("some-b")
    done = await run_verb(shared_fleet, "apply", text, "-l", "x=y")
    assert done.out == "modeldeployment/some-a created\n"
    none = await run_verb(shared_fleet, "apply", text, "-l", "x=z")
    assert (none.code, none.err) == (1, "error: no manifest has the labels x=z\n")


async def test_a_client_dry_run_needs_no_store(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(pool_manifest("dry"))
    words = ("apply", "-f", str(file), "--dry-run=client", "--etcd", NOTHING_THERE)
    done = await fleetctl(*words)
    assert (done.code, done.out) == (0, "nodepool/dry valid (dry run)\n")
    shown = await fleetctl(*words, "-o", "yaml")
    assert shown.out == (
        "apiVersion: fleet/v1alpha1\nkind: NodePool\nmetadata:\n  name: dry\nspec:\n  nodes:\n  - mac-1\n"
    )
    file.write_text(pool_manifest("dry").replace("nodes", "nodse"))
    wrong = await fleetctl(*words)
    assert wrong.code == 1
    assert f"{file}:5:8: NodePool/dry: spec.nodse: unknown field" in wrong.err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--prune",), "--prune needs --applyset NAME"),
        (("--prune", "--applyset=a", "-l", "x=y"), "--prune cannot be combined with -l"),
        (
            ("--prune", "--applyset=a", "--dry-run=client"),
            "needs the store to know what to delete; use --dry-run=server",
        ),
        (("--dry-run",), "a value is required; write --dry-run=client or --dry-run=server"),
        (
            ("--dry-run", "true"),
            "'true' is not one of 'none', 'client', 'server'; write --dry-run=client or --dry-run=server",
        ),
        (("--prune-allowlist=md",), "--prune-allowlist needs --prune"),
        (
            ("--prune", "--applyset=a", "--prune-allowlist=rep"),
            "replicas cannot be declared in manifests",
        ),
        (("--applyset=A/b",), "--applyset: 'A/b' is not a valid name"),
        (("--field-manager=gitsource/x",), "is reserved for the reconciler (GitSource)"),
        (("--field-manager=",), "give a name of 1 to 128 printable characters"),
    ],
)
async def test_contradicting_flags_are_errors(flags: tuple[str, ...], told: str) -> None:
    done = await fleetctl("apply", "-f", "-", *flags, stdin=pool_manifest("a").encode())
    assert done.code == 2
    assert told in " ".join(done.err.split())


async def test_diff_has_colours_only_on_request(
    shared_fleet: MemoryFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = await run_verb(shared_fleet, "diff", pool_manifest("colour"))
    assert "\x1b" not in plain.out
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = await run_verb(shared_fleet, "diff", pool_manifest("colour"))
    assert "\x1b[32m+kind: NodePool\n\x1b[0m" in shown.out


async def test_a_damaged_inventory_is_an_error(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await shared_transport.commit(
        [], [Put(key=keys.named(keys.APPLY_SET_PREFIX, "bad"), value=b"{}")]
    )
    done = await run_verb(shared_fleet, "apply", pool_manifest("x"), "--applyset=bad")
    assert done.code == 1
    assert "/mlx-fleet/v1/applyset/bad: name: Field required" in done.err


COUNT = 250
FLAGS = ("--applyset=many", "--prune")


def manifests(prefix: str) -> str:
    return "".join(deployment_manifest(f"{prefix}-{n:03}", replicas=0) for n in range(COUNT))


async def stay(transport: Transport) -> set[str]:
    found = await objects.list_all(transport, ModelDeployment)
    return {obj.name for obj in found if obj.metadata.deletion_timestamp is None}


async def of_set(transport: Transport) -> set[str]:
    found = await objects.list_all(transport, ModelDeployment)
    left = [obj for obj in found if obj.metadata.deletion_timestamp is None]
    return {obj.name for obj in left if apply_sets.apply_set_of(obj) == "many"}


async def killed_at(shared: Fleet, transport: Transport, file: Path, revisions: int) -> None:
    """Run the command, and kill it when it has written so often."""
    before = (await transport.status()).revision
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleetctl", "apply", "-f", str(file), *FLAGS),
        *("--etcd", str(shared.etcd.address)),
        stdout=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )

    async def is_under_way() -> bool:
        written = (await transport.status()).revision - before
        return written >= revisions or process.returncode is not None

    try:
        await until_async(is_under_way, limit_s=60, what="writes of apply")
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()


@pytest.mark.ci
async def test_an_apply_after_a_kill_completes_the_work(
    shared: Fleet, transport: Transport, tmp_path: Path
) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(manifests("old"))
    new.write_text(manifests("new"))
    done = await shared.ctl("apply", "-f", str(old), *FLAGS)
    assert done.code == 0, done.err
    # Kill points in order: after the inventory was extended, after some writes, after some deletions.
    for revisions in (1, 3, 20):
        await killed_at(shared, transport, new, revisions)
        held = {key.name for key in (await apply_sets.read_set(transport, "many")).members}
        assert await of_set(transport) <= held
    done = await shared.ctl("apply", "-f", str(new), *FLAGS)
    assert done.code == 0, done.err
    wanted = {f"new-{n:03}" for n in range(COUNT)}
    assert await stay(transport) == wanted
    assert {key.name for key in (await apply_sets.read_set(transport, "many")).members} == wanted
    again = await shared.ctl("apply", "-f", str(new), *FLAGS)
    assert set(again.out.splitlines()) == {f"modeldeployment/{name} unchanged" for name in wanted}


async def test_an_apply_warns_of_what_no_mac_can_serve(fleet: MemoryFleet) -> None:
    models = (
        LocalModel(path="org/Qwen3-8B", weights_bytes=5 << 30),
        LocalModel(path="llama", weights_bytes=1),
    )
    status = node_status("mac-1").model_copy(update={"local_models": models})
    names = [f"mac-{number}" for number in range(2, 4)]
    known = [node_status(name).model_copy(update={"local_models": ()}) for name in names]
    for name, one in (("mac-1", status), *zip(names, known, strict=True)):
        await fleet.store.commit([], [put_node(name, one)])

    async def warned(model: str, more: str = "", *flags: str) -> str:
        text = f"apiVersion: fleet/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: w}}\nspec: {{model: {model}{more}}}\n"
        done = await fleet.ctl("apply", "-f", "-", "--dry-run=server", *flags, stdin=text.encode())
        assert done.code == 0, done.err
        return done.err.removeprefix("warning: modeldeployment/w: ")

    assert await warned("{path: org/qwen3-8b-4bit}") == (
        "no Mac has a model org/qwen3-8b-4bit in its models folder; did you mean org/Qwen3-8B? "
        "Models there: llama, org/Qwen3-8B, qwen\n"
    )
    for quiet in (
        "{path: llama}",
        "{path: ./llama}",
        "{path: /models/elsewhere}",
        "{hub: {repo: a/B}}",
    ):
        assert await warned(quiet) == ""
    assert await warned("{path: ./org/Qwen3-8B}", ", resources: {memory: 2Gi}") == (
        "spec.resources.memory is 2.0 GiB, less than the weights (5.0 GiB): remove it, and the memory proof decides\n"
    )
    hub = "{hub: {repo: mlx-community/Qwen3-8B-4bit}}"
    told = await warned(hub, ", resources: {memory: 2Gi}")
    assert told.startswith(
        "spec.resources.memory is 2.0 GiB, less than the weights (4.3 GiB), and the memory proof says "
    )
    assert await warned(hub, f", resources: {{memory: {told.split()[-1]}}}") == ""
