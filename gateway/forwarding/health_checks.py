"""Whom to ask how it is: those that nobody has heard lately, or that somebody waits for. Pure; told the time.

Whoever answers requests is not asked: its answers say more. A thousand endpoints cost no more than RATE_PER_S.

Asks engines how they are where nothing else tells: GET /health. Also keeps what is known of them tidy.

An engine that was stopped, or whose Mac hangs, takes connections and never answers. Whoever waits for it would wait
for as long as a long prompt may take; so it is asked, and given up when it does not answer that, either.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gateway.forwarding.attempt import AttemptRunner, whole_body
from gateway.forwarding.model_state import ModelStates
from gateway.routing.table import EngineEndpoint, Origin, RoutingTable
from gateway.upstream import connection_pool
from gateway.upstream.connection import BrokenResponseError
from gateway.upstream.connection_pool import ConnectionPool, UnreachableError

TICK_S = 0.5
RATE_PER_S = 20
# An engine sends nothing while it reads a prompt, which takes seconds; asking it then costs it next to nothing.
WAITED_S = 1.0
# How often the ejected are looked for, which is every time: who comes back is used again within a second.
_EJECTED_INTERVAL_S = 0.4
_QUIET_S = 10.0


@dataclass(slots=True)
class ProbeSchedule:
    """When everybody was heard and asked last."""

    _targets: dict[Origin, EngineEndpoint] = field(default_factory=dict)
    _heard_s: dict[Origin, float] = field(default_factory=dict)
    _asked_s: dict[Origin, float] = field(default_factory=dict)
    _asking: set[Origin] = field(default_factory=set)

    def know(self, targets: Iterable[EngineEndpoint], now_s: float) -> None:
        """Learn who is there now. Who is new counts as heard: its agent has just asked it."""
        self._targets = {target.origin: target for target in targets}
        self._heard_s = {o: self._heard_s.get(o, now_s) for o in self._targets}
        self._asked_s = {o: s for o, s in self._asked_s.items() if o in self._targets}

    def hear(self, origins: Collection[Origin], now_s: float) -> None:
        """Note who said anything."""
        for origin in origins:
            if origin in self._heard_s:
                self._heard_s[origin] = now_s

    def heard_since(self, origin: Origin, then_s: float) -> bool:
        """Return whether it said anything after that."""
        return self._heard_s.get(origin, then_s) > then_s

    def due(
        self, now_s: float, *, awaited: AbstractSet[Origin], is_open: Callable[[Origin], bool]
    ) -> list[EngineEndpoint]:
        """Return who is to be asked now, the most urgent first; each is being asked until `done`.

        `awaited` are those from whom somebody has been waiting for `WAITED_S`.
        """
        urgent, quiet = [], []
        for origin, heard_s in self._heard_s.items():
            if origin in self._asking:
                continue
            asked_s = self._asked_s.get(origin, float("-inf"))
            last_s = max(heard_s, asked_s)
            if is_open(origin):
                if now_s - asked_s >= _EJECTED_INTERVAL_S:
                    urgent.append((last_s, origin))
            elif origin in awaited:
                if now_s - last_s >= WAITED_S:
                    urgent.append((last_s, origin))
            elif now_s - last_s >= _QUIET_S:
                quiet.append((last_s, origin))
        # The longest ago first, so that with more than the rate allows nobody is left out for ever.
        chosen = [*sorted(urgent), *sorted(quiet)][: int(RATE_PER_S * TICK_S)]
        for _, origin in chosen:
            self._asking.add(origin)
            self._asked_s[origin] = now_s
        return [self._targets[origin] for _, origin in chosen]

    def done(self, origin: Origin) -> None:
        """Note that it was asked, whatever came of it."""
        self._asking.discard(origin)


# Engines answer from figures that are there already, within milliseconds; a Mac may be short of processors for a
# while, not for seconds. With the second before it is asked, a hanging engine costs its requests 4 to 5 s.
PROBE_S = 3.0
# Of one that is ejected already: nothing is lost by asking it once more.
_EJECTED_TIMEOUT_S = 1.0

ProbeResult: TypeAlias = Literal["well", "busy", "gone", "mute", "bad"]


class HealthChecker:
    """Makes the rounds. Run `run()` in a task group."""

    def __init__(self, attempts: AttemptRunner, pool: ConnectionPool, names: ModelStates) -> None:
        self._attempts = attempts
        self._pool = pool
        self._names = names
        self.probe_s = PROBE_S
        self._keeper, self._loads, self._clock = attempts.keeper, attempts.loads, attempts.clock
        self._rounds = ProbeSchedule()
        self._table: RoutingTable | None = None

    async def run(self) -> None:
        """Look after engines for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                for target in self.look(self._clock.monotonic()):
                    group.create_task(self._probe(target))
                await self._clock.sleep(TICK_S)

    def look(self, now_s: float) -> list[EngineEndpoint]:
        """Take in what happened since the last look; return who is to be asked."""
        table, rounds, circuits = self._keeper.table, self._rounds, self._loads.circuits
        if table is not self._table:
            self._table = table
            targets = _targets(table)
            rounds.know(targets.values(), now_s)
            circuits.know(targets.values(), now_s)
            self._loads.know(targets.keys())
            self._names.keep(table.models)
        self._loads.tidy(now_s)
        rounds.hear(connection_pool.responding_origins(self._pool.open), now_s)
        awaited = connection_pool.silent_origins(self._pool.open, now_s - WAITED_S)
        return rounds.due(now_s, awaited=awaited, is_open=circuits.is_open)

    async def _probe(self, target: EngineEndpoint) -> None:
        began_s = self._clock.monotonic()
        health = await self._health(target)
        now_s, circuits = self._clock.monotonic(), self._loads.circuits
        self._rounds.hear(connection_pool.responding_origins(self._pool.open), now_s)
        self._rounds.done(target.origin)
        match health:
            case "well":
                circuits.lives(target, now_s)
            case "busy":
                circuits.failed(target, "full", now_s)
            case "bad" | "gone":
                self._attempts.blame(target, health)
            case "mute":
                if not self._rounds.heard_since(target.origin, began_s):
                    self._attempts.blame(target, "gone")
                    self._give_up(target, now_s)

    async def _health(self, target: EngineEndpoint) -> ProbeResult:
        is_open = self._loads.circuits.is_open(target.origin)
        try:
            async with asyncio.timeout(
                min(_EJECTED_TIMEOUT_S, self.probe_s) if is_open else self.probe_s
            ):
                answer = await self._pool.request(target.origin, _request(target.origin))
                try:
                    await whole_body(answer)
                finally:
                    answer.close()
        except TimeoutError:
            return "mute"
        except UnreachableError as error:
            return "mute" if error.is_timeout else "gone"
        except BrokenResponseError:
            return "bad"
        found = dict(answer.headers)
        if found.get(b"x-fleet-replica", b"").decode("latin-1") not in ("", target.replica):
            return "gone"  # somebody else listens there now
        self._loads.hear(target.origin, found, self._clock.monotonic())
        return "busy" if answer.status >= 500 else "well"

    def _give_up(self, target: EngineEndpoint, now_s: float) -> None:
        """Have its requests asked elsewhere; where there is nobody else, waiting is better than failing."""
        table, shunned = self._keeper.table, self._loads.circuits.shunned(now_s)
        others = (
            other
            for model in table.models.values()
            for share in model.shares
            if target in share.leased or target in share.orphans
            for other in (*share.leased, *share.orphans)
        )
        if any(other.origin not in shunned for other in others):
            connection_pool.fail_waiting(
                self._pool.open, target.origin, "it answers nothing at all"
            )


def _targets(table: RoutingTable) -> dict[Origin, EngineEndpoint]:
    """Return everybody who may be asked, by origin."""
    return {
        target.origin: target
        for model in table.models.values()
        for share in model.shares
        for target in (*share.orphans, *share.leased)
    }


def _request(origin: Origin) -> bytes:
    host, port = origin
    named = f"[{host}]" if ":" in host else host
    # A connection of its own: one to each of a thousand engines must not be kept for this alone.
    head = f"GET /health HTTP/1.1\r\nhost: {named}:{port}\r\nconnection: close\r\n\r\n"
    return head.encode("ascii")
