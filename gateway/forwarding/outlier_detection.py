"""Whether an endpoint that failed is asked again: a circuit breaker. Pure; told the time and the draws.

    closed --3 failures in a row, half of 10 s' requests, or nobody there--> open
    open --its time is over--> half open, which lets one request through: closed if it is answered, else open for longer
    open for silence --a sign of life--> open; for nobody being there --a sign of life--> closed

Times in seconds of `Clock.monotonic`. Who is shunned is asked last, not never.

Which engines are asked last because they failed: a breaker for each that did, and the set of those shunned now.
"""

import random
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gateway.routing.table import EngineEndpoint, Origin

# In a row. Envoy ejects after 5 and HAProxy after 10; a request here is seconds of a GPU's work.
FAILURES = 3
# Of the requests since the first failure, and how many those must be: else one of two is a half.
ERROR_RATE, LEAST_REQUESTS = 0.5, 10
_WINDOW_S = 10.0
# Long enough to route around a restart, short enough to use a restarted engine within a second.
PAUSE_S = 1.0
_LONGEST_PAUSE_S = 10.0
_OPEN_S, LONGEST_OPEN_S = 1.0, 30.0

Fault: TypeAlias = Literal["full", "bad", "silent", "gone"]
"""full: it says itself that it cannot take more now. bad: what it answers is an error, or no whole answer.
silent: it did not answer in time. gone: nobody is there, or nobody answers anything."""
Phase: TypeAlias = Literal["closed", "half_open", "open"]


@dataclass(slots=True)
class Breaker:
    """One endpoint's. Made at its first failure: without one it is as good as closed."""

    failed_s: float = 0.0
    """When it failed last."""
    is_open: bool = False
    is_gone: bool = False
    """Whether no request tries it out before a sign of life: it would wait for nothing."""
    _is_well_if_alive: bool = False
    """Whether a sign of life is all that was missing."""
    _in_row: int = 0
    _trips: int = 0
    _opened_s: float = 0.0
    _until_s: float = 0.0
    _is_tried: bool = False
    _window_s: float = 0.0
    _requests: int = 0
    _failures: int = 0

    def phase(self, now_s: float) -> Phase:
        """Return where it is."""
        if not self.is_open:
            return "closed"
        return "open" if self.is_gone or now_s < self._until_s else "half_open"

    def shuns(self, now_s: float) -> bool:
        """Return whether others are to be asked first."""
        return now_s < self._until_s or (self.is_open and (self.is_gone or self._is_tried))

    def until_s(self) -> float:
        """Return when `shuns` may say something else without anything having happened."""
        return self._until_s

    def asked(self, now_s: float) -> bool:
        """Note that a request goes there; return whether it is the one that tries it out."""
        if self.is_open and not self._is_tried and self.phase(now_s) == "half_open":
            self._is_tried = True
            return True
        return False

    def left(self) -> None:
        """Note that the request that tried it out ended without telling anything."""
        self._is_tried = False

    def failed(self, fault: Fault, now_s: float, *, draw: float, pause_s: float = PAUSE_S) -> bool:
        """Note a failure; return whether that opened it.

        `draw` in 0..1 spreads the times of many gateways, which saw the same engine fail at once. `pause_s` is
        what the engine itself asks for.
        """
        self.failed_s = now_s
        pause_s = min(max(pause_s, PAUSE_S), _LONGEST_PAUSE_S)
        self._until_s = max(self._until_s, now_s + pause_s)
        if fault == "full":
            self._is_tried = False  # it answers, so it lives; but that it works nobody has seen
            return False
        self._count(now_s, is_failure=True)
        if self.is_open and not self._is_tried:
            # What was sent before it opened says nothing new; but who is gone is gone.
            self._miss(fault)
            return False
        if not (self._is_tried or fault == "gone" or self._is_too_bad()):
            return False
        self._is_tried, self.is_open = False, True
        self._miss(fault)
        self._opened_s = now_s
        open_s = min(_OPEN_S * 2**self._trips, LONGEST_OPEN_S)
        self._until_s = max(self._until_s, now_s + open_s * (0.75 + draw / 2))
        self._trips = min(self._trips + 1, 10)
        return True

    def succeeded(self, asked_s: float, now_s: float) -> None:
        """Note that a request was answered; `asked_s` is when it was sent."""
        self._count(now_s, is_failure=False)
        if self.is_open and asked_s < self._opened_s:
            return  # an answer from before: it had its place when all was well
        self._in_row = 0
        if self.is_open:
            self._close()

    def lives(self) -> None:
        """Note that it says to be well when asked for nothing else."""
        if self.is_gone and self._is_well_if_alive:
            self._close()
        self.is_gone = False

    def is_forgotten(self, now_s: float) -> bool:
        """Return whether it is as good as one that never failed."""
        return not self.is_open and now_s > max(self._until_s, self.failed_s + _WINDOW_S)

    def _miss(self, fault: Fault) -> None:
        """Note whether a sign of life is missed."""
        self.is_gone = self.is_gone or fault in ("gone", "silent")
        self._is_well_if_alive = self._is_well_if_alive or fault == "gone"

    def _close(self) -> None:
        self.is_open = self.is_gone = self._is_tried = self._is_well_if_alive = False
        self._in_row = self._trips = self._requests = self._failures = 0
        self._until_s = 0.0

    def _count(self, now_s: float, *, is_failure: bool) -> None:
        if now_s >= self._window_s + _WINDOW_S:
            self._window_s, self._requests, self._failures = now_s, 0, 0
        self._requests += 1
        if is_failure:
            self._failures += 1
            self._in_row += 1

    def _is_too_bad(self) -> bool:
        if self._in_row >= FAILURES:
            return True
        return self._requests >= LEAST_REQUESTS and self._failures >= ERROR_RATE * self._requests


_PHASES = {"closed": 0, "half_open": 1, "open": 2}
_NEVER = float("inf")


class OutlierDetector:
    """Breakers by origin. Where nobody failed, nothing is kept, and asking costs nothing."""

    def __init__(self, entropy: random.Random) -> None:
        self._random = entropy
        self.breakers: dict[Origin, Breaker] = {}
        """Of who failed lately. While there are none, nothing here need be asked or told."""
        self._versions: dict[Origin, int] = {}
        self._targets: dict[Origin, EngineEndpoint] = {}
        self.live: set[Origin] = set()
        """Who is asked last, as of when somebody last called anything here."""
        self._due_s = _NEVER

    def shunned(self, now_s: float) -> AbstractSet[Origin]:
        """Return who is asked last; a live view, which is right until anything is called again."""
        if now_s >= self._due_s:
            self._look(now_s)
        return self.live

    def asked(self, target: EngineEndpoint, now_s: float) -> bool:
        """Note that a request goes there; return whether it is the one that tries out an open breaker."""
        breaker = self.breakers.get(target.origin)
        if breaker is None or not breaker.asked(now_s):
            return False
        self._look(now_s)
        return True

    def left(self, target: EngineEndpoint, now_s: float) -> None:
        """Note that the request that tried it out told nothing."""
        breaker = self.breakers.get(target.origin)
        if breaker is not None:
            breaker.left()
            self._look(now_s)

    def failed(
        self, target: EngineEndpoint, fault: Fault, now_s: float, *, pause_s: float = PAUSE_S
    ) -> bool:
        """Note that it failed; return whether it is ejected for that."""
        origin = target.origin
        breaker = self.breakers.get(origin)
        if breaker is None or self._versions[origin] != target.version:
            breaker = self.breakers[origin] = Breaker()
            self._versions[origin] = target.version
        opened = breaker.failed(fault, now_s, draw=self._random.random(), pause_s=pause_s)
        self._look(now_s)
        return opened

    def succeeded(self, target: EngineEndpoint, asked_s: float, now_s: float) -> None:
        """Note that it answered a request sent at `asked_s`."""
        breaker = self.breakers.get(target.origin)
        if breaker is not None:
            breaker.succeeded(asked_s, now_s)
            if target.origin in self.live:
                self._look(now_s)

    def lives(self, target: EngineEndpoint, now_s: float) -> None:
        """Note that it says to be well."""
        breaker = self.breakers.get(target.origin)
        if breaker is not None:
            breaker.lives()
            self._look(now_s)

    def is_open(self, origin: Origin) -> bool:
        """Return whether it is ejected."""
        breaker = self.breakers.get(origin)
        return breaker is not None and breaker.is_open

    def know(self, targets: Iterable[EngineEndpoint], now_s: float) -> None:
        """Learn who is there now: what is published anew begins anew, and who is gone is forgotten."""
        self._targets = {target.origin: target for target in targets}
        for origin in tuple(self.breakers):
            target = self._targets.get(origin)
            if target is None or target.version != self._versions[origin]:
                self._forget(origin)
        self._look(now_s)

    def tidy(self, now_s: float) -> None:
        """Forget failures of long ago."""
        for origin, breaker in tuple(self.breakers.items()):
            if breaker.is_forgotten(now_s):
                self._forget(origin)
        self._look(now_s)

    def phases(self, now_s: float) -> dict[str, int]:
        """Return by replica: 0 closed, 1 half open, 2 open."""
        return {
            target.replica: _PHASES[breaker.phase(now_s)]
            if (breaker := self.breakers.get(origin)) is not None
            else 0
            for origin, target in self._targets.items()
        }

    def _forget(self, origin: Origin) -> None:
        del self.breakers[origin], self._versions[origin]

    def _look(self, now_s: float) -> None:
        # In place: whoever chooses holds this very set.
        self.live.clear()
        due_s = _NEVER
        for origin, breaker in self.breakers.items():
            if breaker.shuns(now_s):
                self.live.add(origin)
                if breaker.until_s() > now_s:
                    due_s = min(due_s, breaker.until_s())
        self._due_s = due_s
