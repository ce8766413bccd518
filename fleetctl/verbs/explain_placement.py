"""`fleetctl explain placement`: which nodes fit one more replica, with scores and refusals."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import click
import orjson

from fleetctl.cli.connect import open_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects.kind_args import kind_of
from fleetctl.output import memory_proof, printers
from machinery.clock import SystemClock
from manifests.suggestions import not_found_message
from manifests.trees import Tree
from manifests.yaml import parser
from reconciler import snapshot
from reconciler.explain import NodeExplanation
from reconciler.placement.memory_proof import describe_proof
from schemas import sizes
from schemas.deployment import ModelDeploymentSpec

_NO_PLACE = (
    "Healthy members of the group, which cannot take the replica as a whole (see the first line):"
)


async def placement_report(name: str, output: str, options: dict[str, Any]) -> str:
    """Return the report about a deployment in the format of -o."""
    async with open_store(options) as transport:
        seen = await snapshot.take(transport, SystemClock())
    known = [one.name for one in seen.deployments()]
    if name not in known:
        raise FleetctlError(not_found_message(kind_of("md"), name, known))
    for key in seen.unreadable():
        click.echo(f"warning: {key} cannot be read and is ignored", err=True)
    outlook = seen.outlook(name, seen.table())
    observed, found, line = outlook.observed, outlook.nodes, outlook.line
    there: dict[str, list[str]] = defaultdict(list)
    for one in observed.replicas:
        for rank in one.replica.spec.ranks:
            there[rank.node].append(one.name)
    if output == "json":
        return (
            orjson.dumps(
                placement_tree(name, found, there, line), option=orjson.OPT_INDENT_2
            ).decode()
            + "\n"
        )
    if output == "yaml":
        return parser.dump(placement_tree(name, found, there, line))
    placed = len(observed.replicas)
    head = f"modeldeployment/{name}: {placed} of {observed.desired_replicas} replicas are placed"
    assert observed.deployment is not None  # its name is known
    parts = need_lines(found, observed.deployment.spec)
    return "\n".join((f"{head}; for one more, {line}", *node_tables(found, there), *parts)) + "\n"


def need_lines(found: Sequence[NodeExplanation], spec: ModelDeploymentSpec) -> list[str]:
    """Return the memory proof of a replica on the best node; empty if no node fits. Pure."""
    best = found[0] if found else None
    if best is None or best.memory is None:
        return []
    size = memory_proof.size_text(best.memory.total_bytes)
    lines = ["", f"On {best.node} it would use {size}: {describe_proof(best.memory, spec)}"]
    if best.missing_bytes:
        lines.append(f"{best.node} would fetch {sizes.show(best.missing_bytes)} of the model first")
    return lines


def node_tables(found: Sequence[NodeExplanation], there: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the tables of the nodes that fit, and of the others. Pure."""
    fitting = [one for one in found if one.fits]
    refused = [one for one in found if not one.fits]
    parts: list[str] = []
    if fitting:
        has_missing = any(one.missing_bytes for one in fitting)
        scores = [f"{part.name.upper()} x{part.weight}" for part in fitting[0].parts]
        rows = [
            [
                one.node,
                f"{one.score:.1f}",
                *(f"{part.score:.0f}" for part in one.parts),
                memory_proof.size_text(one.memory.total_bytes) if one.memory else "-",
                memory_proof.size_text(one.room_bytes),
                *((sizes.show(one.missing_bytes),) if has_missing else ()),
                "yes" if one.is_preferred else "no",
                ",".join(there.get(one.node, ())) or "-",
            ]
            for one in fitting
        ]
        missing = ("MISSING",) if has_missing else ()
        titles = ["NODE", "SCORE", *scores, "NEED", "FREE", *missing, "PREFERRED", "REPLICAS"]
        # Members of a group that cannot be formed have no share of the model.
        has_place = any(one.memory is not None for one in fitting)
        heading = "Nodes that fit, best first:" if has_place else _NO_PLACE
        parts += ["", heading, printers.align_columns(rows, titles)]
    if refused:
        rows = [
            [
                one.node,
                one.refusal.reason,
                memory_proof.amount_text(one.refusal, one.refusal.need),
                memory_proof.amount_text(one.refusal, one.refusal.have),
                ",".join(there.get(one.node, ())) or "-",
                one.refusal.message,
            ]
            for one in refused
            if one.refusal is not None
        ]
        titles = ["NODE", "REASON", "NEED", "HAVE", "REPLICAS", "MESSAGE"]
        parts += ["", "Nodes that do not fit:", printers.align_columns(rows, titles)]
    return parts


def placement_tree(
    name: str,
    found: Sequence[NodeExplanation],
    there: Mapping[str, Sequence[str]],
    line: str,
) -> dict[str, Tree]:
    """Return the report as a tree; sizes are in bytes. Pure."""
    return {
        "deployment": name,
        "summary": line,
        "nodes": [
            {
                "node": one.node,
                "fits": one.fits,
                **_refusal(one),
                **_scores(one),
                "roomBytes": one.room_bytes,
                "replicas": list(there.get(one.node, ())),
            }
            for one in found
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
