"""Events of Macs and figures for streams: a Mac comes online, goes offline or reports, and the fleet's rates."""

from dataclasses import dataclass, field
from typing import Final

from compat import shapes
from dashboard.fleet_figures import FleetFigures
from dashboard.fleet_model import FIGURES
from dashboard.live_views import LiveViews
from insight.mac_state import is_connected

_PERIOD_S: Final = 1.0
_METRICS_EVERY: Final = 2
"""Rounds between two `metrics_update` events."""
_MEASURED: Final = ("cpuUsagePercent", "gpuUtilizationPercent", "memoryUsedGB", "modelsLoaded")
"""Metrics whose change is an event of its own; requests have theirs."""


@dataclass(slots=True)
class UpdateEvents:
    """Compares the Macs once a second and adds an event for each difference. Run `run()` in a task group."""

    views: FleetFigures
    _macs: dict[str, tuple[str, object]] = field(default_factory=dict)
    """The last state of each Mac, and what it measured."""

    async def run(self) -> None:
        """Add events forever."""
        await self.views.model.wait_ready()
        live = LiveViews(self.views)
        live.update()
        self.views.note_alive()
        self._compare(is_first=True)
        rounds = 0
        while True:
            await self.views.clock.sleep(_PERIOD_S)
            rounds += 1
            self.views.note_alive()
            self._compare()
            self.views.model.replace_rows(FIGURES, self.views.page_rows())
            live.update()
            if rounds % _METRICS_EVERY == 0:
                self.views.traffic.emit("metrics_update", shapes.metrics_update(self.views))

    def _compare(self, *, is_first: bool = False) -> None:
        """Add an event for each difference; the first time, only remember the Macs."""
        views, rows = self.views, self.views.model.rows("macs")
        running = views.running_by_mac()
        for gone in set(self._macs) - set(rows):
            status, _ = self._macs.pop(gone)
            if status != "offline":
                views.traffic.emit("worker_offline", {"workerId": gone})
        for name, row in rows.items():
            old_status, old_measured = self._macs.get(name, ("offline", None))
            metrics = shapes.worker_metrics(views.worker(name, row, running.get(name, 0)))
            status = str(row["state"]) if is_connected(row) else "offline"
            measured = [metrics[field] for field in _MEASURED]
            self._macs[name] = (status, measured)
            if is_first:
                continue
            if status != "offline" and old_status == "offline":
                details = {key: row[key] for key in ("hostname", "chip", "memoryBytes")}
                views.traffic.emit("worker_online", {"workerId": name, **details})
            elif status == "offline" and old_status != "offline":
                views.traffic.emit("worker_offline", {"workerId": name})
            if status != "offline" and measured != old_measured:
                views.traffic.emit("worker_update", {"workerId": name, "metrics": metrics})
