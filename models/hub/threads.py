"""Blocking work of a fetch in threads. A cancellation waits for the end of the work, so that nothing runs unowned."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar


class Closable(Protocol):
    """A resource, such as a locked file."""

    def close(self) -> None:
        """Release it."""
        ...


P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=Closable)


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of a blocking function."""
    future = _start(lambda: function(*args, **kwargs))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await _ended(future)
        raise


async def acquire_in_thread(acquire: Callable[[], R | None]) -> R | None:
    """Return the resource that a blocking function acquires; a cancellation closes it again.

    Without that, a lock that is acquired in the moment of a cancellation would be held until the process ends.
    """
    future = _start(acquire)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await _ended(future)
        if future.exception() is None and (resource := future.result()) is not None:
            resource.close()
        raise


def _start(function: Callable[[], T]) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(None, function)


async def _ended(future: asyncio.Future[T]) -> None:
    """Wait for the end of the work, however often the task is cancelled meanwhile; the caller raises anyway."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
