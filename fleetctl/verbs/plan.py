"""`fleetctl plan`: what an apply would change, and where replicas would go then. Writes nothing."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import DiffError, FleetctlError
from fleetctl.output import memory_proof, printers
from fleetctl.verbs.apply import change_text, files_option, recursive_option
from machinery.clock import SystemClock
from manifests import apply as applying
from manifests.errors import ManifestErrors
from manifests.load import LoadedObject, load_objects
from manifests.plan import Change, UnchangedObject
from models import inspection
from reconciler import forecast, snapshot
from reconciler.forecast import ForecastKind, ForecastStep
from reconciler.groups.group_view import GroupForm
from reconciler.placement.inputs import NodeView
from reconciler.placement.refusals import Unschedulable, summary_line
from reconciler.placement.table import NodeTable
from reconciler.placer import Assignment, PendingAssignment, PlacementOutcome, PreemptingAssignment
from reconciler.snapshot import FleetSnapshot
from schemas.deployment import ModelSource
from schemas.replica import RankAssignment
from store.codec import UndecodableError

_HELP = """Show what an apply would change, and where replicas would go then. Nothing is written.

\b
  fleetctl plan -f fleet/
  fleetctl plan -f new.yaml --models-dir ~/Models

First the differences, as `fleetctl diff` shows them. Then every replica that would be started, replaced or ended,
with what its memory is needed for, and for what has no place the reason. It is the reconciler's own planner at work,
on the fleet as it is now; none needs to run.

Nodes look at a model when it is first deployed. Before that nobody knows what it needs: --models-dir says where this
machine has the models, and the plan supposes that every node has the same files.

Exit code 0: apply would change nothing, 1: something, more: it failed.
"""


@click.command(help=_HELP)
@files_option
@recursive_option
@click.option(
    "--models-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where models that no node has looked at yet are on this machine.",
)
@store_options
def plan(files: tuple[str, ...], recursive: bool, models_dir: Path | None, **options: Any) -> None:
    """Show what an apply would change, and where replicas would go then. Nothing is written."""
    try:
        loaded = load_objects(files, recursive=recursive, stdin=sys.stdin.buffer)
        changes, seen = run(_observe(loaded, options))
    except ManifestErrors as error:
        raise DiffError(str(error)) from error
    except FleetctlError as error:
        raise DiffError(error.message) from error
    for key in seen.unreadable():
        click.echo(f"warning: {key} cannot be read, and does not count", err=True)
    shown = [text for text in map(change_text, changes) if text]
    for text in shown:
        click.echo(text, nl=False)
    seen.suppose(change.obj for change in changes if not isinstance(change, UnchangedObject))
    steps = _forecast(seen, models_dir)
    if shown:
        click.echo()
    click.echo("\n".join(format_steps(steps)))
    if shown:
        raise click.exceptions.Exit(1)


async def _observe(
    loaded: list[LoadedObject], options: dict[str, Any]
) -> tuple[list[Change], FleetSnapshot]:
    clock = SystemClock()
    async with open_store(options) as transport:
        try:
            changes = await applying.prepare(transport, loaded, clock)
        except (ManifestErrors, UndecodableError) as error:
            raise FleetctlError(str(error)) from error
        return changes, await snapshot.take(transport, clock)


def _forecast(seen: FleetSnapshot, models_dir: Path | None) -> tuple[ForecastStep, ...]:
    table, deployments = seen.table(), seen.deployments()
    if models_dir is not None:
        wanted = [one.spec.model for one in deployments]
        table = NodeTable([_with_models(node, wanted, models_dir) for node in table.nodes])
    return forecast.forecast([seen.observe(one.name, table) for one in deployments], table)


def _with_models(node: NodeView, wanted: Sequence[ModelSource], models_dir: Path) -> NodeView:
    """Return the node as if it had looked at models that are here, and that it was not asked about yet."""
    on_linux = node.labels.get("fleet/os") == "Linux"
    paths = {one.path for one in wanted} | {one.draft.path for one in wanted if one.draft}
    adapters = {one.adapter for one in wanted if one.adapter is not None}
    found = inspection.report_models(
        paths - node.models.keys(), models_dir, casts_to_float32=on_linux
    )
    fitted = inspection.report_adapters(
        adapters - node.adapters.keys(), models_dir, casts_to_float32=on_linux
    )
    if not found and not fitted:
        return node
    return replace(
        node,
        models={**node.models, **{one.path: one for one in found}},
        adapters={**node.adapters, **{one.path: one for one in fitted}},
    )


def format_steps(steps: Sequence[ForecastStep]) -> list[str]:
    """Return what becomes of replicas as a table, and below it why some have no place. Pure."""
    if not steps:
        return ["Placement: every replica stays where it is."]
    has_extras = any(step.memory is not None and step.memory.extra_bytes for step in steps)
    more = ("EXTRAS",) if has_extras else ()
    titles = ("REPLICA", "CHANGE", "FROM", "TO", "NEED", *memory_proof.TITLES, *more, "WHY")
    lines = [
        "Placement, who has a higher priority first:",
        printers.align_columns([_row(step, has_extras=has_extras) for step in steps], titles),
    ]
    for name, group in groupby(steps, key=lambda step: step.deployment):
        lines += _notes(name, [step.outcome for step in group])
    return lines


def _row(step: ForecastStep, *, has_extras: bool) -> tuple[str, ...]:
    node, why, proof = "-", step.because, step.memory
    match step.outcome:
        case Assignment(ranks=ranks, form=form):
            node = _nodes(ranks)
            if form is not None:
                why = "; ".join(filter(None, (why, _sharding_text(form))))
        case PreemptingAssignment(ranks=ranks, victims=victims):
            node = _nodes(ranks)
            names = ", ".join(victim.replica for victim in victims)
            why = f"displaces {names} of a lower priority"
        case PendingAssignment(ranks=ranks, why=told):
            node, why = _nodes(ranks), told.note
        case Unschedulable():
            why = "no node fits"
        case None:
            pass
    need = memory_proof.size_text(proof.total_bytes) if proof is not None else "-"
    parts = (
        memory_proof.part_texts(proof) if proof is not None else ["-"] * len(memory_proof.TITLES)
    )
    if has_extras:
        parts.append(memory_proof.extra_text(proof) if proof is not None else "-")
    if proof is not None and proof.overridden:
        why = f"{why}; spec.resources.memory counts" if why else "spec.resources.memory counts"
    return (
        step.replica,
        _KIND_TEXTS[step.kind],
        step.before or "-",
        node,
        need,
        *parts,
        why or "-",
    )


def _nodes(ranks: Sequence[RankAssignment]) -> str:
    return ",".join(rank.node for rank in ranks)


def _sharding_text(form: GroupForm) -> str:
    """Return how the ranks of a replica work together."""
    fallback = f", its fallback {form.fallback}" if form.fallback else ""
    return f"{form.parallelism} on shardgroup {form.group}{fallback}"


_KIND_TEXTS = {
    ForecastKind.NEW: "new",
    ForecastKind.REPLACED: "replaced",
    ForecastKind.IN_PLACE: "replaced in place",
    ForecastKind.KEPT: "stays as it is",
    ForecastKind.ENDS: "ends",
}


def _notes(name: str, outcomes: Sequence[PlacementOutcome | None]) -> list[str]:
    """Return in a line why replicas of a deployment have no place, or whom they displace."""
    fallen = [one for one in outcomes if isinstance(one, Unschedulable)]
    if not fallen:
        return []
    number = f"{len(fallen)} {'replica has' if len(fallen) == 1 else 'replicas have'}"
    line = f"modeldeployment/{name}: {number} no place: {summary_line(fallen[0])}"
    if any(tally.reason == "ModelNotInspected" for tally in fallen[0].tallies):
        line += (
            "; agents look at it once it is applied, --models-dir shows the proof from files here"
        )
    return ["", line]
