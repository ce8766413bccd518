"""Which of the nodes that fit is best: parts of 0..100, weighed by the deployment's profile. Pure.

Node by node, to be read and to explain; ranking.py does the same for all nodes at once.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

from reconciler.placement import columns, hardware
from reconciler.placement.columns import Column
from reconciler.placement.filters import proof_of
from reconciler.placement.inputs import PlacementRequest
from reconciler.views import NodeView
from schemas.placement import Profile, ScoreName, tolerates

Weights: TypeAlias = Mapping[ScoreName, int]

_PROFILES: Final[dict[Profile, dict[ScoreName, int]]] = {
    "Balanced": {
        "speed": 10, "pool": 10, "taints": 20, "headroom": 20, "siblings": 50, "spreading": 40,
        "movement": 5,
    },
    "BinPack": {"speed": 5, "pool": 10, "taints": 20, "packing": 60, "spreading": 20, "movement": 5},
    "Spread": {
        "pool": 10, "taints": 20, "headroom": 20, "siblings": 60, "spreading": 60, "movement": 5,
    },
    "HardwareAware": {
        "speed": 20, "hardware": 60, "pool": 10, "taints": 20, "headroom": 10, "siblings": 20,
        "spreading": 20, "movement": 5,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePart:
    """One reason to prefer a node, 0..100, and how much it counts."""

    name: ScoreName
    score: float
    weight: int


# How many replicas of the deployment run on nodes with a value for a label: (label, value) to number.
SpreadCounts: TypeAlias = Mapping[tuple[str, str | None], int]


def count_spread(want: PlacementRequest, nodes: Iterable[NodeView]) -> SpreadCounts:
    """Return how the deployment's replicas are spread over the labels that it asks for."""
    found: dict[tuple[str, str | None], int] = {}
    for node in nodes:
        there = node.replicas.get(want.name, 0)
        if there:
            for key in want.spec.placement.spread_by:
                place = (key, node.labels.get(key))
                found[place] = found.get(place, 0) + there
    return found


def speed(_: PlacementRequest, node: NodeView) -> float:
    """Estimate decoding: a token reads all weights once, so memory bandwidth decides (facts 4.6)."""
    return min(100.0, 100.0 * node.bandwidth_gbps / hardware.FASTEST_GBPS)


def machine(_: PlacementRequest, node: NodeView) -> float:
    return hardware.points(chip=node.chip, gpu_cores=node.gpu_cores, memory_bytes=node.memory_bytes)


def pool(_: PlacementRequest, node: NodeView) -> float:
    return float(node.pool_priority)


def taints(want: PlacementRequest, node: NodeView) -> float:
    """Avoid nodes with taints that say PreferNoSchedule."""
    tolerations = want.spec.placement.tolerations
    soft = [taint for taint in node.taints if taint.effect == "PreferNoSchedule"]
    return 100.0 if all(tolerates(tolerations, taint) for taint in soft) else 0.0


def headroom(want: PlacementRequest, node: NodeView) -> float:
    """Return which part of the node would be left."""
    left = node.free_bytes - proof_of(want, node).total_bytes
    return 100.0 * max(0, left) / max(1, node.allocatable_bytes)


def siblings(want: PlacementRequest, node: NodeView) -> float:
    """Keep replicas of a deployment apart: one Mac's end should cost one of them."""
    return 100.0 / (1 + node.replicas.get(want.name, 0))


def spreading(want: PlacementRequest, node: NodeView, crowd: SpreadCounts) -> float:
    """Spread replicas over the values of labels such as rack and site."""
    keys = want.spec.placement.spread_by
    if not keys:
        return 100.0
    total = 0.0
    for key in keys:
        total += 100.0 / (1 + crowd.get((key, node.labels.get(key)), 0))
    return total / len(keys)


def movement(want: PlacementRequest, node: NodeView) -> float:
    """Take the place of a replica that ends: its node has the weights, and in its page cache.

    It decides between nodes that are equal otherwise: never to stack replicas that could be spread.
    """
    is_there = any(one.is_ending and one.deployment == want.name for one in node.allocations)
    return 100.0 if is_there else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedScore:
    """A part that does not change while replicas are placed."""

    name: ScoreName
    score: Callable[[PlacementRequest, NodeView], float]
    column: Column
    """All of a node that it looks at."""
    aspect: Callable[[PlacementRequest], Hashable] = lambda _: None
    """All of a want that it looks at."""


FIXED: Final = (
    FixedScore(name="speed", score=speed, column=columns.BANDWIDTH),
    FixedScore(name="hardware", score=machine, column=columns.HARDWARE),
    FixedScore(name="pool", score=pool, column=columns.POOL_PRIORITY),
    FixedScore(
        name="taints",
        score=taints,
        column=columns.TAINTS,
        aspect=lambda want: want.spec.placement.tolerations,
    ),
)


def weights_of(want: PlacementRequest) -> Weights:
    """Return the weights of the profile, with what the deployment says instead."""
    placement = want.spec.placement
    said = cast("dict[ScoreName, int]", placement.weights.model_dump(exclude_none=True))
    return {**_PROFILES[placement.profile], **said}


def score_parts(
    want: PlacementRequest, node: NodeView, crowd: SpreadCounts
) -> tuple[ScorePart, ...]:
    """Return why the node is preferred, part by part; only those that count."""
    weights = weights_of(want)
    left = headroom(want, node)
    found: list[tuple[ScoreName, float]] = [
        *((one.name, one.score(want, node)) for one in FIXED),
        ("headroom", left),
        ("packing", 100.0 - left),
        ("siblings", siblings(want, node)),
        ("spreading", spreading(want, node, crowd)),
        ("movement", movement(want, node)),
    ]
    return tuple(
        ScorePart(name=name, score=score, weight=weights[name])
        for name, score in found
        if weights.get(name, 0) > 0
    )


def total(parts: Iterable[ScorePart]) -> float:
    """Return 0..100: the parts by their weights."""
    # In the order of the parts, one after the other: ranking.py adds up in the same order, and floats
    # that are added in another differ in their last digit.
    weighed, weights = 0.0, 0
    for part in parts:
        weighed += part.weight * part.score
        weights += part.weight
    return weighed / max(1, weights)


def is_preferred(want: PlacementRequest, node: NodeView) -> bool:
    """Return whether the node is big enough for a model of this size; others are for want of better."""
    if want.spec.placement.tier == "Off":
        return True
    report = node.models.get(want.path)
    if report is None or report.geometry is None:
        return False
    tier = hardware.tier(report.geometry.parameters)
    return tier is None or hardware.qualifies(
        tier, gpu_cores=node.gpu_cores, memory_bytes=node.memory_bytes
    )
