"""Active health checks: probes of the links to engines, and GET /models of external servers, that are silent, awaited or ejected.

Also drops outdated endpoint state.

A stopped engine or a hanging Mac accepts connections and never answers. Its requests would wait as
long as a long prompt takes; the health check ends that wait. Endpoints that answer requests are not
checked.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gateway.forwarding.attempt import AttemptRunner
from gateway.forwarding.model_state import ModelStates
from gateway.routing.table import EngineEndpoint, RoutingTable
from gateway.upstream.call import BrokenResponseError, UnreachableError
from gateway.upstream.engine_links import EngineLinks
from machinery.clock import NEVER
from machinery.engine_link import EngineGauges
from schemas.wire.engine_address import EngineAddress

TICK_S = 0.5
RATE_PER_S = 20
# An engine sends nothing while it processes a prompt, which takes seconds; a check then costs it
# next to nothing.
AWAITED_S = 1.0
# Ejected endpoints are checked again after a tenth of the time since they were first seen ejected: at every tick
# during the first seconds, so that a restarted engine is used within a second, then less and less often.
_EJECTED_PART = 0.1
_LEAST_EJECTED_INTERVAL_S, MOST_EJECTED_INTERVAL_S = 0.4, 5.0
_QUIET_S = 10.0
# Clouds count requests.
_EXTERNAL_QUIET_S = 30.0
# Engines answer within milliseconds. A Mac may be short of CPU for a moment, but not for seconds.
# With the second before the check, a hanging engine costs its requests 4 to 5 s.
PROBE_S = 3.0
# For ejected endpoints, where a failed check costs nothing.
_EJECTED_TIMEOUT_S = 1.0
_KEY_REFUSED = frozenset({401, 403, 407})
ProbeResult: TypeAlias = Literal["well", "busy", "gone", "mute", "bad", "unknown"]
"""The last is that the gateway could not open a connection."""


@dataclass(slots=True)
class _Watched:
    """One endpoint, and the times of its last response and its last check."""

    endpoint: EngineEndpoint
    heard_s: float
    checked_s: float = -NEVER
    ejected_s: float = NEVER
    """The time at which it was first seen ejected; infinite if it is not."""
    is_checking: bool = False


class ProbeSchedule:
    """Chooses the endpoints to check. Pure. At most `RATE_PER_S` checks a second."""

    def __init__(self) -> None:
        self._watched: dict[EngineAddress, _Watched] = {}

    def set_endpoints(self, endpoints: Iterable[EngineEndpoint], now_s: float) -> None:
        """Set the current endpoints. A new one counts as heard from, because its agent has just checked it."""
        before, self._watched = self._watched, {}
        for endpoint in endpoints:
            watched = before.get(endpoint.origin) or _Watched(endpoint, now_s)
            watched.endpoint = endpoint
            self._watched[endpoint.origin] = watched

    def record_heard(self, origins: Collection[EngineAddress], now_s: float) -> None:
        """Record endpoints that sent anything."""
        for origin in origins:
            if origin in self._watched:
                self._watched[origin].heard_s = now_s

    def heard_since(self, origin: EngineAddress, then_s: float) -> bool:
        """Return whether the endpoint sent anything after that time."""
        watched = self._watched.get(origin)
        return watched is not None and watched.heard_s > then_s

    def due(
        self,
        now_s: float,
        *,
        awaited: AbstractSet[EngineAddress],
        is_open: Callable[[EngineAddress], bool],
        draw: Callable[[], float],
    ) -> list[EngineEndpoint]:
        """Return the endpoints to check now, the most urgent first; each is in progress until `done`.

        `awaited`: endpoints that requests have been waiting on for `AWAITED_S`. `draw`: random numbers, 0..1, which
        spread the checks of several gateways.
        """
        due: list[tuple[bool, float, EngineAddress]] = []
        for origin, watched in self._watched.items():
            if watched.is_checking:
                continue
            last_s = max(watched.heard_s, watched.checked_s)
            if is_urgent := is_open(origin):
                watched.ejected_s = min(watched.ejected_s, now_s)
                interval_s = _ejected_interval_s(now_s - watched.ejected_s, draw())
                is_due = now_s - watched.checked_s >= interval_s
            else:
                watched.ejected_s, is_urgent = NEVER, origin in awaited
                is_due = now_s - last_s >= (
                    AWAITED_S if is_urgent else _interval_s(watched.endpoint)
                )
            if is_due:
                due.append((not is_urgent, last_s, origin))
        # The longest ago first, so that the rate limit never starves an endpoint.
        chosen = [self._watched[origin] for _, _, origin in sorted(due)[: int(RATE_PER_S * TICK_S)]]
        for watched in chosen:
            watched.is_checking, watched.checked_s = True, now_s
        return [watched.endpoint for watched in chosen]

    def done(self, origin: EngineAddress) -> None:
        """Record the end of a check."""
        if origin in self._watched:
            self._watched[origin].is_checking = False


def _interval_s(endpoint: EngineEndpoint) -> float:
    declared_s = endpoint.checks.interval_s
    if declared_s is not None:
        return declared_s
    return _EXTERNAL_QUIET_S if endpoint.origin.external else _QUIET_S


def _ejected_interval_s(ejected_s: float, draw: float) -> float:
    """Return the time between two checks of an endpoint that has been ejected for so long."""
    interval_s = min(ejected_s * _EJECTED_PART * (0.75 + draw / 2), MOST_EJECTED_INTERVAL_S)
    return max(interval_s, _LEAST_EJECTED_INTERVAL_S)


class HealthChecker:
    """Runs the health checks. Run `run()` in a task group."""

    def __init__(
        self, attempts: AttemptRunner, links: EngineLinks, model_states: ModelStates
    ) -> None:
        self._attempts = attempts
        self._links = links
        self._model_states = model_states
        self.probe_s = PROBE_S
        self._table_cache, self._load_tracker, self._clock = (
            attempts.table_cache,
            attempts.load_tracker,
            attempts.clock,
        )
        self._schedule = ProbeSchedule()
        self._table: RoutingTable | None = None

    async def run(self) -> None:
        """Check endpoints forever."""
        async with asyncio.TaskGroup() as group:
            while True:
                for endpoint in self.select_due(self._clock.monotonic()):
                    group.create_task(self._probe(endpoint))
                await self._clock.sleep(TICK_S)

    def select_due(self, now_s: float) -> list[EngineEndpoint]:
        """Update the schedule and return the endpoints to check."""
        table, schedule, outliers = (
            self._table_cache.table,
            self._schedule,
            self._load_tracker.outliers,
        )
        if table is not self._table:
            self._table = table
            endpoints = all_endpoints(table)
            schedule.set_endpoints(endpoints.values(), now_s)
            outliers.set_endpoints(endpoints.values(), now_s)
            self._load_tracker.set_endpoints(endpoints.keys())
            self._model_states.update(table.models)
        self._load_tracker.drop_old(now_s)
        schedule.record_heard(self._links.responding_origins(), now_s)
        awaited = self._links.silent_origins(now_s - AWAITED_S)
        return schedule.due(
            now_s, awaited=awaited, is_open=outliers.is_open, draw=self._load_tracker.draw
        )

    async def _probe(self, endpoint: EngineEndpoint) -> None:
        began_s = self._clock.monotonic()
        health = await self._health(endpoint)
        now_s, outliers = self._clock.monotonic(), self._load_tracker.outliers
        self._schedule.record_heard(self._links.responding_origins(), now_s)
        self._schedule.done(endpoint.origin)
        match health:
            case "well":
                outliers.record_alive(endpoint, now_s)
            case "busy":
                outliers.record_failure(endpoint, "full", now_s)
            case "bad" | "gone":
                self._attempts.blame(endpoint, health)
                if health == "gone":
                    self._table_cache.drop_orphan(endpoint)
            case "mute":
                if not self._schedule.heard_since(endpoint.origin, began_s):
                    self._attempts.blame(endpoint, "gone")
                    # A server that is no engine may be too busy to answer, and busy with these requests.
                    if endpoint.external is None:
                        self._give_up(endpoint, now_s)
            case "unknown":
                pass

    async def _health(self, endpoint: EngineEndpoint) -> ProbeResult:
        is_open = self._load_tracker.outliers.is_open(endpoint.origin)
        declared_s = endpoint.checks.timeout_s
        timeout_s = self.probe_s if declared_s is None else declared_s
        try:
            async with asyncio.timeout(
                min(_EJECTED_TIMEOUT_S, timeout_s) if is_open else timeout_s
            ):
                if endpoint.external is None:
                    return self._engine_result(endpoint, await self._links.probe(endpoint.origin))
                server = endpoint.external
                path = f"{server.path}/models"
                # Not its body: a cloud lists hundreds of models.
                status, _ = await self._links.request(
                    endpoint.origin, path, server.authorization, limit=0
                )
        except TimeoutError:
            return "mute"
        except UnreachableError as error:
            return "unknown" if error.is_own_fault else "mute" if error.is_timeout else "gone"
        except BrokenResponseError:
            return "bad"
        return "bad" if status in _KEY_REFUSED else "busy" if status >= 500 else "well"

    def _engine_result(self, endpoint: EngineEndpoint, gauges: EngineGauges) -> ProbeResult:
        """Return what the report of an engine says."""
        if gauges.replica not in ("", endpoint.replica):
            return "gone"  # another process listens there now
        return "well" if gauges.is_ready else "busy"

    def _give_up(self, endpoint: EngineEndpoint, now_s: float) -> None:
        """Move its requests to other endpoints; without others, waiting is better than failing."""
        table, ejected = self._table_cache.table, self._load_tracker.outliers.ejected(now_s)
        others = (
            other
            for model in table.models.values()
            for backend in model.backends
            if endpoint in backend.leased or endpoint in backend.orphans
            for other in (*backend.leased, *backend.orphans)
        )
        if any(other.origin not in ejected for other in others):
            self._links.fail_waiting(endpoint.origin, "it does not answer health checks")


def all_endpoints(table: RoutingTable) -> dict[EngineAddress, EngineEndpoint]:
    """Return all endpoints of the table by origin."""
    return {
        endpoint.origin: endpoint
        for model in table.models.values()
        for backend in model.all_backends()
        for endpoint in (*backend.orphans, *backend.leased)
    }
