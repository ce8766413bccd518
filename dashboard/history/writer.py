"""Writer of the history: one thread that writes batches behind the event loop, which never waits for the disk.

A disk that is full, slow or gone costs history and nothing else: what waits is bounded, the oldest is dropped and
counted, and `problem` says why.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from dashboard.history.database import (
    DAMAGED,
    FILE,
    DamagedError,
    HistoryError,
    HistoryFile,
    HistoryLimits,
    Restored,
    set_aside,
)
from dashboard.history.records import Batch, KeyRevision, Sample
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from schemas.wire.requests import EndedRequest

log = logging.getLogger(__name__)

_BATCH_S: Final = 2.0
_PRUNE_S: Final = 300.0
_OPEN_S: Final = 10.0
_CLOSE_S: Final = 5.0
# Waiting for a disk that does not take them: ten minutes of samples, a few minutes of requests of a busy fleet.
_MOST_SAMPLES: Final = 180
_MOST_REQUESTS: Final = 20_000
_MOST_REVISIONS: Final = 2000
_RETRY: Final = Backoff(first_s=1.0, limit_s=30.0)


@dataclass(frozen=True, slots=True)
class _Work:
    """One batch for the thread, and whether old rows are removed after it; by age only while the clock is trusted."""

    batch: Batch
    prune_at_s: float | None = None
    by_age: bool = False
    reply: Callable[[Restored], None] | None = None
    """Called with what the file holds after it."""


class HistoryWriter:
    """Takes what is to be written, and writes it. Run `run()` in a task group; `restored` is there after `opened()`."""

    def __init__(self, folder: Path, clock: Clock, limits: HistoryLimits) -> None:
        self.folder: Final = folder
        self.limits: Final = limits
        self.problem = "it was not opened yet"
        """The reason why nothing is written now; empty if it is."""
        self.lost = 0
        """The number of samples and requests that were dropped."""
        self.used_bytes = 0
        self.restored: Restored | None = None
        self.damaged_times = 0
        """Number of times that a damaged file was set aside."""
        self.is_clock_trusted = False
        """True while old rows may be removed by their age."""
        self._clock = clock
        self._waiting = Batch()
        self._since: list[EndedRequest] | None = None
        """Requests that were added since the file is read again; None if it is not."""
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._is_idle = True
        self._stop = threading.Event()
        self._opened = asyncio.Event()
        self._file: HistoryFile | None = None
        self._retries = Retries(_RETRY, clock)
        self._pruned_s = float("-inf")

    def add_samples(self, samples: Sequence[Sample]) -> None:
        """Write samples soon."""
        waiting = self._waiting.samples
        waiting += samples
        self._drop(waiting, _MOST_SAMPLES)

    def add_requests(self, ended: Sequence[EndedRequest], cursors: Mapping[str, str]) -> None:
        """Write ended requests of a gateway soon; with them its cursors after the last of them."""
        self._waiting.requests += ended
        if self._since is not None:
            self._since += ended
        self._waiting.cursors |= cursors
        self._drop(self._waiting.requests, _MOST_REQUESTS)

    def add_revisions(self, revisions: Sequence[KeyRevision]) -> None:
        """Write revisions of keys soon; call it only while there is room."""
        self._waiting.revisions += revisions

    @property
    def room(self) -> int:
        """The number of revisions that can be added now."""
        return max(0, _MOST_REVISIONS - len(self._waiting.revisions))

    def _drop(self, waiting: list[Sample] | list[EndedRequest], most: int) -> None:
        surplus = len(waiting) - most
        if surplus > 0:
            del waiting[:surplus]
            self.lost += surplus

    async def opened(self) -> Restored | None:
        """Wait until the file is open; return what it holds, or None if it cannot be read within ten seconds."""
        try:
            async with asyncio.timeout(_OPEN_S):
                await self._opened.wait()
        except TimeoutError:
            log.warning("the history does not open in time", extra={"folder": str(self.folder)})
        return self.restored

    async def reread(self) -> tuple[Restored | None, list[EndedRequest]]:
        """Write what waits; return what the file holds then, and the requests that were added meanwhile.

        The former is None if that takes longer than ten seconds.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Restored] = loop.create_future()

        def give(restored: Restored) -> None:
            if not future.done():
                future.set_result(restored)

        def reply(restored: Restored) -> None:
            loop.call_soon_threadsafe(give, restored)

        self._put(_Work(self._take(), reply=reply))
        self._since = []
        restored = None
        try:
            async with asyncio.timeout(_OPEN_S):
                restored = await future
        except TimeoutError:
            log.warning("the history is not read in time", extra={"folder": str(self.folder)})
        since, self._since = self._since, None
        return restored, since

    async def run(self) -> None:
        """Hand batches to the thread forever; at the end, write the rest if the disk is fast enough."""
        loop = asyncio.get_running_loop()
        now_s = self._clock.now().timestamp()
        # Not a thread of the event loop's pool: the process would wait for one with a hanging disk.
        thread = threading.Thread(
            target=self._live, args=(loop, now_s), name="history", daemon=True
        )
        thread.start()
        try:
            while True:
                await self._clock.sleep(_BATCH_S)
                if self._is_idle:
                    self._hand_over()
        finally:
            self._stop.set()
            self._hand_over()
            self._work.put(None)
            thread.join(_CLOSE_S)

    def _hand_over(self) -> None:
        now_s, elapsed_s = self._clock.now().timestamp(), self._clock.elapsed()
        prune_at_s = None
        if elapsed_s - self._pruned_s >= _PRUNE_S:
            self._pruned_s, prune_at_s = elapsed_s, now_s
        if self._waiting or prune_at_s is not None:
            self._put(_Work(self._take(), prune_at_s, self.is_clock_trusted))

    def _take(self) -> Batch:
        """Return what waits, with the time now."""
        batch, self._waiting = self._waiting, Batch()
        batch.at_s = self._clock.now().timestamp()
        return batch

    def _put(self, work: _Work) -> None:
        self._is_idle = False
        self._work.put(work)

    def _live(self, loop: asyncio.AbstractEventLoop, now_s: float) -> None:
        """Open the file, write batches, close the file: the life of the thread."""
        try:
            self._serve(loop, now_s)
        finally:
            self.problem = self.problem or "its thread has ended"

    def _serve(self, loop: asyncio.AbstractEventLoop, now_s: float) -> None:
        # The second time, a damaged file was set aside.
        for _ in range(2):
            if self._try_to(partial(self._open, now_s)):
                break
        loop.call_soon_threadsafe(self._opened.set)
        while (work := self._work.get()) is not None:
            while not self._try_to(partial(self._do, work)):
                if self._stop.wait(self._retries.next_delay_s()):
                    break
            self._is_idle = True
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, now_s: float) -> None:
        self._file = HistoryFile(self.folder, self.limits)
        self.restored = self._file.restore(now_s)
        self.used_bytes = self._file.used_bytes

    def _do(self, work: _Work) -> None:
        if self._file is None:
            self._file = HistoryFile(self.folder, self.limits)
        self._file.write(work.batch)
        self.used_bytes = self._file.used_bytes
        if work.reply is not None:
            work.reply(self._file.restore(work.batch.at_s))
        is_full = self.used_bytes > self.limits.file_bytes
        fields = {"bytes": self.used_bytes, "is_full": is_full, "by_age": work.by_age}
        log.debug("history written", extra={**fields, "prunes": work.prune_at_s is not None})
        if work.prune_at_s is not None or is_full:
            at_s = work.batch.at_s if work.prune_at_s is None else work.prune_at_s
            self._file.prune(at_s, by_age=work.by_age)

    def _try_to(self, act: Callable[[], None]) -> bool:
        """Do something with the file; return whether that succeeded. A damaged file is set aside."""
        try:
            act()
        except HistoryError as error:
            self._fail(error)
            return False
        if self.problem:
            log.info("the history is written", extra={"folder": str(self.folder)})
        self.problem = ""
        self._retries.reset()
        return True

    def _fail(self, error: HistoryError) -> None:
        self._close()
        why = str(error)
        try:
            if isinstance(error, DamagedError):
                set_aside(self.folder)
                self.damaged_times += 1
                why = f"{FILE} was damaged ({error}); it is {DAMAGED} now"
        except HistoryError as failed:
            why = str(failed)
        if why != self.problem:
            log.error(
                "the history is not written; everything else goes on",
                extra={"folder": str(self.folder), "why": why},
            )
        self.problem = why
