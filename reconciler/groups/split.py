"""Whole layers dealt out to unequal Macs: each within its room, and all done at about the same time. Pure.

mlx-lm's pipeline takes the number of layers of each rank, in rank order, and gives rank 0 the last layers of the
model (mlx_lm/models/pipeline.py).
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf


def split(
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


def spans(layers: Sequence[int]) -> tuple[tuple[int, int], ...]:
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
