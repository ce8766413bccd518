"""Answers in the shapes of earlier dashboards, from what a process knows. Pure; names, units and nesting are theirs.

A gateway and the recorder each give their own facts. Unknown values are null; `details` are what a process adds.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias, TypeVar

from machinery.version import version
from schemas import chips
from schemas.node import NodeStatus
from schemas.wire.errors import invalid
from schemas.wire.requests import EndedRequest

Json: TypeAlias = dict[str, object]

DAY_S: Final = 24 * 3600.0
RECENT_S: Final = 60.0
"""Window of current rates: long enough to be steady, short enough to follow changes."""
_MAX_POINTS: Final = 360
"""The width of a graph in pixels."""
_GENERATIONS: Final = 40
_GIB: Final = 1 << 30
_METRICS: Final = {
    "throughput": "tokens_per_second",
    "requests": "rps",
    "errors": "error_rate",
    "latencyMs": "latency",
    "ttft": "first_token",
}
_UNITS: Final = {"tokens/s": "tokens/sec", "requests/s": "requests/sec"}


class Sums(Protocol):
    """Sums of requests over a time."""

    @property
    def requests(self) -> float: ...

    @property
    def errors(self) -> float: ...

    @property
    def prompt_tokens(self) -> float: ...

    @property
    def output_tokens(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One Mac. Memory in bytes, rates from 0 to 1."""

    name: str
    status: str
    """online, degraded or offline."""
    report: NodeStatus | None
    hostname: object = None
    address: object = None
    port: int | None = None
    models: object = ()
    active: int = 0
    handled: int = 0
    whole_s: float = 0.0
    """Seconds of all requests that it handled."""
    cpu: float | None = None
    gpu: float | None = None
    used_bytes: float | None = None
    uptime_s: float | None = None
    seen_ms: int | None = None
    """The last time at which it was alive, in milliseconds since 1970."""
    details: Json = field(default_factory=dict)


S = TypeVar("S", bound=Sums)


class Facts(Protocol[S]):
    """Knowledge of one process about the fleet and its requests."""

    @property
    def figures(self) -> Mapping[str, tuple[str, Callable[[S], float | None]]]:
        """The unit of each figure over time, and its computation from sums."""
        ...

    def uptime_s(self) -> float: ...

    async def workers(self) -> Sequence[Worker]: ...

    def over(self, seconds: float) -> S: ...

    def points(self, seconds: int, most: int) -> Iterable[tuple[int, S | None]]:
        """Return the begin and the sums of each interval, oldest first; None where nothing was measured."""
        ...

    def fastest(self) -> float:
        """Return the most tokens per second in the last day."""
        ...

    def ended(
        self, limit: int, outcomes: frozenset[str], model: str = "", node: str = ""
    ) -> Iterable[EndedRequest]:
        """Return the last requests with one of the outcomes, or any if there are none; newest first."""
        ...

    def ready_models(self) -> list[str]: ...

    def active(self) -> int:
        """Return the number of requests at engines."""
        ...

    def waiting(self) -> Mapping[str, int]:
        """Return the number of waiting requests by model."""
        ...

    def queue_details(self) -> Json: ...

    def cluster_details(self, workers: Sequence[Worker]) -> Json: ...


def worker(mac: Worker) -> Json:
    """Return a Mac."""
    return {
        "workerId": mac.name,
        "hostname": mac.hostname,
        "ip": mac.address,
        "port": mac.port,
        "status": mac.status,
        "hardware": hardware(mac.report),
        "metrics": worker_metrics(mac),
        "uptime": None if mac.uptime_s is None else int(mac.uptime_s * 1000),
        "lastHeartbeat": mac.seen_ms,
        **mac.details,
    }


def hardware(report: NodeStatus | None) -> Json:
    """Return the hardware of a Mac, which its agent reported; nulls if it did not."""
    if report is None:
        return {"chipModel": None, "gpuCores": None, "unifiedMemoryGB": None}
    designation = chips.parse_designation(report.chip)
    fast = report.performance_cores or None
    return {
        "chipModel": report.chip,
        "chipGeneration": None if designation is None else f"M{designation.generation}",
        "variant": None if designation is None else designation.variant or "Base",
        "cpuCores": report.cpu_cores,
        "performanceCores": fast,
        "efficiencyCores": None if fast is None else report.cpu_cores - fast,
        "metalVersion": report.metal or None,
        "supportedModelTiers": chips.supported_tiers(
            gpu_cores=report.gpu_cores, memory_bytes=report.memory_bytes
        ),
        "gpuCores": report.gpu_cores,
        "unifiedMemoryGB": round(report.memory_bytes / _GIB, 1),
        "memoryForModelsGB": round(report.allocatable_bytes / _GIB, 1),
        "osVersion": report.os_version,
    }


def worker_metrics(mac: Worker) -> Json:
    """Return what a Mac measured and handled."""
    return {
        "cpuUsagePercent": None if mac.cpu is None else round(mac.cpu * 100, 1),
        "gpuUtilizationPercent": None if mac.gpu is None else round(mac.gpu * 100, 1),
        "memoryUsedGB": None if mac.used_bytes is None else round(mac.used_bytes / _GIB, 2),
        "modelsLoaded": mac.models,
        "activeRequests": mac.active,
        "totalRequests": mac.handled,
        "totalRequestsHandled": mac.handled,
        "avgLatencyMs": round(mac.whole_s / mac.handled * 1000, 3) if mac.handled else None,
    }


def count_workers(workers: Iterable[Worker]) -> dict[str, int]:
    """Return the number of Macs: a degraded one is online."""
    states = Counter(mac.status for mac in workers)
    offline = states["offline"]
    return {"total": states.total(), "online": states.total() - offline, "offline": offline}


def overview(facts: Facts[S], workers: Iterable[Worker]) -> Json:
    """Return the figures of a dashboard's cards."""
    recent, day = facts.over(RECENT_S), facts.over(DAY_S)
    rate, mean = facts.figures["tokens_per_second"][1], facts.figures["latency"][1]
    return {
        "workers": count_workers(workers),
        "throughput": {"current": rate(recent), "avg24h": rate(day)},
        "requests": {"active": facts.active(), "total24h": int(day.requests)},
        "latency": {"current": mean(recent), "avg24h": mean(day)},
    }


def cluster(facts: Facts[S], workers: Sequence[Worker]) -> Json:
    """Return the state of the cluster."""
    day = facts.over(DAY_S)
    return {
        "controller": {
            "version": version(),
            "uptime": int(facts.uptime_s() * 1000),
            "mode": "declarative",
        },
        "workers": count_workers(workers),
        "models": {"loaded": facts.ready_models()},
        "requests": {
            "active": facts.active(),
            "total": int(day.requests),
            "successRate": round(1 - day.errors / day.requests, 4) if day.requests else None,
        },
        **facts.cluster_details(workers),
    }


def queue(facts: Facts[S]) -> Json:
    """Return the waiting requests by model."""
    waiting = facts.waiting()
    return {
        "queueDepth": sum(waiting.values()),
        "active": facts.active(),
        "waitingByModel": waiting,
        **facts.queue_details(),
    }


def snapshot(facts: Facts[S], online: int) -> Json:
    """Return the figures of a small dashboard at once; `online` is the number of Macs that are."""
    recent, day = facts.over(RECENT_S), facts.over(DAY_S)
    waiting, generations = facts.waiting(), facts.ended(_GENERATIONS, frozenset({"ok"}))
    speeds = [
        round(ended.output_tokens / (ended.whole_s - ended.first_s), 2)
        for ended in generations
        if ended.output_tokens and ended.whole_s > ended.first_s
    ]
    return {
        "uptimeSeconds": round(facts.uptime_s(), 1),
        "worldSize": online,
        "requests24h": int(day.requests),
        "errors24h": int(day.errors),
        "promptTokens24h": int(day.prompt_tokens),
        "outputTokens24h": int(day.output_tokens),
        "tokensPerSecond": facts.figures["tokens_per_second"][1](recent),
        "peakTokensPerSecond": round(facts.fastest(), 4),
        "avgLatencyMs": facts.figures["latency"][1](recent),
        "avgFirstTokenMs": facts.figures["first_token"][1](recent),
        "lastGenerationsTokensPerSecond": speeds[::-1],
        "queueDepth": sum(waiting.values()),
        "active": facts.active(),
        "waitingByModel": waiting,
    }


def metrics_update(facts: Facts[S]) -> Json:
    """Return the figures of the event `metrics_update`."""
    recent = facts.over(RECENT_S)
    return {
        "throughput": facts.figures["tokens_per_second"][1](recent),
        "latency": facts.figures["latency"][1](recent),
        "activeRequests": facts.active(),
    }


def timeseries(facts: Facts[S], metric: str, seconds: int) -> Json:
    """Return one figure over time, in at most 360 points; null where nothing was measured.

    Raises:
        RefusedError: the metric is unknown.

    """
    figure = facts.figures.get(_METRICS.get(metric, metric))
    if figure is None:
        known = ", ".join([*_METRICS, *facts.figures])
        raise invalid(f"There is no metric '{metric[:50]}'; there are {known}.", "metric")
    unit, value = figure
    return {
        "metric": metric,
        "unit": _UNITS.get(unit, unit),
        "points": [
            {"timestamp": int(at_s * 1000), "value": None if sums is None else value(sums)}
            for at_s, sums in facts.points(seconds, _MAX_POINTS)
        ],
    }


def request(ended: EndedRequest) -> Json:
    """Return an ended request."""
    return {
        "requestId": ended.id,
        "modelId": ended.model,
        "workerId": ended.worker,
        "latencyMs": ended.latency_ms,
        "tokensGenerated": ended.output_tokens,
        "status": request_status(ended.outcome),
        "timestamp": int(ended.time_s * 1000),
    }


def request_status(outcome: str) -> str:
    """Return the word for an outcome."""
    return "success" if outcome == "ok" else outcome
