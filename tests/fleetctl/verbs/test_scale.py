"""`fleetctl scale`: output, exit codes and errors."""

import pytest

from schemas.deployment import ModelDeploymentStatus
from store import codec, keys
from store.port import Put, Transport
from tests.support.fleetctl_manifests import DEPLOYMENT, apply_deployments, read_deployment
from tests.support.fleetctl_runner import MemoryFleet

pytestmark = pytest.mark.timeout(120)


async def test_scale(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await apply_deployments(shared_fleet, "sc-1", "sc-2")
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
    seen = await read_deployment(shared_transport, "sc-1")
    assert (seen.spec.replicas, seen.metadata.generation) == (4, 2)
    assert seen.metadata.managed_fields[-1].manager == "fleetctl-scale"
    # A repeated apply does not revert it.
    kept = await shared_fleet.ctl(
        "apply", "-f", "-", stdin=DEPLOYMENT.replace("NAME", "sc-1").encode()
    )
    assert "spec.replicas stays 4, set by fleetctl-scale; the manifest says 2" in kept.err
    assert (await read_deployment(shared_transport, "sc-1")).spec.replicas == 4
    file = DEPLOYMENT.replace("NAME", "sc-2").encode()
    assert (await shared_fleet.ctl("scale", "--replicas=1", "-f", "-", stdin=file)).code == 0
    assert (await read_deployment(shared_transport, "sc-2")).spec.replicas == 1


async def test_scale_waits(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await apply_deployments(shared_fleet, "slow")
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
    """Write the status that a reconciler would write: two replicas are placed."""
    generation = (await read_deployment(shared_transport, name)).metadata.generation
    status = ModelDeploymentStatus(observed_generation=generation, replicas=2, ready_replicas=ready)
    put = Put(key=keys.status_key("ModelDeployment", name), value=codec.encode(status))
    await shared_transport.commit([], [put])


async def test_autoscaled_deployments_are_not_scaled(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await apply_deployments(shared_fleet, "auto", "hand")
    bounds = ("patch", "md/auto", "-p", "spec: {autoscaling: {maxReplicas: 3}}")
    assert (await shared_fleet.ctl(*bounds)).code == 0
    done = await shared_fleet.ctl("scale", "--replicas=5", "md/hand", "md/auto")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "error: modeldeployment/auto is autoscaled between 1 and 3 replicas; "
        "nothing was changed. Change the bounds: fleetctl patch modeldeployment/auto "
        "-p 'spec: {autoscaling: {minReplicas: 5, maxReplicas: 5}}'; or end autoscaling: "
        "fleetctl patch modeldeployment/auto -p 'spec: {autoscaling: null, replicas: 5}'\n"
    )
    assert (await read_deployment(shared_transport, "hand")).spec.replicas == 2


MISUSED = [
    (("scale", "md/chat", "3"), 2, "Missing option '--replicas'. Write: fleetctl scale md/chat --replicas=3."),
    (("scale", "md/x"), 2, "Missing option '--replicas'"),
    (("scale", "--replicas=-1", "md/x"), 2, "-1 is not in the range"),
    (("scale", "--replicas=1"), 2, "which objects? Give KIND NAME..., KIND/NAME... or -f FILE"),
    (("scale", "--replicas=1", "np/x"), 1, "nodepools have no replicas; scale modeldeployments"),
    (("scale", "--replicas=1", "md", "-l", "a=b", "-R"), 2, "-R applies to the folders of -f"),
    (("scale", "--replicas=1", "md/x", "y"), 2, "write KIND NAME NAME..., or KIND/NAME KIND/NAME..."),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "said"), MISUSED, ids=lambda v: str(v)[:40])
async def test_errors_have_hints(
    shared_fleet: MemoryFleet, words: tuple[str, ...], code: int, said: str
) -> None:
    done = await shared_fleet.ctl(*words)
    assert (done.code, done.out) == (code, ""), done.err
    assert said in done.err
