"""`fleetctl delete`: what it takes, in which order things go, and what it says of those that cannot."""

import pytest

from schemas.deployment import ModelDeployment
from schemas.meta import FOREGROUND, ORPHAN
from store import objects
from store.port import Transport
from tests.fleetctl.test_apply import deployment, pool
from tests.support.fleet import Fleet, fleetctl

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]


def in_pool(name: str, where: str, *, labels: str = "team: a") -> str:
    return deployment(name, labels=labels) + f"  placement: {{pools: [{where}]}}\n"


async def finalizers(transport: Transport, name: str) -> tuple[str, ...]:
    found = await objects.get(transport, ModelDeployment, name)
    assert found is not None
    assert found.metadata.deletion_timestamp is not None
    return found.metadata.finalizers


async def test_several_kinds_who_names_others_first(shared: Fleet) -> None:
    await shared.applied(pool("order") + in_pool("order", "order"))
    done = await shared.ctl("delete", "np/order", "md/order", "--no-wait")
    assert (done.code, done.err) == (0, "")
    assert done.out == "modeldeployment/order is being deleted\nnodepool/order deleted\n"


async def test_by_labels_and_all_of_a_kind(shared: Fleet) -> None:
    one, two = (pool(f"label-{n}").replace("{name:", f"{{labels: {{n: {n}}}, name:") for n in "ab")
    await shared.applied(one + two)
    done = await shared.ctl("delete", "np", "-l", "n=a", "-o", "name")
    assert (done.code, done.out) == (0, "nodepool/label-a\n")
    none = await shared.ctl("delete", "np", "-l", "n=a")
    assert (none.code, none.out, none.err) == (0, "", "no nodepools found\n")
    group = "apiVersion: fleet/v1alpha1\nkind: ShardGroup\nmetadata: {name: all}\nspec: {members: [{node: a}, {node: b}]}\n"
    await shared.applied(group)
    every = await shared.ctl("delete", "shardgroups", "--all")
    assert (every.code, every.out) == (0, "shardgroup/all deleted\n")


async def test_what_is_in_files(shared: Fleet) -> None:
    text = (pool("filed") + in_pool("filed", "filed")).encode()
    await shared.applied(text.decode())
    dry = await shared.ctl("delete", "-f", "-", "--dry-run=server", stdin=text)
    assert dry.out == (
        "modeldeployment/filed deleted (server dry run)\nnodepool/filed deleted (server dry run)\n"
    )
    done = await shared.ctl("delete", "-f", "-", "--cascade=background", stdin=text)
    assert done.out == "modeldeployment/filed is being deleted\nnodepool/filed deleted\n"


async def test_one_that_cannot_go_does_not_keep_the_others(shared: Fleet) -> None:
    await shared.applied(pool("held") + pool("free") + in_pool("holder", "held"))
    words = ("delete", "np", "held", "fred", "free")
    told = (
        "error: NodePool/held is used by ModelDeployment/holder. Change or delete it first\n"
        'error: nodepools "fred" not found; did you mean free?\n'
    )
    dry = await shared.ctl(*words, "--dry-run=server")
    assert (dry.code, dry.out, dry.err) == (1, "nodepool/free deleted (server dry run)\n", told)
    done = await shared.ctl(*words)
    assert (done.code, done.out, done.err) == (1, "nodepool/free deleted\n", told)


async def test_a_client_dry_run_does_not_ask_who_names_it(shared: Fleet) -> None:
    await shared.applied(pool("named") + in_pool("namer", "named"))
    done = await shared.ctl("delete", "np/named", "--dry-run=client")
    assert (done.code, done.out) == (0, "nodepool/named deleted (dry run)\n")
    assert (await shared.ctl("get", "np/named")).code == 0


async def test_replicas_go_or_stay(shared: Fleet, transport: Transport) -> None:
    await shared.applied(deployment("first") + deployment("left"))
    done = await shared.ctl("delete", "md/first", "--cascade=background")
    assert done.out == "modeldeployment/first is being deleted\n"
    assert await finalizers(transport, "first") == (FOREGROUND,)
    await shared.ctl("delete", "md/left", "--cascade=orphan", "--no-wait")
    assert await finalizers(transport, "left") == (ORPHAN,)


async def test_waiting_ends_with_a_reason(shared: Fleet) -> None:
    await shared.applied(deployment("stuck"))
    done = await shared.ctl("delete", "md/stuck", "--timeout=100ms")
    assert done.code == 1
    assert "is marked for deletion, but not gone after 0.1 s" in done.err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("md", "a", "-l", "x=y"), 2, "only one of these"),
        (("md", "-l", "x=y", "--all"), 2, "only one of these"),
        (("md/a", "-f", "x.yaml"), 2, "not both"),
        (("md/a", "b"), 2, "KIND/NAME"),
        (("apikey/a", "-l", "a=b"), 2, "API keys are deleted by name, without -l"),
        (("apikey/a", "--all"), 2, "API keys are deleted by name, without --all"),
        (("md/a", "--cascade=away"), 2, "foreground"),
        (("endpoints", "a"), 1, "Endpoint/a cannot be deleted by users: the fleet writes it"),
    ],
)
async def test_misuse(shared: Fleet, words: tuple[str, ...], code: int, told: str) -> None:
    run = shared.ctl if code == 1 else fleetctl
    done = await run("delete", *words)
    assert done.code == code
    assert told in " ".join(done.err.split())
