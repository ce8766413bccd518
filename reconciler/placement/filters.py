"""Filters: reasons why a node cannot take a replica, as values. Pure.

The first half checks the folders on the node's disk: model, adapter, draft model. The second half checks the node.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from models.footprint import SMALL_QUANT_GROUP, layer_groups
from reconciler.placement import decode_rate, inputs
from reconciler.placement.inputs import (
    AnyColumn,
    Column,
    ColumnPair,
    NodeView,
    PlacementRequest,
    Rejection,
)
from reconciler.placement.memory_proof import describe_proof, draft_of, geometry_of, proof_of
from schemas import quantity
from schemas.kv_cache import KvCache
from schemas.node import AdapterReport, ModelGeometry, ModelReport, matches
from schemas.placement import tolerates

_NO_FULL_LAYERS = "has no layers that keep keys and values of all tokens"


def source_columns(request: PlacementRequest) -> AnyColumn:
    """Return the columns that the checks of the folders depend on."""
    any_column: AnyColumn
    any_column, *others = inputs.source_columns(request.spec.model)
    for column in others:
        any_column = ColumnPair(any_column, column)
    return any_column


def has_folders(request: PlacementRequest, node: NodeView) -> Rejection | None:
    """Check that the node has every folder that the engine reads."""
    for title, report in _reports(request, node):
        if report is None:
            return Rejection(
                reason="ModelNotInspected", message=f"its agent has not inspected the {title} yet"
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
    request: PlacementRequest, node: NodeView
) -> Iterator[tuple[str, ModelReport | AdapterReport | None]]:
    source = request.spec.model
    yield "model", node.models.get(source.folder)
    if source.draft is not None:
        yield "draft model", node.models.get(source.draft.path)
    for path in source.adapter_paths:
        yield "adapter", node.adapters.get(path)


def is_understood(request: PlacementRequest, node: NodeView) -> Rejection | None:
    """Check that the memory of the model is known, or set by spec.resources.memory."""
    for title, geometry in _geometries(request, node):
        if geometry.unknown and not request.override_bytes:
            return Rejection(
                reason="ModelNotUnderstood",
                message=f"the memory of the {title} is not known: {geometry.unknown}. Set "
                "spec.resources.memory to the memory of one replica",
            )
    return None


def supports_context(request: PlacementRequest, node: NodeView) -> Rejection | None:
    """Check that the model was trained for contexts of this length."""
    length = request.spec.context_length
    for title, geometry in _geometries(request, node):
        most = geometry.max_context
        if most is not None and length > most:
            return Rejection(
                reason="ContextTooLong",
                message=f"spec.contextLength is {length}, the {title} supports at most {most} tokens",
                need=length,
                have=most,
            )
    return None


def supports_kv_cache(request: PlacementRequest, node: NodeView) -> Rejection | None:
    """Check that the model's caches support spec.kvCache."""
    kv_cache = request.spec.kv_cache or KvCache()
    groups = layer_groups(geometry_of(request, node))
    if not groups:
        return None  # its layers are unknown; the engine reports what it cannot do
    kinds = {group.kind for group in groups}
    sizes = {size for g in groups if g.kind == "Full" for size in (g.head_dim, g.value_dim)}
    if kv_cache.bits is not None and ("Latent" in kinds or not sizes):
        return _unsuited("spec.kvCache.bits", _NO_FULL_LAYERS)
    if kv_cache.bits is not None and any(size % SMALL_QUANT_GROUP for size in sizes):
        listed = " and ".join(map(str, sorted(sizes)))
        why = f"has heads of {listed} numbers, which is no multiple of {SMALL_QUANT_GROUP}"
        return _unsuited("spec.kvCache.bits", why)
    if kv_cache.window is not None and ("Latent" in kinds or not sizes):
        return _unsuited("spec.kvCache.window", _NO_FULL_LAYERS)
    return None


def has_mtp_head(request: PlacementRequest, node: NodeView) -> Rejection | None:
    """Check that there is a multi-token prediction head if the deployment uses it."""
    if request.spec.model.mtp is None or geometry_of(request, node).has_mtp_head is not False:
        return None
    return Rejection(
        reason="DraftUnsupported",
        message="spec.model.mtp needs a multi-token prediction head, and the weights have none that engines can use; "
        "use ngram, or leave it out",
    )


def _unsuited(field: str, why: str) -> Rejection:
    return Rejection(reason="KvCacheUnsupported", message=f"the model {why}; leave {field} out")


def _geometries(request: PlacementRequest, node: NodeView) -> Iterator[tuple[str, ModelGeometry]]:
    yield "model", geometry_of(request, node)
    draft = draft_of(request, node)
    if draft is not None:
        yield "draft model", draft


def suits_model(request: PlacementRequest, node: NodeView) -> Rejection | None:
    """Apply all checks of the folders; the later ones rely on the earlier ones."""
    return (
        has_folders(request, node)
        or is_understood(request, node)
        or supports_context(request, node)
        or supports_kv_cache(request, node)
        or has_mtp_head(request, node)
    )


Check: TypeAlias = Callable[[PlacementRequest, NodeView], Rejection | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFilter:
    """A check whose answer does not change while replicas are placed."""

    check: Check
    column: Callable[[PlacementRequest], AnyColumn]
    """The columns of a node that `check` depends on."""
    aspect: Callable[[PlacementRequest], Hashable] = lambda _: None
    """The part of a request that it depends on."""
    is_passing: bool = False
    """True if the answer may change on the same Mac, such as readiness."""


def is_ready(_: PlacementRequest, node: NodeView) -> Rejection | None:
    if node.is_ready:
        return None
    return Rejection(reason="NodeNotReady", message="its agent does not renew its lease")


def is_not_held_back(_: PlacementRequest, node: NodeView) -> Rejection | None:
    """Reject with the first hold of the node (nodes/node_state.py)."""
    return node.holds[0] if node.holds else None


def is_not_cordoned(_: PlacementRequest, node: NodeView) -> Rejection | None:
    if not node.is_cordoned:
        return None
    return Rejection(reason="NodeCordoned", message="it is cordoned (spec.unschedulable)")


def is_in_pool(request: PlacementRequest, node: NodeView) -> Rejection | None:
    pools = request.spec.placement.pools
    if not pools or node.pools.intersection(pools):
        return None
    return Rejection(reason="NotInPool", message=f"it is in none of the pools {', '.join(pools)}")


def matches_selector(request: PlacementRequest, node: NodeView) -> Rejection | None:
    selector = request.spec.placement.node_selector
    if matches(dict(node.labels), selector):
        return None
    missing = [f"{k}={v}" for k, v in sorted(selector.items()) if node.labels.get(k) != v]
    return Rejection(reason="SelectorMismatch", message=f"it lacks the label {', '.join(missing)}")


def has_chip(request: PlacementRequest, node: NodeView) -> Rejection | None:
    chips = request.spec.placement.chips
    if not chips or node.chip in chips:
        return None
    return Rejection(
        reason="ChipMismatch",
        message=f"its chip is {node.chip or 'not known'}, spec.placement.chips asks for "
        f"{' or '.join(chips)}",
    )


def has_gpu_cores(request: PlacementRequest, node: NodeView) -> Rejection | None:
    need = request.spec.placement.min_gpu_cores
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


def is_tolerated(request: PlacementRequest, node: NodeView) -> Rejection | None:
    tolerations = request.spec.placement.tolerations
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


def keeps_apart(request: PlacementRequest, node: NodeView) -> Rejection | None:
    others = sorted(request.apart_from.intersection(node.replicas))
    if not others:
        return None
    return Rejection(
        reason="AntiAffinity",
        message=f"it runs {', '.join(others)}, and spec.placement.antiAffinity keeps them apart",
    )


def is_below_limit(request: PlacementRequest, node: NodeView) -> Rejection | None:
    limit = request.spec.placement.max_replicas_per_node
    count = node.replicas.get(request.name, 0)
    if limit is None or count < limit:
        return None
    return Rejection(
        reason="ReplicaLimit",
        message=f"it has {count} {'replica' if count == 1 else 'replicas'} of this deployment, "
        f"spec.placement.maxReplicasPerNode is {limit}",
        need=count + 1,
        have=limit,
    )


def has_memory(request: PlacementRequest, node: NodeView) -> Rejection | None:
    proof = proof_of(request, node)
    need, have = proof.total_bytes, node.room_bytes
    if need <= have:
        return None
    show = quantity.show
    notes = [f"its pools reserve {show(node.reserved_bytes)}"] if node.reserved_bytes else []
    if node.promised_bytes:
        notes.append(f"{show(node.promised_bytes)} are reserved for a higher priority")
    note = f" ({', '.join(notes)})" if notes else ""
    streaming = decode_rate.describe_streaming(
        geometry_of(request, node),
        need_bytes=0 if request.override_bytes else need,
        capacity_bytes=node.allocatable_bytes,
        bandwidth_gbps=node.bandwidth_gbps,
        disk_gbps=node.disk_gbps,
    )
    return Rejection(
        reason="InsufficientMemory",
        message=f"needs {show(need)} ({describe_proof(proof, request.spec)}), "
        f"has {show(max(0, have))} free of {show(max(0, node.allocatable_bytes))}{note}{streaming}",
        need=need,
        have=have,
        capacity=node.allocatable_bytes,
    )


def _on(column: Column) -> Callable[[PlacementRequest], Column]:
    return lambda _: column


FIXED: tuple[NodeFilter, ...] = (
    NodeFilter(check=is_ready, column=_on(inputs.READY), is_passing=True),
    NodeFilter(check=is_not_held_back, column=_on(inputs.HOLDS), is_passing=True),
    NodeFilter(check=is_not_cordoned, column=_on(inputs.CORDONED), is_passing=True),
    NodeFilter(
        check=is_in_pool,
        column=_on(inputs.POOLS),
        aspect=lambda request: request.spec.placement.pools,
    ),
    NodeFilter(
        check=matches_selector,
        column=lambda request: inputs.LabelsColumn(
            tuple(sorted(request.spec.placement.node_selector))
        ),
        aspect=lambda request: tuple(sorted(request.spec.placement.node_selector.items())),
    ),
    NodeFilter(check=has_chip, column=_on(inputs.CHIP), aspect=lambda w: w.spec.placement.chips),
    NodeFilter(
        check=has_gpu_cores,
        column=_on(inputs.GPU_CORES),
        aspect=lambda request: request.spec.placement.min_gpu_cores,
    ),
    NodeFilter(check=is_not_reserved, column=_on(inputs.GROUP)),
    NodeFilter(
        check=is_tolerated,
        column=_on(inputs.TAINTS),
        aspect=lambda request: request.spec.placement.tolerations,
    ),
    NodeFilter(
        check=suits_model,
        column=source_columns,
        aspect=lambda request: (
            request.spec.model,
            request.override_bytes > 0,
            request.spec.context_length,
            request.spec.kv_cache,
        ),
    ),
)
# Checked after FIXED, in this order. They depend on allocations: ranking.py compares the same numbers as columns.
MOVING: tuple[Check, ...] = (keeps_apart, is_below_limit, has_memory)


def find_rejection(request: PlacementRequest, node: NodeView) -> Rejection | None:
    """Return the first reason against the node; None if it can take the replica."""
    for check in (*(rule.check for rule in FIXED), *MOVING):
        rejected = check(request, node)
        if rejected is not None:
            return rejected
    return None
