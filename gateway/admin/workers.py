"""Macs as workers, in the words of dashboards: who is online, what it serves, what it has to do. Pure.

A gateway sees requests and leases; what only a Mac itself could say (CPU and GPU load, memory in use, uptime) is
null here. docs/operations/gateway.md says which.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

from gateway.admin.nodes import Macs
from gateway.routing.standing import Standing
from gateway.routing.table import Origin, Target
from schemas.node import NodeStatus

Json: TypeAlias = dict[str, object]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything that workers are made of."""

    macs: Macs
    targets: Mapping[Target, bool]
    """Who may be asked, and whether its lease is there."""
    names: Mapping[str, AbstractSet[str]]
    """What clients call that which a replica serves."""
    standing: Standing
    served: Mapping[str, tuple[int, float]]
    """Requests since this gateway started, and the seconds that they took, by replica."""


def workers(seen: Seen) -> list[Json]:
    """Return all of them by name."""
    by_node: dict[str, list[Target]] = {name: [] for name in seen.macs.statuses}
    for name in seen.macs.alive:
        by_node.setdefault(name, [])
    for target in seen.targets:
        by_node.setdefault(target.node, []).append(target)
    return [_worker(name, by_node[name], seen) for name in sorted(by_node)]


def counted(found: Iterable[Json]) -> dict[str, int]:
    """Return how many are in which state."""
    counts = {"total": 0, "online": 0, "degraded": 0, "offline": 0}
    for worker in found:
        counts["total"] += 1
        counts[str(worker["status"])] += 1
    return counts


def _worker(name: str, here: list[Target], seen: Seen) -> Json:
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


def _status(name: str, here: list[Target], seen: Seen) -> tuple[str, str]:
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


def _host(here: list[Target]) -> str | None:
    return here[0].origin.host if here else None


def _active(origin: Origin, standing: Standing) -> int:
    """Return how many requests are there: ours, and those of others by the engine's word."""
    return standing.in_flight.get(origin, 0) + round(standing.elsewhere.get(origin, 0.0))


def _free_percent(here: list[Target], standing: Standing) -> float | None:
    """Return the part of its memory that the fullest engine has left; None if none has said so."""
    told = [standing.headroom[t.origin] for t in here if t.origin in standing.headroom]
    return round(min(told) * 100, 1) if told else None


def _endpoint(target: Target, seen: Seen) -> Json:
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
