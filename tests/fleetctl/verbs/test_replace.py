"""`fleetctl replace`: missing, existing and changed objects."""

import pytest

from fleetctl.verbs.replace import replacement
from schemas.pools import NodePool
from store import objects
from store.port import Transport
from tests.support.fleetctl_manifests import DEPLOYMENT, read_deployment
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.manifests_faults import InstantClock
from tests.support.manifests_texts import pool, read


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
    before = await read_deployment(shared_transport, "swap")
    done = await shared_fleet.ctl("replace", "-f", "-", stdin=manifest.encode())
    assert (done.code, done.out, done.err) == (0, "modeldeployment/swap replaced\n", "")
    seen = await read_deployment(shared_transport, "swap")
    assert (seen.spec.replicas, seen.spec.priority, seen.metadata.labels) == (2, 0, {})
    assert seen.metadata.uid == before.metadata.uid
    assert seen.metadata.generation == before.metadata.generation + 1
    assert [entry.manager for entry in seen.metadata.managed_fields] == ["fleetctl"]
    again = await shared_fleet.ctl("replace", "-f", "-", stdin=manifest.encode())
    assert again.out == "modeldeployment/swap replaced\n"
    assert await read_deployment(shared_transport, "swap") == seen


@pytest.mark.etcd
async def test_replace_with_a_resource_version(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await shared_fleet.applied(DEPLOYMENT.replace("NAME", "known"))
    read_ = (await shared_fleet.ctl("get", "md", "known", "-o", "yaml")).out
    other = read_.replace("replicas: 2", "replicas: 3").encode()
    assert (await shared_fleet.ctl("replace", "-f", "-", stdin=other)).code == 0
    assert (await read_deployment(shared_transport, "known")).spec.replicas == 3
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
    # Without a reconciler a deleted deployment stays: nothing is created in its place.
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


def test_replace_keeps_annotations_of_the_fleet() -> None:
    [item] = read(pool("a"))
    marked = item.obj.metadata.model_copy(update={"annotations": {"fleet/x": "1", "note": "n"}})
    after = replacement(
        item.obj.model_copy(update={"metadata": marked}), item, "fleetctl", InstantClock()
    )
    assert after is not None
    assert after.metadata.annotations == {"fleet/x": "1"}
    assert replacement(after, item, "fleetctl", InstantClock()) is None


MISUSED = [
    (("replace",), "Missing option '-f'"),
    (("replace", "-f", "x.yaml", "--timeout=1s"), "--timeout needs --force"),
]  # fmt: skip


@pytest.mark.etcd
@pytest.mark.parametrize(("words", "expected"), MISUSED, ids=lambda v: str(v)[:40])
async def test_errors_have_hints(
    shared_fleet: MemoryFleet, words: tuple[str, ...], expected: str
) -> None:
    done = await shared_fleet.ctl(*words)
    assert (done.code, done.out) == (2, ""), done.err
    assert expected in done.err
