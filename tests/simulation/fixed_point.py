"""The fixed point of a fleet after the mishaps: everything desired exists, or a reason is given, and nothing else."""

from collections.abc import Iterator

from reconciler.deployments.rollout.revisions import template_hash
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from schemas.meta import ConditionStatus, find_condition, is_true
from schemas.replica import Replica
from store import keys
from tests.simulation.world import World


def faults(world: World) -> list[str]:
    """Return the differences to the desired state."""
    state = world.store.state
    return [
        *(
            fault
            for deployment in state.deployments.values()
            for fault in _deployment(world, deployment)
        ),
        *(fault for replica in state.replicas.values() for fault in _replica(world, replica)),
        *_machines(world),
        *_leftovers(world),
    ]


def _machines(world: World) -> Iterator[str]:
    for name, status in world.store.state.machines.items():
        if is_true(status.conditions, "DiskPressure"):
            yield f"{name} says that its disk is full"


def _deployment(world: World, it: ModelDeployment) -> Iterator[str]:
    if it.metadata.deletion_timestamp is not None:
        yield f"{it.name} is still being deleted"
        return
    status = world.store.state.statuses.get(it.name)
    if status is None or status.observed_generation != it.metadata.generation:
        yield f"the status of {it.name} is out of date"
        return
    wanted, bounds = it.spec.replicas, it.spec.autoscaling
    if bounds is not None:
        wanted = status.desired_replicas
        if not bounds.min_replicas <= wanted <= bounds.max_replicas:
            yield f"{it.name} is scaled to {wanted}, out of its bounds"
    mine = [r for r in world.store.state.replicas.values() if r.spec.deployment == it.name]
    short = wanted - len(mine)
    yield from _told(it.name, status, short)
    old = [r.name for r in mine if r.spec.template != template_hash(it)]
    if old and not short and not it.spec.rollout.paused:
        yield f"{', '.join(old)} run another version of {it.name}"


def _told(name: str, status: ModelDeploymentStatus, short: int) -> Iterator[str]:
    """Return the contradictions between the status and the replicas, of which `short` are missing."""
    placed, available = (find_condition(status.conditions, t) for t in ("Placed", "Available"))
    if placed is None or available is None:
        yield f"{name} does not say whether it is placed and available"
        return
    if short > 0 and (placed.status is ConditionStatus.TRUE or not placed.message):
        yield f"{name} lacks {short} replicas, and does not say why"
    if short < 0:
        yield f"{name} has {-short} replicas too many"
    if short == 0 and placed.status is not ConditionStatus.TRUE:
        yield f"{name} has all replicas, and says that it has not: {placed.message}"
    if (short <= 0) != (available.status is ConditionStatus.TRUE):
        yield f"{name}: Available is {available.status} ({available.message})"


def _replica(world: World, it: Replica) -> Iterator[str]:
    state, node = world.store.state, it.spec.ranks[0].node
    if it.metadata.deletion_timestamp is not None:
        yield f"{it.name} drains on {node}"
    if it.spec.deployment not in state.deployments:
        yield f"{it.name} belongs to nobody"
    if not state.answers(it):
        yield f"{it.name} does not answer on {node}"


def _leftovers(world: World) -> Iterator[str]:
    """Return leftovers of replicas that do not exist: endpoints, reports, statuses, engines."""
    replicas = world.store.state.replicas
    places = {(r.spec.ranks[0].node, r.name) for r in replicas.values()}
    for prefix in (keys.ENDPOINT_PREFIX, keys.RANK_PREFIX):
        for key in world.store.keys_below(prefix):
            node = key.removeprefix(prefix).partition("/")[0]
            if (node, keys.replica_of(key)) not in places:
                yield f"{key} is left over"
    for key in world.store.keys_below(keys.status_prefix("Replica")):
        if key.removeprefix(keys.status_prefix("Replica")) not in replicas:
            yield f"{key} is left over"
    running = [
        (mac.name, engine.order.config.replica)
        for mac in world.macs.values()
        for engine in mac.engines.running()
        if not engine.is_silent  # not observed yet
    ]
    if sorted(running) != sorted(places):
        yield f"engines run for {sorted(running)}, and should for {sorted(places)}"
