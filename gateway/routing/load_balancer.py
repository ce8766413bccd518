"""The strategies: whom of some engines that may be asked. Pure.

Each gets the engines, what they have to do, and a part of a draw that decides between equals. Equals must not
always be the same one: at low load one Mac would get hot while its twin stands idle.

Whom of one pool: everybody is looked at in a small one, a few who are drawn in a large one. Pure.

With d drawn of many, the busiest engine has hardly more to do than with all looked at (the power of d choices), a
request costs the same however many there are, and gateways that know the same of others do not run all to the same one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeAlias

from gateway.routing.query import EndpointHealth, RoutingQuery
from gateway.routing.table import EndpointPool, EngineEndpoint, Origin, WeightedBackend

# Scores that differ by less are equal. One request more at an engine that does 16 at once makes four times
# as much, and memory that goes up and down by 2 % should draw nobody.
_EQUAL = 0.005
# What is left of a figure's last bits after adding and taking away.
_EXACT = 1e-9
# mlx-serving's `avoid_overloaded`. Without it its formula gives a strong Mac everything, however much it has.
_OVERLOADED = 0.8


class Candidates:
    """Who may be asked, and what is known of them. A plain object: one is made for each request."""

    __slots__ = ("loads", "part", "read", "targets")

    def __init__(
        self, targets: Sequence[EngineEndpoint], loads: Sequence[float], part: float
    ) -> None:
        self.targets = targets
        self.loads = loads
        """Requests at each, ours and others'."""
        self.part = part
        """0..1."""
        self.read: Mapping[int, float] = {}
        """Which part of the prompt they have read, by mark."""


def _least_loaded(
    of: Candidates, _share: WeightedBackend, _standing: EndpointHealth
) -> EngineEndpoint:
    """Return one of those with the least to do."""
    least = min(of.loads) + _EXACT
    ties = [target for target, load in zip(of.targets, of.loads, strict=True) if load <= least]
    return ties[_index(of.part, len(ties))]


def _scored(of: Candidates, share: WeightedBackend, standing: EndpointHealth) -> EngineEndpoint:
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


def _hardware_aware(
    of: Candidates, _share: WeightedBackend, _standing: EndpointHealth
) -> EngineEndpoint:
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


def _power_of_two(
    of: Candidates, _share: WeightedBackend, _standing: EndpointHealth
) -> EngineEndpoint:
    """Draw two, return the one with less to do."""
    count = len(of.targets)
    if count == 1:
        return of.targets[0]
    first = _index(of.part, count)
    second = (first + 1 + _index(of.part * 7919 % 1, count - 1)) % count
    return of.targets[first if of.loads[first] <= of.loads[second] else second]


def _highest(of: Candidates, scores: Sequence[float], equal: float) -> EngineEndpoint:
    top = max(scores) - equal
    ties: list[EngineEndpoint] = []
    for target, score in zip(of.targets, scores, strict=True):
        if score >= top:
            ties.append(target)
    return ties[0] if len(ties) == 1 else ties[_index(of.part, len(ties))]


def _index(part: float, count: int) -> int:
    return min(int(part * count), count - 1)


Chooser: TypeAlias = Callable[[Candidates, WeightedBackend, EndpointHealth], EngineEndpoint]
# RoundRobin and Random are not here: they look at nobody's load (picking.py).
BY_NAME: Mapping[str, Chooser] = {
    "Scored": _scored,
    "HardwareAware": _hardware_aware,
    "LeastLoaded": _least_loaded,
    "PowerOfTwo": _power_of_two,
}


# Up to so many, all are looked at.
SMALL = 16
# Of more than that so many are drawn, and drawn again so often where some of them may not be asked.
DRAWN = 8
_REDRAWS = 3
NO_ORIGINS: AbstractSet[Origin] = frozenset()


class Scope:
    """What one choice is made on. A plain object: one is made for each request."""

    __slots__ = ("_others", "_ours", "has_others", "skipped", "standing", "wish")

    def __init__(
        self, wish: RoutingQuery, standing: EndpointHealth, skipped: AbstractSet[Origin]
    ) -> None:
        self.wish = wish
        self.standing = standing
        self.skipped = skipped
        """Who is left out because it failed a moment ago."""
        self.has_others = False
        """Whether the engines looked at last have requests of others."""
        self._ours = self._others = 1.0

    def loads(self, targets: Sequence[EngineEndpoint]) -> list[float]:
        """Return how many requests each has, ours and others'.

        What is known of others is a moment old and the same at every gateway: if each of them made up for all
        that is uneven, together they would do so several times over, back and forth. So each makes up for its
        own part: others' requests count as much as ours are a part of all, with the sum left as it is.
        """
        # A loop, and no comprehension: those are calls, and this is done for each request.
        ours, others = self.standing.in_flight, self.standing.elsewhere
        own: list[float] = []
        told: list[float] = []
        theirs = 0.0
        for target in targets:
            origin = target.origin
            own.append(ours.get(origin, 0))
            if others:
                other = others.get(origin, 0.0)
                told.append(other)
                theirs += other
        self.has_others = theirs > 0
        if not theirs:
            self._ours = self._others = 1.0
            return own
        mine = sum(own)
        part = (mine + 1) / (mine + 1 + theirs)
        self._ours = (mine + theirs) / (mine + part * theirs)
        self._others = part * self._ours
        return [
            self._ours * one + self._others * other for one, other in zip(own, told, strict=True)
        ]

    def load(self, target: EngineEndpoint) -> float:
        """Return how many requests one has, on the scale of the last `loads`."""
        standing, origin = self.standing, target.origin
        own = self._ours * standing.in_flight.get(origin, 0)
        return own + self._others * standing.elsewhere.get(origin, 0.0)

    def is_within(self, target: EngineEndpoint, pool: EndpointPool, bound: int) -> bool:
        """Return whether one request more would leave the engine within so many percent of the average."""
        if len(pool.targets) == 1:
            return True
        loads = self.loads(candidates(pool.targets, self))
        return self.load(target) + 1 <= allowed(loads, bound)


def can_take(target: EngineEndpoint, grounds: Scope) -> bool:
    """Return whether the engine may be asked."""
    failed, skipped = grounds.wish.failed, grounds.skipped
    return not (failed and target in failed) and not (skipped and target.origin in skipped)


def allowed(loads: Sequence[float], bound: int) -> int:
    """Return the most that one may have, a request more included, to be asked for what it has cached.

    As in "Consistent Hashing with Bounded Loads" (Mirrokni, Thorup, Zadimoghaddam 2018): rounded up, or nobody
    would get the first.
    """
    return math.ceil(bound * (sum(loads) + 1) / (100 * len(loads)))


def pick(pool: EndpointPool, share: WeightedBackend, grounds: Scope) -> EngineEndpoint | None:
    """Return whom the share's strategy chooses of those that may be asked; None if there are none."""
    targets, wish, routing = pool.targets, grounds.wish, share.routing
    if len(targets) == 1:
        return targets[0] if can_take(targets[0], grounds) else None
    if routing.strategy == "RoundRobin":
        return _next(targets, grounds)
    if len(targets) > SMALL or wish.failed or grounds.skipped:
        some = candidates(targets, grounds)
        if not some:
            return None
    else:
        some = targets
    # Another part of the same draw, so that it has nothing to do with the weights.
    part = wish.draw * 997 % 1
    if routing.strategy == "Random":
        return some[min(int(part * len(some)), len(some) - 1)]
    loads = grounds.loads(some)
    readers = (
        _cached_endpoints(pool, loads, share, grounds)
        if wish.cached and share.minds_prefixes
        else ()
    )
    of = Candidates(some, loads, part)
    if grounds.has_others and 2 < len(targets) <= SMALL:
        of = _drop_quarter(of)
    if readers:
        if routing.strategy != "Scored":
            return readers[0][0]
        _add_cached(of, readers, len(targets))
    return BY_NAME[routing.strategy](of, share, grounds.standing)


def candidates(targets: Sequence[EngineEndpoint], grounds: Scope) -> Sequence[EngineEndpoint]:
    """Return who is looked at: everybody able, or some drawn of them."""
    count, failed, skipped = len(targets), grounds.wish.failed, grounds.skipped
    if count <= SMALL:
        if not failed and not skipped:
            return targets
        return [target for target in targets if can_take(target, grounds)]
    # Steps of one length from one place: any two of them are as good as drawn apart.
    bits = int(grounds.wish.draw * 2**53)
    begin, step = bits % count, 1 + bits // count % (count - 1)
    if not failed and not skipped:
        return [targets[n % count] for n in range(begin, begin + DRAWN * step, step)]
    found: list[EngineEndpoint] = []
    for n in range(begin, begin + DRAWN * (1 + _REDRAWS) * step, step):
        target = targets[n % count]
        if can_take(target, grounds):
            found.append(target)
            if len(found) == DRAWN:
                return found
    if found:
        return found
    # The last resort, and the only time that everybody is looked at.
    left = [target for target in targets if can_take(target, grounds)]
    begin = bits % len(left) if left else 0
    return (left[begin:] + left[:begin])[:SMALL]


def _next(targets: Sequence[EngineEndpoint], grounds: Scope) -> EngineEndpoint | None:
    """Return who is next, or the next after it who may be asked."""
    count, turn = len(targets), grounds.wish.turn
    for step in range(count):
        target = targets[(turn + step) % count]
        if can_take(target, grounds):
            return target
    return None


def _cached_endpoints(
    pool: EndpointPool, loads: Sequence[float], share: WeightedBackend, grounds: Scope
) -> list[tuple[EngineEndpoint, float, float]]:
    """Return who has read the prompt's beginning, is not too busy, and may be asked: load, and which part.

    The longest match first; of an engine its longest counts.
    """
    found: list[tuple[EngineEndpoint, float, float]] = []
    most = -1
    seen: set[int] = set()
    for mark, part in grounds.wish.cached:
        if mark in seen:
            continue
        seen.add(mark)
        target = pool.by_mark.get(mark)
        if target is None or not can_take(target, grounds):
            continue
        if most < 0:
            most = allowed(loads, share.routing.prefix_affinity.bound)
        load = grounds.load(target)
        if load + 1 <= most:
            found.append((target, load, part))
    return found


def _drop_quarter(of: Candidates) -> Candidates:
    """Leave out a quarter, drawn, where other gateways ask, too: not all see the same one as the best.

    Of a large pool only a few are drawn anyway.
    """
    count = len(of.targets)
    begin = int(of.part * 31 % 1 * count)
    end = begin + (3 * count + 2) // 4
    targets, loads = (*of.targets, *of.targets), (*of.loads, *of.loads)
    return Candidates(targets[begin:end], loads[begin:end], of.part)


def _add_cached(
    of: Candidates, readers: Sequence[tuple[EngineEndpoint, float, float]], count: int
) -> None:
    """Have those who read the prompt before judged with the others; `count`: how many there are in all."""
    of.read = read = {}
    for target, _, part in readers:
        read[target.mark] = part
    if len(of.targets) == count:
        return  # they are there
    there = {target.mark for target in of.targets}
    more = [(target, load) for target, load, _ in readers if target.mark not in there]
    of.targets = [*of.targets, *(target for target, _ in more)]
    of.loads = [*of.loads, *(load for _, load in more)]
