"""The replicas that remain on draining nodes, and the reasons. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from reconciler.deployments.placer import Assignment
from reconciler.deployments.snapshot import FleetSnapshot
from schemas import quantity
from schemas.deployment import ModelDeployment
from schemas.meta import ConditionStatus, ObjectKey, find_condition
from schemas.replica import Replica

_MOST_NAMED: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounts:
    """The numbers of wanted, ready and required replicas of a deployment."""

    wanted: int
    ready: int
    needed: int


def replica_counts(deployment: ModelDeployment) -> ReplicaCounts:
    """Return the numbers of a deployment from its status."""
    spec, status = deployment.spec, deployment.status
    scaled = spec.autoscaling is not None and status is not None
    wanted = status.desired_replicas if scaled and status is not None else spec.replicas
    return ReplicaCounts(
        wanted=wanted,
        ready=status.ready_replicas if status is not None else 0,
        needed=quantity.resolve_amount(spec.min_available, wanted, round_up=True),
    )


def replicas_on(replicas: Sequence[Replica], nodes: frozenset[str]) -> dict[str, Replica]:
    """Return the replicas with a rank on one of the nodes, by name."""
    return {
        replica.name: replica
        for replica in sorted(replicas, key=lambda replica: replica.name)
        if any(rank.node in nodes for rank in replica.spec.ranks)
    }


def count_blocked(deployment: ModelDeployment, leaving: int) -> int:
    """Return how many of `leaving` replicas must stay because of minAvailable, if no node accepts a replacement."""
    count = replica_counts(deployment)
    return max(0, min(leaving, count.needed - (count.ready - leaving)))


def unplaceable_deployments(seen: FleetSnapshot, names: Iterable[str]) -> dict[str, str]:
    """Return those of the deployments for which no node accepts one more replica, each with a one-line reason."""
    table, found = seen.table(), {}
    for deployment in seen.deployments():
        if deployment.name not in names:
            continue
        outlook = seen.outlook(deployment.name, table)
        if not isinstance(outlook.outcome, Assignment):
            found[deployment.name] = outlook.line
    return found


def blocked_warning(deployment: ModelDeployment, leaving: int, lacks: str) -> str:
    """Return the warning about a deployment whose replicas cannot all be moved."""
    replicas = "replica" if leaving == 1 else "replicas"
    return (
        f"{count_blocked(deployment, leaving)} of {leaving} {replicas} of modeldeployment/{deployment.name} cannot be "
        f"moved: no node accepts a replacement ({lacks}), and {_min_available_text(deployment)}. "
        "Free memory on other nodes, or lower spec.minAvailable"
    )


def waiting_replicas(seen: FleetSnapshot) -> dict[str, str]:
    """Return the replicas that are not ready yet with what each does, such as a fetch, by deployment."""
    found: dict[str, list[str]] = {}
    for replica in seen.lister.replicas():
        status = seen.lister.status(ObjectKey("Replica", replica.name))
        ready = None if status is None else find_condition(status.conditions, "Ready")
        is_waiting = ready is not None and ready.status is not ConditionStatus.TRUE
        if ready is not None and is_waiting and replica.metadata.deletion_timestamp is None:
            text = f"{replica.name} on {replica.spec.ranks[0].node}: {ready.reason}"
            text = f"{text}: {ready.message}".removesuffix(": ")
            found.setdefault(replica.spec.deployment, []).append(text)
    return {name: "; ".join(sorted(texts)[:_MOST_NAMED]) for name, texts in found.items()}


def remaining_reason(
    replica: Replica,
    deployments: Mapping[str, ModelDeployment],
    lacks: Mapping[str, str],
    waiting: Mapping[str, str],
) -> str:
    """Return why the replica is still on the node.

    `lacks` maps deployments without a node for a replacement to reasons, `waiting` others to what replacements do.
    """
    if replica.metadata.deletion_timestamp is not None:
        return "it is draining: its requests have not finished, or its agent is unreachable"
    deployment = deployments.get(replica.spec.deployment)
    if deployment is None:
        return f"its deployment {replica.spec.deployment} is gone, and it will be ended"
    if deployment.name not in lacks:
        count, now = replica_counts(deployment), waiting.get(deployment.name, "")
        return (
            f"its replacement is not ready yet: {count.ready} of {count.wanted} replicas of "
            f"modeldeployment/{deployment.name} are ready; {now}"
        ).removesuffix("; ")
    reason = f"no node accepts a replacement ({lacks[deployment.name]})"
    if not count_blocked(deployment, 1):
        return reason
    return (
        f"{reason}, and {_min_available_text(deployment)}. "
        "Free memory on other nodes, or lower spec.minAvailable"
    )


def _min_available_text(deployment: ModelDeployment) -> str:
    count = replica_counts(deployment)
    return (
        f"minAvailable is {deployment.spec.min_available} with {count.ready} of {count.wanted} "
        "replicas ready"
    )
