"""Placement reports: why a deployment's next replica fits on a Mac or not, with need and have. Pure."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from insight import memory_proof
from insight.fleet_caches import FleetCaches
from manifests.trees import Tree
from reconciler.explain import NodeExplanation
from reconciler.listers.lister import Lister
from reconciler.placement.memory_proof import describe_proof
from reconciler.snapshot import FleetSnapshot
from schemas import sizes
from schemas.deployment import ModelDeployment


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementReport:
    """The outcome of placing one more replica of a deployment, Mac by Mac."""

    deployment: ModelDeployment
    placed: int
    desired: int
    line: str
    """The outcome in one line."""
    nodes: tuple[NodeExplanation, ...]
    """Every Mac, the best first."""
    present: Mapping[str, list[str]]
    """The replicas of the deployment on each Mac."""


def snapshot_of(caches: FleetCaches, now: datetime) -> FleetSnapshot:
    """Return the fleet in these caches for questions that change nothing."""
    return FleetSnapshot(caches=caches.objects, lister=Lister(caches.objects), now=now)


def explain_placement(seen: FleetSnapshot, name: str) -> PlacementReport | None:
    """Explain where one more replica of a deployment would go; None if there is no such deployment."""
    if name not in (one.name for one in seen.deployments()):
        return None
    outlook = seen.outlook(name, seen.table())
    observed = outlook.observed
    assert observed.deployment is not None  # its name is known
    present: dict[str, list[str]] = defaultdict(list)
    for one in observed.replicas:
        for rank in one.replica.spec.ranks:
            present[rank.node].append(one.name)
    return PlacementReport(
        deployment=observed.deployment,
        placed=len(observed.replicas),
        desired=observed.desired_replicas,
        line=outlook.line,
        nodes=outlook.nodes,
        present=present,
    )


def need_lines(report: PlacementReport) -> list[str]:
    """Return the memory proof of a replica on the best Mac; empty if none fits."""
    best = report.nodes[0] if report.nodes else None
    if best is None or best.memory is None:
        return []
    size = memory_proof.size_text(best.memory.total_bytes)
    proof = describe_proof(best.memory, report.deployment.spec)
    lines = [f"On {best.node} it would use {size}: {proof}"]
    if best.missing_bytes:
        lines.append(f"{best.node} would fetch {sizes.show(best.missing_bytes)} of the model first")
    return lines


def placement_tree(report: PlacementReport) -> dict[str, Tree]:
    """Return the report as a tree; sizes are in bytes."""
    return {
        "deployment": report.deployment.name,
        "summary": report.line,
        "nodes": [
            {
                "node": one.node,
                "fits": one.fits,
                **_refusal(one),
                **_scores(one),
                "roomBytes": one.room_bytes,
                "replicas": list(report.present.get(one.node, ())),
            }
            for one in report.nodes
        ],
    }


def _refusal(one: NodeExplanation) -> dict[str, Tree]:
    if one.refusal is None:
        return {}
    why = one.refusal
    return {
        "refusal": {
            "reason": why.reason,
            "message": why.message,
            "need": why.need,
            "have": why.have,
        }
    }


def _scores(one: NodeExplanation) -> dict[str, Tree]:
    if not one.fits or one.memory is None:
        return {}
    return {
        "memory": memory_proof.proof_tree(one.memory),
        "missingBytes": one.missing_bytes,
        "isPreferred": one.is_preferred,
        "score": round(one.score, 3),
        "parts": [
            {"name": part.name, "score": round(part.score, 3), "weight": part.weight}
            for part in one.parts
        ],
    }
