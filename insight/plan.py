"""Forecasts of every replica in a fleet, as `fleetctl plan` shows them: steps, and blocks of Macs."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from insight import memory_proof
from insight.catalogue_snapshots import expected_snapshots
from insight.fleet_caches import FleetCaches
from insight.mac_blocks import MacBlock, MacEntry
from insight.memory_outlook import look_at_memory
from insight.placement import snapshot_of
from machinery.clock import Clock
from manifests.trees import Tree
from models import inspection
from reconciler.deployments import forecast
from reconciler.deployments.forecast import ForecastKind, ForecastStep
from reconciler.deployments.placer import Assignment, PendingAssignment, PreemptingAssignment
from reconciler.deployments.snapshot import FleetSnapshot
from reconciler.placement.inputs import NodeView
from reconciler.placement.refusals import Unschedulable, summary_line
from reconciler.placement.table import NodeTable
from schemas.deployment import ModelSource
from schemas.model_snapshot import ModelSnapshot

# Nothing is below it: only what the hub says counts.
_NO_FOLDER: Final = Path(os.devnull)


def forecast_replicas(
    seen: FleetSnapshot,
    *,
    models_dir: Path | None = None,
    answers: Sequence[ModelSnapshot] = (),
) -> tuple[tuple[ForecastStep, ...], Sequence[NodeView]]:
    """Return the fate of every replica that does not stay as it is, and the Macs as they are before.

    `models_dir`: inspect models that no Mac has inspected there; `answers`: what hubs say of models.
    """
    table, deployments = seen.table(), seen.deployments()
    if models_dir is not None:
        sources = [deployment.spec.model for deployment in deployments]
        table = NodeTable([_with_models(node, sources, models_dir) for node in table.nodes])
    if answers:
        table = NodeTable([_with_answers(node, answers) for node in table.nodes])
    steps = forecast.forecast(
        [seen.observe(deployment.name, table) for deployment in deployments], table
    )
    return steps, table.nodes


def _with_models(node: NodeView, sources: Sequence[ModelSource], models_dir: Path) -> NodeView:
    """Return the node with reports about models that it has not inspected, made from the files on this machine."""
    on_linux = node.labels.get("fleet/os") == "Linux"
    paths = {source.folder for source in sources if source.folder} | {
        source.draft.path for source in sources if source.draft
    }
    adapters = {path for source in sources for path in source.adapter_paths}
    reports = inspection.report_models(
        paths - node.models.keys(), models_dir, casts_to_float32=on_linux
    )
    fitted = inspection.report_adapters(
        adapters - node.adapters.keys(), models_dir, casts_to_float32=on_linux
    )
    if not reports and not fitted:
        return node
    return replace(
        node,
        models={**node.models, **{report.path: report for report in reports}},
        adapters={**node.adapters, **{report.path: report for report in fitted}},
    )


def _with_answers(node: NodeView, answers: Sequence[ModelSnapshot]) -> NodeView:
    """Return the node with the reports that its agent will make about models of hubs."""
    reports = inspection.report_models(
        (),
        _NO_FOLDER,
        casts_to_float32=node.labels.get("fleet/os") == "Linux",
        snapshots={answer.folder: answer for answer in answers if answer.folder not in node.models},
    )
    return replace(node, models={**node.models, **{report.path: report for report in reports}})


def planned_blocks(steps: Sequence[ForecastStep], nodes: Sequence[NodeView]) -> list[MacBlock]:
    """Return each Mac as it would be after the steps; replicas that come and go are marked. Pure."""
    gone: dict[tuple[str, str], str] = {}
    """Reasons why replicas leave, by node and replica."""
    come: dict[str, list[MacEntry]] = {}
    for step in steps:
        if step.before and step.kind is not ForecastKind.KEPT:
            gone |= {(node, step.replica): "" for node in step.before.split(",")}
        if isinstance(step.outcome, PreemptingAssignment):
            for victim in step.outcome.victims:
                places = victim.nodes or tuple(rank.node for rank in step.outcome.ranks)
                gone |= {(node, victim.replica): f"displaced by {step.replica}" for node in places}
        if isinstance(step.outcome, Unschedulable) or step.kind is ForecastKind.KEPT:
            continue
        for rank in step.outcome.ranks if step.outcome is not None else ():
            entry = MacEntry(label=step.replica, size_bytes=rank.memory.total_bytes, mark="+")
            come.setdefault(rank.node, []).append(entry)
    return [_planned_block(node, gone, come.get(node.name, [])) for node in nodes]


def _planned_block(
    node: NodeView, gone: Mapping[tuple[str, str], str], come: Sequence[MacEntry]
) -> MacBlock:
    """Return the block of one Mac; a replica that drains already counts as gone."""
    entries = [
        MacEntry(
            label=allocation.replica,
            size_bytes=allocation.bytes,
            mark="-" if (node.name, allocation.replica) in gone or allocation.is_ending else "",
            note=gone.get((node.name, allocation.replica), ""),
        )
        for allocation in node.allocations
    ]
    return MacBlock(
        name=node.name,
        chip=node.chip,
        offered_bytes=node.allocatable_bytes + node.reserved_bytes,
        reserved_bytes=node.reserved_bytes,
        entries=(*entries, *come),
        is_ready=node.is_ready,
    )


def step_tree(step: ForecastStep) -> dict[str, Tree]:
    """Return one step as a tree; sizes are in bytes. Pure."""
    before: list[Tree] = [*step.before.split(",")] if step.before else []
    trees: dict[str, Tree] = {
        "deployment": step.deployment,
        "replica": step.replica,
        "change": step.kind.value,
        "from": before,
        "to": [],
        "reason": step.because,
        "fetchBytes": step.fetch_bytes,
    }
    if step.memory is not None:
        trees["memory"] = memory_proof.proof_tree(step.memory)
    match step.outcome:
        case Assignment(ranks=ranks, form=form):
            trees["to"] = [rank.node for rank in ranks]
            if form is not None:
                trees["group"] = {"name": form.group, "parallelism": form.parallelism}
        case PreemptingAssignment(ranks=ranks, victims=victims):
            trees["to"] = [rank.node for rank in ranks]
            trees["displaces"] = [victim.replica for victim in victims]
        case PendingAssignment(ranks=ranks, why=pending):
            trees["to"] = [rank.node for rank in ranks]
            trees["waitsFor"] = pending.note
        case Unschedulable():
            trees["refusal"] = summary_line(step.outcome)
            trees["needBytes"] = step.outcome.need_bytes or None
        case None:
            pass
    return trees


def block_tree(block: MacBlock) -> dict[str, Tree]:
    """Return the memory of one Mac as a tree. Pure."""
    return {
        "node": block.name,
        "chip": block.chip,
        "isReady": block.is_ready,
        "offeredBytes": block.offered_bytes,
        "reservedBytes": block.reserved_bytes,
        "freeBytes": block.free_bytes,
        "replicas": [
            {
                "name": entry.label,
                "bytes": entry.size_bytes,
                "change": entry.mark,
                "note": entry.note,
            }
            for entry in block.entries
        ],
    }


Replicas: TypeAlias = tuple[tuple[ForecastStep, ...], Sequence[NodeView]]
"""The fate of replicas, and the Macs before, as `forecast_replicas` returns them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The effect of a change on the replicas of a fleet; what happens without it, too, is left out."""

    steps: tuple[ForecastStep, ...]
    """The fate of every replica that the change alters."""
    waiting: tuple[ForecastStep, ...]
    """Replicas that have no place, with the change or without it."""
    settled: int
    """The number of replicas that have no place without the change, and are not needed with it."""
    macs: tuple[MacBlock, ...]
    """The Macs that the change alters."""

    @property
    def unplaced(self) -> int:
        """The number of replicas that the change leaves without a place."""
        return sum(map(_is_unplaced, self.steps))

    @property
    def sentence(self) -> str:
        """The forecast in one sentence."""
        placed = [step for step in self.steps if step.outcome and not _is_unplaced(step)]
        new = sum(step.kind is ForecastKind.NEW for step in placed)
        counts = (
            (new, "placed"),
            (len(placed) - new, "moved or replaced"),
            (sum(step.kind is ForecastKind.ENDS for step in self.steps), "ended"),
            (self.unplaced, "left without a place"),
            (self.settled, "no longer waiting for a place"),
        )
        parts = [f"{number} {words}" for number, words in counts if number]
        return f"Replicas: {', '.join(parts)}." if parts else "No replica changes."


def forecast_change(after: Replicas, before: Replicas = ((), ())) -> Forecast:
    """Return what a change causes, by the fate of replicas with it and without it. Pure."""
    known = set(map(_fate, before[0]))
    shared = [step for step in after[0] if _fate(step) in known]
    needed = {step.replica for step in after[0]}
    unplaced = filter(_is_unplaced, before[0])
    blocks = [block for block in planned_blocks(*after) if block.has_changed]
    known_blocks = planned_blocks(*before)
    return Forecast(
        steps=tuple(step for step in after[0] if _fate(step) not in known),
        waiting=tuple(filter(_is_unplaced, shared)),
        settled=sum(step.replica not in needed for step in unplaced),
        macs=tuple(block for block in blocks if block not in known_blocks),
    )


def _is_unplaced(step: ForecastStep) -> bool:
    return isinstance(step.outcome, Unschedulable)


def _fate(step: ForecastStep) -> tuple[object, ...]:
    """Return the parts of a step that tell it from others: the amounts in a refusal may differ."""
    nodes = (
        None if _is_unplaced(step) else [rank.node for rank in getattr(step.outcome, "ranks", ())]
    )
    return step.replica, step.kind, step.before, step.because, str(nodes), step.memory


def _expected(caches: FleetCaches, clock: Clock) -> tuple[FleetSnapshot, Replicas]:
    """Return the fleet and the fate of its replicas, with the catalogue's answers for hubs that were not asked yet."""
    snapshot = snapshot_of(caches, clock.now())
    answers = expected_snapshots(snapshot.unresolved(), clock.now())
    for answer in answers:
        snapshot.suppose_model(answer)
    return snapshot, forecast_replicas(snapshot, answers=answers)


def forecast_of(
    supposed: FleetCaches, clock: Clock, before: FleetCaches | None = None
) -> dict[str, Tree]:
    """Return the forecast of a supposed fleet as a tree, in bytes; `before`: the fleet without the change, None for none."""
    snapshot, (steps, nodes) = _expected(supposed, clock)
    earlier = ((), ()) if before is None else _expected(before, clock)[1]
    found = forecast_change((steps, nodes), earlier)
    return {
        "sentence": found.sentence,
        "unplaced": found.unplaced,
        "steps": [step_tree(step) for step in found.steps],
        "waiting": [step_tree(step) for step in found.waiting],
        "macs": [block_tree(mac) for mac in found.macs],
        "memory": look_at_memory(snapshot, steps, nodes).trees,
    }
