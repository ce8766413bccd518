"""`fleetctl scale --timeout`."""

import pytest

from schemas.deployment import ModelDeploymentStatus
from store import codec, keys
from store.port import Put, Transport
from tests.support.fleetctl_manifests import apply_deployments, read_deployment
from tests.support.fleetctl_runner import MemoryFleet

pytestmark = pytest.mark.timeout(120)


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
