"""Who leaves a node: at once where a taint drives it out, else when it can be spared. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from reconciler.observe import Observed, ReplicaView
from reconciler.rollout.steps import Ending
from schemas import amount
from schemas.deployment import ModelDeployment
from schemas.placement import tolerates


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """The replicas of a deployment by whether they may stay where they are."""

    staying: tuple[ReplicaView, ...]
    leaving: tuple[ReplicaView, ...]
    """On nodes that are drained or withheld: to be replaced elsewhere first."""
    driven_out: tuple[ReplicaView, ...]
    """On nodes with a taint NoExecute that the deployment does not tolerate."""


def sort(seen: Observed, deployment: ModelDeployment, active: Sequence[ReplicaView]) -> Sorted:
    """Sort the replicas that do not drain yet; what is on a lost node is moved, and counts as staying."""
    tolerations = deployment.spec.placement.tolerations
    drives_out = {
        node.name
        for node in seen.nodes
        for taint in node.taints
        if taint.effect == "NoExecute" and not tolerates(tolerations, taint)
    }
    to_leave = {node.name for node in seen.nodes if node.leave}
    driven_out = [r for r in active if r.nodes & drives_out and not r.is_node_lost]
    leaving = [
        r for r in active if r.nodes & to_leave and r not in driven_out and not r.is_node_lost
    ]
    return Sorted(
        staying=tuple(r for r in active if r not in driven_out and r not in leaving),
        leaving=tuple(sorted(leaving, key=lambda r: r.ordinal)),
        driven_out=tuple(driven_out),
    )


def spared(
    found: Sorted, seen: Observed, deployment: ModelDeployment, *, is_stuck: bool
) -> tuple[Ending, ...]:
    """Return who of those that leave may drain now.

    All of them once their replacements answer. `is_stuck`: there is no place for a replacement; then as many as
    minAvailable allows.
    """
    idle = [r for r in found.leaving if r.is_idle]
    ready = [r for r in found.leaving if r.is_ready]
    elsewhere = sum(r.is_ready for r in found.staying)
    if elsewhere < seen.wanted:
        least = amount.of(deployment.spec.min_available, seen.wanted, round_up=True)
        ready = ready[: max(0, elsewhere + len(ready) - least)] if is_stuck else []
    return tuple(Ending(replica=r, because="Evicted") for r in (*idle, *ready))
