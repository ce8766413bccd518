"""The cost of many agents' leases: each renewed three times in its time to live."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from bench.store.client import Client
from bench.store.meter import Stage, connections

T = TypeVar("T")
_RENEWALS = 3
_AT_ONCE = 16


@dataclass
class Tally:
    """Results of the renewals."""

    done: int = 0
    late: int = 0
    """Answered only after the next one was due."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """One lease, renewed by its own beat."""

    client: Client
    lease: int

    async def keep(self, first_s: float, period_s: float, tally: Tally) -> None:
        """Renew for ever."""
        due_s = first_s
        while True:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            lives_s = await self.client.keep_alive(self.lease)
            assert lives_s > 0, "the lease was lost"
            due_s += period_s
            tally.done += 1
            tally.late += time.monotonic() > due_s


async def some_at_once(acts: list[Callable[[], Awaitable[T]]]) -> list[T]:
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(act: Callable[[], Awaitable[T]]) -> T:
        async with places:
            return await act()

    return await asyncio.gather(*(one(act) for act in acts))


async def leases(
    stage: Stage, *, agents: int, ttl_s: int, periods: int, is_apart: bool
) -> dict[str, float]:
    """Renew all leases, evenly spread; with a connection each if they are apart, as agents are."""
    clients = [await stage.connect() for _ in range(agents)] if is_apart else [stage.client]

    async def hire(client: Client) -> Agent:
        return Agent(client=client, lease=await client.grant(ttl_s))

    crew = await some_at_once([partial(hire, clients[n % len(clients)]) for n in range(agents)])
    period_s, tally = ttl_s / _RENEWALS, Tally()
    try:
        async with asyncio.TaskGroup() as group:
            now_s = time.monotonic()
            tasks = [
                group.create_task(agent.keep(now_s + n / agents * period_s, period_s, tally))
                for n, agent in enumerate(crew)
            ]
            await asyncio.sleep(period_s)  # opens what is not open yet
            opened, done, late = connections(), tally.done, tally.late
            with stage.meter() as meter:
                await asyncio.sleep(periods * period_s)
                done, late = tally.done - done, tally.late - late
            for task in tasks:
                task.cancel()
    finally:
        await some_at_once([partial(agent.client.revoke, agent.lease) for agent in crew])
        for client in clients if is_apart else ():
            await client.close()
    return {
        "python_percent": meter.python_s / meter.elapsed_s * 100,
        "etcd_percent": meter.etcd_s / meter.elapsed_s * 100,
        "python_us": meter.python_s / done * 1e6,
        "etcd_us": meter.etcd_s / done * 1e6,
        "late": late,
        "connections": opened,
    }
