"""A queue of keys, as client-go has it: a key waits once, and is worked on by one worker at a time.

It carries keys, never events: who takes a key looks at what is, not at what happened.

The control loop: takes keys, has them reconciled, and alone decides about retries.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from machinery.backoff import Backoff
from machinery.clock import Clock

K = TypeVar("K", bound=Hashable)


class WorkQueue(Generic[K]):
    """De-duplicated keys that await reconciling. Owned by one event loop."""

    def __init__(self, clock: Clock, backoff: Backoff | None = None) -> None:
        self._clock = clock
        self._backoff = backoff or Backoff(first_s=0.05, limit_s=30.0)
        self._ready: deque[K] = deque()
        self._waiting: set[K] = set()
        self._busy: set[K] = set()
        self._due: dict[K, float] = {}
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()

    def add(self, key: K) -> None:
        """Ask for a look at the key now; asking twice is asking once."""
        self._due.pop(key, None)
        if key in self._waiting:
            return
        self._waiting.add(key)
        # A busy key is queued again by done(): two workers never hold one key.
        if key not in self._busy:
            self._ready.append(key)
            self._changed.set()

    def add_after(self, key: K, delay_s: float) -> None:
        """Ask for a look in `delay_s` seconds, unless an earlier one is due."""
        if key in self._waiting:
            return
        due = self._clock.monotonic() + delay_s
        if key not in self._due or due < self._due[key]:
            self._due[key] = due
            self._changed.set()

    def retry(self, key: K, *, jitter: float) -> float:
        """Ask for a look after the key's next backoff; return the delay in seconds."""
        self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = self._backoff.delay_s(self._failures[key], jitter=jitter)
        self.add_after(key, delay_s)
        return delay_s

    def forget(self, key: K) -> None:
        """Take the failures of a key as mended."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """Wait for a key and take it; done() must follow."""
        while True:
            self._promote()
            if self._ready:
                key = self._ready.popleft()
                self._waiting.discard(key)
                self._busy.add(key)
                return key
            await self._wait()

    def done(self, key: K) -> None:
        """Give a key back; if it was added meanwhile it is ready again."""
        self._busy.discard(key)
        if key in self._waiting:
            self._ready.append(key)
            self._changed.set()

    def __len__(self) -> int:
        return len(self._waiting)

    def _promote(self) -> None:
        now = self._clock.monotonic()
        for key in [key for key, due in self._due.items() if due <= now]:
            self.add(key)

    async def _wait(self) -> None:
        self._changed.clear()
        if not self._due:
            await self._changed.wait()
            return
        async with asyncio.TaskGroup() as group:
            alarm = group.create_task(
                self._ring_after(min(self._due.values()) - self._clock.monotonic())
            )
            await self._changed.wait()
            alarm.cancel()

    async def _ring_after(self, delay_s: float) -> None:
        await self._clock.sleep(max(0.0, delay_s))
        self._changed.set()


log = logging.getLogger(__name__)


class TerminalError(Exception):
    """Looking again will not help until the object changes."""


class AuthorityLostError(Exception):
    """The right to act is gone (leadership, lease): the whole loop must end."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Look again in `after_s` seconds, though nothing failed."""

    after_s: float


async def run_loop(
    queue: WorkQueue[K],
    reconcile: Callable[[K], Awaitable[Requeue | None]],
    *,
    transient: tuple[type[Exception], ...] = (),
) -> None:
    """Work off the queue for ever, one key at a time.

    `transient` errors are expected (the store is away, somebody else wrote first): retried with
    backoff and one line of log. Anything else is a defect of ours: retried too, with its traceback.

    Raises:
        LostError: the loop may not act any more.

    """
    while True:
        key = await queue.get()
        try:
            verdict = await reconcile(key)
        except AuthorityLostError:
            raise
        except TerminalError:
            log.exception("reconcile gave up until the object changes", extra={"key": str(key)})
            queue.forget(key)
        except transient as error:
            delay_s = queue.retry(key, jitter=random.random())
            log.info(
                "reconcile will be tried again",
                extra={"key": str(key), "error": str(error), "after_s": round(delay_s, 3)},
            )
        except Exception:  # the one place that may: see house rule 7
            queue.retry(key, jitter=random.random())
            log.exception("reconcile failed", extra={"key": str(key)})
        else:
            queue.forget(key)
            if verdict is not None:
                queue.add_after(key, verdict.after_s)
        finally:
            queue.done(key)
        # A look that finds nothing to do waits for nothing. Thousands of them in a row would keep everybody else
        # from running: leases would end unrenewed.
        await asyncio.sleep(0)
