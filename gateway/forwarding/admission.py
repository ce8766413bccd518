"""Admission: requests wait here for a slot of their model, or for an engine that can take them.

A request that waits here costs an engine nothing. The first to arrive is the first to be served,
whichever engine becomes free.
"""

import asyncio
import bisect
import contextlib
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol

from gateway import errors
from gateway.forwarding.policy import QueuePolicy
from gateway.forwarding.router import LoadTracker
from gateway.state.table_cache import TableCache
from machinery.clock import NEVER, Clock
from schemas.wire.errors import Refusal

# Starting the response fixes its status, so not at once. Proxies drop silent connections after 30
# to 60 s (nginx: proxy_read_timeout 60s; AWS load balancers: 60 s).
KEEP_ALIVE_S = 5.0
# Requests that ended in the last minute tell the rate; more of them than this add nothing.
_WINDOW_S = 60.0
_MAX_ENDS = 1024
MIN_RETRY_S, MAX_RETRY_S = 1, 60
WAITING_NOTE = "waiting"
# Longer than the interval at which the reconciler reads the metrics.
_MISSED_S = 30.0
# The first of a line looks so often for a free slot without an event.
_LOOK_S = 0.5
# A client that asks for ever must not hold a Mac after it was forgotten.
LONGEST_KEEP_S = 24 * 3600.0


class ClientWait(Protocol):
    """A client that waits for its response to begin."""

    async def send_keep_alive(self, note: str) -> None:
        """Send a keep-alive event, if the response has a form for it; `note` says what is waited for, in one line."""
        ...


class KeepAlive:
    """Keep-alive events for one client over all of its waits."""

    def __init__(self, clock: Clock, client: ClientWait, keep_alive_s: float) -> None:
        """`keep_alive_s`: the time before the first event and between two events."""
        self._clock = clock
        self._client = client
        self._keep_alive_s = keep_alive_s
        self._next_event_s = clock.monotonic() + keep_alive_s
        self.note = WAITING_NOTE
        """Text of the events."""

    async def wait(self, future: "asyncio.Future[None]", *, until_s: float) -> bool:
        """Wait for the future or the deadline; return whether the future is done. Never cancels the future."""
        while not future.done():
            now_s = self._clock.monotonic()
            if now_s >= until_s:
                return False
            if now_s >= self._next_event_s:
                await self._client.send_keep_alive(self.note)
                self._next_event_s = self._clock.monotonic() + self._keep_alive_s
                continue
            await asyncio.wait((future,), timeout=min(until_s, self._next_event_s) - now_s)
        return True

    async def next_pause_s(self, *, until_s: float) -> float:
        """Send a keep-alive event if one is due; return the seconds to wait before the next, at least 0."""
        now_s = self._clock.monotonic()
        if now_s >= self._next_event_s:
            await self._client.send_keep_alive(self.note)
            self._next_event_s = self._clock.monotonic() + self._keep_alive_s
        return max(0.0, min(until_s, self._next_event_s) - now_s)


@dataclass(slots=True, eq=False)
class Slot:
    """Slot of one request in the queue."""

    is_admitted: bool = False
    """True once the request may be forwarded."""
    is_left: bool = False
    admission: "asyncio.Future[None] | None" = None
    """Done once it is admitted, if it is awaited."""


class ConcurrencyLimiter:
    """Limits the number of concurrent requests of one model; others wait in a queue. Policy None admits all."""

    def __init__(
        self, name: str, policy: QueuePolicy | None, clock: Clock, keep_alive_s: float
    ) -> None:
        """`keep_alive_s`: interval of keep-alive events to waiting streaming clients."""
        self.running = 0
        """The number of admitted requests."""
        self._name = name
        self._policy = policy
        self._clock = clock
        self._keep_alive_s = keep_alive_s
        self._waiting: OrderedDict[Slot, None] = OrderedDict()
        self._ends: deque[float] = deque(maxlen=_MAX_ENDS)
        self._busy_since_s = 0.0

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    def try_enter(self) -> Slot | None:
        """Return a slot if there is one now; its holder must `leave`."""
        if self._waiting or not self._has_slot():
            return None
        if not self.running:
            # Idle time says nothing about the rate.
            self._ends.clear()
            self._busy_since_s = self._clock.monotonic()
        slot = Slot(is_admitted=True)
        self.running += 1
        return slot

    def add(self) -> Slot | None:
        """Return the slot of a new request, which may have to wait; None if the queue is full."""
        slot = self.try_enter()
        if slot is None and (self._policy is None or self.waiting < self._policy.depth):
            slot = Slot()
            self._waiting[slot] = None
        return slot

    async def enter(self, client: ClientWait, *, until_s: float) -> Slot | Refusal:
        """Wait for a slot until `until_s` at most; the holder of a slot must `leave`."""
        slot = self.add()
        if slot is None:
            return errors.queue_full(
                self._name,
                running=self.running,
                waiting=self.waiting,
                retry_after_s=self.retry_after_s(),
            )
        if slot.is_admitted:
            return slot
        timeout_s = 0.0 if self._policy is None else self._policy.timeout_s
        until_s = min(until_s, self._clock.monotonic() + timeout_s)
        slot.admission = asyncio.get_running_loop().create_future()
        keep_alive = KeepAlive(self._clock, client, self._keep_alive_s)
        try:
            if await keep_alive.wait(slot.admission, until_s=until_s):
                return slot
        except BaseException:
            self.leave(slot)  # the client left, perhaps in the moment of its admission
            raise
        self.leave(slot)
        return errors.queue_timeout(self._name, timeout_s, self.retry_after_s())

    def leave(self, slot: Slot) -> None:
        """Free the slot for the next request. May be called again."""
        if slot.is_left:
            return
        slot.is_left = True
        if slot.is_admitted:
            self.running -= 1
            self._ends.append(self._clock.monotonic())
        else:
            del self._waiting[slot]
        self._fill()

    def change(self, policy: QueuePolicy | None) -> None:
        """Change the policy. Waiting requests stay."""
        self._policy = policy
        self._fill()

    def retry_after_s(self) -> int:
        """Return the seconds until a slot is likely to be free, from 1 to 60."""
        now_s = self._clock.monotonic()
        since_s = max(self._busy_since_s, now_s - _WINDOW_S)
        while self._ends and self._ends[0] < since_s:
            self._ends.popleft()
        if len(self._ends) == _MAX_ENDS:
            since_s = self._ends[0]
        wait_s = (self.waiting + 1) * (now_s - since_s) / max(1, len(self._ends))
        return min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(wait_s)))

    def _has_slot(self) -> bool:
        return self._policy is None or self.running < self._policy.concurrency

    def _fill(self) -> None:
        """Admit those that wait longest."""
        while self._waiting and self._has_slot():
            slot, _ = self._waiting.popitem(last=False)
            slot.is_admitted = True
            self.running += 1
            if slot.admission is not None:
                slot.admission.set_result(None)


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """The place of one request in the line of its model. It keeps its place until an engine has accepted it."""

    model: str
    number: int
    """Requests that arrived earlier have lower numbers."""
    deployment: str = ""
    """The deployment that the request waits for."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Release(NamedTuple):
    """The end of a deployment's use, by the wish of clients."""

    level: int
    """1: its idle replicas may give way at once. 2: they end now."""
    until_s: float


class Activator:
    """Holds requests that no engine can take now, and releases them into free slots, oldest first (Knative's activator).

    The deployment may be at zero, its first replica may load, its replicas may start again, or all of its slots may be
    taken. The number of waiting requests is a metric, by which the reconciler starts replicas.
    """

    def __init__(
        self, table_cache: TableCache, load_tracker: LoadTracker, clock: Clock, *, limit: int
    ) -> None:
        """`limit`: requests that may wait for one model, for each of its ready replicas."""
        self._table_cache = table_cache
        self._load_tracker = load_tracker
        self._clock = clock
        self._limit = limit
        self._count = itertools.count()
        self.lines: dict[str, list[WaitingRequest]] = {}
        """The waiting requests of each model, the oldest first; no line is empty."""
        self._awaited: set[str] = set()
        """Deployments that requests have waited for."""
        self._missed_until_s: dict[str, float] = {}
        self._kept_until_s: dict[str, float] = {}
        self.released: dict[str, Release] = {}
        """Deployments that no client needs at the moment; nearly always empty."""
        table_cache.on_change(self._wake_all)

    def keep(self, deployments: Iterable[str], hold_s: float) -> None:
        """Ask that a replica of each deployment stays for so long (a client's `keep_alive`).

        A longer wish of another client remains. 0 ends all wishes: idle replicas may give way at once, until the next
        request.
        """
        now_s = self._clock.monotonic()
        for name in deployments:
            if hold_s <= 0:
                self._kept_until_s.pop(name, None)
                self.released[name] = Release(1, NEVER)
                continue
            self.released.pop(name, None)
            until_s = now_s + min(hold_s, LONGEST_KEEP_S)
            self._kept_until_s[name] = max(until_s, self._kept_until_s.get(name, until_s))

    def unload(self, deployments: Iterable[str]) -> None:
        """Ask that the idle replicas of the deployments end now."""
        until_s = self._clock.monotonic() + _MISSED_S
        for name in deployments:
            self._kept_until_s.pop(name, None)
            self.released[name] = Release(2, until_s)

    def claim(self, deployments: Iterable[str]) -> None:
        """Note that a request uses the deployments: they are released no longer."""
        for name in deployments:
            self.released.pop(name, None)

    def releases(self) -> dict[str, int]:
        """Return the released deployments: 1 if they may give way at once, 2 if they are unloaded."""
        now_s = self._clock.monotonic()
        for name, release in tuple(self.released.items()):
            if release.until_s <= now_s:
                self.released[name] = Release(1, NEVER)
        return {name: release.level for name, release in self.released.items()}

    def kept_until(self, deployments: Iterable[str], now: datetime) -> datetime | None:
        """Return the end of the longest wish for these deployments; None without one."""
        now_s = self._clock.monotonic()
        left_s = max(
            (self._kept_until_s.get(name, now_s) - now_s for name in deployments), default=0
        )
        return now + timedelta(seconds=left_s) if left_s > 0 else None

    def demand(self) -> dict[str, int]:
        """Return `waiting`, in which a deployment that a client keeps counts as 1, so that it is not scaled to zero."""
        now_s, demand = self._clock.monotonic(), self.waiting()
        for name, until_s in tuple(self._kept_until_s.items()):
            if until_s > now_s:
                demand[name] = max(1, demand.get(name, 0))
            else:
                del self._kept_until_s[name]
                demand.setdefault(name, 0)
        return demand

    def waiting(self) -> dict[str, int]:
        """Return the number of waiting requests by deployment, 0 for deployments without any.

        A deployment that a fallback stood in for a moment ago counts as 1.
        """
        now_s = self._clock.monotonic()
        self._awaited |= {request.deployment for line in self.lines.values() for request in line}
        found = dict.fromkeys(self._awaited, 0)
        for line in self.lines.values():
            for request in line:
                found[request.deployment] += 1
        for name, until_s in self._missed_until_s.items():
            found[name] = max(found.get(name, 0), int(until_s > now_s))
        return found

    def note_missing(self, deployment: str) -> None:
        """Note that a fallback answers for this deployment, so that a replica is started; "" is ignored."""
        if deployment:
            self._missed_until_s[deployment] = self._clock.monotonic() + _MISSED_S

    def enter(self, name: str, place: WaitingRequest | None) -> WaitingRequest | None:
        """Return the place of a request in the line, the one that it had if it did; None if too many wait already."""
        if place is None:
            if len(self.lines.get(name, ())) >= self.limit_of(name):
                return None
            place = WaitingRequest(name, next(self._count))
        bisect.insort(self.lines.setdefault(name, []), place, key=lambda one: one.number)
        self._load_tracker.waiting = self
        return place

    def limit_of(self, name: str) -> int:
        """Return the number of requests that may wait for the model."""
        model = self._table_cache.table.models.get(name)
        return self._limit * max(1, 0 if model is None else model.ready())

    def leave(self, place: WaitingRequest) -> None:
        """Take the request out of the line; the next one may find a free slot."""
        line = self.lines[place.model]
        line.remove(place)
        if line:
            line[0].changed.set()
            return
        del self.lines[place.model]
        if not self.lines:
            self._load_tracker.waiting = None

    def is_first(self, place: WaitingRequest) -> bool:
        """Return whether the next free slot is for this request."""
        return self.lines[place.model][0] is place

    def is_awaited(self, deployment: str) -> bool:
        """Return whether a request waits for the deployment."""
        return any(
            request.deployment == deployment for line in self.lines.values() for request in line
        )

    async def wait(self, place: WaitingRequest, keep_alive: KeepAlive, *, until_s: float) -> None:
        """Wait until the request should look again: for a change, the deadline or a time without either."""
        place.changed.clear()
        forecast = self._table_cache.load_forecast(place.deployment)
        loading = None if forecast is None else forecast.text(self._clock.now(), "loading")
        keep_alive.note = loading or WAITING_NOTE
        left_s = await keep_alive.next_pause_s(until_s=until_s)
        if self.is_first(place):
            left_s = min(
                left_s, _LOOK_S
            )  # what others do at the engines, and pauses of engines, cause no event
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await place.changed.wait()

    def _wake_all(self) -> None:
        for line in self.lines.values():
            for place in line:
                place.changed.set()

    def wake_first(self) -> None:
        """Let the first request of each line look again: an engine has a free slot."""
        for line in self.lines.values():
            line[0].changed.set()
