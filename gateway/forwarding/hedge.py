"""Hedging: the race of an attempt with a second one that starts when the first is slow."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from gateway.forwarding.attempt import AttemptResult
from gateway.forwarding.engine_stream import EngineStream

AttemptCoroutine: TypeAlias = Coroutine[Any, Any, AttemptResult | None]
"""Returns None if the attempt failed, which is recorded."""


async def race(
    first: AttemptCoroutine, rival: Callable[[], AttemptCoroutine | None], *, after_s: float
) -> AttemptResult | None:
    """Await the first attempt; after `after_s` start a second one, and return the first result of the two.

    `rival` returns None if there is no second endpoint. If one attempt fails, the other decides.
    """
    tasks: list[asyncio.Task[AttemptResult | None]] = []
    winner: asyncio.Task[AttemptResult | None] | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks.append(group.create_task(first))
            await asyncio.wait(tasks, timeout=after_s)
            other = None if tasks[0].done() else rival()
            if other is not None:
                tasks.append(group.create_task(other))
            winner = await _first_result(tasks)
            for task in tasks:
                task.cancel()
    finally:
        for task in tasks:
            if task is not winner:
                _discard(task)
    return winner.result()


async def _first_result(
    tasks: list[asyncio.Task[AttemptResult | None]],
) -> asyncio.Task[AttemptResult | None]:
    """Return the first successful result; the last result if all failed."""
    left = list(tasks)
    while True:
        await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in left if task.done()]:
            left.remove(task)
            if task.result() is not None or not left:
                return task


def _discard(task: asyncio.Task[AttemptResult | None]) -> None:
    """Close the losing result, which may have arrived in the same moment or after the client left."""
    if task.cancelled() or task.exception() is not None:
        return
    result = task.result()
    if isinstance(result, EngineStream):
        result.close()
