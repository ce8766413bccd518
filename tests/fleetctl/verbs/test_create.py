"""`fleetctl create`, from manifests and from flags."""

from pathlib import Path

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects.writer import create_all
from fleetctl.verbs import create_flags
from schemas.deployment import ModelDeployment
from schemas.meta import ApiObject
from schemas.pools import NodePool
from store import codec, objects
from store.port import Transport
from tests.support.fleetctl_manifests import (
    DEPLOYMENT,
    read_deployment,
)
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.manifests_faults import FaultyTransport, InstantClock, lost
from tests.support.manifests_texts import pool, read


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
    seen = await read_deployment(shared_transport, "made-2")
    [entry] = seen.metadata.managed_fields
    assert (entry.manager, entry.operation) == ("fleetctl", "Apply")
    again = await shared_fleet.ctl(*words)
    assert (again.code, again.out) == (1, "")
    assert again.err == (
        "error: nothing was created:\n"
        f"{file}:4:18: ModelDeployment/made-2: metadata.name: modeldeployment/made-2 already exists. "
        "Change it with `fleetctl apply` or `fleetctl edit modeldeployment/made-2`\n"
        f"{file}:10:9: NodePool/made: metadata.name: nodepool/made already exists. "
        "Change it with `fleetctl apply` or `fleetctl edit nodepool/made`\n"
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
    (("create", "md", "x"), "give either --hub ORG/NAME or --model FOLDER"),
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
]  # fmt: skip


@pytest.mark.etcd
@pytest.mark.parametrize(("words", "said"), MISUSED, ids=lambda v: str(v)[:40])
async def test_errors_have_hints(
    shared_fleet: MemoryFleet, words: tuple[str, ...], said: str
) -> None:
    done = await shared_fleet.ctl(*words)
    assert (done.code, done.out) == (2, ""), done.err
    assert said in done.err


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


def test_errors_name_the_flag_of_a_field() -> None:
    flags = {"spec.model.path": "--model", "spec.autoscaling": "--max", "spec": "--spec"}
    found = [
        create_flags.flag_of(path, flags)
        for path in ("spec.model.path", "spec.autoscaling.x", "spec.b[0]", "specs", "")
    ]
    assert found == ["--model", "--max", "--spec", "specs", ""]
