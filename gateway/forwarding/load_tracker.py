"""How busy engines are: our own requests exactly, those of others by the engines' own words in every answer."""

import random
from collections.abc import Collection, Mapping

from gateway.forwarding.outlier_detection import OutlierDetector
from gateway.routing.query import EndpointHealth
from gateway.routing.table import EngineEndpoint, Origin

# What an engine said of others' requests is true for about as long as those take.
_TOLD_S = 3.0


class LoadTracker:
    """Open requests by engine and by deployment; who is shunned is in `circuits`."""

    def __init__(self, entropy: random.Random) -> None:
        self.circuits = OutlierDetector(entropy)
        self._in_flight: dict[Origin, int] = {}
        self._by_deployment: dict[str, int] = {}
        self._elsewhere: dict[Origin, float] = {}
        self._headroom: dict[Origin, float] = {}
        self._told_s: dict[Origin, float] = {}
        # Its parts change in place; making one for each request would be most of what choosing costs.
        self._standing = EndpointHealth(
            in_flight=self._in_flight,
            elsewhere=self._elsewhere,
            headroom=self._headroom,
            penalised=self.circuits.shunned(0.0),
        )

    def begin(self, target: EngineEndpoint) -> None:
        """Count a request to the engine; `end` must follow."""
        origin, deployment = target.origin, target.deployment
        self._in_flight[origin] = self._in_flight.get(origin, 0) + 1
        self._by_deployment[deployment] = self._by_deployment.get(deployment, 0) + 1

    def end(self, target: EngineEndpoint) -> None:
        """Count the request no more."""
        origin = target.origin
        left = self._in_flight[origin] - 1
        if left:
            self._in_flight[origin] = left
        else:
            del self._in_flight[origin]
        self._by_deployment[target.deployment] -= 1

    def hear(self, origin: Origin, headers: Mapping[bytes, bytes], now_s: float) -> None:
        """Take an engine's word about its load and its memory; what is no number is no word."""
        running = headers.get(b"x-fleet-in-flight", b"")
        queued = headers.get(b"x-fleet-queued", b"")
        if running.isdigit() and queued.isdigit() and len(running) + len(queued) < 20:
            others = int(running) + int(queued) - self._in_flight.get(origin, 0)
            self._elsewhere[origin] = others if others > 0 else 0.0
            self._told_s[origin] = now_s
        free = headers.get(b"x-fleet-memory-free", b"")
        if free.isdigit() and len(free) <= 3:
            self._headroom[origin] = min(int(free), 100) / 100

    def know(self, origins: Collection[Origin]) -> None:
        """Forget the memory of engines that are gone."""
        for origin in self._headroom.keys() - origins:
            del self._headroom[origin]

    def tidy(self, now_s: float) -> None:
        """Forget words and failures of long ago."""
        for origin, told_s in tuple(self._told_s.items()):
            if told_s < now_s - _TOLD_S:
                del self._told_s[origin]
                del self._elsewhere[origin]
        self.circuits.tidy(now_s)

    def by_deployment(self) -> dict[str, int]:
        """Return how many requests are at engines; deployments that had some before with 0."""
        return dict(self._by_deployment)

    def total(self) -> int:
        """Return how many requests are at engines."""
        return sum(self._in_flight.values())

    def standing(self, now_s: float) -> EndpointHealth:
        """Return what a choice is made from; the same object again and again, with what is true now."""
        if self.circuits.breakers:
            self.circuits.shunned(now_s)
        return self._standing
