"""Figures of the whole fleet, from the fleet model and the traffic: for the page, and the facts for `compat.routes`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import TypeAlias
from urllib.parse import urlsplit

from compat import shapes
from compat.shapes import DAY_S, Worker
from dashboard.fleet_model import FleetModel
from dashboard.traffic import Traffic, milliseconds
from gateway.telemetry.time_series import SERIES_METRICS, IntervalSums
from insight.conditions import Row
from insight.mac_state import is_connected
from machinery.clock import Clock
from schemas.node import NodeStatus
from schemas.wire.requests import EndedRequest
from store import keys

Json: TypeAlias = dict[str, object]


@dataclass(slots=True)
class FleetFigures:
    """Figures of Macs and requests."""

    model: FleetModel
    traffic: Traffic
    clock: Clock
    started: datetime
    _started_s: float = field(init=False)
    """By a clock that never jumps."""
    _seen: dict[str, int] = field(default_factory=dict)
    """The last time at which each Mac was alive, in milliseconds."""
    figures = SERIES_METRICS

    def __post_init__(self) -> None:
        self._started_s = self.clock.elapsed()

    def uptime_s(self) -> float:
        """Return the seconds since the start."""
        return self.clock.elapsed() - self._started_s

    def note_alive(self) -> None:
        """Remember the time for every Mac that is alive; called once a second."""
        now = milliseconds(self.clock.now())
        for name, row in self.model.rows("macs").items():
            if is_connected(row):
                self._seen[name] = now
        for gone in set(self._seen) - set(self.model.rows("macs")):
            del self._seen[gone]

    async def workers(self) -> list[Worker]:
        """Return all Macs, by name."""
        running = self.running_by_mac()
        rows = sorted(self.model.rows("macs").items())
        return [self.worker(name, row, running.get(name, 0)) for name, row in rows]

    def worker(self, name: str, row: Row, active: int) -> Worker:
        """Return a Mac with its requests in flight."""
        report = self.model.caches.objects.statuses.items.get(keys.status_key("Node", name))
        assert report is None or isinstance(report, NodeStatus)
        total = self._figure(name, "fleet_agent_memory_total_bytes")
        free = self._figure(name, "fleet_agent_memory_available_bytes")
        sums = self.traffic.macs.get(name)
        return Worker(
            name=name,
            status=str(row["state"]) if is_connected(row) else "offline",
            report=report,
            hostname=row["hostname"],
            address=row["address"],
            port=_port(row["agentUrl"]),
            models=row["models"],
            active=active,
            handled=0 if sums is None else sums.requests,
            whole_s=0.0 if sums is None else sums.whole_s,
            cpu=self._figure(name, "fleet_node_cpu_usage_ratio"),
            gpu=self._figure(name, "fleet_node_gpu_usage_ratio"),
            used_bytes=None if total is None or free is None else total - free,
            uptime_s=self._figure(name, "fleet_node_uptime_seconds", "fleet_agent_uptime_seconds"),
            seen_ms=self._seen.get(name),
        )

    def page_rows(self) -> dict[str, Row]:
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
            if is_connected(row)
        }

    def _warmest(self, node: str) -> float | None:
        """Return the temperature of the warmest sensor of a Mac."""
        names = ("fleet_node_temperature_celsius/cpu", "fleet_node_temperature_celsius/gpu")
        sensors = [self._figure(node, name) for name in names]
        return max((celsius for celsius in sensors if celsius is not None), default=None)

    def running_by_mac(self) -> dict[str, int]:
        """Return the requests in flight by Mac."""
        counts: dict[str, int] = {}
        for _, request in self.traffic.running(self.clock.monotonic()):
            if request.worker:
                counts[request.worker] = counts.get(request.worker, 0) + 1
        return counts

    def _figure(self, node: str, *names: str) -> float | None:
        now_s = self.clock.monotonic()
        values = (self.traffic.figure(node, name, now_s) for name in names)
        return next((value for value in values if value is not None), None)

    def over(self, seconds: float) -> IntervalSums:
        """Return the sums over the last seconds; those of a day without the time in which no recorder ran."""
        now = self.clock.now()
        sums = self.traffic.over(now, seconds)
        if seconds < DAY_S:
            return sums
        return self.traffic.measured(now.timestamp() - sums.seconds, sums) or sums

    def points(self, seconds: int, most: int) -> Iterator[tuple[int, IntervalSums | None]]:
        """Yield the begin and the sums of each interval; None where no recorder ran."""
        now_s = self.clock.now().timestamp()
        for at_s, sums in self.traffic.series.points(now_s, seconds, most):
            yield at_s, self.traffic.measured(at_s, sums)

    def fastest(self) -> float:
        """Return the most tokens per second in the last day."""
        return self.traffic.series.fastest(self.clock.now().timestamp())

    def ended(
        self, limit: int, outcomes: frozenset[str], model: str = "", node: str = ""
    ) -> list[EndedRequest]:
        """Return the last requests at all gateways, newest first."""
        matches = (
            ended
            for ended in reversed(self.traffic.ended)
            if (not outcomes or ended.outcome in outcomes)
            and (not model or ended.model == model)
            and (not node or ended.worker == node)
        )
        return list(islice(matches, limit))

    def ready_models(self) -> list[str]:
        """Return the names of the models that have a ready replica."""
        return sorted(name for name, row in self.model.rows("models").items() if row["ready"])

    def active(self) -> int:
        """Return the number of requests at engines."""
        return self.traffic.active(self.clock.monotonic())

    def waiting(self) -> dict[str, int]:
        """Return the number of waiting requests by model."""
        return self.traffic.waiting(self.clock.monotonic())

    def silent_gateways(self) -> dict[str, str]:
        """Return why each gateway that does not show its requests does not."""
        states = sorted(self.traffic.gateways.items())
        return {id_: state.problem for id_, state in states if state.problem}

    def queue_details(self) -> Json:
        """Return the requests under way, and the gateways that do not show theirs."""
        return {
            "running": [
                {
                    "gateway": gateway,
                    "requestId": request.id,
                    "modelId": request.model,
                    "workerId": request.worker,
                    "phase": request.phase,
                    "seconds": request.seconds,
                }
                for gateway, request in self.traffic.running(self.clock.monotonic())[:500]
            ],
            "gatewaysSilent": self.silent_gateways(),
        }

    def cluster_details(self, _workers: Sequence[Worker]) -> Json:
        """Return nothing: the page has the state of the fleet."""
        return {}

    def snapshot(self) -> Json:
        """Return the figures of the whole fleet at once."""
        rows = self.model.rows("macs").values()
        return shapes.snapshot(self, sum(map(is_connected, rows)))


def _whole(value: float | None, scale: int = 1) -> int | None:
    return None if value is None else round(value * scale)


def _port(url: object) -> int | None:
    try:
        return urlsplit(str(url)).port if url else None
    except ValueError:
        return None
