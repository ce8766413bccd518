"""Waiting for something while a client waits for us: until its time is up, with signs of life. Chooses nothing.

Who is let through to a name's engines, and who waits for whom: first come, first served. Pure; told the time.

Waiting here costs an engine nothing, and whoever comes first is served first whichever engine has room first.

What clients are told of requests that were not, or not in time, carried to an engine. Decides nothing.

Lets a name's requests through to its engines, so many at once: `Queue` with somebody who waits at it.

Where requests wait for a deployment that autoscaling left without a replica. Starts nothing itself.

That somebody waits here is in the metrics; the reconciler reads them, and has a replica started.
"""

import asyncio
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from typing import Protocol

import orjson

from gateway import errors
from gateway.errors import Refusal, RefusedError, invalid
from gateway.forwarding.policy import QueuePolicy
from gateway.routing.selection import NoReadyEndpoint
from gateway.state.table_cache import TableCache
from machinery.clock import Clock

# What begins to answer can be refused no more by a status, so not at once; and proxies give up silent connections
# after 30 to 60 s (nginx: proxy_read_timeout 60s; AWS load balancers: 60 s).
QUIET_S = 5.0


class ClientWait(Protocol):
    """A client that waits for its answer to begin."""

    async def tick(self) -> None:
        """Tell it that it is not forgotten, if there is a way to."""
        ...


class KeepAlive:
    """One client's waiting, over as many waits as it takes."""

    def __init__(self, clock: Clock, patience: ClientWait, quiet_s: float) -> None:
        """`quiet_s`: after how long, and how often from then on, the client is told."""
        self._clock = clock
        self._patience = patience
        self._quiet_s = quiet_s
        self._tick_s = clock.monotonic() + quiet_s

    async def wait(self, future: "asyncio.Future[None]", *, until_s: float) -> bool:
        """Wait until the future is done, or the time is up; return whether it is done. Never cancels it."""
        while not future.done():
            now_s = self._clock.monotonic()
            if now_s >= until_s:
                return False
            if now_s >= self._tick_s:
                await self._patience.tick()
                self._tick_s = self._clock.monotonic() + self._quiet_s
                continue
            await asyncio.wait((future,), timeout=min(until_s, self._tick_s) - now_s)
        return True

    async def quietly(self, *, until_s: float) -> float:
        """Give a sign of life if it is time to; return how many seconds may be waited now, at least 0."""
        now_s = self._clock.monotonic()
        if now_s >= self._tick_s:
            await self._patience.tick()
            self._tick_s = self._clock.monotonic() + self._quiet_s
        return max(0.0, min(until_s, self._tick_s) - now_s)


# Ends of the last minute tell the pace; more of them than this tell no more.
_WINDOW_S = 60.0
_MOST_ENDS = 1024
LEAST_RETRY_S, MOST_RETRY_S = 1, 60


@dataclass(slots=True, eq=False)
class Slot:
    """One request's place."""

    entered_s: float
    is_through: bool = False
    """Whether it was let through."""
    is_left: bool = False


@dataclass(slots=True)
class SlotQueue:
    """Those who were let through, and those who wait. `lines` None: everybody is let through."""

    lines: QueuePolicy | None
    running: int = 0
    _waiting: OrderedDict[Slot, None] = field(default_factory=OrderedDict)
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_ENDS))
    _busy_since_s: float = 0.0

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def enter(self, now_s: float) -> Slot | None:
        """Give a request a place; None if none is left."""
        place = Slot(now_s)
        if not self._waiting and self._has_room():
            if not self.running:
                # The time without work says nothing of the pace.
                self._ends.clear()
                self._busy_since_s = now_s
            self._pass(place)
            return place
        if self.lines is not None and len(self._waiting) >= self.lines.depth:
            return None
        self._waiting[place] = None
        return place

    def leave(self, place: Slot, now_s: float) -> list[Slot]:
        """Take back a place, whether it waited or was let through; return who is let through now."""
        if place.is_left:
            return []
        place.is_left = True
        if place.is_through:
            self.running -= 1
            self._ends.append(now_s)
        else:
            del self._waiting[place]
        return self._fill()

    def change(self, lines: QueuePolicy | None) -> list[Slot]:
        """Go by other numbers; return who is let through now. Nobody who waits is sent away."""
        self.lines = lines
        return self._fill()

    def retry_after_s(self, now_s: float) -> int:
        """Return when there is likely to be a place for one more, in whole seconds from 1 to 60."""
        since_s = max(self._busy_since_s, now_s - _WINDOW_S)
        while self._ends and self._ends[0] < since_s:
            self._ends.popleft()
        if len(self._ends) == _MOST_ENDS:
            since_s = self._ends[0]
        wait_s = (len(self._waiting) + 1) * (now_s - since_s) / max(1, len(self._ends))
        return min(MOST_RETRY_S, max(LEAST_RETRY_S, math.ceil(wait_s)))

    def _has_room(self) -> bool:
        return self.lines is None or self.running < self.lines.concurrency

    def _pass(self, place: Slot) -> None:
        place.is_through = True
        self.running += 1

    def _fill(self) -> list[Slot]:
        passed = []
        while self._waiting and self._has_room():
            place, _ = self._waiting.popitem(last=False)
            self._pass(place)
            passed.append(place)
        return passed


TIMEOUT = "x-request-timeout"


def request_timeout(name: str, timeout_s: float, attempts: int) -> Refusal:
    """Return what to say when the request's own time is up."""
    asked = f"{attempts} replicas were asked" if attempts != 1 else "1 replica was asked"
    return Refusal(
        status=504,
        message=f"The answer of '{name}' was not complete within {timeout_s:g} s ({asked}); allow more time in the "
        f"header '{TIMEOUT}', or in spec.routing.timeouts.request if that is what limits it.",
        type="server_error",
        code="request_timeout",
    )


def bad_timeout(text: str, longest_s: float) -> RefusedError:
    """Return the refusal of a header that makes no sense, in the engine's words."""
    return invalid(
        f"The header '{TIMEOUT}' must be a number of seconds, above 0 and at most "
        f"{longest_s:.0f}, such as 2.5; it is {text[:50]!r}.",
        param=TIMEOUT,
    )


def queue_full(name: str, queue: SlotQueue, retry_after_s: int) -> Refusal:
    """Return what to say when as many as may be wait already."""
    return Refusal(
        status=429,
        message=f"Of requests to '{name}', {queue.running} {_are(queue.running)} being answered and {queue.waiting} "
        f"{'waits' if queue.waiting == 1 else 'wait'}, which is all "
        f"that spec.routing.queueing allows; try again in {retry_after_s} s.",
        type="rate_limit_error",
        code="queue_full",
        retry_after_s=retry_after_s,
    )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def queue_timeout(name: str, waited_s: float, retry_after_s: int) -> Refusal:
    """Return what to say to who waited for its turn in vain."""
    return Refusal(
        status=503,
        message=f"The request waited {waited_s:g} s for its turn at '{name}', which is all that "
        f"spec.routing.queueing.timeout allows; try again in {retry_after_s} s.",
        type="server_error",
        code="queue_timeout",
        retry_after_s=retry_after_s,
    )


def not_repeated(refusal: Refusal) -> Refusal:
    """Return the last refusal, and that it was the last because too many requests are being repeated."""
    message = (
        f"{refusal.message} No other was asked: so many requests fail now that repeating them all would make it "
        "worse (spec.routing.retries.budget)."
    )
    return replace(refusal, message=message, retry_after_s=refusal.retry_after_s or 1)


def engine_refusal(status: int, body: bytes) -> Refusal:
    """Return an engine's refusal as one of ours: its status can be told no more, for an answer has begun."""
    try:
        error = orjson.loads(body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        message, code = f"The replica answered a request for a stream with {status}.", None
    return Refusal(
        status=status,
        message=message,
        type="server_error" if status >= 500 else "invalid_request_error",
        code=code if isinstance(code, str) else None,
    )


class ConcurrencyLimiter:
    """One name's."""

    def __init__(self, name: str, lines: QueuePolicy, clock: Clock, quiet_s: float) -> None:
        """`quiet_s`: how long clients of streams wait without a sign of life."""
        self._name = name
        self._clock = clock
        self._quiet_s = quiet_s
        self._queue = SlotQueue(lines)
        self._turns: dict[Slot, asyncio.Future[None]] = {}

    @property
    def waiting(self) -> int:
        """How many wait."""
        return self._queue.waiting

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits and nobody is through."""
        return not self._queue.waiting and not self._queue.running

    async def enter(self, patience: ClientWait, *, until_s: float) -> Slot | Refusal:
        """Wait to be let through, not beyond `until_s`; whoever is must `leave`."""
        queue, now_s = self._queue, self._clock.monotonic()
        place = queue.enter(now_s)
        if place is None:
            return queue_full(self._name, queue, queue.retry_after_s(now_s))
        if place.is_through:
            return place
        timeout_s = queue.lines.timeout_s if queue.lines is not None else 0.0
        until_s = min(until_s, now_s + timeout_s)
        self._turns[place] = turn = asyncio.get_running_loop().create_future()
        try:
            if await KeepAlive(self._clock, patience, self._quiet_s).wait(turn, until_s=until_s):
                return place
        except BaseException:
            self.leave(place)  # its client left, perhaps in the moment it was let through
            raise
        finally:
            del self._turns[place]
        now_s = self._clock.monotonic()
        self.leave(place)
        return queue_timeout(self._name, timeout_s, queue.retry_after_s(now_s))

    def leave(self, place: Slot) -> None:
        """Make room for the next. May be called again."""
        self._let(self._queue.leave(place, self._clock.monotonic()))

    def change(self, lines: QueuePolicy | None) -> None:
        """Go by other numbers from now on."""
        self._let(self._queue.change(lines))

    def _let(self, places: list[Slot]) -> None:
        for place in places:
            self._turns[place].set_result(None)


# Longer than the reconciler takes to read the figures again.
_MISSED_S = 30.0


class Activator:
    """Holds so many requests of a deployment for so long; others are turned away at once."""

    def __init__(self, keeper: TableCache, clock: Clock, *, limit: int, patience_s: float) -> None:
        self._keeper = keeper
        self._clock = clock
        self._limit = limit
        self._patience_s = patience_s
        self._waiting: dict[str, int] = {}
        self._missed: dict[str, float] = {}

    def waiting(self) -> dict[str, int]:
        """Return how many wait now, by deployment; those for which nobody waits any more with 0.

        Who was missed a moment ago counts as waited for by one.
        """
        now_s = self._clock.monotonic()
        missed = {name: int(until_s > now_s) for name, until_s in self._missed.items()}
        return {
            name: max(self._waiting.get(name, 0), missed.get(name, 0))
            for name in self._waiting.keys() | missed.keys()
        }

    def miss(self, deployment: str) -> None:
        """Note that a fallback answers what this deployment should: it is to be started, too; "" is none."""
        if deployment:
            self._missed[deployment] = self._clock.monotonic() + _MISSED_S

    async def hold(
        self,
        name: str,
        choice: NoReadyEndpoint,
        vigil: KeepAlive,
        *,
        began_s: float,
        until_s: float,
    ) -> Refusal | None:
        """Wait for the next change of the table; return what to say if it is no use to wait longer.

        `began_s`: when the request began to wait; `until_s`: when its own time is up.
        """
        end_s = began_s + self._patience_s
        if self._clock.monotonic() >= end_s:
            return errors.model_starting(name, self._patience_s, choice.reason)
        before = self._waiting.get(choice.wakes, 0)
        if before >= self._limit:
            return errors.too_many_waiting(name, self._limit)
        self._waiting[choice.wakes] = before + 1
        try:
            left_s = await vigil.quietly(until_s=min(end_s, until_s))
            await self._keeper.changed(within_s=left_s)
        finally:
            self._waiting[choice.wakes] -= 1
        return None
