"""Work on thousands of objects in a thread beside the leader's loop, which has leases to renew meanwhile.

The work runs in an event loop of its own; what it asks of the store is done by the leader's. Comparing ten thousand
objects takes seconds: in the leader's loop they would cost it the lead.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from store.errors import FencedError
from store.port import (
    Guard,
    KeyValue,
    Listing,
    Operation,
    ServerStatus,
    Transport,
    WatchBatch,
)

T = TypeVar("T")


async def offload(transport: Transport, work: Callable[[Transport], Coroutine[Any, Any, T]]) -> T:
    """Return what the work returns, done in a thread; when this is cancelled, the work ends at its next request."""
    bridge = OffloadedTransport(transport, asyncio.get_running_loop())
    try:
        return await asyncio.to_thread(lambda: asyncio.run(work(bridge)))
    finally:
        bridge.close_down()


class OffloadedTransport:
    """A transport for another loop: every request is carried out by the loop that has the connection."""

    def __init__(self, inner: Transport, home: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._home = home
        self._is_down = False

    def close_down(self) -> None:
        """Refuse all requests from now on."""
        self._is_down = True

    async def _there(self, request: Coroutine[Any, Any, T]) -> T:
        if self._is_down:
            request.close()
            raise FencedError("the work that this was for has been given up")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(request, self._home))

    async def get(self, key: str) -> KeyValue | None:
        return await self._there(self._inner.get(key))

    async def list(self, prefix: str) -> Listing:
        return await self._there(self._inner.list(prefix))

    async def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        pages = self._inner.pages(prefix)
        try:
            while (page := await self._there(_next(pages))) is not None:
                yield page
        finally:
            await self._there(_closed(pages))

    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        return await self._there(self._inner.commit(guards, operations))

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[WatchBatch]:
        batches = self._inner.watch(prefix, after_revision=after_revision)
        try:
            while (batch := await self._there(_next(batches))) is not None:
                yield batch
        finally:
            await self._there(_closed(batches))

    async def grant(self, ttl_s: int) -> int:
        return await self._there(self._inner.grant(ttl_s))

    async def keep_alive(self, lease: int) -> int:
        return await self._there(self._inner.keep_alive(lease))

    async def revoke(self, lease: int) -> None:
        await self._there(self._inner.revoke(lease))

    async def status(self) -> ServerStatus:
        return await self._there(self._inner.status())

    async def close(self) -> None:
        """Leave the transport to who opened it."""


async def _next(found: AsyncGenerator[T]) -> T | None:
    return await anext(found, None)


async def _closed(found: AsyncGenerator[Any]) -> None:
    await found.aclose()
