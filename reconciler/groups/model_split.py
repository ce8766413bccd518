"""Can the installed mlx-lm split this model over so many Macs? If not, what comes nearest. Pure.

What it can do was found out by a Mac that has the model (models/split_options.py), not listed here: mlx-lm
changes, and a model of the same architecture may have other heads.

Whole layers dealt out to unequal Macs: each within its room, and all done at about the same time. Pure.

mlx-lm's pipeline takes the number of layers of each rank, in rank order, and gives rank 0 the last layers of the
model (mlx_lm/models/pipeline.py).

The memory proof of one rank of a group: a share of every layer, or whole layers. Pure.

One Mac alone is proven in reconciler/placement/memory_proof.py, whose formulas these are. What shares and layers weigh was
found out by mlx-lm itself on a Mac that has the model (models/split_options.py).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Final

from models import footprint
from reconciler.placement import memory_proof as whole
from reconciler.placement.memory_proof import NO_EXTRAS, ProofExtras
from schemas.node import ModelGeometry
from schemas.replica import MemoryProof
from schemas.shardgroup import MOST_RANKS, Parallelism

_BOTH: Final[tuple[Parallelism, ...]] = ("Tensor", "Pipeline")


def supported_ways(geometry: ModelGeometry, size: int) -> tuple[Parallelism, ...]:
    """Return how the model can be split over `size` Macs: Tensor first, which is faster."""
    return tuple(way for way in _BOTH if not unsupported_reason(geometry, way, size))


def unsupported_reason(geometry: ModelGeometry, parallelism: Parallelism, size: int) -> str:
    """Return why the model cannot be split so over `size` Macs, and what would work; "" if it can."""
    splitting = geometry.splitting
    if splitting is None:
        return (
            f"nobody has looked yet over how many Macs this {geometry.model_type} model can be split; "
            "the agent of a Mac that has its folder does so, within a minute"
        )
    if splitting.unknown:
        return (
            f"over how many Macs this {geometry.model_type} model can be split could not be found out: "
            f"{splitting.unknown}; where this was mended, the agent looks again"
        )
    if size in supported_sizes(geometry, parallelism):
        return ""
    return f"{splitting.basis or geometry.model_type}: {_nearest(geometry, parallelism, size)}"


def supported_sizes(geometry: ModelGeometry, parallelism: Parallelism) -> tuple[int, ...]:
    """Return over how many Macs the model can be split so, the fewest first; nothing if nobody knows."""
    splitting = geometry.splitting
    if splitting is None or splitting.unknown:
        return ()
    if parallelism == "Tensor":
        return tuple(sorted(splitting.tensor))
    most = min(MOST_RANKS, len(splitting.layer_bytes))
    return tuple(range(2, most + 1)) if splitting.is_pipelined else ()


def _nearest(geometry: ModelGeometry, parallelism: Parallelism, size: int) -> str:
    """Return what comes nearest to what does not work."""
    other = _BOTH[1 - _BOTH.index(parallelism)]
    found, instead = supported_sizes(geometry, parallelism), supported_sizes(geometry, other)
    if found:
        rest = f"; {other} works with {size}" if size in instead else ""
        return f"{parallelism} works with {_listed(found)}, not {size}{rest}"
    if instead:
        with_size = "" if size in instead else f", not {size}"
        return (
            f"mlx-lm has no {parallelism} for it; {other} works with {_listed(instead)}{with_size}"
        )
    return "mlx-lm can split it neither by Tensor nor by Pipeline; run it on one Mac, or take another model"


def _listed(found: Sequence[int]) -> str:
    """Return numbers as people say them: "3", "2 and 4", "2 to 16"."""
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"{found[0]} to {found[-1]}"
    *most, last = map(str, found)
    return f"{', '.join(most)} and {last}" if most else last


def split_layers(
    layer_bytes: Sequence[int],
    fixed_bytes: int,
    room_bytes: Sequence[int],
    speeds: Sequence[float],
) -> tuple[int, ...] | None:
    """Return how many layers each rank gets, in rank order; None if there is no way.

    Every layer is given once, no rank is left without, and what rank r gets fits together with `fixed_bytes`, which
    every rank holds besides, into `room_bytes[r]`. Among all ways it is one in which the slowest rank takes the least
    time (bytes over `speeds`, in any unit; all are taken as equal unless all are known), and then one that is as
    even as that allows. Takes len(room_bytes) x len(layer_bytes)^2 steps: some 10 ms for 60 layers on 4 ranks.
    """
    ranks = len(room_bytes)
    if not 0 < ranks <= len(layer_bytes):
        return None
    known = len(speeds) == ranks and all(0 < speed < inf for speed in speeds)
    # The search goes from the first layer to the last, and the last rank has the first layers.
    rooms = [room - fixed_bytes for room in reversed(room_bytes)]
    paces = list(reversed(speeds)) if known else [1.0] * ranks
    sums = [0, *accumulate(layer_bytes)]
    slowest = _slowest(sums, rooms, paces)
    if slowest == inf:
        return None
    ends = _evenest(sums, rooms, paces, slowest)
    return tuple(end - start for start, end in pairwise(ends))[::-1]


def layer_spans(layers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return for each rank of a split its first layer, and the one after its last."""
    first = [sum(layers[rank + 1 :]) for rank in range(len(layers))]
    return tuple((start, start + count) for start, count in zip(first, layers, strict=True))


def _slowest(sums: Sequence[int], rooms: Sequence[int], paces: Sequence[float]) -> float:
    """Return the least time that the slowest rank takes in any way; inf if there is none."""
    total = len(sums) - 1
    best = [inf] * (total + 1)
    best[0] = 0.0
    for stage, (room, pace) in enumerate(zip(rooms, paces, strict=True), start=1):
        before, best = best, [inf] * (total + 1)
        for end in range(stage, total + 1):
            for start in range(_earliest(sums, end, room), end):
                time = max(before[start], (sums[end] - sums[start]) / pace)
                best[end] = min(best[end], time)
    return best[total]


def _evenest(
    sums: Sequence[int], rooms: Sequence[int], paces: Sequence[float], slowest: float
) -> list[int]:
    """Return where the stages end, 0 first, in the way with the least sum of squared times, none above `slowest`."""
    total = len(sums) - 1
    best: list[tuple[float, tuple[int, ...]]] = [(inf, ())] * (total + 1)
    best[0] = 0.0, (0,)
    for stage, (room, pace) in enumerate(zip(rooms, paces, strict=True), start=1):
        before, best = best, [(inf, ())] * (total + 1)
        for end in range(stage, total + 1):
            for start in range(_earliest(sums, end, room), end):
                time = (sums[end] - sums[start]) / pace
                if time <= slowest and before[start][0] + time * time < best[end][0]:
                    best[end] = before[start][0] + time * time, (*before[start][1], end)
    return list(best[total][1])


def _earliest(sums: Sequence[int], end: int, room: int) -> int:
    """Return the first layer of the longest run up to `end` that has room; `end` if not even one has."""
    return bisect_left(sums, sums[end] - room, 0, end) if room >= 0 else end


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """What the engine is asked to hold, as for one Mac (reconciler/placement/filters.py)."""

    context_length: int
    concurrency: int
    extras: ProofExtras = NO_EXTRAS
    override_bytes: int = 0
    """What spec.resources.memory says one rank takes; 0 if it says nothing."""


def prove_rank(
    geometry: ModelGeometry, load: RankLoad, *, size: int, layers: tuple[int, int] | None
) -> MemoryProof:
    """Return what one of `size` ranks needs.

    `layers` are the first layer of a Pipeline's rank and the one after its last; None for a Tensor share, which is
    the same for every rank.
    """
    proven = whole.prove(
        geometry,
        context_length=load.context_length,
        concurrency=load.concurrency,
        ranks=size if layers is None else 1,
        override_bytes=load.override_bytes,
        extras=load.extras,
    )
    if layers is None:
        return proven.model_copy(update={"weights_bytes": _share(geometry, size, proven)})
    weights, found = layer_weights(geometry), geometry.splitting
    if found is None or not weights:
        return proven  # nobody weighed the layers: no rank holds more than the whole
    rest = found.rest_bytes
    start, stop = layers
    held = {
        "weights_bytes": rest + sum(weights[start:stop]),
        "kv_cache_bytes": sum(_layer_caches(geometry, load)[start:stop]),
    }
    return proven.model_copy(update=held)


def deal_layers(
    geometry: ModelGeometry, load: RankLoad, room_bytes: Sequence[int], speeds: Sequence[float]
) -> tuple[int, ...] | None:
    """Return how many layers each rank of a Pipeline gets, in rank order, so that each one's proof fits its room.

    `speeds` are the Macs' memory bandwidths. None: there is no such way.
    """
    if load.override_bytes:
        # What a person said holds for every rank, whatever its layers.
        fits = all(load.override_bytes <= room for room in room_bytes)
        boundless = [sum(layer_weights(geometry))] * len(room_bytes)
        return split_layers(layer_weights(geometry), 0, boundless, speeds) if fits else None
    per_layer = [
        weights + kept
        for weights, kept in zip(
            layer_weights(geometry), _layer_caches(geometry, load), strict=True
        )
    ]
    nothing = prove_rank(geometry, load, size=len(room_bytes), layers=(0, 0))
    return split_layers(per_layer, nothing.total_bytes, room_bytes, speeds)


def layer_weights(geometry: ModelGeometry) -> tuple[int, ...]:
    """Return the bytes of each layer's weights, the first one first."""
    return geometry.splitting.layer_bytes if geometry.splitting is not None else ()


def _share(geometry: ModelGeometry, size: int, proven: MemoryProof) -> int:
    """Return the weights of one Tensor share: what mlx-lm made of it, else what the headers' names let expect."""
    found = geometry.splitting
    if found is None or size not in found.tensor or len(found.tensor_bytes) != len(found.tensor):
        return proven.weights_bytes
    return found.tensor_bytes[found.tensor.index(size)]


def _layer_caches(geometry: ModelGeometry, load: RankLoad) -> list[int]:
    """Return what each layer's cache holds: where nobody knows which layer is of which kind, the most of any."""
    use = whole.use_of(load.context_length, load.concurrency, ranks=1, extras=load.extras)
    sizes = [
        footprint.layer_cache_bytes(group, geometry, use)
        for group in footprint.layer_groups(geometry)
    ]
    found = geometry.splitting
    layers = layer_weights(geometry)
    if found is not None and len(found.layer_groups) == len(layers):
        return [sizes[group] for group in found.layer_groups]
    return [max(sizes, default=0)] * len(layers)
