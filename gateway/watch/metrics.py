"""What a gateway counts, in Prometheus' text form. No global state."""

from collections.abc import Callable, Sequence

from machinery.exposition import Counter, Gauge, Histogram, Series, text

# Time to first byte: from a cached prefix on a fast Mac to a long prompt on a slow one.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """What this gateway counts."""

    def __init__(
        self,
        *,
        in_flight: Callable[[], float],
        endpoints: Callable[[], float],
        more: Sequence[Series] = (),
    ) -> None:
        """`more`: what is counted of deployments."""
        self.requests = Counter(
            "fleet_gateway_requests_total", "Requests by how they ended.", ("model", "outcome")
        )
        self.attempts = Counter(
            "fleet_gateway_attempts_total",
            "Requests sent to engines, by what came of it.",
            ("outcome",),
        )
        self.first_byte = Histogram(
            "fleet_gateway_first_byte_seconds",
            "From the request being read to the first byte of its answer.",
            ("model",),
            bounds=SECONDS,
        )
        self._more = tuple(more)
        self._gauges = (
            Gauge("fleet_gateway_in_flight", "Requests at engines now.", in_flight),
            Gauge("fleet_gateway_endpoints", "Endpoints with a lease.", endpoints),
        )

    def text(self) -> str:
        """Return everything in Prometheus' text form."""
        parts: tuple[Series, ...] = (
            self.requests,
            self.attempts,
            self.first_byte,
            *self._gauges,
            *self._more,
        )
        return text(parts)

    def demand_text(self) -> str:
        """Return what the reconciler asks for every second: only what is about deployments."""
        return text(self._more)
