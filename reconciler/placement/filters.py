"""May this replica run on this node? "No" is a value with a reason. Pure."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeAlias

from reconciler.observe import NodeView
from reconciler.placement import columns, sources
from reconciler.placement.columns import Asked, Column
from reconciler.placement.proof import shown
from reconciler.placement.rejected import Rejected
from reconciler.placement.want import Want
from schemas import quantity
from schemas.node import matches
from schemas.placement import tolerates

Check: TypeAlias = Callable[[Want, NodeView], Rejected | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """A reason to say no that does not change while replicas are being placed."""

    check: Check
    column: Callable[[Want], Asked]
    """All of a node that `check` looks at."""
    aspect: Callable[[Want], Hashable] = lambda _: None
    """All of a want that it looks at."""
    is_passing: bool = False
    """Whether it may be another tomorrow, with the very same Mac."""


def is_ready(_: Want, node: NodeView) -> Rejected | None:
    if node.is_ready:
        return None
    return Rejected(reason="NodeNotReady", message="its agent does not renew its lease")


def is_not_held_back(_: Want, node: NodeView) -> Rejected | None:
    """Ask everything about the node itself at once (nodestate.py): the first reason is what people are told."""
    if not node.holds:
        return None
    hold = node.holds[0]
    return Rejected(reason=hold.reason, message=hold.message, need=hold.need, have=hold.have)


def is_not_cordoned(_: Want, node: NodeView) -> Rejected | None:
    if not node.is_cordoned:
        return None
    return Rejected(reason="NodeCordoned", message="it is cordoned (spec.unschedulable)")


def is_in_pool(want: Want, node: NodeView) -> Rejected | None:
    pools = want.spec.placement.pools
    if not pools or node.pools.intersection(pools):
        return None
    return Rejected(reason="NotInPool", message=f"it is in none of the pools {', '.join(pools)}")


def matches_selector(want: Want, node: NodeView) -> Rejected | None:
    wanted = want.spec.placement.node_selector
    if matches(dict(node.labels), wanted):
        return None
    lacking = [f"{k}={v}" for k, v in sorted(wanted.items()) if node.labels.get(k) != v]
    return Rejected(reason="SelectorMismatch", message=f"it lacks the label {', '.join(lacking)}")


def has_chip(want: Want, node: NodeView) -> Rejected | None:
    chips = want.spec.placement.chips
    if not chips or node.chip in chips:
        return None
    return Rejected(
        reason="ChipMismatch",
        message=f"its chip is {node.chip or 'not known'}, spec.placement.chips asks for "
        f"{' or '.join(chips)}",
    )


def has_gpu_cores(want: Want, node: NodeView) -> Rejected | None:
    need = want.spec.placement.min_gpu_cores
    if node.gpu_cores >= need:
        return None
    return Rejected(
        reason="TooFewGpuCores",
        message=f"it has {node.gpu_cores} GPU cores, spec.placement.minGpuCores is {need}",
        need=need,
        have=node.gpu_cores,
    )


def is_not_reserved(_: Want, node: NodeView) -> Rejected | None:
    if not node.reserved_by_group:
        return None
    group = node.reserved_by_group
    return Rejected(reason="ReservedForGroup", message=f"it is reserved for the ShardGroup {group}")


def is_tolerated(want: Want, node: NodeView) -> Rejected | None:
    tolerations = want.spec.placement.tolerations
    kept_off = [
        f"{taint.key}{f'={taint.value}' if taint.value else ''}:{taint.effect}"
        for taint in node.taints
        if taint.effect != "PreferNoSchedule" and not tolerates(tolerations, taint)
    ]
    if not kept_off:
        return None
    return Rejected(
        reason="NodeTainted",
        message=f"it has the taint {', '.join(kept_off)}, which spec.placement.tolerations "
        "does not name",
    )


def keeps_apart(want: Want, node: NodeView) -> Rejected | None:
    beside = sorted(want.apart_from.intersection(node.replicas))
    if not beside:
        return None
    return Rejected(
        reason="AntiAffinity",
        message=f"it runs {', '.join(beside)}, and spec.placement.antiAffinity keeps them apart",
    )


def is_below_limit(want: Want, node: NodeView) -> Rejected | None:
    limit = want.spec.placement.max_replicas_per_node
    there = node.replicas.get(want.name, 0)
    if limit is None or there < limit:
        return None
    return Rejected(
        reason="ReplicaLimit",
        message=f"it has {there} replicas of this deployment, "
        f"spec.placement.maxReplicasPerNode is {limit}",
        need=there + 1,
        have=limit,
    )


def has_memory(want: Want, node: NodeView) -> Rejected | None:
    proof = sources.proof_of(want, node)
    need, have = proof.total_bytes, node.room_bytes
    if need <= have:
        return None
    show = quantity.show
    notes = [f"its pools reserve {show(node.reserved_bytes)}"] if node.reserved_bytes else []
    if node.promised_bytes:
        notes.append(f"{show(node.promised_bytes)} are kept for a higher priority")
    note = f" ({', '.join(notes)})" if notes else ""
    return Rejected(
        reason="InsufficientMemory",
        message=f"needs {show(need)} ({shown(proof, want.spec)}), "
        f"has {show(max(0, have))} free of {show(max(0, node.allocatable_bytes))}{note}",
        need=need,
        have=have,
    )


def _on(column: Column) -> Callable[[Want], Column]:
    return lambda _: column


FIXED: tuple[Filter, ...] = (
    Filter(check=is_ready, column=_on(columns.READY), is_passing=True),
    Filter(check=is_not_held_back, column=_on(columns.HOLDS), is_passing=True),
    Filter(check=is_not_cordoned, column=_on(columns.CORDONED), is_passing=True),
    Filter(
        check=is_in_pool, column=_on(columns.POOLS), aspect=lambda want: want.spec.placement.pools
    ),
    Filter(
        check=matches_selector,
        column=lambda want: columns.Labels(tuple(sorted(want.spec.placement.node_selector))),
        aspect=lambda want: tuple(sorted(want.spec.placement.node_selector.items())),
    ),
    Filter(check=has_chip, column=_on(columns.CHIP), aspect=lambda w: w.spec.placement.chips),
    Filter(
        check=has_gpu_cores,
        column=_on(columns.GPU_CORES),
        aspect=lambda want: want.spec.placement.min_gpu_cores,
    ),
    Filter(check=is_not_reserved, column=_on(columns.GROUP)),
    Filter(
        check=is_tolerated,
        column=_on(columns.TAINTS),
        aspect=lambda want: want.spec.placement.tolerations,
    ),
    Filter(
        check=sources.suits_model,
        column=sources.column,
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


def reject(want: Want, node: NodeView) -> Rejected | None:
    """Return the first reason against the node; None if it may take the replica."""
    for check in (*(one.check for one in FIXED), *MOVING):
        rejected = check(want, node)
        if rejected is not None:
            return rejected
    return None
