"""Whom of one pool: everybody is looked at in a small one, a few who are drawn in a large one. Pure.

With d drawn of many, the busiest engine has hardly more to do than with all looked at (the power of d choices), a
request costs the same however many there are, and gateways that know the same of others do not run all to the same one.
"""

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from gateway.routing import strategies
from gateway.routing.standing import Standing
from gateway.routing.strategies import Runners
from gateway.routing.table import Origin, Pool, Share, Target
from gateway.routing.wish import Wish

# Up to so many, all are looked at.
SMALL = 16
# Of more than that so many are drawn, and drawn again so often where some of them may not be asked.
DRAWN = 8
_REDRAWS = 3
NOBODY: AbstractSet[Origin] = frozenset()


class Grounds:
    """What one choice is made on. A plain object: one is made for each request."""

    __slots__ = ("_others", "_ours", "has_others", "skipped", "standing", "wish")

    def __init__(self, wish: Wish, standing: Standing, skipped: AbstractSet[Origin]) -> None:
        self.wish = wish
        self.standing = standing
        self.skipped = skipped
        """Who is left out because it failed a moment ago."""
        self.has_others = False
        """Whether the engines looked at last have requests of others."""
        self._ours = self._others = 1.0

    def loads(self, targets: Sequence[Target]) -> list[float]:
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

    def load(self, target: Target) -> float:
        """Return how many requests one has, on the scale of the last `loads`."""
        standing, origin = self.standing, target.origin
        own = self._ours * standing.in_flight.get(origin, 0)
        return own + self._others * standing.elsewhere.get(origin, 0.0)

    def is_within(self, target: Target, pool: Pool, bound: int) -> bool:
        """Return whether one request more would leave the engine within so many percent of the average."""
        if len(pool.targets) == 1:
            return True
        loads = self.loads(candidates(pool.targets, self))
        return self.load(target) + 1 <= allowed(loads, bound)


def able(target: Target, grounds: Grounds) -> bool:
    """Return whether the engine may be asked."""
    failed, skipped = grounds.wish.failed, grounds.skipped
    return not (failed and target in failed) and not (skipped and target.origin in skipped)


def allowed(loads: Sequence[float], bound: int) -> int:
    """Return the most that one may have, a request more included, to be asked for what it has cached.

    As in "Consistent Hashing with Bounded Loads" (Mirrokni, Thorup, Zadimoghaddam 2018): rounded up, or nobody
    would get the first.
    """
    return math.ceil(bound * (sum(loads) + 1) / (100 * len(loads)))


def pick(pool: Pool, share: Share, grounds: Grounds) -> Target | None:
    """Return whom the share's strategy chooses of those that may be asked; None if there are none."""
    targets, wish, routing = pool.targets, grounds.wish, share.routing
    if len(targets) == 1:
        return targets[0] if able(targets[0], grounds) else None
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
    readers = _readers(pool, loads, share, grounds) if wish.cached and share.minds_prefixes else ()
    of = Runners(some, loads, part)
    if grounds.has_others and 2 < len(targets) <= SMALL:
        of = _most(of)
    if readers:
        if routing.strategy != "Scored":
            return readers[0][0]
        _add(of, readers, len(targets))
    return strategies.BY_NAME[routing.strategy](of, share, grounds.standing)


def candidates(targets: Sequence[Target], grounds: Grounds) -> Sequence[Target]:
    """Return who is looked at: everybody able, or some drawn of them."""
    count, failed, skipped = len(targets), grounds.wish.failed, grounds.skipped
    if count <= SMALL:
        if not failed and not skipped:
            return targets
        return [target for target in targets if able(target, grounds)]
    # Steps of one length from one place: any two of them are as good as drawn apart.
    bits = int(grounds.wish.draw * 2**53)
    begin, step = bits % count, 1 + bits // count % (count - 1)
    if not failed and not skipped:
        return [targets[n % count] for n in range(begin, begin + DRAWN * step, step)]
    found: list[Target] = []
    for n in range(begin, begin + DRAWN * (1 + _REDRAWS) * step, step):
        target = targets[n % count]
        if able(target, grounds):
            found.append(target)
            if len(found) == DRAWN:
                return found
    if found:
        return found
    # The last resort, and the only time that everybody is looked at.
    left = [target for target in targets if able(target, grounds)]
    begin = bits % len(left) if left else 0
    return (left[begin:] + left[:begin])[:SMALL]


def _next(targets: Sequence[Target], grounds: Grounds) -> Target | None:
    """Return who is next, or the next after it who may be asked."""
    count, turn = len(targets), grounds.wish.turn
    for step in range(count):
        target = targets[(turn + step) % count]
        if able(target, grounds):
            return target
    return None


def _readers(
    pool: Pool, loads: Sequence[float], share: Share, grounds: Grounds
) -> list[tuple[Target, float, float]]:
    """Return who has read the prompt's beginning, is not too busy, and may be asked: load, and which part.

    The longest match first; of an engine its longest counts.
    """
    found: list[tuple[Target, float, float]] = []
    most = -1
    seen: set[int] = set()
    for mark, part in grounds.wish.cached:
        if mark in seen:
            continue
        seen.add(mark)
        target = pool.by_mark.get(mark)
        if target is None or not able(target, grounds):
            continue
        if most < 0:
            most = allowed(loads, share.routing.prefix_affinity.bound)
        load = grounds.load(target)
        if load + 1 <= most:
            found.append((target, load, part))
    return found


def _most(of: Runners) -> Runners:
    """Leave out a quarter, drawn, where other gateways ask, too: not all see the same one as the best.

    Of a large pool only a few are drawn anyway.
    """
    count = len(of.targets)
    begin = int(of.part * 31 % 1 * count)
    end = begin + (3 * count + 2) // 4
    targets, loads = (*of.targets, *of.targets), (*of.loads, *of.loads)
    return Runners(targets[begin:end], loads[begin:end], of.part)


def _add(of: Runners, readers: Sequence[tuple[Target, float, float]], count: int) -> None:
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
