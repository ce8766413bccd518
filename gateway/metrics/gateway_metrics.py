"""Prometheus metrics of the gateway: process, requests by model and replica, and forwarding. No global state.

Names and buckets follow the engine's. The recorder counts requests, durations and tokens when a request ends.
Other modules call `.add(label, ...)`: forwarding counts attempts, retries, ejections, hedges,
refusals of queues and resumptions; auth counts refusals of keys. A thousand replicas multiply every
line, so labels are few.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

import psutil

from gateway.routing.table import EndpointName
from machinery.clock import Clock
from machinery.prometheus import (
    Counter,
    CounterValue,
    Gauge,
    Histogram,
    HistogramValue,
    MetricFamily,
    build_info,
    render,
)
from schemas.wire.metrics import FIRST_TOKEN_BOUNDS_S, PER_TOKEN_BOUNDS_S, REQUEST_BOUNDS_S

# Four times a second costs nothing and meets a pause of 10 ms now and then.
_PROBE_S = 0.25
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_WHERE = ("model", "replica")


class FinishedRequest(Protocol):
    """The figures of a finished request; times in seconds."""

    @property
    def served_by(self) -> EndpointName | None: ...

    @property
    def outcome(self) -> str: ...

    @property
    def queued_s(self) -> float: ...

    @property
    def first_s(self) -> float: ...

    @property
    def whole_s(self) -> float: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def output_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionCounts:
    """Functions that count connections."""

    clients: Callable[[], int]
    engines: Callable[[], int]


class ProcessMetrics:
    """Metrics of the process. `run()` must run for the lag to be measured."""

    def __init__(self, clock: Clock, connections: ConnectionCounts) -> None:
        self._clock = clock
        self._process = psutil.Process()
        self.lag = Histogram(
            "fleet_gateway_event_loop_lag_seconds",
            "Lag of the event loop, measured four times a second.",
            (),
            bounds=_LAG_S,
        )
        self._parts: tuple[MetricFamily, ...] = (
            build_info("gateway"),
            self.lag,
            Gauge("fleet_gateway_client_connections", "Client connections.", connections.clients),
            Gauge(
                "fleet_gateway_engine_connections",
                "Connections to engines, idle ones included.",
                connections.engines,
            ),
            Gauge(
                "process_cpu_seconds_total",
                "CPU time, user and system.",
                self._cpu_s,
                "counter",
            ),
            Gauge("process_resident_memory_bytes", "Memory in use.", self._memory_bytes),
            Gauge("process_open_fds", "Open file descriptors.", self.count_files),
            Gauge(
                "process_start_time_seconds",
                "Start of the process, in seconds since 1970.",
                self._process.create_time,
            ),
        )

    async def run(self) -> None:
        """Measure the event loop's lag, forever."""
        lag = self.lag.child()
        while True:
            asked_s = self._clock.monotonic()
            await self._clock.sleep(_PROBE_S)
            lag.observe(max(0.0, self._clock.monotonic() - asked_s - _PROBE_S))

    def lines(self) -> Iterator[str]:
        """Yield the metrics in Prometheus text format."""
        for part in self._parts:
            yield from part.lines()

    def count_files(self) -> int:
        """Return the number of open file descriptors."""
        return int(self._process.num_fds())

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def _memory_bytes(self) -> float:
        return float(self._process.memory_info().rss)


class ReplicaMetrics:
    """Metrics of one model at one replica, looked up once: an observation must cost next to nothing."""

    __slots__ = (
        "_model",
        "_replica",
        "_served",
        "between_tokens",
        "cached",
        "first_token",
        "outcomes",
        "output",
        "per_token",
        "prompt",
        "queue",
    )

    def __init__(self, served: "RequestMetrics", model: str, replica: str) -> None:
        self._served, self._model, self._replica = served, model, replica
        self.queue = served.queue.child(model)
        self.first_token = served.first_token.child(model, replica)
        self.per_token = served.per_token.child(model, replica)
        self.between_tokens = served.between_tokens.child(model, replica)
        self.prompt = served.prompt.child(model, replica)
        self.cached = served.cached.child(model, replica)
        self.output = served.output.child(model, replica)
        self.outcomes: dict[str, tuple[CounterValue, HistogramValue]] = {}

    def of(self, outcome: str) -> tuple[CounterValue, HistogramValue]:
        """Return the number of requests with an outcome, and their durations, at their first request."""
        requests = self._served.requests.child(self._model, outcome)
        whole = self._served.whole.child(self._model, self._replica, outcome)
        found = self.outcomes[outcome] = (requests, whole)
        return found


class RequestMetrics:
    """Metrics of all models and replicas."""

    def __init__(self) -> None:
        def histogram(name: str, help_: str, *labels: str, ends: Sequence[float]) -> Histogram:
            return Histogram(f"fleet_gateway_{name}_seconds", help_, labels, bounds=ends)

        def tokens(kind: str, help_: str) -> Counter:
            return Counter(f"fleet_gateway_{kind}_tokens_total", help_, _WHERE)

        self.requests = Counter(
            "fleet_gateway_requests_total", "Requests by outcome.", ("model", "outcome")
        )
        self.whole = histogram(
            "e2e_request_latency",
            "From arrival to the last byte of the response; an empty replica means that none answered.",
            *_WHERE,
            "outcome",
            ends=REQUEST_BOUNDS_S,
        )
        self.first_token = histogram(
            "time_to_first_token",
            "From arrival to the first event of a stream.",
            *_WHERE,
            ends=FIRST_TOKEN_BOUNDS_S,
        )
        self.per_token = histogram(
            "time_per_output_token",
            "Time between a stream's tokens, mean of each request.",
            *_WHERE,
            ends=PER_TOKEN_BOUNDS_S,
        )
        self.between_tokens = histogram(
            "inter_token_latency",
            "Time between a stream's tokens; those of one request count with their mean.",
            *_WHERE,
            ends=PER_TOKEN_BOUNDS_S,
        )
        self.queue = histogram(
            "request_queue_time",
            "Wait for a slot or a replica.",
            "model",
            ends=REQUEST_BOUNDS_S,
        )
        self.prompt = tokens("prompt", "Prompt tokens, as in usage.")
        self.cached = tokens("cached", "Prompt tokens that were cached.")
        self.output = tokens("output", "Output tokens, as in usage.")
        self._found: dict[tuple[str, str], ReplicaMetrics] = {}

    def of(self, model: str, replica: str) -> ReplicaMetrics:
        """Return the metrics of a model at one replica, at its first request."""
        replica_metrics = self._found[model, replica] = ReplicaMetrics(self, model, replica)
        return replica_metrics

    def count(self, model: str, request: FinishedRequest) -> None:
        """Count a finished request."""
        endpoint, outcome, output = request.served_by, request.outcome, request.output_tokens
        whole_s, first_s, queued_s = request.whole_s, request.first_s, request.queued_s
        replica = "" if endpoint is None else endpoint.replica
        metrics = self._found.get((model, replica)) or self.of(model, replica)
        requests, whole = metrics.outcomes.get(outcome) or metrics.of(outcome)
        requests.count += 1
        whole.counts[bisect_left(whole.bounds, whole_s)] += 1
        whole.total_s += whole_s
        if queued_s:
            metrics.queue.observe(queued_s)
        else:
            metrics.queue.counts[0] += 1
        if first_s:
            metrics.first_token.observe(first_s)
            if output > 1 and outcome == "ok":
                gap_s = (whole_s - first_s) / (output - 1)
                metrics.per_token.observe(gap_s)
                metrics.between_tokens.observe(gap_s, output - 1)
        if request.prompt_tokens:
            metrics.prompt.count += request.prompt_tokens
            metrics.cached.count += request.cached_tokens
        metrics.output.count += output

    def by_replica(self) -> dict[str, tuple[int, float]]:
        """Return the number of answered requests and their total seconds, by replica."""
        found: dict[str, tuple[int, float]] = {}
        for (_, replica, _), value in self.whole.items():
            count, seconds = found.get(replica, (0, 0.0))
            found[replica] = (count + sum(value.counts), seconds + value.total_s)
        return found

    def parts(self) -> tuple[MetricFamily, ...]:
        """Return all metric families."""
        return (
            self.requests,
            self.whole,
            self.first_token,
            self.per_token,
            self.between_tokens,
            self.queue,
            self.prompt,
            self.cached,
            self.output,
        )

    def drop_gone(self, models: AbstractSet[str], replicas: AbstractSet[str]) -> None:
        """Drop the series of models and replicas that are not given."""

        def is_gone(labels: tuple[str, ...]) -> bool:
            return labels[0] not in models or labels[1] not in replicas

        for histogram in (self.whole, self.first_token, self.per_token, self.between_tokens):
            histogram.drop(is_gone)
        for count in (self.prompt, self.cached, self.output):
            count.drop(is_gone)
        self.queue.drop(lambda labels: labels[0] not in models)
        self.requests.drop(lambda labels: labels[0] not in models)
        # Entries are looked up anew, so that dropped series are not kept alive.
        self._found.clear()


def _counter(name: str, help_: str, *labels: str) -> Counter:
    return Counter(f"fleet_gateway_{name}_total", help_, labels)


class GatewayMetrics:
    """All metrics of this gateway."""

    def __init__(
        self,
        *,
        in_flight: Callable[[], float],
        endpoints: Callable[[], float],
        refused: Callable[[], float],
        more: Sequence[MetricFamily] = (),
        others: Sequence[MetricFamily] = (),
    ) -> None:
        """`more`: metrics about deployments, which the reconciler reads; `others`: metrics that only people read."""
        self.attempts = _counter("attempts", "Attempts at engines by outcome.", "outcome")
        self.retries = _counter("retries", "Attempts after a request's first.", "model")
        self.resumptions = _counter(
            "resumptions", "Streams whose engine died, by the outcome of the resumption.", "outcome"
        )
        self.suspensions = _counter(
            "suspensions",
            "Streams that gave up their engine's slot because their client read nothing while others waited.",
        )
        self.ejections = _counter(
            "ejections", "Ejections of an endpoint because it failed.", "replica"
        )
        self.hedges = _counter("hedges", "Hedged attempts, started and won.", "outcome")
        self.mirrored = _counter(
            "mirrored", "Copies of requests to mirrors, by their outcome.", "outcome"
        )
        self.queue_refused = _counter("queue_refused", "Requests refused by a queue.", "reason")
        self.limited = _counter("limited", "Requests refused by access control.", "reason")
        self.shed = _counter(
            "shed",
            "Request bodies and client connections given up because memory or open files ran out.",
            "reason",
        )
        self.served = RequestMetrics()
        self.requests = self.served.requests
        self._more = tuple(more)
        self._parts: tuple[MetricFamily, ...] = (
            *self.served.parts(),
            self.attempts,
            self.retries,
            self.resumptions,
            self.suspensions,
            self.ejections,
            self.hedges,
            self.queue_refused,
            self.mirrored,
            self.limited,
            self.shed,
            Gauge("fleet_gateway_in_flight", "Requests at engines.", in_flight),
            Gauge("fleet_gateway_endpoints", "Endpoints with a lease.", endpoints),
            Gauge(
                "fleet_gateway_endpoints_refused",
                "Published endpoints that are not used, such as those of a node without the replica.",
                refused,
            ),
            *others,
            *self._more,
        )

    def drop_gone(self, models: AbstractSet[str], replicas: AbstractSet[str]) -> None:
        """Drop the series of models and replicas that are not given."""
        self.served.drop_gone(models, replicas)
        self.retries.drop(lambda labels: labels[0] not in models)
        self.ejections.drop(lambda labels: labels[0] not in replicas)

    def lines(self) -> Iterator[str]:
        """Yield all metrics in Prometheus text format; requests may be counted in between."""
        for part in self._parts:
            yield from part.lines()

    def text(self) -> str:
        """Return all metrics in Prometheus text format."""
        return render(self._parts)

    def demand_text(self) -> str:
        """Return the metrics that the reconciler reads every second."""
        return render(self._more)
