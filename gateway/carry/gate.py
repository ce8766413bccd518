"""Lets a name's requests through to its engines, so many at once: `Queue` with somebody who waits at it."""

import asyncio

from gateway.carry import refusals
from gateway.carry.patience import Patience, Vigil
from gateway.carry.policy import Lines
from gateway.carry.queueing import Place, Queue
from gateway.errors import Refusal
from machinery.clock import Clock


class Gate:
    """One name's."""

    def __init__(self, name: str, lines: Lines, clock: Clock, quiet_s: float) -> None:
        """`quiet_s`: how long clients of streams wait without a sign of life."""
        self._name = name
        self._clock = clock
        self._quiet_s = quiet_s
        self._queue = Queue(lines)
        self._turns: dict[Place, asyncio.Future[None]] = {}

    @property
    def waiting(self) -> int:
        """How many wait."""
        return self._queue.waiting

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits and nobody is through."""
        return not self._queue.waiting and not self._queue.running

    async def enter(self, patience: Patience, *, until_s: float) -> Place | Refusal:
        """Wait to be let through, not beyond `until_s`; whoever is must `leave`."""
        queue, now_s = self._queue, self._clock.monotonic()
        place = queue.enter(now_s)
        if place is None:
            return refusals.queue_full(self._name, queue, queue.retry_after_s(now_s))
        if place.is_through:
            return place
        timeout_s = queue.lines.timeout_s if queue.lines is not None else 0.0
        until_s = min(until_s, now_s + timeout_s)
        self._turns[place] = turn = asyncio.get_running_loop().create_future()
        try:
            if await Vigil(self._clock, patience, self._quiet_s).wait(turn, until_s=until_s):
                return place
        except BaseException:
            self.leave(place)  # its client left, perhaps in the moment it was let through
            raise
        finally:
            del self._turns[place]
        now_s = self._clock.monotonic()
        self.leave(place)
        return refusals.queue_timeout(self._name, timeout_s, queue.retry_after_s(now_s))

    def leave(self, place: Place) -> None:
        """Make room for the next. May be called again."""
        self._let(self._queue.leave(place, self._clock.monotonic()))

    def change(self, lines: Lines | None) -> None:
        """Go by other numbers from now on."""
        self._let(self._queue.change(lines))

    def _let(self, places: list[Place]) -> None:
        for place in places:
            self._turns[place].set_result(None)
