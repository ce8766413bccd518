"""What a gateway shows of engines' standing and of its own queues. Counts nothing itself."""

from gateway.carry.loads import Loads
from gateway.carry.names import Names
from machinery.clock import Clock
from machinery.exposition import Gauges


def figures(loads: Loads, names: Names, clock: Clock) -> tuple[Gauges, Gauges]:
    """Return who is asked last, and how many wait for their turn."""
    return (
        Gauges(
            "fleet_gateway_endpoint_breaker",
            "0 closed; 1 half open, one request may try it; 2 open: others are asked first.",
            "replica",
            lambda: loads.circuits.phases(clock.monotonic()),
        ),
        Gauges(
            "fleet_gateway_queue_waiting",
            "Requests that wait for their turn here.",
            "model",
            names.waiting,
        ),
    )
