"""Answers which models of the catalogue the Macs can serve, in which quantization and how fast. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, NewType

from manifests.trees import Tree
from models.catalogue import catalogue
from models.catalogue.catalogue import CatalogueEntry, CatalogueFile
from reconciler.deployments.model_fit import one_request_rate, with_facts
from reconciler.placement import decode_rate
from reconciler.placement.filters import find_rejection
from reconciler.placement.inputs import NodeView, PlacementRequest, Rejection
from reconciler.placement.memory_proof import geometry_of, proof_of
from schemas import chips, quantity
from schemas.deployment import ModelDeploymentSpec, ModelSource
from schemas.node import ModelReport
from schemas.replica import MemoryProof

FAST_TOKENS_PER_S: Final = 10.0
"""A quantization of more bits is chosen as long as it keeps this rate: twice as fast as people read."""

MOST_KINDS: Final = 6
"""Kinds of Macs that a page compares, the largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MacKind:
    """Equal Macs, by the one with the most free memory."""

    name: str
    node: NodeView
    bandwidths: tuple[float, float]
    """Least and most bandwidth in GB/s; the same for a Mac that is known, and zeroes if nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MacFit:
    """The answer for one model and one kind of Mac."""

    kind: str
    entry: CatalogueEntry
    """The model in the chosen bits; in the fewest if none fits."""
    refusal: Rejection | None
    memory: MemoryProof | None
    rates: tuple[float, float]
    """Tokens per second of one request on the slowest and the fastest chip; zeroes if unknown, or if it does not fit."""
    streamed_rate: float = 0.0
    """Tokens per second at most with all experts on the disk; 0 if it fits, has none, or the disk was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFit:
    """The answers for one model."""

    name: str
    fits: tuple[MacFit, ...]
    """One for each kind of Mac, in their order."""

    @property
    def is_possible(self) -> bool:
        """Return whether any Mac can serve it."""
        return any(fit.refusal is None for fit in self.fits)


def kinds_of(nodes: Iterable[NodeView]) -> tuple[MacKind, ...]:
    """Return the kinds of Macs of a fleet, the largest first."""
    ordered = sorted(nodes, key=lambda node: (*node.hardware, -node.room_bytes, node.name))
    kinds = []
    for _, group in groupby(ordered, key=lambda node: node.hardware):
        first, *others = group
        name = f"{len(others) + 1} x {first.chip or 'Mac'}" if others else first.name
        speeds = (first.bandwidth_gbps, first.bandwidth_gbps)
        kinds.append(MacKind(name=name, node=first, bandwidths=speeds))
    return tuple(sorted(kinds, key=lambda kind: (-kind.node.memory_bytes, kind.name)))


def kind_of_size(node: NodeView) -> MacKind:
    """Return a Mac of which only the memory is known: any chip that was sold with it."""
    speeds = chips.bandwidths_with(node.memory_bytes)
    return MacKind(name=node.name, node=node, bandwidths=speeds)


def fit_catalogue(
    listed: CatalogueFile, request: PlacementRequest, kinds: Sequence[MacKind]
) -> tuple[ModelFit, ...]:
    """Return the answers for each model: those that fit first, the largest first; then others, the smallest first."""
    models, reports = [], _Reports({})
    by_name = groupby(catalogue.entries(listed), key=lambda entry: entry.name)
    for name, group in by_name:
        entries = sorted(group, key=lambda entry: -entry.bits)
        fits = tuple(_fit_kind(entries, request, kind, reports) for kind in kinds)
        models.append(ModelFit(name=name, fits=fits))
    return tuple(sorted(models, key=_rank))


def _rank(model: ModelFit) -> tuple[bool, int, str]:
    parameters = model.fits[0].entry.facts.weights.parameters
    return not model.is_possible, -parameters if model.is_possible else parameters, model.name


_Reports = NewType("_Reports", dict[tuple[str, int, str | None], Mapping[str, ModelReport]])
"""Reports of agents about each entry, by its bits and the system of the Mac: the same for all kinds of Macs."""


def _fit_kind(
    entries: Sequence[CatalogueEntry], request: PlacementRequest, kind: MacKind, reports: _Reports
) -> MacFit:
    """Return the answer with the most bits that fit and are fast enough, else with the fewest.

    Bits that must be made are chosen only if no repository that fits has others.
    """
    fits = [_fit(entry, request, kind, reports) for entry in entries]
    possible = [fit for fit in fits if fit.refusal is None]
    possible = [fit for fit in possible if fit.entry.is_published] or possible
    fast = [fit for fit in possible if not fit.rates[0] or fit.rates[0] >= FAST_TOKENS_PER_S]
    return (fast or possible[-1:] or fits[-1:])[0]


def _fit(
    entry: CatalogueEntry, request: PlacementRequest, kind: MacKind, reports: _Reports
) -> MacFit:
    key = entry.name, entry.bits, kind.node.labels.get("fleet/os")
    if key not in reports:
        bare = replace(kind.node, models={})
        reports[key] = with_facts(bare, request.path, entry.facts).models
    node = replace(kind.node, models=reports[key])
    refusal, memory, rates = find_rejection(request, node), None, (0.0, 0.0)
    geometry = geometry_of(request, node)
    if not geometry.unknown:
        memory = proof_of(request, node)
    if refusal is None and memory is not None and geometry.layers:
        low, high = (
            one_request_rate(geometry, memory, bandwidth_gbps=speed) for speed in kind.bandwidths
        )
        rates = (low, high)
    streamed_rate = 0.0
    if refusal is not None and memory is not None and geometry.expert_bytes:
        resident = memory.total_bytes - geometry.expert_bytes
        if resident <= node.allocatable_bytes < memory.total_bytes:
            streamed_rate = decode_rate.streamed_tokens_per_s(
                geometry, bandwidth_gbps=node.bandwidth_gbps, disk_gbps=node.disk_gbps
            )
    return MacFit(
        kind=kind.name,
        entry=entry,
        refusal=refusal,
        memory=memory,
        rates=rates,
        streamed_rate=streamed_rate,
    )


def usual_request() -> PlacementRequest:
    """Return a request with the default context and concurrency."""
    source = ModelSource(path="model")
    spec = ModelDeploymentSpec(model=source, concurrency=quantity.DEFAULT_CONCURRENCY)
    return PlacementRequest(name="", spec=spec)


def fleet_tree(nodes: Iterable[NodeView]) -> dict[str, Tree]:
    """Return the answers for the list of this release and the kinds of Macs of a fleet, as a tree."""
    listed, kinds = catalogue.shipped_catalogue(), kinds_of(nodes)[:MOST_KINDS]
    models = fit_catalogue(listed, usual_request(), kinds) if kinds else ()
    return catalogue_tree(listed, models)


def catalogue_tree(listed: CatalogueFile, models: tuple[ModelFit, ...]) -> dict[str, Tree]:
    """Return the answers as a tree; sizes are in bytes. Pure."""
    return {
        "date": listed.date.isoformat(),
        "models": [
            {"name": model.name, "macs": [_fit_tree(fit) for fit in model.fits]} for model in models
        ],
    }


def _fit_tree(fit: MacFit) -> dict[str, Tree]:
    refusal = fit.refusal
    return {
        "mac": fit.kind,
        "fits": refusal is None,
        **entry_tree(fit.entry),
        "memoryBytes": None if fit.memory is None else fit.memory.total_bytes,
        "tokensPerSecond": [round(rate, 1) for rate in fit.rates] if fit.rates[1] else None,
        "streamedTokensPerSecond": round(fit.streamed_rate, 1) or None,
        "refusal": None
        if refusal is None
        else {"reason": refusal.reason, "message": refusal.message},
    }


def entry_tree(entry: CatalogueEntry) -> dict[str, Tree]:
    """Return what the catalogue says of a model, as a tree; sizes are in bytes. Pure."""
    model = entry.model
    return {
        "repo": entry.repo,
        "isPublished": entry.is_published,
        "parameters": entry.facts.weights.parameters,
        "activeParameters": entry.active_parameters,
        "bits": entry.bits,
        "packedExperts": model.packed_experts,
        "bytes": entry.facts.weight_bytes,
        "architecture": entry.facts.model_type,
        "maxContext": entry.facts.max_context,
        "license": model.license,
        "task": model.task,
        "inputs": list(model.inputs),
        "toolFormat": model.format or None,
        "reasons": model.reasons,
        "source": model.source,
    }
