"""May this replica run on this node? "No" is a value with a reason. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from reconciler.observe import NodeView
from reconciler.placement.proof import prove
from schemas import quantity
from schemas.deployment import ModelDeploymentSpec
from schemas.node import matches


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Why a node cannot take a replica; `need` and `have` are bytes where it is about bytes."""

    reason: str
    message: str
    need: int = 0
    have: int = 0


Filter: TypeAlias = Callable[[ModelDeploymentSpec, NodeView], Rejected | None]


def is_ready(_: ModelDeploymentSpec, node: NodeView) -> Rejected | None:
    if node.is_ready:
        return None
    return Rejected(reason="NodeNotReady", message="its agent does not renew its lease")


def is_not_cordoned(_: ModelDeploymentSpec, node: NodeView) -> Rejected | None:
    if not node.is_cordoned:
        return None
    return Rejected(reason="NodeCordoned", message="it is cordoned (spec.unschedulable)")


def is_in_pool(want: ModelDeploymentSpec, node: NodeView) -> Rejected | None:
    pools = want.placement.pools
    if not pools or node.pools.intersection(pools):
        return None
    return Rejected(reason="NotInPool", message=f"it is in none of the pools {', '.join(pools)}")


def matches_selector(want: ModelDeploymentSpec, node: NodeView) -> Rejected | None:
    wanted = want.placement.node_selector
    if matches(dict(node.labels), wanted):
        return None
    lacking = [f"{k}={v}" for k, v in sorted(wanted.items()) if node.labels.get(k) != v]
    return Rejected(reason="SelectorMismatch", message=f"it lacks the label {', '.join(lacking)}")


def is_not_reserved(_: ModelDeploymentSpec, node: NodeView) -> Rejected | None:
    if not node.reserved_by_group:
        return None
    group = node.reserved_by_group
    return Rejected(reason="ReservedForGroup", message=f"it is reserved for the ShardGroup {group}")


def has_model(want: ModelDeploymentSpec, node: NodeView) -> Rejected | None:
    report = node.models.get(want.model.path)
    if report is None:
        return Rejected(
            reason="ModelNotInspected", message="its agent has not looked at the model yet"
        )
    if report.geometry is None:
        return Rejected(reason=report.reason, message=report.message)
    return None


def takes_context(want: ModelDeploymentSpec, node: NodeView) -> Rejected | None:
    geometry = node.models[want.model.path].geometry
    assert geometry is not None
    if want.context_length <= geometry.max_context:
        return None
    return Rejected(
        reason="ContextTooLong",
        message=f"spec.contextLength is {want.context_length}, the model was made for "
        f"{geometry.max_context} tokens at most",
    )


def has_memory(want: ModelDeploymentSpec, node: NodeView) -> Rejected | None:
    geometry = node.models[want.model.path].geometry
    assert geometry is not None
    proof = prove(geometry, context_length=want.context_length, concurrency=want.concurrency)
    need, have = proof.total_bytes, node.free_bytes
    if need <= have:
        return None
    show = quantity.show
    reserved = f" (its pools reserve {show(node.reserved_bytes)})" if node.reserved_bytes else ""
    return Rejected(
        reason="InsufficientMemory",
        message=f"needs {show(need)} (weights {show(proof.weights_bytes)}, KV cache "
        f"{show(proof.kv_cache_bytes)} for {want.concurrency} x {want.context_length} tokens, "
        f"activations {show(proof.activation_bytes)}, process {show(proof.overhead_bytes)}), "
        f"has {show(max(0, have))} free of {show(max(0, node.allocatable_bytes))}{reserved}",
        need=need,
        have=have,
    )


# In order: a filter may rely on what those before it made sure of.
FILTERS: tuple[Filter, ...] = (
    is_ready,
    is_not_cordoned,
    is_in_pool,
    matches_selector,
    is_not_reserved,
    has_model,
    takes_context,
    has_memory,
)


def reject(want: ModelDeploymentSpec, node: NodeView) -> Rejected | None:
    """Return the first reason against the node; None if it may take the replica."""
    for check in FILTERS:
        rejected = check(want, node)
        if rejected is not None:
            return rejected
    return None
