"""Calls that a transport around another one passes on unchanged."""

from collections.abc import AsyncGenerator
from typing import Protocol

from store import reads
from store.port import Listing, ServerStatus, Transport


class ForwardedCalls(Protocol):
    """Leases, status and closing of `inner`, and lists that are collected from the pages of the transport itself."""

    inner: Transport

    def pages(self, prefix: str) -> AsyncGenerator[Listing]: ...

    async def list(self, prefix: str) -> Listing:
        return await reads.collect(lambda: self.pages(prefix))

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
