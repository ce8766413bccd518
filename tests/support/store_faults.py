"""A transport around another one with faults on demand: outages, lost answers, counts of calls."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from typing_extensions import override

from store.errors import StoreError, UnavailableError
from store.forwarding import ForwardedCalls
from store.port import Guard, KeyValue, Listing, Operation, ServerStatus, Transport, WatchBatch


class FaultyTransport(ForwardedCalls):
    """A `store.port.Transport` that fails on demand."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.lists = 0
        self.watches = 0
        self.renewals = 0
        self.revoked = 0
        self.renewal_fails: StoreError | None = None
        self.answers_to_lose = 0
        self.commits_to_lose = 0
        self.before_list: Callable[[], Awaitable[object]] | None = None
        self.between_pages: Callable[[], Awaitable[object]] | None = None
        self._is_away = False
        self._left = asyncio.Event()

    def leave(self) -> None:
        """Stop answering, and break the open streams."""
        self._is_away = True
        self._left.set()

    def come_back(self) -> None:
        self._is_away = False
        self._left = asyncio.Event()

    def _check(self) -> None:
        if self._is_away:
            raise UnavailableError("the store is away")

    @override
    async def get(self, key: str) -> KeyValue | None:
        self._check()
        return await self.inner.get(key)

    @override
    async def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        self._check()
        self.lists += 1
        if self.before_list is not None:
            await self.before_list()
        async with aclosing(self.inner.pages(prefix)) as pages:
            async for page in pages:
                yield page
                self._check()
                if self.between_pages is not None:
                    await self.between_pages()

    @override
    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        self._check()
        if self.commits_to_lose:
            self.commits_to_lose -= 1
            raise UnavailableError("lost on the way there", ambiguous=True)
        revision = await self.inner.commit(guards, operations)
        if self.answers_to_lose:
            self.answers_to_lose -= 1
            raise UnavailableError("lost on the way back", ambiguous=True)
        return revision

    @override
    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[WatchBatch]:
        self._check()
        self.watches += 1
        event = self._left
        async with aclosing(self.inner.watch(prefix, after_revision=after_revision)) as watch:
            while True:
                yield await self._next(watch, event)

    async def _next(self, watch: AsyncGenerator[WatchBatch], left: asyncio.Event) -> WatchBatch:
        async def step() -> WatchBatch | StoreError:
            try:
                return await anext(watch)
            except StoreError as error:
                return error

        async with asyncio.TaskGroup() as group:
            coming = group.create_task(step())
            leaving = group.create_task(left.wait())
            await asyncio.wait({coming, leaving}, return_when=asyncio.FIRST_COMPLETED)
            coming.cancel()
            leaving.cancel()
        if coming.cancelled():
            raise UnavailableError("the store went away")
        got = coming.result()
        if isinstance(got, StoreError):
            raise got
        return got

    @override
    async def grant(self, ttl_s: int) -> int:
        self._check()
        return await self.inner.grant(ttl_s)

    @override
    async def keep_alive(self, lease: int) -> int:
        self._check()
        if self.renewal_fails is not None:
            raise self.renewal_fails
        self.renewals += 1
        return await self.inner.keep_alive(lease)

    @override
    async def revoke(self, lease: int) -> None:
        self._check()
        self.revoked += 1
        await self.inner.revoke(lease)

    @override
    async def status(self) -> ServerStatus:
        self._check()
        return await self.inner.status()
