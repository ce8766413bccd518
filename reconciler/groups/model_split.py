"""Splits a model over the Macs of a group: supported sizes, layers of each rank, and each rank's memory proof. Pure.

A Mac that has the model probes with the installed mlx-lm how it can be split, and what shares and layers weigh
(models/split_options.py). Nothing of that is listed here: mlx-lm changes, and models of one architecture differ.

mlx-lm's pipeline takes the number of layers of each rank in rank order, and gives rank 0 the last layers of the model
(mlx_lm/models/pipeline.py). The memory formulas are those of reconciler/placement/memory_proof.py.
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


def unsupported_reason(geometry: ModelGeometry, parallelism: Parallelism, size: int) -> str:
    """Describe why the model cannot be split this way over `size` Macs, and what works; empty if it can."""
    splitting = geometry.splitting
    if splitting is None:
        return (
            f"it is not known yet over how many Macs this {geometry.model_type} model can be split; "
            "the agents find out within a minute"
        )
    if splitting.unknown:
        return (
            f"the agent could not find out over how many Macs this {geometry.model_type} model can be split: "
            f"{splitting.unknown}; it tries again once this is fixed"
        )
    if size in supported_sizes(geometry, parallelism):
        return ""
    return f"{splitting.basis or geometry.model_type}: {_nearest(geometry, parallelism, size)}"


def supported_sizes(geometry: ModelGeometry, parallelism: Parallelism) -> tuple[int, ...]:
    """Return the numbers of Macs that the model can be split over this way, ascending; empty if unknown."""
    splitting = geometry.splitting
    if splitting is None or splitting.unknown:
        return ()
    if parallelism == "Tensor":
        return tuple(sorted(splitting.tensor))
    most = min(MOST_RANKS, len(splitting.layer_bytes))
    return tuple(range(2, most + 1)) if splitting.is_pipelined else ()


def _nearest(geometry: ModelGeometry, parallelism: Parallelism, size: int) -> str:
    """Describe the supported sizes that are nearest to an unsupported one, and what to set in the ShardGroup."""
    other = _BOTH[1 - _BOTH.index(parallelism)]
    found, instead = supported_sizes(geometry, parallelism), supported_sizes(geometry, other)
    if found:
        nearest = min(found, key=lambda one: (abs(one - size), one))
        cure = f"set size: {nearest}"
        if size in instead:
            cure += f", or parallelism: {other}, which works with {size}"
        return f"{parallelism} works with {_listed(found)}, not {size}; {cure}"
    if instead:
        nearest = min(instead, key=lambda one: (abs(one - size), one))
        with_size, cure = (
            (f", not {size}", f" and size: {nearest}") if nearest != size else ("", "")
        )
        return (
            f"mlx-lm has no {parallelism} for it; {other} works with {_listed(instead)}{with_size}; "
            f"set parallelism: {other}{cure}"
        )
    return "mlx-lm can split it neither by Tensor nor by Pipeline; run it on one Mac, or use another model"


def _listed(found: Sequence[int]) -> str:
    """Join numbers for a message: "3", "2 and 4", "2 to 16"."""
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
    """Return the number of layers of each rank, in rank order; None if no split fits.

    Each layer is used once, and each rank gets at least one. The layers of rank r and `fixed_bytes`, which every rank
    holds, fit into `room_bytes[r]`. Of all such splits, the slowest rank takes the least time (bytes divided by
    `speeds`, in any unit; equal speeds unless all are known), and then the split is as even as possible.
    Takes len(room_bytes) x len(layer_bytes)^2 steps: about 10 ms for 60 layers on 4 ranks.
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


def _slowest(sums: Sequence[int], rooms: Sequence[int], paces: Sequence[float]) -> float:
    """Return the shortest possible time of the slowest rank; inf if no split fits."""
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
    """Return the ends of the stages, starting with 0, with the least sum of squared times and none above `slowest`."""
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
    """Return the first layer of the longest run up to `end` that fits; `end` if not even one layer fits."""
    return bisect_left(sums, sums[end] - room, 0, end) if room >= 0 else end


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """The load of the engine, as for one Mac (reconciler/placement/memory_proof.py)."""

    context_length: int
    concurrency: int
    extras: ProofExtras = NO_EXTRAS
    override_bytes: int = 0
    """Memory of one rank by spec.resources.memory; 0 if it is not set."""


def prove_rank(
    geometry: ModelGeometry, load: RankLoad, *, size: int, layers: tuple[int, int] | None
) -> MemoryProof:
    """Return the memory of one of `size` ranks.

    `layers` are the first layer of a Pipeline rank and the one after its last; None for a Tensor share, which is equal
    for all ranks.
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
    weights, options = layer_weights(geometry), geometry.splitting
    if options is None or not weights:
        return proven  # layer sizes are unknown: no rank holds more than the whole model
    rest = options.rest_bytes
    start, stop = layers
    held = {
        "weights_bytes": rest + sum(weights[start:stop]),
        "kv_cache_bytes": sum(_layer_caches(geometry, load)[start:stop]),
    }
    return proven.model_copy(update=held)


def deal_layers(
    geometry: ModelGeometry, load: RankLoad, room_bytes: Sequence[int], speeds: Sequence[float]
) -> tuple[int, ...] | None:
    """Return the number of layers of each Pipeline rank, in rank order, so that each proof fits its room.

    `speeds` are the memory bandwidths of the Macs. Returns None if no split fits.
    """
    if load.override_bytes:
        # spec.resources.memory holds for every rank, with any number of layers.
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
    """Return the weight bytes of each layer, in order; empty if unknown."""
    return geometry.splitting.layer_bytes if geometry.splitting is not None else ()


def _share(geometry: ModelGeometry, size: int, proven: MemoryProof) -> int:
    """Return the weight bytes of one Tensor share: as mlx-lm split them, or estimated from the file headers."""
    options = geometry.splitting
    if (
        options is None
        or size not in options.tensor
        or len(options.tensor_bytes) != len(options.tensor)
    ):
        return proven.weights_bytes
    return options.tensor_bytes[options.tensor.index(size)]


def _layer_caches(geometry: ModelGeometry, load: RankLoad) -> list[int]:
    """Return the cache bytes of each layer; the largest of any kind if the layers' kinds are unknown."""
    use = whole.engine_load(load.context_length, load.concurrency, ranks=1, extras=load.extras)
    sizes = [
        footprint.layer_cache_bytes(group, geometry, use)
        for group in footprint.layer_groups(geometry)
    ]
    options = geometry.splitting
    layers = layer_weights(geometry)
    if options is not None and len(options.layer_groups) == len(layers):
        return [sizes[group] for group in options.layer_groups]
    return [max(sizes, default=0)] * len(layers)
