"""Laws that no step of a fleet may break. Each law checks one change and returns its violations.

A planner may read caches that lag behind, for example after a broken watch. So changes by users and agents within the
last moments do not count against it.
"""

from schemas import quantity
from schemas.deployment import ModelDeployment, ModelDeploymentSpec
from schemas.meta import ENDED_BECAUSE
from schemas.node import Node
from schemas.placement import tolerates
from schemas.pools import in_pool
from schemas.replica import Replica
from store import keys
from tests.simulation.history import State, Step

# A broken watch is back within a second and a half, and a campaign takes one more.
LATELY_S = 5.0


def memory_suffices(step: Step) -> str:
    """No node is assigned more than it may use at that moment."""
    if not isinstance(step.now, Replica) or _same_assignment(step):
        return ""
    for rank in step.now.spec.ranks:
        machine = step.state.machines.get(rank.node)
        if machine is None:
            return f"{step.now.name} is assigned to {rank.node}, which nobody knows"
        used = _used(step.state, rank.node)
        most = machine.allocatable_bytes - _reserved(step.state, rank.node)
        if used > most:
            return f"{rank.node} has {used} bytes assigned of {most} with {step.now.name}"
    return ""


def edits_are_whole(step: Step) -> str:
    """A replica is edited only to mark it deleted, to change its owner, or to move it as a whole."""
    before, now = step.before, step.now
    if not isinstance(before, Replica) or not isinstance(now, Replica):
        return ""
    if before.metadata.uid != now.metadata.uid:
        if before.metadata.deletion_timestamp is not None:
            return f"{now.name} is assigned anew while it still drains"
        if before.spec.ranks[0].node == now.spec.ranks[0].node:
            return f"{now.name} is moved to where it was"
        return ""
    if before.spec != now.spec:
        return f"the spec of {now.name} was edited"
    was, is_ = before.metadata.deletion_timestamp, now.metadata.deletion_timestamp
    return f"the deletion of {now.name} was taken back" if was is not None and was != is_ else ""


def draining_comes_first(step: Step) -> str:
    """A replica is removed only after it was marked deleted, and its deployment only after it."""
    before = step.before
    if step.now is not None or before is None:
        return ""
    if isinstance(before, Replica):
        if before.metadata.deletion_timestamp is None:
            return f"{before.name} was removed without draining"
        node = before.spec.ranks[0].node
        is_there = keys.node_lease_key(node) in step.state.leases
        if is_there and step.state.runs(node, before.metadata.uid):
            return f"{before.name} was removed while its engine runs on {node}"
        return ""
    left = [r.name for r in step.state.replicas.values() if _owns(before, r)]
    return f"{before.name} was removed before {', '.join(left)}" if left else ""


def only_nodes_that_take(step: Step) -> str:
    """Nothing new goes to a node that is cordoned, drained, tainted or away."""
    state, now = step.state, step.now
    if not isinstance(now, Replica) or _same_assignment(step):
        return ""
    deployment = state.deployments.get(now.spec.deployment)
    for rank in now.spec.ranks:
        node = state.nodes.get(rank.node)
        key = keys.node_lease_key(rank.node)
        if key not in state.leases and not state.is_news(key, LATELY_S):
            return f"{now.name} is assigned to {rank.node}, which is away"
        if node is None or state.is_news(keys.spec_key("Node", rank.node), LATELY_S):
            continue
        if node.spec.unschedulable or node.spec.draining:
            return f"{now.name} is assigned to {rank.node}, which takes nothing new"
        if deployment is not None and _repels(node, deployment):
            return f"{now.name} is assigned to {rank.node}, whose taint it does not tolerate"
    return ""


def surge_is_bounded(step: Step) -> str:
    """No replica is made that would be more than wanted and maxSurge; those that leave a node do not count."""
    state, now = step.state, step.now
    if not isinstance(now, Replica) or step.before is not None:
        return ""
    deployment = state.deployments.get(now.spec.deployment)
    if deployment is None:
        return f"{now.name} was made for nobody"
    if deployment.spec.autoscaling is not None:
        return ""
    wanted, rollout = deployment.spec.replicas, deployment.spec.rollout
    staying = [r.name for r in _active(state, deployment) if not _leaves(state, r, deployment)]
    most = wanted + quantity.resolve_amount(rollout.max_surge, wanted, round_up=True)
    if len(staying) <= most:
        return ""
    return f"{now.name} makes {len(staying)} of at most {most}: {', '.join(staying)}"


def enough_go_on(step: Step) -> str:
    """A rollout ends no replica that answers when that leaves fewer than wanted minus maxUnavailable."""
    state, before, now = step.state, step.before, step.now
    if not isinstance(before, Replica) or not isinstance(now, Replica):
        return ""
    was_marked = before.metadata.deletion_timestamp is not None
    because = now.metadata.annotations.get(ENDED_BECAUSE, "").partition(":")[0]
    deployment = state.deployments.get(now.spec.deployment)
    if was_marked or not because.startswith("Outdated") or deployment is None:
        return ""
    if not state.answers(now):
        return ""
    others = _active(state, deployment)
    left = sum(state.answered(r, LATELY_S) for r in others)
    # Without room for a surge, replicas are replaced in place, one at a time.
    if because == "OutdatedInPlace" and left == len(others):
        return ""
    # The planner may have read a slightly older spec.
    least = min(
        _least(model_deployment.spec, because)
        for model_deployment in state.lately(deployment.name, LATELY_S)
    )
    if left >= least:
        return ""
    return f"{now.name} ends ({because}) while only {left} others answer, and {least} must"


def _least(spec: ModelDeploymentSpec, because: str) -> int:
    """Return how many replicas must go on answering while one ends for such a reason."""
    if spec.autoscaling is not None or spec.rollout.strategy == "Recreate":
        return 0
    missing = quantity.resolve_amount(spec.rollout.max_unavailable, spec.replicas, round_up=False)
    return spec.replicas - (max(missing, 1) if because == "OutdatedInPlace" else missing)


LAWS = (
    memory_suffices,
    edits_are_whole,
    draining_comes_first,
    only_nodes_that_take,
    surge_is_bounded,
    enough_go_on,
)


def _same_assignment(step: Step) -> bool:
    return (
        isinstance(step.before, Replica)
        and step.now is not None
        and step.before.metadata.uid == step.now.metadata.uid
    )


def _used(state: State, node: str) -> int:
    ranks = (rank for replica in state.replicas.values() for rank in replica.spec.ranks)
    return sum(rank.memory.total_bytes for rank in ranks if rank.node == node)


def _reserved(state: State, name: str) -> int:
    node = state.nodes.get(name)
    if node is None:
        return 0
    node = node.model_copy(update={"status": state.machines.get(name)})
    return max(
        (
            quantity.parse(pool.spec.reserved.memory)
            for pool in state.pools.values()
            if pool.spec.reserved is not None
            and not state.is_news(keys.spec_key("NodePool", pool.name), LATELY_S)
            and in_pool(pool, node)
        ),
        default=0,
    )


def _owns(deployment: ModelDeployment, replica: Replica) -> bool:
    return deployment.metadata.uid in {owner.uid for owner in replica.metadata.owner_references}


def _active(state: State, deployment: ModelDeployment) -> list[Replica]:
    """Return the deployment's replicas that do not drain."""
    return [
        replica
        for replica in state.replicas.values()
        if _owns(deployment, replica) and replica.metadata.deletion_timestamp is None
    ]


def _repels(node: Node, deployment: ModelDeployment) -> bool:
    hard = [taint for taint in node.spec.taints if taint.effect != "PreferNoSchedule"]
    return any(not tolerates(deployment.spec.placement.tolerations, taint) for taint in hard)


def _leaves(state: State, replica: Replica, deployment: ModelDeployment) -> bool:
    """Return whether the replica is to leave its node, or was lately."""
    name = replica.spec.ranks[0].node
    node = state.nodes.get(name)
    if node is None or state.is_news(keys.spec_key("Node", name), LATELY_S):
        return True
    return node.spec.draining or _repels(node, deployment)
