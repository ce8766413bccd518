"""`fleetctl autoscale`: bounds for the number of replicas."""

import pytest

from schemas.deployment import ModelDeploymentStatus
from store import codec, keys
from store.port import Put, Transport
from tests.support.fleetctl_manifests import apply_deployments, read_deployment
from tests.support.fleetctl_runner import MemoryFleet


async def test_bounds_are_set_and_changed(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await apply_deployments(shared_fleet, "one")
    done = await shared_fleet.ctl("autoscale", "md/one", "--max=3")
    assert (done.code, done.out) == (0, "modeldeployment/one autoscaled\n")
    again = await shared_fleet.ctl("autoscale", "md", "one", "--max", "3")
    assert again.out == "modeldeployment/one autoscaled (no change)\n"
    idle = "spec: {autoscaling: {idleTime: 1h}}"
    assert (await shared_fleet.ctl("patch", "md/one", "-p", idle)).code == 0
    await shared_fleet.ctl("autoscale", "md/one", "--min=0", "--target-requests=2")
    found = (await read_deployment(shared_transport, "one")).spec.autoscaling
    assert found is not None
    assert (found.min_replicas, found.max_replicas) == (0, 3)
    assert (found.target_requests, found.idle_time) == (2, "1h")


async def test_the_number_of_now_stays_when_autoscaling_ends(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await apply_deployments(shared_fleet, "ends")
    await shared_fleet.ctl("autoscale", "md/ends", "--max=5")
    status = ModelDeploymentStatus(desired_replicas=4)
    put = Put(key=keys.status_key("ModelDeployment", "ends"), value=codec.encode(status))
    await shared_transport.commit([], [put])
    done = await shared_fleet.ctl("autoscale", "md/ends", "--off")
    assert done.out == "modeldeployment/ends autoscaling ended\n"
    spec = (await read_deployment(shared_transport, "ends")).spec
    assert (spec.autoscaling, spec.replicas) == (None, 4)


MISUSED = [
    (("md/x",), 2, "give --max (and --min, --target-requests), or --off"),
    (("md/x", "--off", "--max=2"), 2, "give --max (and --min, --target-requests), or --off"),
    (("md/x", "--min=1"), 1, "modeldeployment/x is not autoscaled yet: give --max"),
    (("md/x", "--min=5", "--max=3"), 1, "the fewest replicas (5) would be more than the most (3)"),
    (("md/x", "--max=3", "--cpu-percent=80"), 2, "load is counted in requests"),
    (("np/x", "--max=3"), 1, "nodepools have no replicas; autoscale modeldeployments"),
    (("md/y", "--max=3"), 1, 'modeldeployments "y" not found'),
]


@pytest.mark.parametrize(("words", "code", "expected"), MISUSED, ids=lambda v: str(v)[:40])
async def test_mistakes_are_explained(
    fleet: MemoryFleet, words: tuple[str, ...], code: int, expected: str
) -> None:
    await apply_deployments(fleet, "x")
    done = await fleet.ctl("autoscale", *words)
    assert done.code == code
    assert expected in done.err
