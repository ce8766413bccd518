"""What the process itself takes, and how late its event loop is. Counts no requests."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from machinery.clock import Clock
from machinery.exposition import Gauge, Histogram, Series

# Four times a second costs nothing, and a pause of 10 ms is hit once in a while.
_PROBE_S = 0.25
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """Who counts the connections."""

    clients: Callable[[], int]
    engines: Callable[[], int]


class Process:
    """The process' own figures. `keep()` must run for the lag to be measured."""

    def __init__(self, clock: Clock, connections: Connections) -> None:
        self._clock = clock
        self._process = psutil.Process()
        self.lag = Histogram(
            "fleet_gateway_event_loop_lag_seconds",
            "How much later than asked for the event loop came back, four times a second.",
            (),
            bounds=_LAG_S,
        )
        self._parts: tuple[Series, ...] = (
            self.lag,
            Gauge(
                "fleet_gateway_client_connections", "Connections of clients.", connections.clients
            ),
            Gauge(
                "fleet_gateway_engine_connections",
                "Connections to engines, idle ones too.",
                connections.engines,
            ),
            Gauge(
                "process_cpu_seconds_total",
                "CPU time, user and system.",
                self._cpu_s,
                "counter",
            ),
            Gauge("process_resident_memory_bytes", "Memory in use.", self._memory_bytes),
            Gauge("process_open_fds", "Open file descriptors.", self._process.num_fds),
            Gauge(
                "process_start_time_seconds",
                "When it started, since 1970.",
                self._process.create_time,
            ),
        )

    async def keep(self) -> None:
        """Measure the event loop's lag, for ever."""
        lag = self.lag.child()
        while True:
            asked_s = self._clock.monotonic()
            await self._clock.sleep(_PROBE_S)
            lag.observe(max(0.0, self._clock.monotonic() - asked_s - _PROBE_S))

    def lines(self) -> Iterator[str]:
        """Yield Prometheus' text."""
        for part in self._parts:
            yield from part.lines()

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def _memory_bytes(self) -> float:
        return float(self._process.memory_info().rss)
