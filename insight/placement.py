"""Placement reports: why a deployment's next replica fits on a Mac or not, with need and have. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from insight import memory_proof
from insight.fleet_caches import FleetCaches
from machinery.text_table import align_columns
from manifests.trees import Tree
from reconciler.deployments.explain import NodeExplanation
from reconciler.deployments.snapshot import FleetSnapshot
from reconciler.listers.lister import Lister
from reconciler.placement.memory_proof import describe_proof
from schemas import sizes
from schemas.deployment import ModelDeployment

_NO_PLACE = (
    "Healthy members of the group, which cannot take the replica as a whole (see the first line):"
)


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
    if name not in (deployment.name for deployment in seen.deployments()):
        return None
    outlook = seen.outlook(name, seen.table())
    observed = outlook.observed
    assert observed.deployment is not None  # its name is known
    present: dict[str, list[str]] = defaultdict(list)
    for replica in observed.replicas:
        for rank in replica.replica.spec.ranks:
            present[rank.node].append(replica.name)
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
    if best.concurrency_note:
        lines.append(best.concurrency_note)
    if best.missing_bytes:
        lines.append(f"{best.node} would fetch {sizes.show(best.missing_bytes)} of the model first")
    return lines


def report_text(report: PlacementReport) -> str:
    """Return the report as `fleetctl explain placement` prints it."""
    name = report.deployment.name
    head = f"modeldeployment/{name}: {report.placed} of {report.desired} replicas are placed"
    proof = need_lines(report)
    parts = (*node_tables(report.nodes, report.present), *(["", *proof] if proof else ()))
    return "\n".join((f"{head}; for one more, {report.line}", *parts)) + "\n"


def node_tables(found: Sequence[NodeExplanation], there: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the tables of the nodes that fit, and of the others. Pure."""
    fitting = [explanation for explanation in found if explanation.fits]
    refused = [explanation for explanation in found if not explanation.fits]
    parts: list[str] = []
    if fitting:
        has_missing = any(explanation.missing_bytes for explanation in fitting)
        scores = [f"{part.name.upper()} x{part.weight}" for part in fitting[0].parts]
        rows = [
            [
                explanation.node,
                f"{explanation.score:.1f}",
                *(f"{part.score:.0f}" for part in explanation.parts),
                memory_proof.size_text(explanation.memory.total_bytes)
                if explanation.memory
                else "-",
                memory_proof.size_text(explanation.room_bytes),
                *((sizes.show(explanation.missing_bytes),) if has_missing else ()),
                "yes" if explanation.is_preferred else "no",
                ",".join(there.get(explanation.node, ())) or "-",
            ]
            for explanation in fitting
        ]
        missing = ("MISSING",) if has_missing else ()
        titles = ["NODE", "SCORE", *scores, "NEED", "FREE", *missing, "PREFERRED", "REPLICAS"]
        # Members of a group that cannot be formed have no share of the model.
        has_place = any(explanation.memory is not None for explanation in fitting)
        heading = "Nodes that fit, best first:" if has_place else _NO_PLACE
        parts += ["", heading, align_columns(rows, titles)]
    if refused:
        rows = [
            [
                explanation.node,
                explanation.refusal.reason,
                memory_proof.amount_text(explanation.refusal, explanation.refusal.need),
                memory_proof.amount_text(explanation.refusal, explanation.refusal.have),
                ",".join(there.get(explanation.node, ())) or "-",
                explanation.refusal.message,
            ]
            for explanation in refused
            if explanation.refusal is not None
        ]
        titles = ["NODE", "REASON", "NEED", "HAVE", "REPLICAS", "MESSAGE"]
        parts += ["", "Nodes that do not fit:", align_columns(rows, titles)]
    return parts


def placement_tree(report: PlacementReport) -> dict[str, Tree]:
    """Return the report as a tree; sizes are in bytes."""
    return {
        "deployment": report.deployment.name,
        "summary": report.line,
        "nodes": [
            {
                "node": node.node,
                "fits": node.fits,
                **_refusal(node),
                **_scores(node),
                "roomBytes": node.room_bytes,
                "replicas": list(report.present.get(node.node, ())),
            }
            for node in report.nodes
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
        "concurrencyNote": one.concurrency_note or None,
        "missingBytes": one.missing_bytes,
        "isPreferred": one.is_preferred,
        "score": round(one.score, 3),
        "parts": [
            {"name": part.name, "score": round(part.score, 3), "weight": part.weight}
            for part in one.parts
        ],
    }
