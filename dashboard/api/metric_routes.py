"""Routes for Prometheus: the metrics of this process and of the fleet's objects, and the processes to scrape."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import psutil
from fastapi import APIRouter, Response

from dashboard.api.event_stream import StreamSlots
from dashboard.api.routes import json_response
from dashboard.fleet_figures import FleetFigures
from dashboard.fleet_model import FleetModel
from dashboard.history.writer import HistoryWriter
from dashboard.objectives import ObjectiveMonitor, state_row
from insight.fleet_metrics import FleetMetrics, scrape_targets
from machinery.prometheus import Gauge, MetricFamily, build_info, render
from store.metrics import StoreMetrics

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
# Prometheus keeps the targets that it has when it is refused.
_NOT_READY: Final = "The state of the fleet is not known yet: etcd was not reached since the start."


@dataclass(frozen=True, slots=True)
class MetricRoutes:
    """Handlers of the routes for Prometheus."""

    model: FleetModel
    slots: StreamSlots
    views: FleetFigures
    history: HistoryWriter | None
    objectives: ObjectiveMonitor
    store_metrics: StoreMetrics
    process: psutil.Process = field(default_factory=psutil.Process)

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        router.add_api_route("/metrics", self.metrics, methods=["GET"])
        router.add_api_route("/api/v1/objectives", self.judged, methods=["GET"])
        router.add_api_route("/sd/prometheus", self.targets, methods=["GET"])

    async def metrics(self) -> Response:
        """Return metrics in Prometheus text format: conditions of all objects, releases, the store, this process."""
        families: list[MetricFamily] = [
            build_info("dashboard"),
            self.store_metrics,
            *self._own(),
        ]
        if self.model.is_ready:
            families += [FleetMetrics(self.model.caches), self.objectives]
        return Response(render(families), media_type=_TEXT)

    async def judged(self) -> Response:
        """Return every objective of every deployment: declared, measured over 1h and 24h, and its burn rate."""
        states = self.objectives.states() if self.model.is_ready else []
        return json_response({"objectives": [state_row(state) for state in states]})

    async def targets(self) -> Response:
        """Return the processes to scrape, for Prometheus' `http_sd_configs`."""
        if not self.model.is_ready:
            return json_response({"error": {"message": _NOT_READY}}, 503)
        return json_response(scrape_targets(self.model.caches))

    def _own(self) -> Iterator[Gauge]:
        traffic, process = self.views.traffic, self.process
        silent = sum(1 for state in traffic.gateways.values() if state.problem)
        wrong = sum(state.is_clock_wrong for state in traffic.gateways.values())
        for name, help_, value in (
            ("fleet_dashboard_gateways_clock_wrong", "Gateways whose clock is another.", wrong),
            ("fleet_dashboard_streams", "Open streams of pages and programs.", self.slots.count),
            ("fleet_dashboard_gateways_silent", "Gateways that do not show requests.", silent),
            ("fleet_dashboard_synced", "Whether the fleet is known.", int(self.model.is_ready)),
            ("process_resident_memory_bytes", "Memory in use.", process.memory_info().rss),
            ("process_open_fds", "Open file descriptors.", process.num_fds()),
            ("process_start_time_seconds", "Start, in Unix time.", process.create_time()),
        ):
            yield Gauge(name, help_, partial(float, value))
        for name, help_, value in (
            ("feed_requests", "Ended requests that were read from gateways.", traffic.read),
            ("feed_gaps", "Answers of gateways that had forgotten requests.", traffic.gaps),
            ("feed_lost", "Requests that gateways had forgotten, if they know it.", traffic.lost),
            ("clock_jumps", "Jumps of this machine's clock.", traffic.clock_jumps),
        ):
            full_name = f"fleet_dashboard_{name}_total"
            yield Gauge(full_name, help_, partial(float, value), "counter")
        cpu = process.cpu_times()
        help_ = "CPU time, user and system."
        yield Gauge("process_cpu_seconds_total", help_, lambda: cpu.user + cpu.system, "counter")
        sent, help_ = self.slots.sent_bytes, "Bytes of all streams, as sent."
        yield Gauge("fleet_dashboard_stream_bytes_total", help_, lambda: float(sent), "counter")
        yield from self._of_history()

    def _of_history(self) -> Iterator[Gauge]:
        writer = self.history
        if writer is None:
            return
        name = "fleet_dashboard_history"
        is_up, used, lost = not writer.problem, writer.used_bytes, writer.lost
        yield Gauge(f"{name}_written", "Whether the history is written.", lambda: float(is_up))
        yield Gauge(f"{name}_bytes", "Size of what the history holds.", lambda: float(used))
        help_ = "Samples and requests that could not be written."
        yield Gauge(f"{name}_lost_total", help_, lambda: float(lost), "counter")
