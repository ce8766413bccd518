"""`fleetctl plan`: shows what an apply would change, and where replicas would be placed. Writes nothing."""

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from fleetctl.cli.arguments import manifests_option, recursive_option, tree_option
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.documents import tree_text
from fleetctl.cli.errors import DiffError, FleetctlError
from fleetctl.output import printers
from insight import memory_proof
from insight.conditions import names_text
from insight.mac_blocks import blocks_text
from insight.plan import Forecast, block_tree, forecast_change, forecast_replicas, step_tree
from machinery.clock import SystemClock
from manifests import apply as applying
from manifests.errors import ManifestErrors
from manifests.load import LoadedObject, load_objects
from manifests.plan import Change, UnchangedObject, change_text, change_tree
from manifests.trees import Tree
from models.hub.hub_settings import HubSettings, hub_endpoint_option, hub_settings
from reconciler.deployments import snapshot
from reconciler.deployments.forecast import ForecastKind, ForecastStep
from reconciler.deployments.placer import (
    Assignment,
    PendingAssignment,
    PlacementOutcome,
    PreemptingAssignment,
)
from reconciler.deployments.snapshot import FleetSnapshot
from reconciler.groups.group_view import GroupForm
from reconciler.placement.refusals import Unschedulable, summary_line
from reconciler.services.model_lookup import LOOKUP_ERRORS, look_up, reason_of
from schemas import sizes
from schemas.model_snapshot import ModelSnapshot
from schemas.replica import RankAssignment
from store.codec import UndecodableError

_MOST_NAMES = 6
_HELP = """Show what an apply would change, and where replicas would be placed. Nothing is written.

\b
  fleetctl plan -f fleet/
  fleetctl plan -f new.yaml --models-dir ~/Models

The output starts with the differences, as `fleetctl diff` shows them. Then it lists every replica that would be
started, replaced or ended because of them, with its memory proof, or the reason why it cannot be placed. What happens
without the apply, too, is left out. The plan is computed by the
reconciler's planner from the current state of the fleet. A running reconciler is not needed.

A model of a hub that the fleet does not know yet is looked up there, without a token; no weights are read.

The memory of a model in a folder is unknown until a node has inspected it. Use --models-dir to inspect models on this
machine instead; the plan then assumes that every node has the same files.

-o json and -o yaml print the changes field by field, each replica and each Mac that changes, for programs.

Exit code 0: no changes; 1: changes; more than 1: an error.
"""


@click.command(help=_HELP, short_help="Show what an apply would change, and where replicas go.")
@manifests_option()
@recursive_option
@click.option(
    "--models-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder on this machine with the models that no node has inspected yet.",
)
@hub_endpoint_option
@tree_option("Print changes, replicas and Macs for programs.")
@store_options
def plan(
    files: tuple[str, ...],
    recursive: bool,
    models_dir: Path | None,
    output: str | None,
    **options: Any,
) -> None:
    """Show what an apply would change, and where replicas would be placed. Nothing is written."""
    try:
        loaded = load_objects(files, recursive=recursive, stdin=sys.stdin.buffer)
        changes, fleet_snapshot = run(_observe(loaded, options))
    except ManifestErrors as error:
        raise DiffError(str(error)) from error
    except FleetctlError as error:
        raise DiffError(error.message) from error
    before = forecast_replicas(fleet_snapshot, models_dir=models_dir)
    fleet_snapshot.suppose(
        change.obj for change in changes if not isinstance(change, UnchangedObject)
    )
    snapshots, failed = run(_ask_hubs(fleet_snapshot, hub_settings(options)))
    warnings = [
        f"{key} cannot be read and is ignored" for key in fleet_snapshot.unreadable()
    ] + failed
    for text in warnings:
        click.echo(f"warning: {text}", err=True)
    after = forecast_replicas(fleet_snapshot, models_dir=models_dir, answers=snapshots)
    forecast = forecast_change(after, before)
    if output is not None:
        click.echo(tree_text(plan_tree(changes, forecast, warnings), output), nl=False)
    else:
        click.echo("\n".join(_plan_parts(changes, forecast, macs=len(after[1]))))
    if any(map(change_text, changes)):
        raise click.exceptions.Exit(1)


def _plan_parts(changes: Sequence[Change], forecast: Forecast, *, macs: int) -> list[str]:
    """Return the texts of a plan: differences, replicas, and the Macs that change. Pure."""
    differences = "".join(map(change_text, changes))
    parts = [*([differences] if differences else []), *format_steps(forecast.steps)]
    if blocks := forecast.macs:
        parts.append(f"\nMacs that change, {len(blocks)} of {macs}:\n\n{blocks_text(blocks)}")
    if forecast.waiting:
        names = names_text([step.replica for step in forecast.waiting], _MOST_NAMES)
        parts.append(
            f"\nWithout a place before and after the apply: {names}. `fleetctl explain placement NAME` says why"
        )
    return parts


def plan_tree(
    changes: Sequence[Change], forecast: Forecast, warnings: Sequence[str]
) -> dict[str, Tree]:
    """Return a plan for programs; docs/operations/rollouts-and-nodes.md describes the fields. Pure."""
    return {
        "changes": [change_tree(change) for change in changes],
        "unplaced": forecast.unplaced,
        "steps": [step_tree(step) for step in forecast.steps],
        "waiting": [step_tree(step) for step in forecast.waiting],
        "macs": [block_tree(block) for block in forecast.macs],
        "warnings": [*warnings],
    }


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


async def _ask_hubs(
    seen: FleetSnapshot, hubs: HubSettings
) -> tuple[list[ModelSnapshot], list[str]]:
    """Return what hubs say of models that the leader has not resolved, and why others are not planned.

    They are asked without a token.
    """
    answers: list[ModelSnapshot] = []
    failed: list[str] = []
    waiting = seen.unresolved()
    if not waiting:
        return answers, failed
    async with hubs.open() as factory:
        for deployment in waiting:
            source = deployment.spec.model.hub
            assert source is not None
            endpoint, now = hubs.endpoint_of(source), SystemClock().now()
            try:
                hub = factory(source, "")
                model_snapshot = await look_up(hub, deployment, endpoint=endpoint, now=now)
            except LOOKUP_ERRORS as error:
                reason, why = reason_of(error)
                failed.append(
                    f"modeldeployment/{deployment.name} is not planned: {reason}: {why}. "
                    "The hub was asked without a token"
                )
                continue
            seen.suppose_model(model_snapshot)
            answers.append(model_snapshot)
    return answers, failed


def format_steps(steps: Sequence[ForecastStep]) -> list[str]:
    """Return the steps as a table, followed by the reasons of replicas that cannot be placed. Pure."""
    if not steps:
        return ["Placement: no replica changes."]
    has_extras = any(step.memory is not None and step.memory.extra_bytes for step in steps)
    more = ("EXTRAS",) if has_extras else ()
    if any(step.fetch_bytes for step in steps):
        more = (*more, "DOWNLOAD")
    titles = (
        "REPLICA",
        "CHANGE",
        "FROM",
        "TO",
        "CONCURRENCY",
        "NEED",
        *memory_proof.TITLES,
        *more,
        "WHY",
    )
    lines = [
        "Placement, highest priority first:",
        printers.align_columns([_row(step, more) for step in steps], titles),
    ]
    for name, group in groupby(steps, key=lambda step: step.deployment):
        lines += _notes(name, [step.outcome for step in group])
    return lines


def _row(step: ForecastStep, more: Sequence[str]) -> tuple[str, ...]:
    node, why, proof = "-", step.because, step.memory
    match step.outcome:
        case Assignment(ranks=ranks, form=form):
            node = _nodes(ranks)
            if form is not None:
                why = "; ".join(filter(None, (why, _sharding_text(form))))
        case PreemptingAssignment(ranks=ranks, victims=victims):
            node = _nodes(ranks)
            names = ", ".join(victim.replica for victim in victims)
            why = f"displaces {names} with lower priority"
        case PendingAssignment(ranks=ranks, why=pending):
            node, why = _nodes(ranks), pending.note
        case Unschedulable():
            why = "no node fits"
        case None:
            pass
    need = memory_proof.size_text(proof.total_bytes) if proof is not None else "-"
    requests = str(proof.concurrency) if proof is not None and proof.concurrency else "-"
    parts = (
        memory_proof.part_texts(proof) if proof is not None else ["-"] * len(memory_proof.TITLES)
    )
    if "EXTRAS" in more:
        parts.append(memory_proof.extra_text(proof) if proof is not None else "-")
    if "DOWNLOAD" in more:
        parts.append(sizes.show(step.fetch_bytes) if step.fetch_bytes else "-")
    if proof is not None and proof.overridden:
        note = "the override of spec.resources.memory applies"
        why = f"{why}; {note}" if why else note
    return (
        step.replica,
        _KIND_TEXTS[step.kind],
        step.before or "-",
        node,
        requests,
        need,
        *parts,
        why or "-",
    )


def _nodes(ranks: Sequence[RankAssignment]) -> str:
    return ",".join(rank.node for rank in ranks)


def _sharding_text(form: GroupForm) -> str:
    """Return how the ranks of a sharded replica are formed."""
    fallback = f", its fallback {form.fallback}" if form.fallback else ""
    return f"{form.parallelism} on shardgroup {form.group}{fallback}"


_KIND_TEXTS = {
    ForecastKind.NEW: "new",
    ForecastKind.REPLACED: "replaced",
    ForecastKind.IN_PLACE: "replaced in place",
    ForecastKind.KEPT: "unchanged",
    ForecastKind.ENDS: "ends",
}


def _notes(name: str, outcomes: Sequence[PlacementOutcome | None]) -> list[str]:
    """Return a line that says why replicas of a deployment cannot be placed."""
    unplaced = [outcome for outcome in outcomes if isinstance(outcome, Unschedulable)]
    if not unplaced:
        return []
    number = f"{len(unplaced)} {'replica' if len(unplaced) == 1 else 'replicas'}"
    line = f"modeldeployment/{name}: {number} cannot be placed: {summary_line(unplaced[0])}"
    if any(tally.reason == "ModelNotInspected" for tally in unplaced[0].tallies):
        line += "; agents inspect the model after the apply. Use --models-dir to inspect files on this machine"
    return ["", line]
