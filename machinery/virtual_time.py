"""An event loop whose time jumps to the next timer when nothing is left to do: hours pass in milliseconds.

Whatever runs in it by timers alone is deterministic. Knows nothing of what is simulated. Must not be used where
anybody outside the process is waited for: nobody else's time jumps.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, TypeVarTuple, Unpack

from typing_extensions import override

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


# asyncio joins its threads in a thread of its own when a loop ends, of which nobody else hears.
_THREAD_WAIT_S = 1.0
# More turns of the loop than any burst of work takes: somebody goes round in circles.
_MAX_TURNS = 100_000
# What a turn takes. Without it who waits for the rest of a rounding error would wait for ever.
_TURN_S = 1e-9


class StalledError(RuntimeError):
    """Time cannot go on: every task waits and no timer is set, or work at one moment never ends."""


class _JumpingSelector(selectors.DefaultSelector):
    """Where the loop would wait for a timer, takes the wait for done."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.threads = 0
        self._turns = 0

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            self._turns += 1
            self.now_s += _TURN_S
            if self._turns > _MAX_TURNS:
                self._turns = 0  # what is cancelled now must be able to end
                raise StalledError(f"work at {self.now_s} s never ends: time cannot go on")
            return []  # there is work at hand; files and signals are looked at before each jump
        self._turns = 0
        if timeout is None and not self.threads:
            found = super().select(_THREAD_WAIT_S)
            if not found:
                raise StalledError("every task waits, and no timer is set")
            return found
        found = super().select(None if self.threads else 0)
        if not found and not self.threads:
            assert timeout is not None
            self.now_s += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """A selector event loop that owns its time, from 0 on. Threads are waited for in real time."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    @override
    def time(self) -> float:
        return self._jumping.now_s

    @override
    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[Unpack[Ts]], T],
        *args: *Ts,
    ) -> asyncio.Future[T]:
        self._jumping.threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, _: object) -> None:
        self._jumping.threads -= 1


class VirtualClock:
    """A `machinery.clock.Clock` of the running loop's time; nobody ever sleeps through it."""

    def now(self) -> datetime:
        return _EPOCH + timedelta(seconds=self.monotonic())

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def elapsed(self) -> float:
        return self.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end in virtual time, and return what came of it.

    Raises:
        StalledError: time cannot go on.

    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
