"""The control loop and its work queue, as in controller-runtime and client-go: a key waits once and has one worker.

The queue carries keys, never events: the reconciler reads the current state, not the change. The loop alone decides
about retries.
"""

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from machinery.backoff import Backoff
from machinery.clock import Clock

K = TypeVar("K", bound=Hashable)
log = logging.getLogger(__name__)

# After an outage of the store the work must go on within seconds.
_TRANSIENT_S = 5.0


# While there are changes, each so many of them let one key of the backlog go before them.
_CHANGES_PER_BACKLOG_KEY = 4


class WorkQueue(Generic[K]):
    """A queue of distinct keys to reconcile. Owned by one event loop.

    Keys that changed go before the backlog, which is what a process queues when it starts, whether it changed or not. The
    priority queue of controller-runtime does the same: otherwise a new leader would look at the whole fleet before it
    acted on a change.
    """

    def __init__(self, clock: Clock, backoff: Backoff | None = None) -> None:
        self._clock = clock
        self._backoff = backoff or Backoff(first_s=0.05, limit_s=30.0)
        self._ready: deque[K] = deque()
        self._backlog: dict[K, None] = {}
        """The keys that are ready and did not change, in order."""
        self._taken = 0
        self._waiting: set[K] = set()
        self._busy: set[K] = set()
        self._due: dict[K, float] = {}
        self._earliest = math.inf
        """No key is due before; thousands may wait, and are not read for each key that is taken."""
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()

    def add(self, key: K) -> None:
        """Queue the key now; a key that waits already is not queued twice."""
        self._due.pop(key, None)
        if key in self._backlog:
            del self._backlog[key]
        elif key in self._waiting:
            return
        self._waiting.add(key)
        # done() queues a busy key again: two workers never hold one key.
        if key not in self._busy:
            self._ready.append(key)
            self._changed.set()

    def add_to_backlog(self, key: K) -> None:
        """Queue the key behind those that changed; a key that waits already keeps its place."""
        self._due.pop(key, None)
        if key in self._waiting:
            return
        if key in self._busy:
            self.add(key)
            return
        self._waiting.add(key)
        self._backlog[key] = None
        self._changed.set()

    def clear(self) -> None:
        """Drop every key that no worker has; failures stay counted."""
        self._ready.clear()
        self._backlog.clear()
        self._waiting.clear()
        self._due.clear()
        self._earliest = math.inf

    def add_after(self, key: K, delay_s: float) -> None:
        """Queue the key in `delay_s` seconds, unless it is due earlier."""
        if key in self._waiting:
            return
        due = self._clock.monotonic() + delay_s
        if key not in self._due or due < self._due[key]:
            self._due[key] = due
            self._earliest = min(self._earliest, due)
            self._changed.set()

    def retry(self, key: K, *, jitter: float, limit_s: float = math.inf) -> float:
        """Queue the key after its next backoff, of `limit_s` seconds at most; return the delay in seconds."""
        self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = min(self._backoff.delay_s(self._failures[key], jitter=jitter), limit_s)
        self.add_after(key, delay_s)
        return delay_s

    def forget(self, key: K) -> None:
        """Reset the failure count of the key."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """Wait for a key and take it; the caller must call `done()` afterwards."""
        while True:
            self._promote()
            if self._ready or self._backlog:
                key = self._take()
                self._waiting.discard(key)
                self._busy.add(key)
                return key
            await self._wait()

    def _take(self) -> K:
        self._taken += 1
        is_backlogs_turn = self._taken % (_CHANGES_PER_BACKLOG_KEY + 1) == 0
        if self._ready and not (self._backlog and is_backlogs_turn):
            return self._ready.popleft()
        key = next(iter(self._backlog))
        del self._backlog[key]
        return key

    def done(self, key: K) -> None:
        """Give the key back; it becomes ready again if it was added meanwhile."""
        self._busy.discard(key)
        if key in self._waiting:
            self._ready.append(key)
            self._changed.set()

    def __len__(self) -> int:
        return len(self._waiting)

    def _promote(self) -> None:
        now = self._clock.monotonic()
        if now < self._earliest:
            return
        for key in [key for key, due in self._due.items() if due <= now]:
            self.add(key)
        self._earliest = min(self._due.values(), default=math.inf)

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


class TerminalError(Exception):
    """A retry does not help until the object changes."""


class AuthorityLostError(Exception):
    """The right to act is lost (leadership, lease): the whole loop must end."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Reconcile the key again in `after_s` seconds, though nothing failed."""

    after_s: float


def soonest_s(*delays_s: float | None) -> float | None:
    """Return the shortest of the delays; None if all are None."""
    return min((delay_s for delay_s in delays_s if delay_s is not None), default=None)


async def run_loop(
    queue: WorkQueue[K],
    reconcile: Callable[[K], Awaitable[Requeue | None]],
    *,
    transient: tuple[type[Exception], ...] = (),
) -> None:
    """Reconcile the keys of the queue forever, one at a time.

    `transient` errors are expected (the store is unreachable, another writer was first): the key is retried with
    backoff and one log line. Any other error is a defect: the key is retried too, and the traceback is logged.

    Raises:
        AuthorityLostError: the loop must not act any more.

    """
    while True:
        key = await queue.get()
        try:
            result = await reconcile(key)
        except AuthorityLostError:
            raise
        except TerminalError:
            log.exception("reconcile gave up until the object changes", extra={"key": str(key)})
            queue.forget(key)
        except transient as error:
            delay_s = queue.retry(key, jitter=random.random(), limit_s=_TRANSIENT_S)
            log.info(
                "reconcile will be retried",
                extra={"key": str(key), "why": str(error), "after_s": round(delay_s, 3)},
            )
        except Exception:  # the one place that may: see house rule 7
            queue.retry(key, jitter=random.random())
            log.exception("reconcile failed", extra={"key": str(key)})
        else:
            queue.forget(key)
            if result is not None:
                queue.add_after(key, result.after_s)
        finally:
            queue.done(key)
        # A reconcile that finds nothing to do never waits. Thousands in a row would block the event loop, and leases
        # would expire.
        await asyncio.sleep(0)
