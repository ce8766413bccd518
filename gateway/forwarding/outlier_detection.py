"""Passive outlier detection: a circuit breaker for each endpoint that failed, and the set of ejected endpoints.

    closed --N failures in a row, half of 10 s' requests, or connection refused--> open
    open --its time is over--> half open: one trial request closes it if answered, else reopens it for longer
    open for silence --sign of life--> open with a trial; for a refused connection --sign of life--> closed

Times are seconds of `Clock.monotonic`. Ejected endpoints are still used when no healthy endpoint
remains.
"""

import random
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gateway.routing.table import DEFAULT_CHECKS, EngineEndpoint
from machinery.clock import NEVER
from schemas.wire.engine_address import EngineAddress

# Share of failures and the least number of requests in the window; without it one of two is half.
ERROR_RATE, MIN_REQUESTS = 0.5, 10
_WINDOW_S = 10.0
# Long enough to route around a restart, short enough to use a restarted engine within a second.
PAUSE_S = 1.0
_LONGEST_PAUSE_S = 10.0
_OPEN_S, LONGEST_OPEN_S = 1.0, 30.0

Fault: TypeAlias = Literal["full", "bad", "silent", "gone"]
"""full: the engine cannot take more now. bad: it answers with an error or an incomplete response.
silent: no answer in time. gone: the connection is refused, or nothing answers at all."""
Phase: TypeAlias = Literal["closed", "half_open", "open"]
_PHASES = {"closed": 0, "half_open": 1, "open": 2}


@dataclass(slots=True)
class Breaker:
    """Breaker of one endpoint, created at its first failure."""

    failed_s: float = 0.0
    """Time of the last failure."""
    is_open: bool = False
    is_gone: bool = False
    """True if no trial is sent before a sign of life, because it would wait in vain."""
    _closes_if_alive: bool = False
    """True if a sign of life is all that is missing."""
    _in_a_row: int = 0
    _trips: int = 0
    _opened_s: float = 0.0
    _until_s: float = 0.0
    _is_on_trial: bool = False
    _window_s: float = 0.0
    _requests: int = 0
    _failures: int = 0

    def phase(self, now_s: float) -> Phase:
        """Return the current phase."""
        if not self.is_open:
            return "closed"
        return "open" if self.is_gone or now_s < self._until_s else "half_open"

    def is_avoided(self, now_s: float) -> bool:
        """Return whether other endpoints are preferred."""
        return now_s < self._until_s or (self.is_open and (self.is_gone or self._is_on_trial))

    def until_s(self) -> float:
        """Return the time at which `is_avoided` can change without an event."""
        return self._until_s

    def begin_trial(self, now_s: float) -> bool:
        """Record a request to the endpoint; return whether it is the trial request."""
        if self.is_open and not self._is_on_trial and self.phase(now_s) == "half_open":
            self._is_on_trial = True
            return True
        return False

    def abandon_trial(self) -> None:
        """Record that the trial request ended without a result."""
        self._is_on_trial = False

    def record_failure(
        self,
        fault: Fault,
        now_s: float,
        *,
        draw: float,
        pause_s: float = PAUSE_S,
        limit: int = DEFAULT_CHECKS.failures,
    ) -> bool:
        """Record a failure; return whether it opened the breaker. `limit`: failures in a row that open it.

        `draw`, 0..1, spreads the times of many gateways that saw the same failure. `pause_s`: the
        engine's own request for a pause.
        """
        self.failed_s = now_s
        if self.is_open and not self._is_on_trial and fault != "full":
            # Requests sent before the breaker opened add no failure and no pause, but may show that the engine is gone.
            self._note_missing_sign(fault)
            return False
        pause_s = min(max(pause_s, PAUSE_S), _LONGEST_PAUSE_S)
        self._until_s = max(self._until_s, now_s + pause_s)
        if fault == "full":
            self._is_on_trial = (
                False  # the engine answers, so it lives, but the trial is not passed
            )
            return False
        self._count(now_s, is_failure=True)
        if not (self._is_on_trial or fault == "gone" or self._exceeds_limits(limit)):
            return False
        self._is_on_trial, self.is_open = False, True
        self._note_missing_sign(fault)
        self._opened_s = now_s
        open_s = min(_OPEN_S * 2**self._trips, LONGEST_OPEN_S)
        self._until_s = max(self._until_s, now_s + open_s * (0.75 + draw / 2))
        self._trips = min(self._trips + 1, 10)
        return True

    def record_success(self, sent_s: float, now_s: float) -> None:
        """Record an answered request that was sent at `sent_s`."""
        self._count(now_s, is_failure=False)
        if self.is_open and sent_s < self._opened_s:
            return  # sent before the breaker opened
        self._in_a_row = 0
        if self.is_open:
            self._close()

    def record_alive(self) -> None:
        """Record a successful health check."""
        if self.is_gone and self._closes_if_alive:
            self._close()
        self.is_gone = False

    def is_forgotten(self, now_s: float) -> bool:
        """Return whether the breaker is the same as a new one."""
        return not self.is_open and now_s > max(self._until_s, self.failed_s + _WINDOW_S)

    def _note_missing_sign(self, fault: Fault) -> None:
        """Record whether a sign of life is missing."""
        self.is_gone = self.is_gone or fault in ("gone", "silent")
        self._closes_if_alive = self._closes_if_alive or fault == "gone"

    def _close(self) -> None:
        self.is_open = self.is_gone = self._is_on_trial = self._closes_if_alive = False
        self._in_a_row = self._trips = self._requests = self._failures = 0
        self._until_s = 0.0

    def _count(self, now_s: float, *, is_failure: bool) -> None:
        if now_s >= self._window_s + _WINDOW_S:
            self._window_s, self._requests, self._failures = now_s, 0, 0
        self._requests += 1
        if is_failure:
            self._failures += 1
            self._in_a_row += 1

    def _exceeds_limits(self, limit: int) -> bool:
        if self._in_a_row >= limit:
            return True
        return self._requests >= MIN_REQUESTS and self._failures >= ERROR_RATE * self._requests


class OutlierDetector:
    """Breakers by origin. Endpoints without failures cost nothing."""

    def __init__(self, entropy: random.Random) -> None:
        self._random = entropy
        self.breakers: dict[EngineAddress, Breaker] = {}
        """Endpoints that failed lately. While it is empty, no other method needs to be called."""
        self._versions: dict[EngineAddress, int] = {}
        self._endpoints: dict[EngineAddress, EngineEndpoint] = {}
        self.ejected_origins: set[EngineAddress] = set()
        """Ejected endpoints as of the last call of any method."""
        self._due_s = NEVER

    def ejected(self, now_s: float) -> AbstractSet[EngineAddress]:
        """Return the ejected endpoints: a live set, valid until the next call."""
        if now_s >= self._due_s:
            self._refresh(now_s)
        return self.ejected_origins

    def begin_trial(self, endpoint: EngineEndpoint, now_s: float) -> bool:
        """Record a request; return whether it is the trial of an open breaker."""
        breaker = self.breakers.get(endpoint.origin)
        if breaker is None or not breaker.begin_trial(now_s):
            return False
        self._refresh(now_s)
        return True

    def abandon_trial(self, endpoint: EngineEndpoint, now_s: float) -> None:
        """Record that the trial request ended without a result."""
        breaker = self.breakers.get(endpoint.origin)
        if breaker is not None:
            breaker.abandon_trial()
            self._refresh(now_s)

    def record_failure(
        self, endpoint: EngineEndpoint, fault: Fault, now_s: float, *, pause_s: float = PAUSE_S
    ) -> bool:
        """Record a failure; return whether it ejects the endpoint."""
        origin = endpoint.origin
        breaker = self.breakers.get(origin)
        if breaker is None or self._versions[origin] != endpoint.version:
            breaker = self.breakers[origin] = Breaker()
            self._versions[origin] = endpoint.version
        opened = breaker.record_failure(
            fault,
            now_s,
            draw=self._random.random(),
            pause_s=pause_s,
            limit=endpoint.checks.failures,
        )
        self._refresh(now_s)
        return opened

    def record_success(self, endpoint: EngineEndpoint, sent_s: float, now_s: float) -> None:
        """Record a response to a request sent at `sent_s`."""
        breaker = self.breakers.get(endpoint.origin)
        if breaker is not None:
            breaker.record_success(sent_s, now_s)
            if endpoint.origin in self.ejected_origins:
                self._refresh(now_s)

    def record_alive(self, endpoint: EngineEndpoint, now_s: float) -> None:
        """Record a successful health check."""
        breaker = self.breakers.get(endpoint.origin)
        if breaker is not None:
            breaker.record_alive()
            self._refresh(now_s)

    def is_open(self, origin: EngineAddress) -> bool:
        """Return whether the endpoint is ejected."""
        breaker = self.breakers.get(origin)
        return breaker is not None and breaker.is_open

    def set_endpoints(self, endpoints: Iterable[EngineEndpoint], now_s: float) -> None:
        """Set the current endpoints: republished ones start anew, and missing ones are dropped."""
        self._endpoints = {endpoint.origin: endpoint for endpoint in endpoints}
        for origin in tuple(self.breakers):
            endpoint = self._endpoints.get(origin)
            if endpoint is None or endpoint.version != self._versions[origin]:
                self._forget(origin)
        self._refresh(now_s)

    def drop_old(self, now_s: float) -> None:
        """Drop old failures."""
        for origin, breaker in tuple(self.breakers.items()):
            if breaker.is_forgotten(now_s):
                self._forget(origin)
        self._refresh(now_s)

    def phases(self, now_s: float) -> dict[str, int]:
        """Return by replica: 0 closed, 1 half open, 2 open."""
        return {
            endpoint.replica: _PHASES[breaker.phase(now_s)]
            if (breaker := self.breakers.get(origin)) is not None
            else 0
            for origin, endpoint in self._endpoints.items()
        }

    def _forget(self, origin: EngineAddress) -> None:
        del self.breakers[origin], self._versions[origin]

    def _refresh(self, now_s: float) -> None:
        # In place: `EndpointHealth` holds this very set.
        self.ejected_origins.clear()
        due_s = NEVER
        for origin, breaker in self.breakers.items():
            if breaker.is_avoided(now_s):
                self.ejected_origins.add(origin)
                if breaker.until_s() > now_s:
                    due_s = min(due_s, breaker.until_s())
        self._due_s = due_s
