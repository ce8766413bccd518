"""Requests of all gateways and figures of all Macs: what ended, what is under way, and sums over time.

Pure bookkeeping: `dashboard/collector.py` asks the processes. A figure that was not reported lately is None, never an
old one.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from sys import intern
from typing import Final

import msgspec

from gateway.telemetry.time_series import IntervalSums, RateSeries
from schemas.wire.requests import EndedRequest, GatewayFeed, RequestAttempt, RunningRequest

KEPT: Final = 10_000
"""Ended requests that are kept in memory."""
_EVENTS: Final = 4096
# Figures of a process that was silent for longer are not shown.
GATEWAY_FRESH_S: Final = 5.0
AGENT_FRESH_S: Final = 30.0
DAY_S: Final = 24 * 3600.0
# Differences of times that are no wrong clock: those of two machines, and a busy gateway's delay.
_AHEAD_S: Final = 2.0
_BEHIND_S: Final = 30.0
# A step of the sums. Smaller jumps move no figure by more.
_CLOCK_JUMP_S: Final = 10.0
_MOST_INTERVALS: Final = 100


# What many requests have in common: all but their ids.
_SHARED: Final = (
    *("gateway", "model", "outcome", "worker", "replica", "deployment", "api_key", "path"),
    *("strategy", "endpoint", "session"),
)


def with_shared_texts(request: EndedRequest) -> EndedRequest:
    """Return the same request with the names of other requests in memory: a decoder makes new ones for each."""
    shared = {name: intern(text) for name in _SHARED if (text := getattr(request, name))}
    attempts = tuple(
        RequestAttempt(
            replica=intern(attempt.replica),
            worker=intern(attempt.worker),
            outcome=intern(attempt.outcome),
            ms=attempt.ms,
            why=attempt.why and intern(attempt.why),
        )
        for attempt in request.attempts
    )
    return msgspec.structs.replace(request, **shared, attempts=attempts)


def on_own_clock(
    ended: Sequence[EndedRequest], begin_s: float, now_s: float
) -> tuple[list[EndedRequest], bool]:
    """Return ended requests with times of the recorder's clock, and whether the gateway's clock is another.

    What is new in an answer ended after the answer before, and not in the future. A request that says otherwise counts
    as ended now: a gateway with a wrong clock must not move the figures of the whole fleet.
    """
    begin_s, end_s = begin_s - _BEHIND_S, now_s + _AHEAD_S
    requests = [
        request
        if begin_s <= request.time_s + request.whole_s <= end_s
        else msgspec.structs.replace(
            request, time=datetime.fromtimestamp(now_s - request.whole_s, tz=UTC)
        )
        for request in ended
    ]
    return requests, any(new is not old for new, old in zip(requests, ended, strict=True))


@dataclass(slots=True)
class GatewayState:
    """The last word of one gateway."""

    feed: GatewayFeed | None = None
    seen_s: float = float("-inf")
    problem: str = ""
    """The reason why nothing is known now; empty if it answers."""
    read_s: float = float("-inf")
    """Time of the last answer with all that had ended, by a clock that never jumps."""
    is_clock_wrong: bool = False
    """True if the last requests had times that cannot be, by this machine's clock."""


@dataclass(slots=True)
class AgentState:
    """The last figures of one agent, by the name of the metric."""

    figures: Mapping[str, float] = field(default_factory=dict)
    seen_s: float = float("-inf")
    problem: str = ""


@dataclass(slots=True)
class MacSums:
    """Requests that one Mac answered: those in the history, and all since the recorder started."""

    requests: int = 0
    whole_s: float = 0.0
    output_tokens: float = 0.0


class KnownTimes:
    """The times in which a recorder ran: figures of other times are unknown, not zero."""

    def __init__(self, started_s: float = float("-inf")) -> None:
        """Begin with this run, at `started_s` in seconds since 1970."""
        self._intervals = [(started_s, float("inf"))]
        self._seen: tuple[float, float] | None = None
        self._latest_s = started_s

    def note(self, now_s: float, elapsed_s: float) -> float:
        """Note the wall clock, and one that never jumps; return by how many seconds the former jumped, or 0.

        The time over which a clock jumps is unknown. What a clock that was set back will reach again is known then.
        """
        before, self._seen = self._seen, (now_s, elapsed_s)
        self._latest_s = max(self._latest_s, now_s)
        if before is None:
            return 0.0
        expected_s = before[0] + elapsed_s - before[1]
        jump_s = now_s - expected_s
        if abs(jump_s) < _CLOCK_JUMP_S:
            return 0.0
        begin_s, _ = self._intervals.pop()
        found = [*self._intervals, (begin_s, expected_s)]
        if jump_s < 0:
            # Sums reach back a day, from the latest time at which requests were counted.
            oldest_s, self._latest_s = self._latest_s - DAY_S, now_s
            found = [(max(a, oldest_s), min(b, now_s)) for a, b in found]
        found = [(a, b) for a, b in found if a < b][-_MOST_INTERVALS:]
        self._intervals = [*found, (now_s, float("inf"))]
        return jump_s

    def restore(self, steps: Iterable[tuple[int, int]]) -> None:
        """Add the steps of earlier runs: begin and seconds, in order."""
        found: list[tuple[float, float]] = []
        for begin_s, seconds in steps:
            if found and begin_s <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], begin_s + seconds))
            else:
                found.append((begin_s, begin_s + seconds))
        started_s = self._intervals[-1][0]
        before = [(a, min(b, started_s)) for a, b in found if a < started_s]
        self._intervals = [*before, self._intervals[-1]]

    def seconds(self, begin_s: float, end_s: float) -> float:
        """Return how many of the seconds between two times are known."""
        parts = (min(end_s, b) - max(begin_s, a) for a, b in self._intervals)
        return sum(part for part in parts if part > 0)


@dataclass(frozen=True, slots=True)
class TrafficEvent:
    """One event for streams: its name in the WebSocket of the fleet, and its content."""

    name: str
    data: Mapping[str, object]


class Traffic:
    """All requests and figures of a fleet."""

    def __init__(self, started_s: float = float("-inf")) -> None:
        """Begin with this run, at `started_s` in seconds since 1970."""
        self.known = KnownTimes(started_s)
        self.ended: deque[EndedRequest] = deque(maxlen=KEPT)
        self.series = RateSeries()
        self.gateways: dict[str, GatewayState] = {}
        self.agents: dict[str, AgentState] = {}
        self.macs: dict[str, MacSums] = {}
        self.read = 0
        """The number of requests that gateways showed."""
        self.gaps = 0
        """The number of answers in which requests were missing."""
        self.clock_jumps = 0
        """The number of times that this machine's clock jumped."""
        self.lost = 0
        """The number of requests that were missing, as far as gateways know it."""
        self.broken_at_s: deque[float] = deque(maxlen=KEPT)
        """The times at which requests broke with their gateway."""
        self._events: deque[TrafficEvent] = deque(maxlen=_EVENTS)
        self._advanced = asyncio.Event()
        self.place = 0
        """The number of events so far."""

    def record_feed(self, id_: str, found: GatewayFeed, now_s: float) -> list[EndedRequest]:
        """Take the answer of a gateway, and return the requests in it that have ended."""
        state = self.gateways.setdefault(id_, GatewayState())
        known = {request.id for request in state.feed.running} if state.feed is not None else set()
        first = state.feed is None
        state.feed, state.seen_s, state.problem = found, now_s, ""
        self.read += len(found.requests)
        self.gaps += not found.is_complete
        self.lost += found.lost
        self.record_ended(found.requests)
        if not first:
            for request in found.running:
                if request.id not in known:
                    self._started(request.id, request.model, request.worker)
            for ended in found.requests:
                if ended.id not in known:
                    self._started(ended.id, ended.model, ended.worker)
                self._emit("request_completed", completed(ended))
        return found.requests

    def restore(
        self,
        ended: Iterable[EndedRequest],
        macs: Mapping[str, tuple[int, float]],
        totals: Iterable[tuple[int, int, Sequence[float]]],
        steps: Iterable[tuple[int, int]],
    ) -> None:
        """Take what an earlier run recorded; only before anything else was recorded.

        `macs` has requests and their seconds; `totals` has begin, seconds and sums of intervals in order, and `steps`
        begin and seconds of every interval in which a recorder ran.
        """
        self.ended.extend(map(with_shared_texts, ended))
        self.macs = {name: MacSums(*sums) for name, sums in macs.items()}
        for begin_s, seconds, numbers in totals:
            self.series.add_totals(begin_s, seconds, numbers)
        self.known.restore(steps)

    def rebuild(
        self,
        totals: Iterable[tuple[int, int, Sequence[float]]],
        steps: Iterable[tuple[int, int]],
        since: Iterable[EndedRequest],
    ) -> None:
        """Replace all sums by those that were recorded, and by requests that were counted since then."""
        self.series = RateSeries()
        for begin_s, seconds, numbers in totals:
            self.series.add_totals(begin_s, seconds, numbers)
        self.series.extend(since)
        self.known.restore(steps)

    def measured(self, begin_s: float, sums: IntervalSums) -> IntervalSums | None:
        """Return the sums with the seconds in which a recorder ran; None if none did."""
        seconds = self.known.seconds(begin_s, begin_s + sums.seconds)
        return replace(sums, seconds=seconds) if seconds > 0 else None

    def record_ended(self, ended: Iterable[EndedRequest]) -> None:
        """Count ended requests, in the order of their end."""
        for request in ended:
            self.ended.append(with_shared_texts(request))
            self.series.add(request)
            if request.worker:
                sums = self.macs.setdefault(intern(request.worker), MacSums())
                sums.requests += 1
                sums.whole_s += request.whole_s
                sums.output_tokens += request.output_tokens

    def record_silence(self, id_: str, why: str) -> None:
        """Note that a gateway did not answer."""
        self.gateways.setdefault(id_, GatewayState()).problem = why

    def forget_gateways(self, present: Iterable[str], now_s: float) -> None:
        """Drop gateways that are not registered any more. What one had in flight when it fell silent has failed."""
        for id_ in set(self.gateways) - set(present):
            state = self.gateways.pop(id_)
            if state.problem and state.feed is not None:
                self.broken_at_s.extend([now_s] * len(state.feed.running))

    def broken(self, now_s: float) -> int:
        """Return the number of requests of the last day whose gateway died before they ended: no journal has them."""
        return sum(at_s > now_s - DAY_S for at_s in self.broken_at_s)

    def fresh(self, now_s: float) -> list[GatewayFeed]:
        """Return the last answers of the gateways that answered lately."""
        return [
            state.feed
            for state in self.gateways.values()
            if state.feed is not None
            and not state.problem
            and now_s - state.seen_s <= GATEWAY_FRESH_S
        ]

    def running(self, now_s: float) -> list[tuple[str, RunningRequest]]:
        """Return the requests under way with their gateways, the oldest first."""
        found = [(feed.gateway, request) for feed in self.fresh(now_s) for request in feed.running]
        return sorted(found, key=lambda one: -one[1].seconds)

    def active(self, now_s: float) -> int:
        """Return the number of requests at engines."""
        return sum(feed.active for feed in self.fresh(now_s))

    def waiting(self, now_s: float) -> dict[str, int]:
        """Return the number of waiting requests by model."""
        found: dict[str, int] = {}
        for feed in self.fresh(now_s):
            for model, count in feed.waiting_by_model.items():
                found[model] = found.get(model, 0) + count
        return dict(sorted(found.items()))

    def figure(self, node: str, metric: str, now_s: float) -> float | None:
        """Return a figure that an agent measured; None if it is unknown or old."""
        state = self.agents.get(node)
        if state is None or now_s - state.seen_s > AGENT_FRESH_S:
            return None
        return state.figures.get(metric)

    def over(self, at: datetime, seconds: float) -> IntervalSums:
        """Return the sums of the last seconds."""
        return self.series.over(at.timestamp(), seconds)

    def emit(self, name: str, data: Mapping[str, object]) -> None:
        """Add an event for the streams."""
        self._emit(name, data)

    def events_since(self, place: int) -> tuple[list[TrafficEvent], int]:
        """Return the events after a place, as far as they are kept, and the place now."""
        missed = min(max(0, self.place - place), len(self._events))
        return (list(self._events)[len(self._events) - missed :] if missed else []), self.place

    async def wait_beyond(self, place: int) -> None:
        """Wait until there are events after a place."""
        while self.place <= place:
            await self._advanced.wait()

    def _started(self, id_: str, model: str, worker: str | None) -> None:
        self._emit("request_started", {"requestId": id_, "modelId": model, "workerId": worker})

    def _emit(self, name: str, data: Mapping[str, object]) -> None:
        self._events.append(TrafficEvent(name, data))
        self.place += 1
        self._advanced.set()
        self._advanced = asyncio.Event()


def completed(one: EndedRequest) -> dict[str, object]:
    """Return the event of an ended request; latency in milliseconds."""
    return {
        "requestId": one.id,
        "latency": one.latency_ms,
        "tokens": one.tokens.output,
        "status": one.outcome,
    }


def milliseconds(at: datetime) -> int:
    """Return a time as milliseconds since 1970."""
    return int(at.astimezone(UTC).timestamp() * 1000)
