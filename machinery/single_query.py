"""Blocking queries beside an event loop, such as of disks and sensors."""

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_QUERY_TIMEOUT_S: Final = 5.0


class SingleQuery(Generic[T]):
    """A blocking query that runs in a thread, at most one at a time: a lost network disk blocks its thread for minutes."""

    def __init__(self, query: Callable[[], T], *, limit_s: float = _QUERY_TIMEOUT_S) -> None:
        self._query = query
        self._limit_s = limit_s
        self._pending: asyncio.Future[T] | None = None

    async def ask(self) -> T | None:
        """Return the result; None if it is late, or an OSError."""
        is_late = self._pending is not None
        if self._pending is None:
            self._pending = asyncio.get_running_loop().run_in_executor(None, self._query)
        # A query that was late once is not waited for again.
        await asyncio.wait((self._pending,), timeout=0 if is_late else self._limit_s)
        if not self._pending.done():
            return None
        done, self._pending = self._pending, None
        try:
            return done.result()
        except OSError:
            return None
