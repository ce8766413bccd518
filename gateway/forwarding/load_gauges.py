"""Gauges of the load: requests by deployment, ejected endpoints, waiting requests."""

from gateway.forwarding.admission import Activator
from gateway.forwarding.model_state import ModelStates
from gateway.forwarding.router import LoadTracker
from machinery.clock import Clock
from machinery.prometheus import Gauge
from schemas.wire import metrics as wire_metrics


def deployment_gauges(
    load_tracker: LoadTracker, activator: Activator
) -> tuple[Gauge, Gauge, Gauge]:
    """Return the gauges of the load by deployment."""
    return (
        Gauge(
            wire_metrics.DEPLOYMENT_IN_FLIGHT,
            "Requests at engines.",
            load_tracker.by_deployment,
            labels=(wire_metrics.DEPLOYMENT_LABEL,),
        ),
        Gauge(
            wire_metrics.DEPLOYMENT_WAITING,
            "Requests that wait for a replica; at least 1 while a client's keep_alive lasts.",
            activator.demand,
            labels=(wire_metrics.DEPLOYMENT_LABEL,),
        ),
        Gauge(
            wire_metrics.DEPLOYMENT_RELEASED,
            "1: no client needs it, so it may give way at once. 2: it is unloaded.",
            activator.releases,
            labels=(wire_metrics.DEPLOYMENT_LABEL,),
        ),
    )


def forwarding_gauges(
    load_tracker: LoadTracker, model_states: ModelStates, clock: Clock
) -> tuple[Gauge, Gauge]:
    """Return the gauges of ejected endpoints and waiting requests."""
    return (
        Gauge(
            "fleet_gateway_endpoint_breaker",
            "0 closed; 1 half open: one trial request; 2 open: ejected.",
            lambda: load_tracker.outliers.phases(clock.monotonic()),
            labels=("replica",),
        ),
        Gauge(
            "fleet_gateway_queue_waiting",
            "Requests that wait for a slot.",
            model_states.waiting,
            labels=("model",),
        ),
    )
