"""Calls that a transport around another one passes on unchanged."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from store import reads
from store.port import (
    Guard,
    KeyValue,
    Listing,
    Operation,
    ServerStatus,
    Transport,
    WatchBatch,
)


class ForwardedCalls(Protocol):
    """All calls of `inner`; lists are collected from the pages of the transport itself."""

    inner: Transport

    async def get(self, key: str) -> KeyValue | None:
        return await self.inner.get(key)

    async def list(self, prefix: str) -> Listing:
        return await reads.collect(lambda: self.pages(prefix))

    def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        return self.inner.pages(prefix)

    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        return await self.inner.commit(guards, operations)

    def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[WatchBatch]:
        return self.inner.watch(prefix, after_revision=after_revision)

    async def grant(self, ttl_s: int) -> int:
        return await self.inner.grant(ttl_s)

    async def keep_alive(self, lease: int) -> int:
        return await self.inner.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        await self.inner.revoke(lease)

    async def status(self) -> ServerStatus:
        return await self.inner.status()

    async def close(self) -> None:
        await self.inner.close()
