"""May this node serve from what it has on its disk: the model, its adapter, its draft model? And what would that take? Pure.

May this replica run on this node? "No" is a value with a reason. Pure.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from models.footprint import SMALL_QUANT_GROUP, layer_groups
from reconciler.placement import columns
from reconciler.placement.columns import AnyColumn, Column, ColumnPair
from reconciler.placement.inputs import PlacementRequest, Rejection
from reconciler.placement.memory_proof import ProofExtras, describe_proof, prove
from reconciler.views import NodeView
from schemas import quantity
from schemas.deployment import KvCache
from schemas.node import AdapterReport, ModelGeometry, ModelReport, matches
from schemas.placement import tolerates
from schemas.replica import MemoryProof

_NOT_PLAIN = "has no layers with plain keys and values of all tokens"


def source_columns(want: PlacementRequest) -> AnyColumn:
    """Return all of a node that the questions of this file look at."""
    source = want.spec.model
    found: AnyColumn = columns.ModelColumn(source.path)
    if source.draft is not None:
        found = ColumnPair(found, columns.ModelColumn(source.draft.path))
    if source.adapter is not None:
        found = ColumnPair(found, columns.AdapterColumn(source.adapter))
    return found


def has_all(want: PlacementRequest, node: NodeView) -> Rejection | None:
    """Ask for every folder that the engine reads."""
    for title, report in _reports(want, node):
        if report is None:
            return Rejection(
                reason="ModelNotInspected", message=f"its agent has not looked at the {title} yet"
            )
        if isinstance(report, ModelReport) and report.geometry is not None:
            continue
        if isinstance(report, ModelReport) or report.reason:
            prefix = "" if title == "model" else f"{title}: "
            return Rejection(
                reason=report.reason, message=f"{prefix}{report.message.removeprefix(prefix)}"
            )
    return None


def _reports(
    want: PlacementRequest, node: NodeView
) -> Iterator[tuple[str, ModelReport | AdapterReport | None]]:
    source = want.spec.model
    yield "model", node.models.get(source.path)
    if source.draft is not None:
        yield "draft model", node.models.get(source.draft.path)
    if source.adapter is not None:
        yield "adapter", node.adapters.get(source.adapter)


def is_understood(want: PlacementRequest, node: NodeView) -> Rejection | None:
    for title, geometry in _geometries(want, node):
        if geometry.unknown and not want.override_bytes:
            return Rejection(
                reason="ModelNotUnderstood",
                message=f"what the {title} needs is not known: {geometry.unknown}. Set "
                "spec.resources.memory to what one replica takes",
            )
    return None


def takes_context(want: PlacementRequest, node: NodeView) -> Rejection | None:
    length = want.spec.context_length
    for title, geometry in _geometries(want, node):
        most = geometry.max_context
        if most is not None and length > most:
            return Rejection(
                reason="ContextTooLong",
                message=f"spec.contextLength is {length}, the {title} was made for {most} tokens at most",
                need=length,
                have=most,
            )
    return None


def keeps_as_told(want: PlacementRequest, node: NodeView) -> Rejection | None:
    """Ask whether the model's caches can be what spec.kvCache and a draft model make of them."""
    kept = want.spec.kv_cache or KvCache()
    groups = layer_groups(geometry_of(want, node))
    if not groups:
        return None  # nobody knows its layers; the engine will say what it cannot do
    kinds = {group.kind for group in groups}
    sizes = {size for g in groups if g.kind == "Full" for size in (g.head_dim, g.value_dim)}
    if kept.bits is not None and ("Latent" in kinds or not sizes):
        return _unsuited("spec.kvCache.bits", _NOT_PLAIN)
    if kept.bits is not None and any(size % SMALL_QUANT_GROUP for size in sizes):
        shown = " and ".join(map(str, sorted(sizes)))
        why = f"has heads of {shown} numbers, and they are packed {SMALL_QUANT_GROUP} together"
        return _unsuited("spec.kvCache.bits", why)
    if kept.window is not None and ("Latent" in kinds or not sizes):
        return _unsuited("spec.kvCache.window", _NOT_PLAIN)
    for title, shape in _geometries(want, node) if want.spec.model.draft is not None else ():
        if any(group.kind in ("Sliding", "State") for group in layer_groups(shape)):
            why = (
                f"needs to take back what was guessed wrong, and the {title} has layers that cannot"
            )
            return Rejection(
                reason="DraftUnsupported", message=f"spec.model.draft {why}; leave it out"
            )
    return None


def _unsuited(field: str, why: str) -> Rejection:
    return Rejection(reason="KvCacheUnsupported", message=f"the model {why}; leave {field} out")


def _geometries(want: PlacementRequest, node: NodeView) -> Iterator[tuple[str, ModelGeometry]]:
    yield "model", geometry_of(want, node)
    draft = draft_of(want, node)
    if draft is not None:
        yield "draft model", draft


def suits_model(want: PlacementRequest, node: NodeView) -> Rejection | None:
    """Ask everything about the folders at once: the later questions rely on the earlier ones."""
    return (
        has_all(want, node)
        or is_understood(want, node)
        or takes_context(want, node)
        or keeps_as_told(want, node)
    )


def geometry_of(want: PlacementRequest, node: NodeView) -> ModelGeometry:
    """Return what the node knows of the model, after `has_all` made sure that it does."""
    geometry = node.models[want.path].geometry
    assert geometry is not None
    return geometry


def draft_of(want: PlacementRequest, node: NodeView) -> ModelGeometry | None:
    """Return the same of the draft model; None if none is wanted."""
    draft = want.spec.model.draft
    return None if draft is None else node.models[draft.path].geometry


def extras_of(want: PlacementRequest, node: NodeView) -> ProofExtras:
    """Return what the deployment asks for beside the model, as the node has it."""
    source, kept = want.spec.model, want.spec.kv_cache or KvCache()
    return ProofExtras(
        kv_bits=kept.bits,
        kv_window=kept.window,
        prefix_cache_bytes=quantity.parse(kept.prefix_bytes) if kept.prefix_bytes else 0,
        adapter_bytes=node.adapters[source.adapter].weights_bytes if source.adapter else 0,
        draft=draft_of(want, node),
        draft_tokens=source.draft.tokens if source.draft is not None else 0,
    )


def proof_of(want: PlacementRequest, node: NodeView) -> MemoryProof:
    """Return what the replica would need if it had the node for itself alone."""
    return prove(
        geometry_of(want, node),
        context_length=want.spec.context_length,
        concurrency=want.spec.concurrency,
        override_bytes=want.override_bytes,
        extras=extras_of(want, node),
    )


Check: TypeAlias = Callable[[PlacementRequest, NodeView], Rejection | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFilter:
    """A reason to say no that does not change while replicas are being placed."""

    check: Check
    column: Callable[[PlacementRequest], AnyColumn]
    """All of a node that `check` looks at."""
    aspect: Callable[[PlacementRequest], Hashable] = lambda _: None
    """All of a want that it looks at."""
    is_passing: bool = False
    """Whether it may be another tomorrow, with the very same Mac."""


def is_ready(_: PlacementRequest, node: NodeView) -> Rejection | None:
    if node.is_ready:
        return None
    return Rejection(reason="NodeNotReady", message="its agent does not renew its lease")


def is_not_held_back(_: PlacementRequest, node: NodeView) -> Rejection | None:
    """Ask everything about the node itself at once (nodestate.py): the first reason is what people are told."""
    if not node.holds:
        return None
    hold = node.holds[0]
    return Rejection(reason=hold.reason, message=hold.message, need=hold.need, have=hold.have)


def is_not_cordoned(_: PlacementRequest, node: NodeView) -> Rejection | None:
    if not node.is_cordoned:
        return None
    return Rejection(reason="NodeCordoned", message="it is cordoned (spec.unschedulable)")


def is_in_pool(want: PlacementRequest, node: NodeView) -> Rejection | None:
    pools = want.spec.placement.pools
    if not pools or node.pools.intersection(pools):
        return None
    return Rejection(reason="NotInPool", message=f"it is in none of the pools {', '.join(pools)}")


def matches_selector(want: PlacementRequest, node: NodeView) -> Rejection | None:
    wanted = want.spec.placement.node_selector
    if matches(dict(node.labels), wanted):
        return None
    lacking = [f"{k}={v}" for k, v in sorted(wanted.items()) if node.labels.get(k) != v]
    return Rejection(reason="SelectorMismatch", message=f"it lacks the label {', '.join(lacking)}")


def has_chip(want: PlacementRequest, node: NodeView) -> Rejection | None:
    chips = want.spec.placement.chips
    if not chips or node.chip in chips:
        return None
    return Rejection(
        reason="ChipMismatch",
        message=f"its chip is {node.chip or 'not known'}, spec.placement.chips asks for "
        f"{' or '.join(chips)}",
    )


def has_gpu_cores(want: PlacementRequest, node: NodeView) -> Rejection | None:
    need = want.spec.placement.min_gpu_cores
    if node.gpu_cores >= need:
        return None
    return Rejection(
        reason="TooFewGpuCores",
        message=f"it has {node.gpu_cores} GPU cores, spec.placement.minGpuCores is {need}",
        need=need,
        have=node.gpu_cores,
    )


def is_not_reserved(_: PlacementRequest, node: NodeView) -> Rejection | None:
    if not node.reserved_by_group:
        return None
    group = node.reserved_by_group
    return Rejection(
        reason="ReservedForGroup", message=f"it is reserved for the ShardGroup {group}"
    )


def is_tolerated(want: PlacementRequest, node: NodeView) -> Rejection | None:
    tolerations = want.spec.placement.tolerations
    kept_off = [
        f"{taint.key}{f'={taint.value}' if taint.value else ''}:{taint.effect}"
        for taint in node.taints
        if taint.effect != "PreferNoSchedule" and not tolerates(tolerations, taint)
    ]
    if not kept_off:
        return None
    return Rejection(
        reason="NodeTainted",
        message=f"it has the taint {', '.join(kept_off)}, which spec.placement.tolerations "
        "does not name",
    )


def keeps_apart(want: PlacementRequest, node: NodeView) -> Rejection | None:
    beside = sorted(want.apart_from.intersection(node.replicas))
    if not beside:
        return None
    return Rejection(
        reason="AntiAffinity",
        message=f"it runs {', '.join(beside)}, and spec.placement.antiAffinity keeps them apart",
    )


def is_below_limit(want: PlacementRequest, node: NodeView) -> Rejection | None:
    limit = want.spec.placement.max_replicas_per_node
    there = node.replicas.get(want.name, 0)
    if limit is None or there < limit:
        return None
    return Rejection(
        reason="ReplicaLimit",
        message=f"it has {there} replicas of this deployment, "
        f"spec.placement.maxReplicasPerNode is {limit}",
        need=there + 1,
        have=limit,
    )


def has_memory(want: PlacementRequest, node: NodeView) -> Rejection | None:
    proof = proof_of(want, node)
    need, have = proof.total_bytes, node.room_bytes
    if need <= have:
        return None
    show = quantity.show
    notes = [f"its pools reserve {show(node.reserved_bytes)}"] if node.reserved_bytes else []
    if node.promised_bytes:
        notes.append(f"{show(node.promised_bytes)} are kept for a higher priority")
    note = f" ({', '.join(notes)})" if notes else ""
    return Rejection(
        reason="InsufficientMemory",
        message=f"needs {show(need)} ({describe_proof(proof, want.spec)}), "
        f"has {show(max(0, have))} free of {show(max(0, node.allocatable_bytes))}{note}",
        need=need,
        have=have,
    )


def _on(column: Column) -> Callable[[PlacementRequest], Column]:
    return lambda _: column


FIXED: tuple[NodeFilter, ...] = (
    NodeFilter(check=is_ready, column=_on(columns.READY), is_passing=True),
    NodeFilter(check=is_not_held_back, column=_on(columns.HOLDS), is_passing=True),
    NodeFilter(check=is_not_cordoned, column=_on(columns.CORDONED), is_passing=True),
    NodeFilter(
        check=is_in_pool, column=_on(columns.POOLS), aspect=lambda want: want.spec.placement.pools
    ),
    NodeFilter(
        check=matches_selector,
        column=lambda want: columns.LabelsColumn(tuple(sorted(want.spec.placement.node_selector))),
        aspect=lambda want: tuple(sorted(want.spec.placement.node_selector.items())),
    ),
    NodeFilter(check=has_chip, column=_on(columns.CHIP), aspect=lambda w: w.spec.placement.chips),
    NodeFilter(
        check=has_gpu_cores,
        column=_on(columns.GPU_CORES),
        aspect=lambda want: want.spec.placement.min_gpu_cores,
    ),
    NodeFilter(check=is_not_reserved, column=_on(columns.GROUP)),
    NodeFilter(
        check=is_tolerated,
        column=_on(columns.TAINTS),
        aspect=lambda want: want.spec.placement.tolerations,
    ),
    NodeFilter(
        check=suits_model,
        column=source_columns,
        aspect=lambda want: (
            want.spec.model,
            want.override_bytes > 0,
            want.spec.context_length,
            want.spec.kv_cache,
        ),
    ),
)
# In order, after the others. These depend on what is assigned already; ranking.py has their arithmetic for all nodes at once.
MOVING: tuple[Check, ...] = (keeps_apart, is_below_limit, has_memory)


def find_rejection(want: PlacementRequest, node: NodeView) -> Rejection | None:
    """Return the first reason against the node; None if it may take the replica."""
    for check in (*(one.check for one in FIXED), *MOVING):
        rejected = check(want, node)
        if rejected is not None:
            return rejected
    return None
