"""Waiting for a condition, with a limit: tests never sleep and hope."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def until(
    condition: Callable[[], T | None],
    *,
    limit_s: float = 30.0,
    what: str = "condition",
    every_s: float = 0.02,
) -> T:
    """Return the first truthy value of `condition`."""
    try:
        async with asyncio.timeout(limit_s):
            while True:
                value = condition()
                if value:
                    return value
                await asyncio.sleep(every_s)
    except TimeoutError:
        raise AssertionError(f"{what} did not come true within {limit_s} s") from None


async def until_async(
    condition: Callable[[], Awaitable[T | None]],
    *,
    limit_s: float = 30.0,
    what: str = "condition",
    every_s: float = 0.05,
) -> T:
    """Return the first truthy value that `condition` resolves to."""
    try:
        async with asyncio.timeout(limit_s):
            while True:
                value = await condition()
                if value:
                    return value
                await asyncio.sleep(every_s)
    except TimeoutError:
        raise AssertionError(f"{what} did not come true within {limit_s} s") from None
