"""The strategies: whom of some engines that may be asked. Pure.

Each gets the engines, what they have to do, and a part of a draw that decides between equals. Equals must not
always be the same one: at low load one Mac would get hot while its twin stands idle.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from gateway.routing.standing import Standing
from gateway.routing.table import Share, Target

# Scores that differ by less are equal. One request more at an engine that does 16 at once makes four times
# as much, and memory that goes up and down by 2 % should draw nobody.
_EQUAL = 0.005
# What is left of a figure's last bits after adding and taking away.
_EXACT = 1e-9
# mlx-serving's `avoid_overloaded`. Without it its formula gives a strong Mac everything, however much it has.
_OVERLOADED = 0.8


class Runners:
    """Who may be asked, and what is known of them. A plain object: one is made for each request."""

    __slots__ = ("loads", "part", "read", "targets")

    def __init__(self, targets: Sequence[Target], loads: Sequence[float], part: float) -> None:
        self.targets = targets
        self.loads = loads
        """Requests at each, ours and others'."""
        self.part = part
        """0..1."""
        self.read: Mapping[int, float] = {}
        """Which part of the prompt they have read, by mark."""


def _least_loaded(of: Runners, _share: Share, _standing: Standing) -> Target:
    """Return one of those with the least to do."""
    least = min(of.loads) + _EXACT
    ties = [target for target, load in zip(of.targets, of.loads, strict=True) if load <= least]
    return ties[_index(of.part, len(ties))]


def _scored(of: Runners, share: Share, standing: Standing) -> Target:
    """Return one of those with the best score.

    Engines that have not loaded their model publish no endpoint: that part is the same for all, and the
    scores stay those of the proposal that they are from.
    """
    headroom, read = standing.headroom, of.read
    if not headroom and not read and not any(of.loads):
        return of.targets[_index(of.part, len(of.targets))]
    loaded, memory, queue, prefix = share.score
    # Loops, and no comprehensions: those are calls, and this is done for each request.
    depths: list[float] = []
    for target, load in zip(of.targets, of.loads, strict=True):
        depths.append(load / target.concurrency)
    # Full counts 0, or the fullest if there are any beyond: who has twice the queue is worse then, too.
    per_depth = queue / max(1.0, *depths)
    scores: list[float] = []
    for target, depth in zip(of.targets, depths, strict=True):
        score = loaded + queue - per_depth * depth
        if headroom:
            score += memory * headroom.get(target.origin, 1.0)
        if read:
            score += prefix * read.get(target.mark, 0.0)
        scores.append(score)
    return _highest(of, scores, _EQUAL)


def _hardware_aware(of: Runners, _share: Share, _standing: Standing) -> Target:
    """Return one of those with the most points (hardware.py), rather not of those that are nearly full."""
    busy = [
        load > _OVERLOADED * target.concurrency
        for target, load in zip(of.targets, of.loads, strict=True)
    ]
    spares_none = all(busy)
    points = [
        target.points + max(0.0, 50 - 5 * load) + 30 if spares_none or not full else -1.0
        for target, load, full in zip(of.targets, of.loads, busy, strict=True)
    ]
    return _highest(of, points, _EXACT)


def _power_of_two(of: Runners, _share: Share, _standing: Standing) -> Target:
    """Draw two, return the one with less to do."""
    count = len(of.targets)
    if count == 1:
        return of.targets[0]
    first = _index(of.part, count)
    second = (first + 1 + _index(of.part * 7919 % 1, count - 1)) % count
    return of.targets[first if of.loads[first] <= of.loads[second] else second]


def _highest(of: Runners, scores: Sequence[float], equal: float) -> Target:
    top = max(scores) - equal
    ties: list[Target] = []
    for target, score in zip(of.targets, scores, strict=True):
        if score >= top:
            ties.append(target)
    return ties[0] if len(ties) == 1 else ties[_index(of.part, len(ties))]


def _index(part: float, count: int) -> int:
    return min(int(part * count), count - 1)


Chooser: TypeAlias = Callable[[Runners, Share, Standing], Target]
# RoundRobin and Random are not here: they look at nobody's load (picking.py).
BY_NAME: Mapping[str, Chooser] = {
    "Scored": _scored,
    "HardwareAware": _hardware_aware,
    "LeastLoaded": _least_loaded,
    "PowerOfTwo": _power_of_two,
}
