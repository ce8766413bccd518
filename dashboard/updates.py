"""Events of Macs and figures for streams: a Mac comes online, goes offline or reports, and the fleet's rates."""

from dataclasses import dataclass, field
from typing import Final

from dashboard.fleet_model import FIGURES
from dashboard.live_views import LiveViews
from dashboard.seed_views import SeedViews
from insight.conditions import Row

_PERIOD_S: Final = 1.0
_METRICS_EVERY: Final = 2
"""Rounds between two `metrics_update` events."""


@dataclass(slots=True)
class UpdateEvents:
    """Compares the Macs once a second and adds an event for each difference. Run `run()` in a task group."""

    views: SeedViews
    _states: dict[str, str] = field(default_factory=dict)
    _metrics: dict[str, Row] = field(default_factory=dict)

    async def run(self) -> None:
        """Add events forever."""
        await self.views.model.wait_ready()
        live = LiveViews(self.views)
        live.update()
        self.views.note_alive()
        self._remember()
        rounds = 0
        while True:
            await self.views.clock.sleep(_PERIOD_S)
            rounds += 1
            self.views.note_alive()
            self._compare()
            self.views.model.replace_rows(FIGURES, self.views.figures())
            live.update()
            if rounds % _METRICS_EVERY == 0:
                self.views.traffic.emit("metrics_update", self.views.metrics_update())

    def _remember(self) -> None:
        for name, row in self.views.model.rows("macs").items():
            self._states[name] = str(row["state"])
            self._metrics[name] = self.views.measured_metrics(name, row)

    def _compare(self) -> None:
        traffic, rows = self.views.traffic, self.views.model.rows("macs")
        running: dict[str, int] | None = None
        for gone in set(self._states) - set(rows):
            if self._states.pop(gone) != "offline":
                traffic.emit("worker_offline", {"workerId": gone})
            self._metrics.pop(gone, None)
        for name, row in rows.items():
            was_online = self._states.get(name, "offline") != "offline"
            is_online = row["state"] != "offline"
            if is_online and not was_online:
                details = {key: row[key] for key in ("hostname", "chip", "memoryBytes")}
                traffic.emit("worker_online", {"workerId": name, **details})
            elif was_online and not is_online:
                traffic.emit("worker_offline", {"workerId": name})
            measured = self.views.measured_metrics(name, row)
            if is_online and measured != self._metrics.get(name):
                if running is None:
                    running = self.views.running_by_mac()
                metrics = self.views.worker_metrics(name, row, running.get(name, 0))
                traffic.emit("worker_update", {"workerId": name, "metrics": metrics})
            self._states[name], self._metrics[name] = str(row["state"]), measured
