"""Replicas on nodes that are drained: which are left, and why each of them is. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from reconciler.placer import Assignment
from reconciler.snapshot import FleetSnapshot
from schemas import quantity
from schemas.deployment import ModelDeployment
from schemas.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounts:
    """How many replicas a deployment wants, how many answer, and how many must."""

    wanted: int
    ready: int
    needed: int


def replica_counts(deployment: ModelDeployment) -> ReplicaCounts:
    """Return the deployment's numbers as its status has them."""
    spec, status = deployment.spec, deployment.status
    scaled = spec.autoscaling is not None and status is not None
    wanted = status.desired_replicas if scaled and status is not None else spec.replicas
    return ReplicaCounts(
        wanted=wanted,
        ready=status.ready_replicas if status is not None else 0,
        needed=quantity.resolve_amount(spec.min_available, wanted, round_up=True),
    )


def replicas_on(replicas: Sequence[Replica], nodes: frozenset[str]) -> dict[str, Replica]:
    """Return the replicas that have a rank on one of the nodes, by name."""
    return {
        replica.name: replica
        for replica in sorted(replicas, key=lambda replica: replica.name)
        if any(rank.node in nodes for rank in replica.spec.ranks)
    }


def count_blocked(deployment: ModelDeployment, leaving: int) -> int:
    """Return how many of `leaving` replicas minAvailable keeps, if no node takes a replacement."""
    count = replica_counts(deployment)
    return max(0, min(leaving, count.needed - (count.ready - leaving)))


def unplaceable_deployments(seen: FleetSnapshot, names: Iterable[str]) -> dict[str, str]:
    """Return, of these deployments, those for which no node takes one more replica, with the reason in a line."""
    table, found = seen.table(), {}
    for deployment in seen.deployments():
        if deployment.name not in names:
            continue
        outlook = seen.outlook(deployment.name, table)
        if not isinstance(outlook.outcome, Assignment):
            found[deployment.name] = outlook.line
    return found


def blocked_warning(deployment: ModelDeployment, leaving: int, lacks: str) -> str:
    """Return what to say of a deployment of which not all replicas can leave as things are."""
    replicas = "replica" if leaving == 1 else "replicas"
    return (
        f"{count_blocked(deployment, leaving)} of {leaving} {replicas} of modeldeployment/{deployment.name} will stay as "
        f"things are: no node takes a replacement ({lacks}), and {_min_available_text(deployment)}. "
        "Make room, or lower spec.minAvailable"
    )


def remaining_reason(
    replica: Replica, deployments: Mapping[str, ModelDeployment], lacks: Mapping[str, str]
) -> str:
    """Return why the replica is still there; `lacks` says which deployments have no place for a replacement."""
    if replica.metadata.deletion_timestamp is not None:
        return "it drains: requests under way are being finished, or its agent is away"
    deployment = deployments.get(replica.spec.deployment)
    if deployment is None:
        return f"its deployment {replica.spec.deployment} is gone, and it is to end"
    if deployment.name not in lacks:
        count = replica_counts(deployment)
        return (
            f"its replacement is not ready yet: {count.ready} of {count.wanted} replicas of "
            f"modeldeployment/{deployment.name} are ready"
        )
    why = f"no node takes a replacement ({lacks[deployment.name]})"
    if not count_blocked(deployment, 1):
        return why
    return f"{why}, and {_min_available_text(deployment)}. Make room, or lower spec.minAvailable"


def _min_available_text(deployment: ModelDeployment) -> str:
    count = replica_counts(deployment)
    return (
        f"minAvailable is {deployment.spec.min_available} with {count.ready} of {count.wanted} "
        "replicas ready"
    )
