"""Scores of the nodes that fit: parts of 0..100, weighted by the deployment's profile. Pure.

Scores that depend on one column are computed once for all nodes with an equal value there; the others are formulas for
one node and for columns alike.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

from reconciler.placement import inputs
from reconciler.placement.inputs import Column, NodeView, Numbers, PlacementRequest
from reconciler.placement.memory_proof import proof_of
from schemas import chips
from schemas.placement import Profile, ScoreName, is_large_enough, tolerates

Weights: TypeAlias = Mapping[ScoreName, int]

_PROFILES: Final[dict[Profile, dict[ScoreName, int]]] = {
    "Balanced": {
        "speed": 10, "pool": 10, "taints": 20, "headroom": 20, "siblings": 50, "spreading": 40,
        "movement": 5, "locality": 5,
    },
    "BinPack": {
        "speed": 5, "pool": 10, "taints": 20, "packing": 60, "spreading": 20, "movement": 5,
        "locality": 5,
    },
    "Spread": {
        "pool": 10, "taints": 20, "headroom": 20, "siblings": 60, "spreading": 60, "movement": 5,
        "locality": 5,
    },
    "HardwareAware": {
        "speed": 20, "hardware": 60, "pool": 10, "taints": 20, "headroom": 10, "siblings": 20,
        "spreading": 20, "movement": 5, "locality": 5,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePart:
    """One score of a node, 0..100, and its weight."""

    name: ScoreName
    score: float
    weight: int


# Number of the deployment's replicas by (label, value) of their nodes.
SpreadCounts: TypeAlias = Mapping[tuple[str, str | None], int]


def count_spread(request: PlacementRequest, nodes: Iterable[NodeView]) -> SpreadCounts:
    """Count the deployment's replicas by the values of its spreadBy labels."""
    spread_counts: dict[tuple[str, str | None], int] = {}
    for node in nodes:
        count = node.replicas.get(request.name, 0)
        if count:
            for key in request.spec.placement.spread_by:
                place = (key, node.labels.get(key))
                spread_counts[place] = spread_counts.get(place, 0) + count
    return spread_counts


def speed(_: PlacementRequest, node: NodeView) -> float:
    """Estimate the decoding speed: a token reads all weights once, so memory bandwidth decides."""
    return min(100.0, 100.0 * node.bandwidth_gbps / chips.FULL_SPEED_GBPS)


def machine(_: PlacementRequest, node: NodeView) -> float:
    """Return the chip points of the Mac, in percent of the best Mac that was sold."""
    points = chips.machine_points(
        chip=node.chip, gpu_cores=node.gpu_cores, memory_bytes=node.memory_bytes
    )
    return min(100.0, 100.0 * points / chips.MOST_POINTS)


def pool(_: PlacementRequest, node: NodeView) -> float:
    return float(node.pool_priority)


def taints(request: PlacementRequest, node: NodeView) -> float:
    """Avoid nodes with taints that say PreferNoSchedule."""
    tolerations = request.spec.placement.tolerations
    soft = [taint for taint in node.taints if taint.effect == "PreferNoSchedule"]
    return 100.0 if all(tolerates(tolerations, taint) for taint in soft) else 0.0


def changing_scores(
    *,
    left: Numbers,
    capacity: Numbers,
    siblings: Numbers,
    neighbours: Sequence[Numbers],
    movement: Numbers,
) -> dict[ScoreName, Numbers]:
    """Return the scores that change while replicas are placed, of one node or of many.

    Args:
        left: bytes that would stay free with the replica.
        capacity: bytes that the node offers, at least 1.
        siblings: replicas of the deployment on the node; the loss of one Mac should cost one replica.
        neighbours: replicas of the deployment in the same rack, site and so on, one for each spreadBy label.
        movement: 100 on the node of an ending replica, whose disk and page cache hold the weights; else 0.

    """
    headroom = 100.0 * (left * (left > 0)) / capacity
    spreading: Numbers = 0.0
    for count in neighbours:
        spreading = spreading + 100.0 / (1 + count)
    return {
        "headroom": headroom,
        "packing": 100.0 - headroom,
        "siblings": 100.0 / (1 + siblings),
        "spreading": spreading / len(neighbours) if neighbours else 100.0,
        "movement": movement,
    }


def add_weighted(total: Numbers, scores: Mapping[ScoreName, Numbers], weights: Weights) -> Numbers:
    """Add the scores that have a weight to a weighted sum."""
    for name, score in scores.items():
        if weights.get(name, 0) > 0:
            total = total + weights[name] * score
    return total


# Half the score: 40 s from another Mac over 1 GbE, and longer from a hub.
_LOCALITY_BYTES: Final = 4 * 2**30


def locality(request: PlacementRequest, node: NodeView) -> float:
    """Prefer nodes with few bytes of the model to fetch, as kube-scheduler's ImageLocality does with images.

    The weight is small: a fetch delays one start, and a slow or full node is slow for as long as the replica runs.
    """
    return 100.0 / (1 + node.missing_bytes(request.path) / _LOCALITY_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedScore:
    """A score that does not change while replicas are placed."""

    name: ScoreName
    score: Callable[[PlacementRequest, NodeView], float]
    column: Column
    """The column of a node that it depends on."""
    aspect: Callable[[PlacementRequest], Hashable] = lambda _: None
    """The part of a request that it depends on."""


FIXED: Final = (
    FixedScore(name="speed", score=speed, column=inputs.BANDWIDTH),
    FixedScore(name="hardware", score=machine, column=inputs.HARDWARE),
    FixedScore(name="pool", score=pool, column=inputs.POOL_PRIORITY),
    FixedScore(
        name="taints",
        score=taints,
        column=inputs.TAINTS,
        aspect=lambda request: request.spec.placement.tolerations,
    ),
)


def weights_of(request: PlacementRequest) -> Weights:
    """Return the weights of the profile, overridden by spec.placement.weights; locality is for models of hubs only."""
    placement = request.spec.placement
    overrides = cast("dict[ScoreName, int]", placement.weights.model_dump(exclude_none=True))
    weights = {**_PROFILES[placement.profile], **overrides}
    if request.spec.model.hub is None:
        weights.pop("locality", None)
    return weights


def score_parts(
    request: PlacementRequest, node: NodeView, spread: SpreadCounts
) -> tuple[ScorePart, ...]:
    """Return the scores of a node that have a weight."""
    weights = weights_of(request)
    keys = request.spec.placement.spread_by
    is_there = any(
        allocation.is_ending and allocation.deployment == request.name
        for allocation in node.allocations
    )
    scores: dict[ScoreName, float] = {fixed.name: fixed.score(request, node) for fixed in FIXED}
    scores["locality"] = locality(request, node)
    scores |= changing_scores(
        left=node.free_bytes - proof_of(request, node).total_bytes,
        capacity=max(1, node.allocatable_bytes),
        siblings=node.replicas.get(request.name, 0),
        neighbours=[spread.get((key, node.labels.get(key)), 0) for key in keys],
        movement=100.0 if is_there else 0.0,
    )
    return tuple(
        ScorePart(name=name, score=score, weight=weights[name])
        for name, score in scores.items()
        if weights.get(name, 0) > 0
    )


def total(parts: Iterable[ScorePart]) -> float:
    """Return the weighted mean of the scores, 0..100."""
    parts = list(parts)
    weights = {part.name: part.weight for part in parts}
    weighted: float = add_weighted(0.0, {part.name: part.score for part in parts}, weights)
    return weighted / max(1, sum(weights.values()))


def is_preferred(request: PlacementRequest, node: NodeView) -> bool:
    """Return whether the node qualifies for the model's size tier; other nodes are used only if none does."""
    tier, report = request.spec.placement.tier, node.models.get(request.path)
    geometry = None if report is None else report.geometry
    if geometry is None and tier == "Auto":
        return False
    return is_large_enough(
        tier,
        0 if geometry is None else geometry.parameters,
        node=node.name,
        chip=node.chip,
        gpu_cores=node.gpu_cores,
        memory_bytes=node.memory_bytes,
    )
