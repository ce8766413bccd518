"""Bodies of the admin API's answers: workers, sums and counts as JSON.

A gateway sees requests and leases. Values that only a Mac itself can measure (CPU and GPU load,
memory in use, uptime) are null; docs/operations/gateway.md lists them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

from gateway.admin.admin_context import DAY_S, RECENT_S, AdminContext, NodeList, endpoints_of
from gateway.routing.table import EndpointHealth, EngineEndpoint
from gateway.telemetry.time_series import SERIES_METRICS
from machinery.version import version
from schemas import chips
from schemas.node import NodeStatus
from schemas.wire.engine_address import EngineAddress

Json: TypeAlias = dict[str, object]

_GIB = 1 << 30
# Same as the sparkline of the dashboard that this format comes from.
_GENERATIONS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInputs:
    """Input of the list of workers."""

    nodes: NodeList
    endpoints: Mapping[EngineEndpoint, bool]
    """Endpoints, and whether they are leased."""
    names: Mapping[str, AbstractSet[str]]
    """Names of the models that each replica serves."""
    health: EndpointHealth
    served: Mapping[str, tuple[int, float]]
    """Requests since the gateway started and their total duration in seconds, by replica."""


def list_workers(inputs: WorkerInputs) -> list[Json]:
    """Return all workers, sorted by name."""
    by_node: dict[str, list[EngineEndpoint]] = {name: [] for name in inputs.nodes.statuses}
    for name in inputs.nodes.alive:
        by_node.setdefault(name, [])
    for endpoint in inputs.endpoints:
        by_node.setdefault(endpoint.node, []).append(endpoint)
    return [_worker(name, by_node[name], inputs) for name in sorted(by_node)]


def count_workers(found: Iterable[Json]) -> dict[str, int]:
    """Return the number of workers in each state; a degraded one is online, too."""
    states = Counter(str(worker["status"]) for worker in found)
    return {
        "total": states.total(),
        "online": states.total() - states["offline"],
        "offline": states["offline"],
        "degraded": states["degraded"],
    }


def _worker(name: str, endpoints_here: list[EngineEndpoint], inputs: WorkerInputs) -> Json:
    report = inputs.nodes.statuses.get(name)
    status, why = _status(name, endpoints_here, inputs)
    served = [inputs.served.get(endpoint.replica, (0, 0.0)) for endpoint in endpoints_here]
    handled = sum(requests for requests, _ in served)
    spent_s = sum(seconds for _, seconds in served)
    names: set[str] = set()
    for endpoint in endpoints_here:
        names |= inputs.names.get(endpoint.replica, frozenset())
    return {
        "workerId": name,
        "hostname": report.hostname if report is not None else None,
        "ip": report.address if report is not None else _host(endpoints_here),
        "port": None,
        "status": status,
        "statusReason": why or None,
        "hardware": describe_hardware(report),
        "metrics": {
            "cpuUsagePercent": None,
            "gpuUtilizationPercent": None,
            "memoryUsedGB": None,
            "memoryFreePercent": _free_percent(endpoints_here, inputs.health),
            "modelsLoaded": sorted(names),
            "activeRequests": sum(
                _active_requests(endpoint.origin, inputs.health) for endpoint in endpoints_here
            ),
            "totalRequests": handled,
            "totalRequestsHandled": handled,
            "avgLatencyMs": round(spent_s / handled * 1000, 3) if handled else None,
        },
        "uptime": None,
        "lastHeartbeat": None,
        "endpoints": [
            _endpoint(endpoint, inputs)
            for endpoint in sorted(endpoints_here, key=lambda one: one.replica)
        ],
    }


def _status(
    name: str, endpoints_here: list[EngineEndpoint], inputs: WorkerInputs
) -> tuple[str, str]:
    if inputs.nodes.error and name not in inputs.nodes.alive:
        # The agent's lease is unknown, so the leases of its engines decide.
        is_there = any(inputs.endpoints[endpoint] for endpoint in endpoints_here)
    else:
        is_there = name in inputs.nodes.alive
    failing = [
        endpoint.replica for endpoint in endpoints_here if endpoint.origin in inputs.health.ejected
    ]
    if not is_there:
        if not endpoints_here:
            return "offline", "its agent does not renew its lease"
        return "degraded", "its agent does not renew its lease; its engines may still answer"
    if failing:
        return "degraded", f"failed requests a moment ago: {', '.join(sorted(failing))}"
    return "online", ""


def describe_hardware(report: NodeStatus | None) -> Json:
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


def _host(endpoints_here: list[EngineEndpoint]) -> str | None:
    """Return the host of the engines; None if there is none, or they listen on sockets."""
    return (endpoints_here[0].origin.host or None) if endpoints_here else None


def _active_requests(origin: EngineAddress, health: EndpointHealth) -> int:
    """Return the requests at an engine: this gateway's, and those that the engine reported of others."""
    return health.in_flight.get(origin, 0) + round(health.others_in_flight.get(origin, 0.0))


def _free_percent(endpoints_here: list[EngineEndpoint], health: EndpointHealth) -> float | None:
    """Return the free memory in percent of the fullest engine; None if no engine reported it."""
    reported = [health.headroom[t.origin] for t in endpoints_here if t.origin in health.headroom]
    return round(min(reported) * 100, 1) if reported else None


def _endpoint(endpoint: EngineEndpoint, inputs: WorkerInputs) -> Json:
    return {
        "replica": endpoint.replica,
        "deployment": endpoint.deployment,
        "url": endpoint.origin.url,
        "site": endpoint.site or None,
        "hasLease": inputs.endpoints[endpoint],
        "isEjected": endpoint.origin in inputs.health.ejected,
        "activeRequests": _active_requests(endpoint.origin, inputs.health),
        "concurrency": endpoint.concurrency,
    }


def all_workers(context: AdminContext, nodes: NodeList) -> list[Json]:
    """Return every Mac as a worker."""
    found: dict[EngineEndpoint, bool] = {}
    names: dict[str, set[str]] = {}
    for model in context.fleet_state.table_cache.table.models.values():
        for endpoint, is_leased in endpoints_of(model):
            found[endpoint] = is_leased
            names.setdefault(endpoint.replica, set()).add(model.name)
    inputs = WorkerInputs(
        nodes=nodes,
        endpoints=found,
        names=names,
        health=context.load_tracker.health(context.clock.monotonic()),
        served=context.recorder.metrics.served.by_replica(),
    )
    return list_workers(inputs)


def overview(context: AdminContext, counts: dict[str, int]) -> Json:
    """Return the totals of this gateway for a dashboard's cards."""
    recent, day = context.over(RECENT_S), context.over(DAY_S)
    rate, mean = SERIES_METRICS["tokens_per_second"][1], SERIES_METRICS["latency"][1]
    return {
        "gateway": context.id,
        "workers": counts,
        "throughput": {"current": rate(recent), "avg24h": rate(day)},
        "requests": {
            "active": context.load_tracker.total(),
            "queued": context.waiting(),
            "total24h": int(day.requests),
            "tokens24h": int(day.prompt_tokens + day.output_tokens),
            "perSecond": SERIES_METRICS["rps"][1](recent),
            "errorRate": SERIES_METRICS["error_rate"][1](recent),
        },
        "latency": {
            "current": mean(recent),
            "avg24h": mean(day),
            "firstToken": SERIES_METRICS["first_token"][1](recent),
        },
    }


def cluster(context: AdminContext, counts: dict[str, int], nodes: NodeList) -> Json:
    """Return the state of the fleet as this gateway knows it."""
    table_cache = context.fleet_state.table_cache
    staleness_s, day = table_cache.staleness_s(), context.over(DAY_S)
    models = sorted(table_cache.table.models.values(), key=lambda model: model.name)
    return {
        "status": _fleet_health(context, counts),
        "controller": {
            "version": version(),
            "uptime": int(context.uptime_s() * 1000),
            "mode": "declarative",
            "gateway": context.id,
        },
        "store": {
            "source": table_cache.source,
            "isStale": table_cache.is_stale,
            "stalenessSeconds": None if staleness_s is None else round(staleness_s, 3),
            "nodesUnknownBecause": nodes.error or None,
        },
        "workers": counts,
        "endpoints": table_cache.table.endpoints,
        "endpointsKept": table_cache.table.kept,
        "models": {
            "loaded": [model.name for model in models if model.ready()],
            "replicas": {
                model.name: {"ready": model.ready(), "kept": model.kept()} for model in models
            },
        },
        "requests": {
            "active": context.load_tracker.total(),
            "queued": context.waiting(),
            "total": int(day.requests),
            "successRate": round(1 - day.errors / day.requests, 4) if day.requests else None,
        },
    }


def _fleet_health(context: AdminContext, counts: dict[str, int]) -> str:
    if not context.fleet_state.table_cache.is_synced:
        return "unknown"
    is_well = not counts["degraded"] and not counts["offline"]
    return "healthy" if is_well and not context.fleet_state.table_cache.is_stale else "degraded"


def queue(context: AdminContext) -> Json:
    """Return the waiting requests by model."""
    turns, replicas = context.model_states.waiting(), context.activator.waiting()
    running = context.load_tracker.by_deployment()
    models = Counter(turns) + Counter(replicas)
    return {
        "queueDepth": sum(turns.values()) + sum(replicas.values()),
        "active": context.load_tracker.total(),
        "waitingByModel": dict(sorted(models.items())),
        "activeByDeployment": {name: count for name, count in sorted(running.items()) if count},
    }


def snapshot(context: AdminContext) -> Json:
    """Return all figures of a small dashboard at once."""
    recent, day = context.over(RECENT_S), context.over(DAY_S)
    now_s = context.clock.now().timestamp()
    rate = SERIES_METRICS["tokens_per_second"][1]
    speeds = []
    for entry in context.recorder.journal.last(_GENERATIONS, outcomes=frozenset({"ok"})):
        spent_s = entry.whole_s - entry.first_s
        if entry.output_tokens and spent_s > 0:
            speeds.append(round(entry.output_tokens / spent_s, 2))
    return {
        "uptimeSeconds": round(context.uptime_s(), 1),
        "requests24h": int(day.requests),
        "errors24h": int(day.errors),
        "promptTokens24h": int(day.prompt_tokens),
        "outputTokens24h": int(day.output_tokens),
        "tokensPerSecond": rate(recent),
        "peakTokensPerSecond": round(context.recorder.series.fastest(now_s), 4),
        "avgLatencyMs": SERIES_METRICS["latency"][1](recent),
        "avgFirstTokenMs": SERIES_METRICS["first_token"][1](recent),
        "lastGenerationsTokensPerSecond": speeds[::-1],
        **queue(context),
    }
