"""Answers which nodes and groups can serve a model that nothing was placed for yet, and with which load. Pure.

The memory proof and the filters of placement decide; only memory limits the loads that are searched for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from models import model_files
from models.model_files import ModelFacts
from reconciler.groups.formation import FormationAttempt, FormationRefusal, FormedGroup, form_group
from reconciler.groups.group_view import GroupView, group_shapes
from reconciler.placement import decode_rate
from reconciler.placement.filters import find_rejection, suits_model
from reconciler.placement.inputs import NodeView, PlacementRequest, Rejection
from reconciler.placement.memory_proof import geometry_of, proof_of
from schemas.node import ModelGeometry, ModelReport, SplitOptions
from schemas.replica import MemoryProof

MOST_REQUESTS: Final = 1024
"""Requests at the same time at most: the limit of spec.concurrency."""
_MOST_TOKENS: Final = 1 << 24
_LEAST_TOKENS: Final = 16
_MOST_RANKS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FitLimits:
    """The loads that the free memory allows."""

    longest_context: int = 0
    """Tokens of a request at the asked concurrency; 0 if not even the shortest fits."""
    highest_concurrency: int = 0
    """Requests at the asked context; 0 if not even one fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFit:
    """The answer for one node."""

    node: str
    room_bytes: int
    refusal: Rejection | None = None
    """Reason against the asked load; None if the node can serve it."""
    memory: MemoryProof | None = None
    """Memory of the asked load; None if it is not known."""
    limits: FitLimits = FitLimits()
    tokens_per_s: float = 0.0
    """Rate of one request at most; 0 if it does not fit, or the bandwidth is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFit:
    """The answer for one ShardGroup."""

    group: str
    nodes: tuple[str, ...] = ()
    """Nodes of the ranks, in rank order."""
    parallelism: str = ""
    memory: MemoryProof | None = None
    """Memory of the largest rank."""
    refusal: Rejection | None = None
    limits: FitLimits = FitLimits()


def with_facts(node: NodeView, path: str, facts: ModelFacts) -> NodeView:
    """Return the node as if its agent had inspected the model; what an agent reported itself stays."""
    if path in node.models:
        return node
    on_linux = node.labels.get("fleet/os") == "Linux"
    geometry = model_files.model_geometry(facts, casts_to_float32=on_linux)
    geometry = geometry.model_copy(update={"splitting": estimate_splitting(geometry)})
    report = ModelReport(path=path, geometry=geometry)
    return replace(node, models={**node.models, path: report})


def estimate_splitting(geometry: ModelGeometry) -> SplitOptions | None:
    """Return an even split, before the installed mlx-lm can be asked; None if the layers are not known."""
    if geometry.unknown or not geometry.layers:
        return None
    shared = geometry.replicated_bytes
    split = max(0, geometry.weights_bytes - shared)
    sizes = tuple(
        size
        for size in range(2, _MOST_RANKS + 1)
        if geometry.heads % size == 0 and geometry.kv_heads and geometry.kv_heads % size == 0
    )
    return SplitOptions(
        tensor=sizes,
        tensor_bytes=tuple(-(-split // size) + shared for size in sizes),
        is_pipelined=True,
        layer_bytes=(-(-split // geometry.layers),) * geometry.layers,
        rest_bytes=shared,
        basis=f"{geometry.model_type}, {geometry.heads} heads, {geometry.kv_heads} KV heads",
    )


def fit_nodes(request: PlacementRequest, nodes: Sequence[NodeView]) -> tuple[NodeFit, ...]:
    """Return the answer for each node: those that fit first, the roomiest first."""
    known: dict[tuple[int, int], FitLimits] = {}
    fits = [_fit_node(request, node, known) for node in nodes]
    return tuple(sorted(fits, key=lambda o: (o.refusal is not None, -o.room_bytes, o.node)))


def _fit_node(
    request: PlacementRequest, node: NodeView, known: dict[tuple[int, int], FitLimits]
) -> NodeFit:
    refusal = find_rejection(request, node)
    report = node.models.get(request.path)
    if report is None or report.geometry is None:
        return NodeFit(node=node.name, room_bytes=node.room_bytes, refusal=refusal)
    geometry = geometry_of(request, node)
    memory = None if geometry.unknown else proof_of(request, node)
    key = id(report), node.room_bytes
    if memory is not None and key not in known:
        request = _with_load(request, concurrency=memory.concurrency)
        known[key] = _limits(request, geometry, lambda asked: _has_memory(asked, node))
    rate = 0.0
    if refusal is None and memory is not None and geometry.layers:
        rate = one_request_rate(geometry, memory, bandwidth_gbps=node.bandwidth_gbps)
    return NodeFit(
        node=node.name,
        room_bytes=node.room_bytes,
        refusal=refusal,
        memory=memory,
        limits=known.get(key, FitLimits()),
        tokens_per_s=rate,
    )


def one_request_rate(
    geometry: ModelGeometry, memory: MemoryProof, *, bandwidth_gbps: float
) -> float:
    """Return the tokens per second of one request at most, with its share of the proven caches."""
    cache_bytes = memory.kv_cache_bytes // max(1, memory.concurrency)
    return decode_rate.tokens_per_s(geometry, cache_bytes, bandwidth_gbps=bandwidth_gbps)


def _has_memory(request: PlacementRequest, node: NodeView) -> bool:
    is_suited = suits_model(request, node) is None
    return is_suited and proof_of(request, node).total_bytes <= node.room_bytes


def fit_group(
    request: PlacementRequest, group: GroupView, nodes: Mapping[str, NodeView]
) -> GroupFit:
    """Return the answer for a group in its declared shape, or in its first fallback with the same model that fits."""
    members = {name: nodes[name] for name in group.members if name in nodes}
    reports = [node.models.get(request.path) for node in members.values()]
    geometry = next(
        (report.geometry for report in reports if report is not None and report.geometry), None
    )
    if geometry is not None and geometry.unknown:
        why = Rejection(reason="ModelNotUnderstood", message=geometry.unknown)
        return GroupFit(group=group.name, refusal=why)
    attempts = [
        FormationAttempt(
            request=request,
            group=group,
            shape=shape,
            nodes=members,
            room=lambda node: node.room_bytes,
        )
        for shape in group_shapes(group.spec)
        if not shape.model
    ]
    tried = [(attempt, form_group(attempt)) for attempt in attempts]
    formed = next(((a, one) for a, one in tried if isinstance(one, FormedGroup)), None)
    if formed is None:
        first = next(one for _, one in tried if isinstance(one, FormationRefusal))
        return GroupFit(group=group.name, refusal=_main_reason(first))
    attempt, best = formed
    limits = FitLimits()
    if geometry is not None:
        limits = _limits(
            request,
            geometry,
            lambda asked: isinstance(form_group(replace(attempt, request=asked)), FormedGroup),
        )
    return GroupFit(
        group=group.name,
        nodes=tuple(rank.node for rank in best.ranks),
        parallelism=best.form.parallelism,
        memory=max((rank.memory for rank in best.ranks), key=lambda one: one.total_bytes),
        limits=limits,
    )


def _main_reason(refused: FormationRefusal) -> Rejection:
    """Return the reason that concerns the group as a whole, else that of its first rejected member."""
    if refused.whole is not None:
        return refused.whole
    if not refused.nodes:
        message = f"it has {refused.members} members, {refused.size} are needed"
        return Rejection(reason="TooFewMembers", message=message)
    name, why = refused.nodes[0]
    return replace(why, message=f"{name}: {why.message}")


def _limits(
    request: PlacementRequest, geometry: ModelGeometry, fits: Callable[[PlacementRequest], bool]
) -> FitLimits:
    most_tokens = min(geometry.max_context or _MOST_TOKENS, _MOST_TOKENS)
    return FitLimits(
        longest_context=_most(
            _LEAST_TOKENS, most_tokens, lambda n: fits(_with_load(request, context_length=n))
        ),
        highest_concurrency=_most(
            1, MOST_REQUESTS, lambda n: fits(_with_load(request, concurrency=n))
        ),
    )


def _with_load(request: PlacementRequest, **load: int) -> PlacementRequest:
    return replace(request, spec=request.spec.model_copy(update=load))


def _most(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, by bisection; 0 if `least` does not."""
    if most < least or not fits(least):
        return 0
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
