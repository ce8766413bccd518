"""Load of each engine: this gateway's requests exactly, other gateways' requests as engines report them."""

import random
from collections.abc import Collection, Mapping

from gateway.forwarding.outlier_detection import OutlierDetector
from gateway.routing.query import EndpointHealth
from gateway.routing.table import EngineEndpoint, Origin
from schemas.wire import headers as wire_headers

_IN_FLIGHT = wire_headers.IN_FLIGHT.encode()
_QUEUED = wire_headers.QUEUED.encode()
_MEMORY_FREE = wire_headers.MEMORY_FREE.encode()

# A reported load is valid for about as long as the reported requests take.
_REPORT_TTL_S = 3.0


class LoadTracker:
    """Requests in flight by engine and by deployment. `outliers` knows the ejected endpoints."""

    def __init__(self, entropy: random.Random) -> None:
        self.outliers = OutlierDetector(entropy)
        self._in_flight: dict[Origin, int] = {}
        self._by_deployment: dict[str, int] = {}
        self._others_in_flight: dict[Origin, float] = {}
        self._headroom: dict[Origin, float] = {}
        self._reported_s: dict[Origin, float] = {}
        # Its members change in place: a new object for each request would be most of the cost of a
        # choice.
        self._health = EndpointHealth(
            in_flight=self._in_flight,
            others_in_flight=self._others_in_flight,
            headroom=self._headroom,
            ejected=self.outliers.ejected(0.0),
        )

    def begin(self, endpoint: EngineEndpoint) -> None:
        """Count a request to the engine; `end` must follow."""
        origin, deployment = endpoint.origin, endpoint.deployment
        self._in_flight[origin] = self._in_flight.get(origin, 0) + 1
        self._by_deployment[deployment] = self._by_deployment.get(deployment, 0) + 1

    def end(self, endpoint: EngineEndpoint) -> None:
        """Count the request no more."""
        origin = endpoint.origin
        left = self._in_flight[origin] - 1
        if left:
            self._in_flight[origin] = left
        else:
            del self._in_flight[origin]
        self._by_deployment[endpoint.deployment] -= 1

    def record_report(self, origin: Origin, headers: Mapping[bytes, bytes], now_s: float) -> None:
        """Record the load and the free memory that an engine reports; values that are not numbers are ignored."""
        running = headers.get(_IN_FLIGHT, b"")
        queued = headers.get(_QUEUED, b"")
        if running.isdigit() and queued.isdigit() and len(running) + len(queued) < 20:
            others = int(running) + int(queued) - self._in_flight.get(origin, 0)
            self._others_in_flight[origin] = others if others > 0 else 0.0
            self._reported_s[origin] = now_s
        free = headers.get(_MEMORY_FREE, b"")
        if free.isdigit() and len(free) <= 3:
            self._headroom[origin] = min(int(free), 100) / 100

    def set_endpoints(self, origins: Collection[Origin]) -> None:
        """Drop the memory values of endpoints that are gone."""
        for origin in self._headroom.keys() - origins:
            del self._headroom[origin]

    def drop_old(self, now_s: float) -> None:
        """Drop outdated load values and failures."""
        for origin, reported_s in tuple(self._reported_s.items()):
            if reported_s < now_s - _REPORT_TTL_S:
                del self._reported_s[origin]
                del self._others_in_flight[origin]
        self.outliers.drop_old(now_s)

    def by_deployment(self) -> dict[str, int]:
        """Return the requests in flight by deployment; 0 for deployments that had some before."""
        return dict(self._by_deployment)

    def total(self) -> int:
        """Return the number of requests in flight."""
        return sum(self._in_flight.values())

    def health(self, now_s: float) -> EndpointHealth:
        """Return the input of a choice: always the same object, with current values."""
        if self.outliers.breakers:
            self.outliers.ejected(now_s)
        return self._health
