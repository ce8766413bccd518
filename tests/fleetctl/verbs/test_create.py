"""create and replace, from manifests and from flags: missing, existing and changed objects."""

from pathlib import Path

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects.writer import create_all
from fleetctl.verbs import create_flags
from fleetctl.verbs.replace import replacement
from schemas.deployment import ModelDeployment
from schemas.meta import ApiObject
from schemas.pools import NodePool
from store import codec, objects
from store.port import Transport
from tests.support.fleetctl_manifests import DEPLOYMENT
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.manifests_faults import FaultyTransport, InstantClock, lost
from tests.support.manifests_texts import pool, read


async def there(shared_transport: Transport, name: str) -> ModelDeployment:
    found = await objects.get(shared_transport, ModelDeployment, name)
    assert found is not None
    return found


@pytest.mark.etcd
async def test_create_from_manifests(
    shared_fleet: MemoryFleet, shared_transport: Transport, tmp_path: Path
) -> None:
    file = tmp_path / "made.yaml"
    file.write_text(DEPLOYMENT.replace("NAME", "made-2").rstrip() + "\n" + pool("made"))
    words = ("create", "-f", str(file))
    dry = await shared_fleet.ctl(*words, "--dry-run=server")
    assert dry.out == (
        "nodepool/made created (server dry run)\nmodeldeployment/made-2 created (server dry run)\n"
    )
    done = await shared_fleet.ctl(*words)
    assert (done.code, done.err) == (0, "")
    assert done.out == "nodepool/made created\nmodeldeployment/made-2 created\n"
    seen = await there(shared_transport, "made-2")
    [entry] = seen.metadata.managed_fields
    assert (entry.manager, entry.operation) == ("fleetctl", "Apply")
    again = await shared_fleet.ctl(*words)
    assert (again.code, again.out) == (1, "")
    assert again.err == (
        "error: nothing was created:\n"
        f"{file}:4:18: ModelDeployment/made-2: metadata.name: modeldeployment/made-2 already exists. "
        "Change it with `fleetctl apply` or `fleetctl edit modeldeployment/made-2`, or replace it with `fleetctl replace`\n"
        f"{file}:10:9: NodePool/made: metadata.name: nodepool/made already exists. "
        "Change it with `fleetctl apply` or `fleetctl edit nodepool/made`, or replace it with `fleetctl replace`\n"
    )
    assert (await shared_fleet.ctl("apply", "-f", str(file))).out.count("unchanged") == 2


@pytest.mark.etcd
async def test_create_from_flags(
    shared_fleet: MemoryFleet, shared_transport: Transport, tmp_path: Path
) -> None:
    words = (
        "create",
        "md",
        "flagged",
        "--model=Qwen3-8B-4bit",
        "--replicas=2",
        "--served-name=fast",
    )
    file = await shared_fleet.ctl(*words, "--label=team=lab", "--dry-run=client", "-o", "yaml")
    assert file.out == (
        "apiVersion: fleet/v1alpha1\nkind: ModelDeployment\nmetadata:\n  name: flagged\n  labels:\n    team: lab\n"
        "spec:\n  model:\n    path: Qwen3-8B-4bit\n  servedNames:\n  - fast\n  replicas: 2\n"
    )
    dry = await shared_fleet.ctl(*words, "--dry-run=client")
    assert dry.out == "modeldeployment/flagged created (dry run)\n"
    assert await objects.get(shared_transport, ModelDeployment, "flagged") is None
    nowhere = await shared_fleet.ctl(*words, "--pool=gone")
    assert (nowhere.code, nowhere.out) == (1, "")
    assert nowhere.err == (
        "error: nothing was created:\n--pool: there is no NodePool gone. Create it first, or apply its manifest "
        "together with this one\n"
    )
    assert (await shared_fleet.ctl(*words)).out == "modeldeployment/flagged created\n"
    again = await shared_fleet.ctl(*words)
    assert "modeldeployment/flagged already exists. Change it with `fleetctl apply` or" in again.err
    route = await shared_fleet.ctl("create", "modelroute", "chat", "--backend=flagged=80")
    assert route.out == "modelroute/chat created\n"
    pooled = (
        "create",
        "nodepools",
        "studio",
        "--node=mac-1",
        "--chip=Apple M4",
        "--min-memory=64Gi",
    )
    assert (await shared_fleet.ctl(*pooled)).out == "nodepool/studio created\n"
    found = await objects.get(shared_transport, NodePool, "studio")
    assert found is not None
    assert found.spec.selector is not None
    assert (found.spec.nodes, found.spec.selector.min_memory) == (("mac-1",), "64Gi")


MISUSED = [
    (("create",), "what to create? Give -f FILE, or KIND NAME with flags"),
    (("create", "md", "x"), "Missing option '--model'"),
    (("create", "md", "x", "--model=m", "--min-replicas=3"), "--max-replicas: is required but not given"),
    (("create", "md", "x", "--model=m", "--replicas=20000"), "--replicas: must be 10000 or less, got 20000"),
    (("create", "md", "X", "--model=m"), "NAME: expected lower-case letters, digits"),
    (("create", "md", "x", "--model=m", "--min-available=x"), "--min-available: is neither a number of replicas"),
    (("create", "np", "x", "--match-label=a"), "--match-label: 'a' is not a pair; write KEY=VALUE"),
    (("create", "mr", "x", "--backend=a=b"), "--backend: the weight of 'a=b' is not a whole number"),
    (("create", "sg", "x"), "a ShardGroup cannot be created from flags; write a manifest"),
    (("create", "rep", "x"), "replicas are created by the fleet only"),
    (("create", "nodepol", "x"), "unknown kind 'nodepol'; did you mean nodepool?"),
    (("create", "-f", "x.yaml", "md", "x"), "give -f, or a kind with flags, but not both"),
    (("create", "--dry-run=client", "md", "x"), "write --dry-run after the kind: create"),
    (("replace",), "Missing option '-f'"),
    (("replace", "-f", "x.yaml", "--timeout=1s"), "--timeout needs --force"),
]  # fmt: skip


@pytest.mark.etcd
@pytest.mark.parametrize(("words", "said"), MISUSED, ids=lambda v: str(v)[:40])
async def test_errors_have_hints(
    shared_fleet: MemoryFleet, words: tuple[str, ...], said: str
) -> None:
    done = await shared_fleet.ctl(*words)
    assert (done.code, done.out) == (2, ""), done.err
    assert said in done.err


@pytest.mark.etcd
async def test_replace(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    manifest = DEPLOYMENT.replace("NAME", "swap")
    early = await shared_fleet.ctl("replace", "-f", "-", stdin=manifest.encode())
    assert (early.code, early.err) == (
        1,
        "error: nothing was replaced:\nstandard input:4:18: ModelDeployment/swap: metadata.name: does not exist. "
        "Create it with `fleetctl create` or `fleetctl apply`\n",
    )
    await shared_fleet.applied(manifest)
    for words in (("scale", "--replicas=7"), ("patch", "-p", "spec: {priority: 3}")):
        assert (await shared_fleet.ctl(words[0], "md/swap", *words[1:])).code == 0
    assert (await shared_fleet.ctl("label", "md/swap", "team=lab")).code == 0
    before = await there(shared_transport, "swap")
    done = await shared_fleet.ctl("replace", "-f", "-", stdin=manifest.encode())
    assert (done.code, done.out, done.err) == (0, "modeldeployment/swap replaced\n", "")
    seen = await there(shared_transport, "swap")
    assert (seen.spec.replicas, seen.spec.priority, seen.metadata.labels) == (2, 0, {})
    assert seen.metadata.uid == before.metadata.uid
    assert seen.metadata.generation == before.metadata.generation + 1
    assert [entry.manager for entry in seen.metadata.managed_fields] == ["fleetctl"]
    again = await shared_fleet.ctl("replace", "-f", "-", stdin=manifest.encode())
    assert again.out == "modeldeployment/swap replaced\n"
    assert await there(shared_transport, "swap") == seen


@pytest.mark.etcd
async def test_replace_with_a_resource_version(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await shared_fleet.applied(DEPLOYMENT.replace("NAME", "known"))
    read_ = (await shared_fleet.ctl("get", "md", "known", "-o", "yaml")).out
    other = read_.replace("replicas: 2", "replicas: 3").encode()
    assert (await shared_fleet.ctl("replace", "-f", "-", stdin=other)).code == 0
    assert (await there(shared_transport, "known")).spec.replicas == 3
    stale = await shared_fleet.ctl("replace", "-f", "-", stdin=other)
    assert (stale.code, stale.out) == (1, "")
    assert "metadata.resourceVersion: is" in stale.err
    assert (
        "the stored object was changed since. Get it again, or remove metadata.resourceVersion"
        in stale.err
    )


@pytest.mark.etcd
async def test_replace_by_force(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await shared_fleet.applied(pool("anew"))
    before = await objects.get(shared_transport, NodePool, "anew")
    done = await shared_fleet.ctl("replace", "--force", "-f", "-", stdin=pool("anew").encode())
    assert (done.code, done.out, done.err) == (0, "nodepool/anew replaced\n", "")
    after = await objects.get(shared_transport, NodePool, "anew")
    assert before is not None
    assert after is not None
    assert before.metadata.uid != after.metadata.uid
    # Without a reconciler a deployment that is deleted stays: nothing is made over it.
    await shared_fleet.applied(DEPLOYMENT.replace("NAME", "stays"))
    manifest = DEPLOYMENT.replace("NAME", "stays").encode()
    words = ("replace", "--force", "-f", "-", "--timeout=200ms")
    late = await shared_fleet.ctl(*words, stdin=manifest)
    assert (late.code, late.out) == (1, "")
    assert (
        "modeldeployment/stays is marked for deletion but not gone in time; nothing was" in late.err
    )
    for verb in (("scale", "--replicas=5"), ("patch", "-p", "spec: {priority: 1}")):
        refused = await shared_fleet.ctl(verb[0], "md/stays", *verb[1:])
        assert refused.code == 1
        assert "is being deleted" in refused.err


async def made(shared_transport: FaultyTransport, *texts: str) -> list[str]:
    told: list[ApiObject] = []
    clock = InstantClock()
    await create_all(
        shared_transport, read("".join(texts)), clock, manager="fleetctl", report=told.append
    )
    return [obj.name for obj in told]


async def test_a_lost_answer_still_counts_as_created() -> None:
    shared_transport = FaultyTransport(InstantClock())
    shared_transport.after = lost(1)
    assert await made(shared_transport, pool("a"), pool("b")) == ["a", "b"]
    assert shared_transport.commits == 1


async def test_objects_created_meanwhile_are_not_overwritten() -> None:
    shared_transport = FaultyTransport(InstantClock())
    [theirs] = read(pool("b"))

    async def create(_: int) -> None:
        await shared_transport.quietly([codec.put_spec(theirs.obj)])

    shared_transport.before = create
    with pytest.raises(FleetctlError, match="nodepool/b was created by another writer meanwhile"):
        await made(shared_transport, pool("a"), pool("b"))
    assert await objects.get(shared_transport, NodePool, "a") is None


def test_replace_keeps_annotations_of_the_fleet() -> None:
    [item] = read(pool("a"))
    marked = item.obj.metadata.model_copy(update={"annotations": {"fleet/x": "1", "note": "n"}})
    after = replacement(
        item.obj.model_copy(update={"metadata": marked}), item, "fleetctl", InstantClock()
    )
    assert after is not None
    assert after.metadata.annotations == {"fleet/x": "1"}
    assert replacement(after, item, "fleetctl", InstantClock()) is None


def test_errors_name_the_flag_of_a_field() -> None:
    flags = {"spec.model.path": "--model", "spec.autoscaling": "--max", "spec": "--spec"}
    found = [
        create_flags.flag_of(path, flags)
        for path in ("spec.model.path", "spec.autoscaling.x", "spec.b[0]", "specs", "")
    ]
    assert found == ["--model", "--max", "--spec", "specs", ""]
