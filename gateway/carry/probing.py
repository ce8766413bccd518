"""Asks engines how they are where nothing else tells: GET /health. Also keeps what is known of them tidy.

An engine that was stopped, or whose Mac hangs, takes connections and never answers. Whoever waits for it would wait
for as long as a long prompt may take; so it is asked, and given up when it does not answer that, either.
"""

import asyncio
from typing import Literal, TypeAlias

from gateway.carry.attempt import Attempts, whole_body
from gateway.carry.names import Names
from gateway.carry.rounds import TICK_S, WAITED_S, Rounds
from gateway.routing.table import Origin, Table, Target
from gateway.upstream import listening
from gateway.upstream.exchange import BrokenError
from gateway.upstream.pool import Pool, UnreachableError

# Engines answer from figures that are there already, within milliseconds; a Mac may be short of processors for a
# while, not for seconds. With the second before it is asked, a hanging engine costs its requests 4 to 5 s.
PROBE_S = 3.0
# Of one that is ejected already: nothing is lost by asking it once more.
_EJECTED_S = 1.0

Health: TypeAlias = Literal["well", "busy", "gone", "mute", "bad"]


class Prober:
    """Makes the rounds. Run `run()` in a task group."""

    def __init__(self, attempts: Attempts, pool: Pool, names: Names) -> None:
        self._attempts = attempts
        self._pool = pool
        self._names = names
        self.probe_s = PROBE_S
        self._keeper, self._loads, self._clock = attempts.keeper, attempts.loads, attempts.clock
        self._rounds = Rounds()
        self._table: Table | None = None

    async def run(self) -> None:
        """Look after engines for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                for target in self.look(self._clock.monotonic()):
                    group.create_task(self._probe(target))
                await self._clock.sleep(TICK_S)

    def look(self, now_s: float) -> list[Target]:
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
        rounds.hear(listening.heard(self._pool.open), now_s)
        awaited = listening.awaited(self._pool.open, now_s - WAITED_S)
        return rounds.due(now_s, awaited=awaited, is_open=circuits.is_open)

    async def _probe(self, target: Target) -> None:
        began_s = self._clock.monotonic()
        health = await self._health(target)
        now_s, circuits = self._clock.monotonic(), self._loads.circuits
        self._rounds.hear(listening.heard(self._pool.open), now_s)
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

    async def _health(self, target: Target) -> Health:
        is_open = self._loads.circuits.is_open(target.origin)
        try:
            async with asyncio.timeout(min(_EJECTED_S, self.probe_s) if is_open else self.probe_s):
                answer = await self._pool.request(target.origin, _request(target.origin))
                try:
                    await whole_body(answer)
                finally:
                    answer.close()
        except TimeoutError:
            return "mute"
        except UnreachableError as error:
            return "mute" if error.is_timeout else "gone"
        except BrokenError:
            return "bad"
        found = dict(answer.headers)
        if found.get(b"x-fleet-replica", b"").decode("latin-1") not in ("", target.replica):
            return "gone"  # somebody else listens there now
        self._loads.hear(target.origin, found, self._clock.monotonic())
        return "busy" if answer.status >= 500 else "well"

    def _give_up(self, target: Target, now_s: float) -> None:
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
            listening.give_up(self._pool.open, target.origin, "it answers nothing at all")


def _targets(table: Table) -> dict[Origin, Target]:
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
