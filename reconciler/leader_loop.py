"""The work of a leader: commits that only a leader can make, and loops that end with the leadership."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from typing_extensions import override

from machinery.control_loop import AuthorityLostError, Requeue, WorkQueue, run_loop
from store.errors import ConflictError, FencedError, StoreError
from store.forwarding import ForwardedCalls
from store.leases import Leadership
from store.port import CreateRevisionGuard, Guard, Operation, Transport

K = TypeVar("K")


class FencedTransport(ForwardedCalls):
    """A transport whose commits succeed only while this process leads.

    Raises:
        FencedError: another process leads, even if this process has not noticed it yet.

    """

    def __init__(self, inner: Transport, fence: Guard) -> None:
        self.inner = inner
        self._fence = fence

    @override
    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        try:
            return await self.inner.commit([self._fence, *guards], operations)
        except ConflictError as error:
            # The failed guard decides: retry for one of the caller's, stop for the fence.
            if await self._holds():
                raise
            raise FencedError("another reconciler leads now") from error

    async def _holds(self) -> bool:
        item = await self.inner.get(self._fence.key)
        if item is None or not isinstance(self._fence, CreateRevisionGuard):
            return False
        return item.create_revision == self._fence.create_revision

    @override
    async def close(self) -> None:
        """Do nothing: the inner transport is closed by its owner."""


async def run_as_leader(
    queue: WorkQueue[K],
    reconcile: Callable[[K], Awaitable[Requeue | None]],
    leadership: Leadership,
    *,
    workers: int,
) -> None:
    """Reconcile the keys of a queue forever, as many at a time as there are workers.

    Raises:
        AuthorityLostError: this process leads no longer (in an exception group).

    """

    async def reconcile_as_leader(key: K) -> Requeue | None:
        if not leadership.valid():
            raise AuthorityLostError("the lease ended")
        try:
            return await reconcile(key)
        except FencedError as error:
            raise AuthorityLostError(str(error)) from error

    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(run_loop(queue, reconcile_as_leader, transient=(StoreError,)))
