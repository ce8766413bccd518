"""`fleetctl explain placement`: which nodes fit one more replica, with scores and refusals."""

from collections.abc import Mapping, Sequence
from typing import Any

import click
import orjson

from fleetctl.cli.connect import open_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects.kind_args import kind_of
from fleetctl.output import printers
from insight import memory_proof
from insight.placement import explain_placement, need_lines, placement_tree
from machinery.clock import SystemClock
from manifests.suggestions import not_found_message
from manifests.yaml import parser
from reconciler import snapshot
from reconciler.explain import NodeExplanation
from schemas import sizes

_NO_PLACE = (
    "Healthy members of the group, which cannot take the replica as a whole (see the first line):"
)


async def placement_report(name: str, output: str, options: dict[str, Any]) -> str:
    """Return the report about a deployment in the format of -o."""
    async with open_store(options) as transport:
        seen = await snapshot.take(transport, SystemClock())
    report = explain_placement(seen, name)
    if report is None:
        known = [one.name for one in seen.deployments()]
        raise FleetctlError(not_found_message(kind_of("md"), name, known))
    for key in seen.unreadable():
        click.echo(f"warning: {key} cannot be read and is ignored", err=True)
    if output == "json":
        return orjson.dumps(placement_tree(report), option=orjson.OPT_INDENT_2).decode() + "\n"
    if output == "yaml":
        return parser.dump(placement_tree(report))
    head = f"modeldeployment/{name}: {report.placed} of {report.desired} replicas are placed"
    proof = need_lines(report)
    parts = (*node_tables(report.nodes, report.present), *(["", *proof] if proof else ()))
    return "\n".join((f"{head}; for one more, {report.line}", *parts)) + "\n"


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
