"""Macs as workers, in the words of dashboards: who is online, what it serves, what it has to do. Pure.

A gateway sees requests and leases; what only a Mac itself could say (CPU and GPU load, memory in use, uptime) is
null here. docs/operations/gateway.md says which.

What the admin API's answers are made of: workers, sums, counts, as JSON. Reads one gateway; sends nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

from gateway.admin.admin_context import DAY_S, RECENT_S, AdminContext, NodeList, endpoints_of
from gateway.routing.query import EndpointHealth
from gateway.routing.table import EngineEndpoint, Origin
from gateway.telemetry.time_series import SERIES_METRICS
from machinery.version import version
from schemas.node import NodeStatus

Json: TypeAlias = dict[str, object]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInputs:
    """Everything that workers are made of."""

    macs: NodeList
    targets: Mapping[EngineEndpoint, bool]
    """Who may be asked, and whether its lease is there."""
    names: Mapping[str, AbstractSet[str]]
    """What clients call that which a replica serves."""
    standing: EndpointHealth
    served: Mapping[str, tuple[int, float]]
    """Requests since this gateway started, and the seconds that they took, by replica."""


def list_workers(seen: WorkerInputs) -> list[Json]:
    """Return all of them by name."""
    by_node: dict[str, list[EngineEndpoint]] = {name: [] for name in seen.macs.statuses}
    for name in seen.macs.alive:
        by_node.setdefault(name, [])
    for target in seen.targets:
        by_node.setdefault(target.node, []).append(target)
    return [_worker(name, by_node[name], seen) for name in sorted(by_node)]


def count_workers(found: Iterable[Json]) -> dict[str, int]:
    """Return how many are in which state."""
    counts = {"total": 0, "online": 0, "degraded": 0, "offline": 0}
    for worker in found:
        counts["total"] += 1
        counts[str(worker["status"])] += 1
    return counts


def _worker(name: str, here: list[EngineEndpoint], seen: WorkerInputs) -> Json:
    report = seen.macs.statuses.get(name)
    status, why = _status(name, here, seen)
    served = [seen.served.get(target.replica, (0, 0.0)) for target in here]
    handled = sum(requests for requests, _ in served)
    spent_s = sum(seconds for _, seconds in served)
    names: set[str] = set()
    for target in here:
        names |= seen.names.get(target.replica, frozenset())
    return {
        "id": name,
        "name": name,
        "hostname": report.hostname if report is not None else None,
        "ip": report.address if report is not None else _host(here),
        "status": status,
        "statusReason": why or None,
        "hardware": _hardware(report),
        "cpuUsagePercent": None,
        "gpuUtilizationPercent": None,
        "memoryUsedGB": None,
        "memoryFreePercent": _free_percent(here, seen.standing),
        "uptimeSeconds": None,
        "activeRequests": sum(_active(target.origin, seen.standing) for target in here),
        "totalRequestsHandled": handled,
        "avgLatencyMs": round(spent_s / handled * 1000, 3) if handled else None,
        "modelsLoaded": sorted(names),
        "endpoints": [
            _endpoint(target, seen) for target in sorted(here, key=lambda one: one.replica)
        ],
    }


def _status(name: str, here: list[EngineEndpoint], seen: WorkerInputs) -> tuple[str, str]:
    if seen.macs.why_not and name not in seen.macs.alive:
        # Nobody says how its agent is: its engines' leases do.
        is_there = any(seen.targets[target] for target in here)
    else:
        is_there = name in seen.macs.alive
    failing = [target.replica for target in here if target.origin in seen.standing.penalised]
    if not is_there:
        if not here:
            return "offline", "its agent does not renew its lease"
        return "degraded", "its agent does not renew its lease; its engines may still answer"
    if failing:
        return "degraded", f"failed requests a moment ago: {', '.join(sorted(failing))}"
    return "online", ""


def _hardware(report: NodeStatus | None) -> Json | None:
    if report is None:
        return None
    return {
        "chipModel": report.chip,
        "cpuCores": report.cpu_cores,
        "gpuCores": report.gpu_cores,
        "unifiedMemoryGB": round(report.memory_bytes / _GIB, 1),
        "memoryForModelsGB": round(report.allocatable_bytes / _GIB, 1),
        "osVersion": report.os_version,
    }


def _host(here: list[EngineEndpoint]) -> str | None:
    return here[0].origin.host if here else None


def _active(origin: Origin, standing: EndpointHealth) -> int:
    """Return how many requests are there: ours, and those of others by the engine's word."""
    return standing.in_flight.get(origin, 0) + round(standing.elsewhere.get(origin, 0.0))


def _free_percent(here: list[EngineEndpoint], standing: EndpointHealth) -> float | None:
    """Return the part of its memory that the fullest engine has left; None if none has said so."""
    told = [standing.headroom[t.origin] for t in here if t.origin in standing.headroom]
    return round(min(told) * 100, 1) if told else None


def _endpoint(target: EngineEndpoint, seen: WorkerInputs) -> Json:
    host, port = target.origin
    return {
        "replica": target.replica,
        "deployment": target.deployment,
        "url": f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
        "site": target.site or None,
        "hasLease": seen.targets[target],
        "isEjected": target.origin in seen.standing.penalised,
        "activeRequests": _active(target.origin, seen.standing),
        "concurrency": target.concurrency,
    }


def all_workers(sight: AdminContext, macs: NodeList) -> list[Json]:
    """Return every Mac as dashboards see it."""
    found: dict[EngineEndpoint, bool] = {}
    names: dict[str, set[str]] = {}
    for model in sight.known.keeper.table.models.values():
        for target, is_leased in endpoints_of(model):
            found[target] = is_leased
            names.setdefault(target.replica, set()).add(model.name)
    seen = WorkerInputs(
        macs=macs,
        targets=found,
        names=names,
        standing=sight.loads.standing(sight.clock.monotonic()),
        served=sight.recorder.metrics.served.by_replica(),
    )
    return list_workers(seen)


def overview(sight: AdminContext, counts: dict[str, int]) -> Json:
    """Return the cards: who is there, how fast, how much; of this gateway alone."""
    recent, day = sight.over(RECENT_S), sight.over(DAY_S)
    return {
        "gateway": sight.id,
        "workers": counts,
        "activeRequests": sight.loads.total(),
        "queuedRequests": sight.waiting(),
        "totalRequests24h": int(day.requests),
        "totalTokens24h": int(day.prompt_tokens + day.output_tokens),
        "requestsPerSecond": SERIES_METRICS["rps"][1](recent),
        "tokensPerSecond": SERIES_METRICS["tokens_per_second"][1](recent),
        "avgLatencyMs": SERIES_METRICS["latency"][1](recent),
        "avgFirstTokenMs": SERIES_METRICS["first_token"][1](recent),
        "errorRate": SERIES_METRICS["error_rate"][1](recent),
    }


def cluster(sight: AdminContext, counts: dict[str, int], macs: NodeList) -> Json:
    """Return the state of the fleet as this gateway knows it."""
    keeper = sight.known.keeper
    staleness_s = keeper.staleness_s()
    models = sorted(keeper.table.models.values(), key=lambda model: model.name)
    return {
        "status": _fleet_health(sight, counts),
        "gateway": sight.id,
        "version": version(),
        "uptimeSeconds": round(sight.uptime_s(), 1),
        "store": {
            "source": keeper.source,
            "isStale": keeper.is_stale,
            "stalenessSeconds": None if staleness_s is None else round(staleness_s, 3),
            "nodesUnknownBecause": macs.why_not or None,
        },
        "workers": counts,
        "endpoints": keeper.table.endpoints,
        "endpointsKept": keeper.table.kept,
        "models": [
            {"name": model.name, "ready": model.ready(), "kept": model.kept()} for model in models
        ],
        "activeRequests": sight.loads.total(),
        "queuedRequests": sight.waiting(),
    }


def _fleet_health(sight: AdminContext, counts: dict[str, int]) -> str:
    if not sight.known.keeper.is_synced:
        return "unknown"
    is_well = not counts["degraded"] and not counts["offline"]
    return "healthy" if is_well and not sight.known.keeper.is_stale else "degraded"


def queue(sight: AdminContext) -> Json:
    """Return who waits here, and for what."""
    turns, replicas = sight.names.waiting(), sight.room.waiting()
    running = sight.loads.by_deployment()
    models = Counter(turns) + Counter(replicas)
    return {
        "queueDepth": sum(turns.values()) + sum(replicas.values()),
        "active": sight.loads.total(),
        "waitingByModel": dict(sorted(models.items())),
        "activeByDeployment": {name: count for name, count in sorted(running.items()) if count},
    }


# As many as the sparkline of the dashboard that this shape is from.
_GENERATIONS = 40


def snapshot(sight: AdminContext) -> Json:
    """Return everything that a small dashboard shows, at once."""
    recent, day = sight.over(RECENT_S), sight.over(DAY_S)
    now_s = sight.clock.now().timestamp()
    rate = SERIES_METRICS["tokens_per_second"][1]
    speeds = []
    for entry in sight.recorder.journal.last(_GENERATIONS, outcomes=frozenset({"ok"})):
        spent_s = entry.whole_s - entry.first_s
        if entry.output_tokens and spent_s > 0:
            speeds.append(round(entry.output_tokens / spent_s, 2))
    return {
        "uptimeSeconds": round(sight.uptime_s(), 1),
        "requests24h": int(day.requests),
        "errors24h": int(day.errors),
        "promptTokens24h": int(day.prompt_tokens),
        "outputTokens24h": int(day.output_tokens),
        "tokensPerSecond": rate(recent),
        "peakTokensPerSecond": round(sight.recorder.series.fastest(now_s), 4),
        "avgLatencyMs": SERIES_METRICS["latency"][1](recent),
        "avgFirstTokenMs": SERIES_METRICS["first_token"][1](recent),
        "lastGenerationsTokensPerSecond": speeds[::-1],
        **queue(sight),
    }
