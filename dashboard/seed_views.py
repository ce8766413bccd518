"""The fleet in the shapes that older dashboards read: overview, workers, time series, requests, queue and snapshot.

Names, units and nesting are fixed by those shapes: milliseconds, camelCase, `workers` for Macs. Unknown values are null.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from dashboard.fleet_model import FleetModel
from dashboard.traffic import DAY_S, Traffic, milliseconds
from gateway.admin.dashboard import describe_hardware
from gateway.admin.query_words import SERIES_UNITS, public_status, series_metric
from gateway.telemetry.time_series import SERIES_METRICS
from insight.conditions import Row
from machinery.clock import Clock
from machinery.version import version
from schemas.node import NodeStatus
from schemas.wire.requests import EndedRequest
from store import keys

Json: TypeAlias = dict[str, object]

_RECENT_S: Final = 60.0
_GIB: Final = 1 << 30
_GENERATIONS: Final = 40
MOST_POINTS: Final = 360


@dataclass(slots=True)
class SeedViews:
    """Answers in the seeds' shapes, from the fleet model and the traffic."""

    model: FleetModel
    traffic: Traffic
    clock: Clock
    started: datetime
    _started_s: float = field(init=False)
    """By a clock that never jumps."""
    _seen: dict[str, int] = field(default_factory=dict)
    """The last time at which each Mac was alive, in milliseconds."""

    def __post_init__(self) -> None:
        self._started_s = self.clock.elapsed()

    def uptime_s(self) -> float:
        """Return the seconds since the start."""
        return self.clock.elapsed() - self._started_s

    def note_alive(self) -> None:
        """Remember the time for every Mac that is alive; called once a second."""
        now = milliseconds(self.clock.now())
        for name, row in self.model.rows("macs").items():
            if row["state"] != "offline":
                self._seen[name] = now
        for gone in set(self._seen) - set(self.model.rows("macs")):
            del self._seen[gone]

    def counts(self) -> dict[str, int]:
        """Return the number of Macs: a degraded one is online."""
        rows = self.model.rows("macs").values()
        offline = sum(row["state"] == "offline" for row in rows)
        return {"total": len(rows), "online": len(rows) - offline, "offline": offline}

    def overview(self) -> Json:
        """Return the figures of a dashboard's cards."""
        now = self.clock.now()
        recent, day = self.traffic.over(now, _RECENT_S), self.traffic.over(now, DAY_S)
        rate, mean = SERIES_METRICS["tokens_per_second"][1], SERIES_METRICS["latency"][1]
        known = self.traffic.measured(now.timestamp() - day.seconds, day) or recent
        return {
            "workers": self.counts(),
            "throughput": {"current": rate(recent), "avg24h": rate(known)},
            "requests": {
                "active": self.traffic.active(self.clock.monotonic()),
                "total24h": int(day.requests),
            },
            "latency": {"current": mean(recent), "avg24h": mean(day)},
        }

    def workers(self) -> list[Json]:
        """Return all Macs, by name."""
        running = self.running_by_mac()
        rows = sorted(self.model.rows("macs").items())
        return [self._worker(name, row, running.get(name, 0)) for name, row in rows]

    def worker(self, name: str) -> Json | None:
        """Return one Mac; None if there is none of the name."""
        row = self.model.rows("macs").get(name)
        return None if row is None else self._worker(name, row, self.running_by_mac().get(name, 0))

    def _worker(self, name: str, row: Row, active: int) -> Json:
        uptime = self._figure(name, "fleet_node_uptime_seconds", "fleet_agent_uptime_seconds")
        report = self.model.caches.objects.statuses.items.get(keys.status_key("Node", name))
        assert report is None or isinstance(report, NodeStatus)
        return {
            "workerId": name,
            "hostname": row["hostname"],
            "ip": row["address"],
            "port": _port(row["agentUrl"]),
            "status": row["state"],
            "hardware": describe_hardware(report),
            "metrics": self.worker_metrics(name, row, active),
            "uptime": None if uptime is None else int(uptime * 1000),
            "lastHeartbeat": self._seen.get(name),
        }

    def worker_metrics(self, name: str, row: Row, active: int) -> Json:
        """Return the metrics of a Mac, `active` requests among them."""
        sums = self.traffic.macs.get(name)
        handled = 0 if sums is None else sums.requests
        return {
            **self.measured_metrics(name, row),
            "activeRequests": active,
            "totalRequests": handled,
            "totalRequestsHandled": handled,
            "avgLatencyMs": round(sums.whole_s / handled * 1000, 3)
            if sums is not None and handled
            else None,
        }

    def measured_metrics(self, name: str, row: Row) -> Json:
        """Return what the agent of a Mac measured, and the models on it."""
        cpu = self._figure(name, "fleet_node_cpu_usage_ratio")
        gpu = self._figure(name, "fleet_node_gpu_usage_ratio")
        total = self._figure(name, "fleet_agent_memory_total_bytes")
        free = self._figure(name, "fleet_agent_memory_available_bytes")
        used = None if total is None or free is None else round((total - free) / _GIB, 2)
        return {
            "cpuUsagePercent": None if cpu is None else round(cpu * 100, 1),
            "gpuUtilizationPercent": None if gpu is None else round(gpu * 100, 1),
            "memoryUsedGB": used,
            "modelsLoaded": row["models"],
        }

    def figures(self) -> dict[str, Row]:
        """Return what the agents of the Macs that are alive measure, in steps that a page can show."""
        running = self.running_by_mac()
        return {
            name: {
                "name": name,
                "gpuPercent": _whole(self._figure(name, "fleet_node_gpu_usage_ratio"), 100),
                "cpuPercent": _whole(self._figure(name, "fleet_node_cpu_usage_ratio"), 100),
                "celsius": _whole(self._warmest(name)),
                "watts": _whole(self._figure(name, "fleet_node_power_watts/system")),
                "active": running.get(name, 0),
            }
            for name, row in self.model.rows("macs").items()
            if row["state"] != "offline"
        }

    def _warmest(self, node: str) -> float | None:
        """Return the temperature of the warmest sensor of a Mac."""
        names = ("fleet_node_temperature_celsius/cpu", "fleet_node_temperature_celsius/gpu")
        found = [self._figure(node, name) for name in names]
        return max((one for one in found if one is not None), default=None)

    def running_by_mac(self) -> dict[str, int]:
        """Return the requests in flight by Mac."""
        found: dict[str, int] = {}
        for _, one in self.traffic.running(self.clock.monotonic()):
            if one.worker:
                found[one.worker] = found.get(one.worker, 0) + 1
        return found

    def _figure(self, node: str, *names: str) -> float | None:
        now_s = self.clock.monotonic()
        found = (self.traffic.figure(node, name, now_s) for name in names)
        return next((one for one in found if one is not None), None)

    def timeseries(self, metric: str, duration_s: int) -> Json:
        """Return one figure over time, in at most 360 points; null where nothing was measured."""
        unit, value = series_metric(metric)
        points = self.traffic.series.points(self.clock.now().timestamp(), duration_s, MOST_POINTS)
        seen = ((at_s, self.traffic.measured(at_s, sums)) for at_s, sums in points)
        return {
            "metric": metric,
            "unit": SERIES_UNITS.get(unit, unit),
            "points": [
                {"timestamp": at_s * 1000, "value": None if sums is None else value(sums)}
                for at_s, sums in seen
            ],
        }

    def requests(
        self, limit: int, outcomes: frozenset[str], *, model: str = "", node: str = ""
    ) -> list[Json]:
        """Return the last requests, newest first."""
        found: list[Json] = []
        for one in reversed(self.traffic.ended):
            if len(found) >= limit:
                break
            if outcomes and one.outcome not in outcomes:
                continue
            if (not model or one.model == model) and (not node or one.worker == node):
                found.append(_request(one))
        return found

    def cluster(self) -> Json:
        """Return the state of the cluster."""
        now = self.clock.now()
        day = self.traffic.over(now, DAY_S)
        models = self.model.rows("models").items()
        ended = day.requests
        return {
            "controller": {
                "version": version(),
                "uptime": int(self.uptime_s() * 1000),
                "mode": "declarative",
            },
            "workers": self.counts(),
            "models": {"loaded": sorted(name for name, row in models if row["ready"])},
            "requests": {
                "active": self.traffic.active(self.clock.monotonic()),
                "total": int(ended),
                "successRate": round(1 - day.errors / ended, 4) if ended else None,
            },
        }

    def queue(self) -> Json:
        """Return the waiting requests of the whole fleet, by model."""
        now_s = self.clock.monotonic()
        waiting = self.traffic.waiting(now_s)
        return {
            "queueDepth": sum(waiting.values()),
            "active": self.traffic.active(now_s),
            "waitingByModel": waiting,
            "running": [
                {
                    "gateway": gateway,
                    "requestId": one.id,
                    "modelId": one.model,
                    "workerId": one.worker,
                    "phase": one.phase,
                    "seconds": one.seconds,
                }
                for gateway, one in self.traffic.running(now_s)[:500]
            ],
            "gatewaysSilent": {
                id_: state.problem
                for id_, state in sorted(self.traffic.gateways.items())
                if state.problem
            },
        }

    def snapshot(self) -> Json:
        """Return the figures of a small dashboard at once."""
        now = self.clock.now()
        recent, day = self.traffic.over(now, _RECENT_S), self.traffic.over(now, DAY_S)
        peak = self.traffic.series.fastest(now.timestamp())
        queue = self.queue()
        return {
            "uptimeSeconds": round(self.uptime_s(), 1),
            "worldSize": self.counts()["online"],
            "requests24h": int(day.requests),
            "errors24h": int(day.errors),
            "promptTokens24h": int(day.prompt_tokens),
            "outputTokens24h": int(day.output_tokens),
            "tokensPerSecond": SERIES_METRICS["tokens_per_second"][1](recent),
            "peakTokensPerSecond": round(peak, 4),
            "avgLatencyMs": SERIES_METRICS["latency"][1](recent),
            "avgFirstTokenMs": SERIES_METRICS["first_token"][1](recent),
            "lastGenerationsTokensPerSecond": self._speeds(),
            "queueDepth": queue["queueDepth"],
            "active": queue["active"],
            "waitingByModel": queue["waitingByModel"],
        }

    def _speeds(self) -> list[float]:
        """Return the tokens per second of the last generations, the oldest first."""
        found: list[float] = []
        for one in reversed(self.traffic.ended):
            spent_s = one.whole_s - one.first_s
            if one.outcome == "ok" and one.output_tokens and spent_s > 0:
                found.append(round(one.output_tokens / spent_s, 2))
            if len(found) >= _GENERATIONS:
                break
        return found[::-1]

    def metrics_update(self) -> Json:
        """Return the figures of the event `metrics_update`."""
        recent = self.traffic.over(self.clock.now(), _RECENT_S)
        return {
            "throughput": SERIES_METRICS["tokens_per_second"][1](recent),
            "latency": SERIES_METRICS["latency"][1](recent),
            "activeRequests": self.traffic.active(self.clock.monotonic()),
        }


def _request(one: EndedRequest) -> Json:
    return {
        "requestId": one.id,
        "modelId": one.model,
        "workerId": one.worker,
        "latencyMs": one.latency_ms,
        "tokensGenerated": one.output_tokens,
        "status": public_status(one.outcome),
        "timestamp": milliseconds(one.time),
    }


def _whole(value: float | None, scale: int = 1) -> int | None:
    return None if value is None else round(value * scale)


def _port(url: object) -> int | None:
    try:
        return urlsplit(str(url)).port if url else None
    except ValueError:
        return None
