"""Recorder of the history: a sample of every figure each ten seconds, and every ended request."""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from dashboard.energy import ShareCounter, divide_power
from dashboard.fleet_model import FleetModel
from dashboard.history.records import COARSE_S, COLUMNS, FINE_S, Sample, merge_steps
from dashboard.history.writer import HistoryWriter
from dashboard.traffic import AGENT_FRESH_S, AgentState, Traffic
from insight.mac_state import is_connected
from machinery.clock import Clock

log = logging.getLogger(__name__)

# Rows by which the fleet is judged are not written when the store was silent for longer.
_STALE_S: Final = 30.0
_JUMP_S: Final = 60.0
# After its start and after a jump, the clock may still be corrected.
_TRUSTED_AFTER_S: Final = 3600.0
_UNKNOWN: Final = math.nan

_GAUGES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "cpu_ratio": "fleet_node_cpu_usage_ratio",
        "gpu_ratio": "fleet_node_gpu_usage_ratio",
        "swap_used_bytes": "fleet_node_swap_used_bytes",
        "cpu_celsius": "fleet_node_temperature_celsius/cpu",
        "gpu_celsius": "fleet_node_temperature_celsius/gpu",
        "thermal_level": "fleet_node_thermal_level",
        "power_watts": "fleet_node_power_watts/system",
    }
)
_GAUGE_COLUMNS: Final = COLUMNS["node"][:9]
_COUNTERS: Final = (
    "fleet_node_network_received_bytes_total",
    "fleet_node_network_sent_bytes_total",
    "fleet_node_disk_read_bytes_total",
    "fleet_node_disk_written_bytes_total",
)


@dataclass(slots=True)
class ClockWatch:
    """Judges whether the wall clock can be trusted: it did not jump within the last hour."""

    clock: Clock
    _steady_since_s: float = field(init=False)
    _offset_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._steady_since_s = self.clock.elapsed()
        self._offset_s = self._offset()

    def _offset(self) -> float:
        return self.clock.now().timestamp() - self.clock.elapsed()

    def is_trusted(self) -> bool:
        """Compare the wall clock with one that never jumps."""
        offset_s = self._offset()
        jump_s = offset_s - self._offset_s
        self._offset_s = offset_s
        if abs(jump_s) > _JUMP_S:
            self._steady_since_s = self.clock.elapsed()
            log.warning(
                "the clock jumped; the history removes nothing by age for an hour",
                extra={"seconds": round(jump_s)},
            )
        return self.clock.elapsed() - self._steady_since_s >= _TRUSTED_AFTER_S


@dataclass(slots=True)
class HistoryRecorder:
    """Samples the figures of one fleet. Run `run()` in a task group."""

    model: FleetModel
    traffic: Traffic
    writer: HistoryWriter
    clock: Clock
    shares: ShareCounter = field(default_factory=ShareCounter)
    """Counts the requests by which the power of Macs is divided."""
    _fine: list[Sample] = field(default_factory=list)
    """The fine samples of the coarse step that is under way."""
    _counters: dict[str, tuple[float, tuple[float, ...]]] = field(default_factory=dict)
    """The time and the values of the counters of each Mac when they were sampled last."""

    async def run(self) -> None:
        """Sample at every multiple of ten seconds, forever."""
        watch = ClockWatch(self.clock)
        await self.model.wait_ready()
        try:
            while True:
                now_s = self.clock.now().timestamp()
                await self.clock.sleep(FINE_S - now_s % FINE_S)
                self.writer.is_clock_trusted = watch.is_trusted()
                self.sample(int(self.clock.now().timestamp()) // FINE_S * FINE_S - FINE_S)
        finally:
            self._flush()

    def sample(self, at_s: int) -> None:
        """Sample the step that begins at a time."""
        if self._fine and self._fine[0].at_s // COARSE_S != at_s // COARSE_S:
            self._flush()
        samples = list(self._samples(at_s))
        self._fine += samples
        self.writer.add_samples(samples)

    def _flush(self) -> None:
        if self._fine:
            at_s = self._fine[0].at_s // COARSE_S * COARSE_S
            self.writer.add_samples(list(merge_steps(self._fine, at_s)))
            self._fine = []

    def _samples(self, at_s: int) -> Iterator[Sample]:
        age_s = self.model.caches.staleness_s()
        is_known = age_s is not None and age_s <= _STALE_S
        for kind, values in (
            ("fleet", {"": self._fleet(is_known=is_known)}),
            ("node", dict(self._nodes())),
            ("model", dict(self._models(is_known=is_known))),
        ):
            if values:
                yield Sample(tier_s=FINE_S, at_s=at_s, kind=kind, values=values)

    def _fleet(self, *, is_known: bool) -> tuple[float, ...]:
        now_s = self.clock.monotonic()
        macs = self.model.rows("macs").values()
        return (
            float(sum(map(is_connected, macs))) if is_known else _UNKNOWN,
            float(self.traffic.active(now_s)),
            float(sum(self.traffic.waiting(now_s).values())),
            float(sum(1 for state in self.traffic.gateways.values() if state.problem)),
        )

    def _nodes(self) -> Iterator[tuple[str, tuple[float, ...]]]:
        now_s = self.clock.monotonic()
        active: dict[str, int] = {}
        for _, request in self.traffic.running(now_s):
            if request.worker:
                active[request.worker] = active.get(request.worker, 0) + 1
        for name, row in self.model.rows("macs").items():
            state = self.traffic.agents.get(name)
            disk = row["diskFreeBytes"]
            if state is None or now_s - state.seen_s > AGENT_FRESH_S:
                self._counters.pop(name, None)
                state, disk = AgentState(), None
            values = _gauges(state.figures)
            values["disk_free_bytes"] = float(disk) if isinstance(disk, int) else _UNKNOWN
            sums = self.traffic.macs.get(name)
            counts = (0.0, 0.0) if sums is None else (float(sums.requests), sums.output_tokens)
            rates = self._rates(
                name, (*(state.figures.get(counter) for counter in _COUNTERS), *counts)
            )
            gauges = tuple(values[column] for column in _GAUGE_COLUMNS)
            found = (*gauges, *rates[:4], float(active.get(name, 0)), *rates[4:])
            if not all(math.isnan(gauge) for gauge in gauges) or any(found[-3:]):
                yield name, found
        for gone in set(self._counters) - set(self.model.rows("macs")):
            del self._counters[gone]

    def _rates(self, name: str, counters: tuple[float | None, ...]) -> tuple[float, ...]:
        """Return the growth of counters a second since the last sample; unknown if one began anew."""
        values = tuple(_UNKNOWN if counter is None else counter for counter in counters)
        now_s = self.clock.monotonic()
        before_s, before = self._counters.get(name, (now_s, values))
        self._counters[name] = now_s, values
        seconds = now_s - before_s
        if seconds <= 0:
            return (_UNKNOWN,) * len(values)
        return tuple(
            (new - old) / seconds if new >= old else _UNKNOWN
            for new, old in zip(values, before, strict=True)
        )

    def _models(self, *, is_known: bool) -> Iterator[tuple[str, tuple[float, ...]]]:
        now_s = self.clock.monotonic()
        waiting, active = self.traffic.waiting(now_s), dict[str, int]()
        power = self._power()
        for feed in self.traffic.fresh(now_s):
            for name, count in feed.active_by_deployment.items():
                active[name] = active.get(name, 0) + count
        for name, row in self.model.rows("models").items():
            counts = (row["desired"], row["ready"]) if is_known else (None, None)
            known = (float(one) if isinstance(one, int) else _UNKNOWN for one in counts)
            counts_now = (float(active.get(name, 0)), float(waiting.get(name, 0)))
            yield name, (*known, *counts_now, *power.get(name, (0.0, 0.0, 0.0)))

    def _power(self) -> dict[str, tuple[float, float, float]]:
        """Return the power of each deployment that answered in this step, with its rates; NaN where it is unknown."""
        now_s = self.clock.monotonic()
        watts = {
            name: state.figures.get(_GAUGES["power_watts"], _UNKNOWN)
            for name, state in self.traffic.agents.items()
            if now_s - state.seen_s <= AGENT_FRESH_S
        }
        counts = self.shares.take()
        unknown = dict.fromkeys((name for _, name in counts), (_UNKNOWN,) * 3)
        return {**unknown, **divide_power(counts, watts, FINE_S)}


def _gauges(figures: Mapping[str, float]) -> dict[str, float]:
    gauges = {column: figures.get(name, _UNKNOWN) for column, name in _GAUGES.items()}
    total = figures.get("fleet_agent_memory_total_bytes")
    free = figures.get("fleet_agent_memory_available_bytes")
    gauges["memory_used_bytes"] = _UNKNOWN if total is None or free is None else total - free
    return gauges
