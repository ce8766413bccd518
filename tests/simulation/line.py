"""One process's line to the store: it loses requests and answers, breaks watches, and can be cut for good."""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from store.errors import ConflictError, StoreError, UnavailableError
from store.memory import MemoryTransport
from store.port import Guard, KeyValue, Listing, Operation, ServerStatus, WatchBatch


@dataclass(slots=True)
class Weather:
    """The faults of all lines: probabilities per call."""

    lost_answer: float = 0.0
    lost_request: float = 0.0
    conflict: float = 0.0
    broken_watch: float = 0.0
    late_write: float = 0.0
    """The writer is told that nobody knows, and then it is done all the same."""

    def become(self, other: "Weather") -> None:
        """Change for all lines at once."""
        self.lost_answer, self.lost_request = other.lost_answer, other.lost_request
        self.conflict, self.broken_watch = other.conflict, other.broken_watch
        self.late_write = other.late_write


class Line:
    """A `store.port.Transport`. Once cut, nothing passes: so the store sees a kill -9."""

    def __init__(
        self,
        store: MemoryTransport,
        dice: random.Random,
        weather: Weather,
        group: asyncio.TaskGroup,
    ) -> None:
        self._store = store
        self._dice = dice
        self._weather = weather
        self._group = group
        self.frozen_until = 0.0
        """Until then whatever is asked waits, as in a process that is stopped and goes on later."""
        self.is_cut = False
        self.breaks = 0
        """Counts up when every watch is to break."""

    async def _check(self) -> None:
        left_s = self.frozen_until - asyncio.get_running_loop().time()
        if left_s > 0:
            await asyncio.sleep(left_s)
        if self.is_cut:
            raise UnavailableError("the line is cut")
        if self._happens(self._weather.lost_request):
            raise UnavailableError("the request was lost")

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self._dice.random() < probability

    async def get(self, key: str) -> KeyValue | None:
        await self._check()
        return await self._store.get(key)

    async def list(self, prefix: str) -> Listing:
        await self._check()
        return await self._store.list(prefix)

    async def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        await self._check()
        async for page in self._store.pages(prefix):
            yield page
            await self._check()

    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        await self._check()
        if guards and self._happens(self._weather.conflict):
            raise ConflictError("somebody wrote at the same time")
        if self._happens(self._weather.late_write):
            self._group.create_task(self._commit_late(guards, operations))
            raise UnavailableError("no answer in time", ambiguous=True)
        revision = await self._store.commit(guards, operations)
        if self._happens(self._weather.lost_answer):
            raise UnavailableError("the answer was lost", ambiguous=True)
        return revision

    async def _commit_late(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> None:
        await asyncio.sleep(self._dice.choice((0.1, 1.0, 5.0)))
        with suppress(StoreError):
            await self._store.commit(guards, operations)

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[WatchBatch]:
        await self._check()
        breaks = self.breaks
        async for batch in self._store.watch(prefix, after_revision=after_revision):
            if self.is_cut or self.breaks != breaks or self._happens(self._weather.broken_watch):
                raise UnavailableError("the stream broke")
            yield batch

    async def grant(self, ttl_s: int) -> int:
        await self._check()
        return await self._store.grant(ttl_s)

    async def keep_alive(self, lease: int) -> int:
        await self._check()
        return await self._store.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        await self._check()
        await self._store.revoke(lease)

    async def status(self) -> ServerStatus:
        await self._check()
        return await self._store.status()

    async def close(self) -> None:
        return
