"""A transport with faults: conflicts, lost answers, silence."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta

from typing_extensions import override

from store.errors import UnavailableError
from store.memory import MemoryTransport
from store.port import Guard, Listing, Operation

Before = Callable[[int], Awaitable[None]]


class FaultyTransport(MemoryTransport):
    """Counts calls, and runs `before` and `after` around every commit; both may raise."""

    def __init__(self, clock: "InstantClock") -> None:
        super().__init__(clock)
        self.commits = 0
        self.lists = 0
        self.before: Before = nothing
        self.after: Before = nothing

    @override
    async def list(self, prefix: str) -> Listing:
        self.lists += 1
        return await super().list(prefix)

    @override
    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        self.commits += 1
        turn = self.commits
        await self.before(turn)
        revision = await super().commit(guards, operations)
        await self.after(turn)
        return revision

    async def quietly(self, operations: Sequence[Operation]) -> None:
        """Write as another client would."""
        await super().commit([], operations)


class InstantClock:
    """A clock that only advances when somebody sleeps, and never really waits."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.slept_s)

    def monotonic(self) -> float:
        return self.slept_s

    def elapsed(self) -> float:
        return self.slept_s

    async def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        await asyncio.sleep(0)


async def nothing(_: int) -> None:
    return


def lost(*turns: int) -> Before:
    """Raise after these commits were applied, as if their answers were lost."""

    async def lose(turn: int) -> None:
        if turn in turns:
            raise UnavailableError("no answer", ambiguous=True)

    return lose
