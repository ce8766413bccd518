"""Where a replica goes: the best of the nodes that fit, or why none does. Pure, deterministic."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reconciler.observe import NodeView
from reconciler.placement.filters import Rejected, reject
from reconciler.placement.proof import prove
from schemas import quantity
from schemas.deployment import ModelDeployment
from schemas.replica import MemoryProof


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The node, and the proof that the replica fits."""

    node: str
    memory: MemoryProof


@dataclass(frozen=True, slots=True, kw_only=True)
class Unschedulable:
    """Why each node cannot take the replica, by node name."""

    refusals: tuple[tuple[str, Rejected], ...]


def place(deployment: ModelDeployment, nodes: Sequence[NodeView]) -> Placed | Unschedulable:
    """Return the best node for one more replica of the deployment."""
    verdicts = [(node, reject(deployment.spec, node)) for node in nodes]
    fitting = [node for node, rejected in verdicts if rejected is None]
    if not fitting:
        refusals = [(node.name, why) for node, why in verdicts if why is not None]
        return Unschedulable(refusals=tuple(sorted(refusals, key=lambda pair: pair[0])))
    best = min(fitting, key=lambda node: (-score(deployment, node), node.name))
    return Placed(node=best.name, memory=_proof(deployment, best))


def score(deployment: ModelDeployment, node: NodeView) -> float:
    """Return 0..100: spread replicas of a deployment first, then even out the load."""
    siblings = node.replicas.get(deployment.metadata.name, 0)
    spread = 100.0 / (1 + siblings)
    headroom = 100.0 * node.free_bytes / max(1, node.allocatable_bytes)
    return 0.7 * spread + 0.3 * headroom


def with_replica(node: NodeView, deployment: ModelDeployment, memory: MemoryProof) -> NodeView:
    """Return the node with one more replica assigned to it."""
    name = deployment.metadata.name
    return replace(
        node,
        used_bytes=node.used_bytes + memory.total_bytes,
        replicas={**node.replicas, name: node.replicas.get(name, 0) + 1},
    )


def explain(unschedulable: Unschedulable) -> str:
    """Return the refusals in one line, as kubectl does: counts by reason, the nearest miss first."""
    refusals = [why for _, why in unschedulable.refusals]
    if not refusals:
        return "no node has joined the fleet yet; start fleet-nodeagent on a Mac"
    parts = []
    for reason in sorted({why.reason for why in refusals}):
        same = [why for why in refusals if why.reason == reason]
        parts.append(f"{len(same)} {reason}{_detail(same)}")
    return f"0/{len(refusals)} nodes fit: {'; '.join(parts)}"


def _detail(same: Sequence[Rejected]) -> str:
    if same[0].reason == "InsufficientMemory":
        best = max(same, key=lambda why: why.have)
        need, have = quantity.show(best.need), quantity.show(max(0, best.have))
        return f" (need {need}, best has {have} free)"
    messages = sorted({why.message for why in same})
    return f" ({messages[0]})" if len(messages) == 1 else f" (for one: {messages[0]})"


def _proof(deployment: ModelDeployment, node: NodeView) -> MemoryProof:
    spec = deployment.spec
    geometry = node.models[spec.model.path].geometry
    assert geometry is not None
    return prove(geometry, context_length=spec.context_length, concurrency=spec.concurrency)
