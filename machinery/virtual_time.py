"""An event loop whose time jumps to the next timer when no task is ready: hours pass in milliseconds.

Code that waits for timers only is deterministic in it. Must not be used by code that waits for another process, whose
time does not jump.
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


# When a loop ends, asyncio joins its threads in a thread of its own, which is not counted here.
_THREAD_WAIT_S = 1.0
# More turns of the loop than any burst of work takes: some task loops without waiting.
_MAX_TURNS = 100_000
# The virtual time of one turn. Without it a wait for the rest of a rounding error would never end.
_TURN_S = 1e-9


class StalledError(RuntimeError):
    """Time cannot advance: every task waits and no timer is set, or the work at one moment never ends."""


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that advances the time and returns at once where the loop would wait for a timer."""

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
                self._turns = 0  # tasks that are cancelled now must be able to end
                raise StalledError(f"work at {self.now_s} s never ends: time cannot advance")
            return []  # tasks are ready; files and signals are polled before each jump
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
    """A selector event loop with its own time, which starts at 0. It waits for threads in real time."""

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
    """A `machinery.clock.Clock` on the running loop's time; the virtual machine never sleeps."""

    def now(self) -> datetime:
        return _EPOCH + timedelta(seconds=self.monotonic())

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def elapsed(self) -> float:
        return self.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in virtual time, and return its result.

    Raises:
        StalledError: time cannot advance.

    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
