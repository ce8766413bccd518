"""The store as a leader may write it: every transaction is guarded by the leadership. Decides nothing."""

from collections.abc import AsyncGenerator, Sequence

from store.errors import ConflictError, FencedError
from store.port import (
    CreatedAt,
    Guard,
    KeyValue,
    Listing,
    Operation,
    ServerStatus,
    Transport,
    WatchBatch,
)


class Fenced:
    """A transport whose commits hold only while the fence does.

    Raises:
        FencedError: the fence is gone, be it that this process does not know yet.

    """

    def __init__(self, inner: Transport, fence: Guard) -> None:
        self._inner = inner
        self._fence = fence

    async def get(self, key: str) -> KeyValue | None:
        return await self._inner.get(key)

    async def list(self, prefix: str) -> Listing:
        return await self._inner.list(prefix)

    def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        return self._inner.pages(prefix)

    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        try:
            return await self._inner.commit([self._fence, *guards], operations)
        except ConflictError as error:
            # Which guard it was decides whether to look again or to stop.
            if await self._holds():
                raise
            raise FencedError("another reconciler leads by now") from error

    async def _holds(self) -> bool:
        found = await self._inner.get(self._fence.key)
        if found is None or not isinstance(self._fence, CreatedAt):
            return False
        return found.create_revision == self._fence.create_revision

    def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[WatchBatch]:
        return self._inner.watch(prefix, after_revision=after_revision)

    async def grant(self, ttl_s: int) -> int:
        return await self._inner.grant(ttl_s)

    async def keep_alive(self, lease: int) -> int:
        return await self._inner.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        await self._inner.revoke(lease)

    async def status(self) -> ServerStatus:
        return await self._inner.status()

    async def close(self) -> None:
        """Leave the transport to who opened it."""
