"""`fleetctl delete`: selection, order, and objects that cannot be deleted."""

import pytest

from schemas.deployment import ModelDeployment
from schemas.meta import FOREGROUND, ORPHAN
from store import keys, objects
from store.port import Put, Transport
from tests.support.fleet import fleetctl
from tests.support.fleetctl_manifests import deployment_manifest, join_node, pool_manifest
from tests.support.fleetctl_runner import MemoryFleet

pytestmark = pytest.mark.timeout(120)


def in_pool(name: str, where: str, *, labels: str = "team: a") -> str:
    return deployment_manifest(name, labels=labels) + f"  placement: {{pools: [{where}]}}\n"


async def finalizers(shared_transport: Transport, name: str) -> tuple[str, ...]:
    found = await objects.get(shared_transport, ModelDeployment, name)
    assert found is not None
    assert found.metadata.deletion_timestamp is not None
    return found.metadata.finalizers


async def test_referring_objects_are_deleted_first(shared_fleet: MemoryFleet) -> None:
    await shared_fleet.applied(pool_manifest("order") + in_pool("order", "order"))
    done = await shared_fleet.ctl("delete", "np/order", "md/order", "--no-wait")
    assert (done.code, done.err) == (0, "")
    assert done.out == "modeldeployment/order is being deleted\nnodepool/order deleted\n"


async def test_delete_by_label_and_all(shared_fleet: MemoryFleet) -> None:
    one, two = (
        pool_manifest(f"label-{n}").replace("{name:", f"{{labels: {{n: {n}}}, name:") for n in "ab"
    )
    await shared_fleet.applied(one + two)
    done = await shared_fleet.ctl("delete", "np", "-l", "n=a", "-o", "name")
    assert (done.code, done.out) == (0, "nodepool/label-a\n")
    none = await shared_fleet.ctl("delete", "np", "-l", "n=a")
    assert (none.code, none.out, none.err) == (0, "", "no nodepools found\n")
    group = "apiVersion: fleet/v1alpha1\nkind: ShardGroup\nmetadata: {name: all}\nspec: {members: [{node: a}, {node: b}]}\n"
    await shared_fleet.applied(group)
    every = await shared_fleet.ctl("delete", "shardgroups", "--all")
    assert (every.code, every.out) == (0, "shardgroup/all deleted\n")


async def test_delete_the_objects_in_files(shared_fleet: MemoryFleet) -> None:
    text = (pool_manifest("filed") + in_pool("filed", "filed")).encode()
    await shared_fleet.applied(text.decode())
    dry = await shared_fleet.ctl("delete", "-f", "-", "--dry-run=server", stdin=text)
    assert dry.out == (
        "modeldeployment/filed deleted (server dry run)\nnodepool/filed deleted (server dry run)\n"
    )
    done = await shared_fleet.ctl("delete", "-f", "-", "--cascade=background", stdin=text)
    assert done.out == "modeldeployment/filed is being deleted\nnodepool/filed deleted\n"


async def test_an_object_in_use_does_not_stop_the_others(shared_fleet: MemoryFleet) -> None:
    await shared_fleet.applied(
        pool_manifest("held") + pool_manifest("free") + in_pool("holder", "held")
    )
    words = ("delete", "np", "held", "fred", "free")
    told = (
        "error: NodePool/held is used by ModelDeployment/holder. Change or delete it first\n"
        'error: nodepools "fred" not found; did you mean free?\n'
    )
    dry = await shared_fleet.ctl(*words, "--dry-run=server")
    assert (dry.code, dry.out, dry.err) == (1, "nodepool/free deleted (server dry run)\n", told)
    done = await shared_fleet.ctl(*words)
    assert (done.code, done.out, done.err) == (1, "nodepool/free deleted\n", told)


async def test_a_client_dry_run_does_not_check_references(shared_fleet: MemoryFleet) -> None:
    await shared_fleet.applied(pool_manifest("named") + in_pool("namer", "named"))
    done = await shared_fleet.ctl("delete", "np/named", "--dry-run=client")
    assert (done.code, done.out) == (0, "nodepool/named deleted (dry run)\n")
    assert (await shared_fleet.ctl("get", "np/named")).code == 0


async def test_cascade_and_replicas(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await shared_fleet.applied(deployment_manifest("first") + deployment_manifest("left"))
    done = await shared_fleet.ctl("delete", "md/first", "--cascade=background")
    assert done.out == "modeldeployment/first is being deleted\n"
    assert await finalizers(shared_transport, "first") == (FOREGROUND,)
    await shared_fleet.ctl("delete", "md/left", "--cascade=orphan", "--no-wait")
    assert await finalizers(shared_transport, "left") == (ORPHAN,)


async def test_a_timeout_reports_the_reason(shared_fleet: MemoryFleet) -> None:
    await shared_fleet.applied(deployment_manifest("stuck"))
    done = await shared_fleet.ctl("delete", "md/stuck", "--timeout=100ms")
    assert done.code == 1
    assert "is marked for deletion but not gone after 0.1 s" in done.err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("md", "a", "-l", "x=y"), 2, "but not both"),
        (("md", "-l", "x=y", "--all"), 2, "but not both"),
        (("md/a", "-f", "x.yaml"), 2, "not both"),
        (("md/a", "b"), 2, "KIND/NAME"),
        (("apikey/a", "-l", "a=b"), 2, "API keys are deleted by name, without -l"),
        (("apikey/a", "--all"), 2, "API keys are deleted by name, without --all"),
        (("md/a", "--cascade=away"), 2, "foreground"),
        (
            ("endpoints", "a"),
            1,
            "Endpoint/a cannot be deleted: only the fleet creates and removes such objects",
        ),
    ],
)
async def test_contradicting_flags_are_errors(
    shared_fleet: MemoryFleet, words: tuple[str, ...], code: int, told: str
) -> None:
    run = shared_fleet.ctl if code == 1 else fleetctl
    done = await run("delete", *words)
    assert done.code == code
    assert told in " ".join(done.err.split())


async def test_a_live_node_is_not_deleted_and_the_advice_is_cordon(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await join_node(shared_transport, "alive")
    done = await shared_fleet.ctl("delete", "node", "alive")
    assert done.code == 1
    assert "`fleetctl cordon alive`" in done.err


async def test_deleting_a_node_says_that_its_agent_registers_it_again(fleet: MemoryFleet) -> None:
    await fleet.store.commit([], [Put(key=keys.status_key("Node", "mac-9"), value=b"{}")])
    done = await fleet.ctl("delete", "node", "mac-9")
    assert (done.code, done.out) == (0, "node/mac-9 deleted\n")
    assert "registers the node again" in done.err
    assert "`fleetctl cordon mac-9`" in done.err
