"""The memory of every Mac after a forecast, replica by replica with its memory proof. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from insight import memory_proof
from manifests.trees import Tree
from reconciler.deployments.forecast import ForecastKind, ForecastStep
from reconciler.deployments.placer import PreemptingAssignment
from reconciler.deployments.snapshot import FleetSnapshot
from reconciler.placement.inputs import NodeView
from reconciler.placement.refusals import Unschedulable
from schemas.replica import MemoryProof


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOutlook:
    """The Macs before a forecast, and what it changes."""

    steps: Sequence[ForecastStep]
    nodes: Sequence[NodeView]
    proofs: Mapping[str, Mapping[str, MemoryProof]]
    """The memory proofs of the replicas that run, by node and replica."""

    @property
    def trees(self) -> list[Tree]:
        """The Macs as trees; sizes are in bytes."""
        return [self._mac(node) for node in self.nodes]

    def _mac(self, node: NodeView) -> dict[str, Tree]:
        gone, come = self._gone(node.name), self._come(node.name)
        entries: list[Tree] = []
        used = 0
        for allocation in node.allocations:
            is_gone = allocation.is_ending or allocation.replica in gone
            proof = self.proofs.get(node.name, {}).get(allocation.replica)
            used += 0 if is_gone else allocation.bytes
            entries.append(
                _entry(
                    allocation.replica,
                    allocation.deployment,
                    allocation.bytes,
                    proof,
                    is_gone=is_gone,
                )
            )
        for step, proof in come:
            used += proof.total_bytes
            entries.append(
                {
                    **_entry(step.replica, step.deployment, proof.total_bytes, proof),
                    "change": "comes",
                }
            )
        free = max(0, node.allocatable_bytes - used)
        return {
            "name": node.name,
            "memoryBytes": node.memory_bytes,
            "allocatableBytes": node.allocatable_bytes,
            "freeBytes": free,
            "replicas": entries,
        }

    def _gone(self, node: str) -> set[str]:
        gone: set[str] = set()
        for step in self.steps:
            moves = step.kind in (ForecastKind.ENDS, ForecastKind.IN_PLACE, ForecastKind.REPLACED)
            if moves and not isinstance(step.outcome, Unschedulable):
                gone |= {step.replica} if node in step.before.split(",") else set()
            if isinstance(step.outcome, PreemptingAssignment):
                gone |= {victim.replica for victim in step.outcome.victims}
        return gone

    def _come(self, node: str) -> list[tuple[ForecastStep, MemoryProof]]:
        return [
            (step, rank.memory)
            for step in self.steps
            if step.outcome is not None
            and not isinstance(step.outcome, Unschedulable)
            and step.kind is not ForecastKind.KEPT
            for rank in step.outcome.ranks
            if rank.node == node
        ]


def _entry(
    replica: str, deployment: str, size: int, proof: MemoryProof | None, *, is_gone: bool = False
) -> dict[str, Tree]:
    return {
        "replica": replica,
        "deployment": deployment,
        "bytes": size,
        "memory": None if proof is None else memory_proof.proof_tree(proof),
        "change": "goes" if is_gone else "",
    }


def look_at_memory(
    seen: FleetSnapshot, steps: Sequence[ForecastStep], nodes: Sequence[NodeView]
) -> MemoryOutlook:
    """Return the memory of the Macs after the steps of a forecast."""
    proofs: dict[str, dict[str, MemoryProof]] = {}
    for replica in seen.lister.replicas():
        for rank in replica.spec.ranks:
            proofs.setdefault(rank.node, {})[replica.name] = rank.memory
    return MemoryOutlook(steps=steps, nodes=nodes, proofs=proofs)
