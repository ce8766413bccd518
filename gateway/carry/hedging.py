"""Two engines asked for one answer: the first that answers counts, the other is cut. Chooses nobody."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from gateway.carry.streaming import Streaming
from gateway.carry.trail import Whole

Answered: TypeAlias = Streaming | Whole | None
"""None: the engine did not serve, which is noted already."""
Asking: TypeAlias = Coroutine[Any, Any, Answered]


async def raced(first: Asking, rival: Callable[[], Asking | None], *, after_s: float) -> Answered:
    """Wait for the first; after so long ask for a rival, and return what comes first of the two.

    `rival` returns None if there is none. One that fails leaves it to the other.
    """
    tasks: list[asyncio.Task[Answered]] = []
    winner: asyncio.Task[Answered] | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks.append(group.create_task(first))
            await asyncio.wait(tasks, timeout=after_s)
            other = None if tasks[0].done() else rival()
            if other is not None:
                tasks.append(group.create_task(other))
            winner = await _first(tasks)
            for task in tasks:
                task.cancel()
    finally:
        for task in tasks:
            if task is not winner:
                _let_go(task)
    return winner.result()


async def _first(tasks: list[asyncio.Task[Answered]]) -> asyncio.Task[Answered]:
    """Return the first that answered; the last if none did."""
    left = list(tasks)
    while True:
        await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in left if task.done()]:
            left.remove(task)
            if task.result() is not None or not left:
                return task


def _let_go(task: asyncio.Task[Answered]) -> None:
    """Close what nobody wants: it may have come in the very moment in which another won, or the client left."""
    if task.cancelled() or task.exception() is not None:
        return
    result = task.result()
    if isinstance(result, Streaming):
        result.close()
