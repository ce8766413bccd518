"""What a gateway counts, in Prometheus' text form. No global state.

Names as the engine's (nodeagent/engine/watch/metrics.py). Who counts what: requests, durations and tokens `watch.recorder` at the end of each request; the rest whoever does it, by `.add(label, ...)`:

- attempts(outcome), retries(model), ejections(replica), hedges(outcome), queue_refused(reason): carry
- resumptions(outcome): carry/resuming.py
- limited(reason): access
"""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from gateway.watch.figures import Served
from machinery.exposition import Counter, Gauge, Series, text

# Time to first byte: from a cached prefix on a fast Mac to a long prompt on a slow one.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


def _counter(name: str, help_: str, *labels: str) -> Counter:
    return Counter(f"fleet_gateway_{name}_total", help_, labels)


class Metrics:
    """What this gateway counts."""

    def __init__(
        self,
        *,
        in_flight: Callable[[], float],
        endpoints: Callable[[], float],
        more: Sequence[Series] = (),
        others: Sequence[Series] = (),
    ) -> None:
        """`more`: what is counted of deployments; `others`: of the process and what else only people read."""
        self.attempts = _counter(
            "attempts", "Requests sent to engines, by what came of it.", "outcome"
        )
        self.retries = _counter("retries", "Attempts after a request's first.", "model")
        self.resumptions = _counter(
            "resumptions", "Streams taken up elsewhere after their engine died.", "outcome"
        )
        self.ejections = _counter(
            "ejections", "How often an endpoint was left out because it failed.", "replica"
        )
        self.hedges = _counter(
            "hedges", "Second engines asked because the first was slow.", "outcome"
        )
        self.queue_refused = _counter(
            "queue_refused", "Requests turned away from a queue here.", "reason"
        )
        self.limited = _counter("limited", "Requests refused for what their key may.", "reason")
        self.served = Served(SECONDS)
        self.requests = self.served.requests
        self._more = tuple(more)
        self._parts: tuple[Series, ...] = (
            *self.served.parts(),
            self.attempts,
            self.retries,
            self.resumptions,
            self.ejections,
            self.hedges,
            self.queue_refused,
            self.limited,
            Gauge("fleet_gateway_in_flight", "Requests at engines now.", in_flight),
            Gauge("fleet_gateway_endpoints", "Endpoints with a lease.", endpoints),
            *others,
            *self._more,
        )

    def drop_gone(self, models: AbstractSet[str], replicas: AbstractSet[str]) -> None:
        """Forget models and replicas that are not among these."""
        self.served.drop_gone(models, replicas)
        self.retries.drop(lambda labels: labels[0] not in models)
        self.ejections.drop(lambda labels: labels[0] not in replicas)

    def lines(self) -> Iterator[str]:
        """Yield everything in Prometheus' text form; requests may be counted in between."""
        for part in self._parts:
            yield from part.lines()

    def text(self) -> str:
        """Return everything in Prometheus' text form."""
        return text(self._parts)

    def demand_text(self) -> str:
        """Return what the reconciler asks for every second: only what is about deployments."""
        return text(self._more)
