"""The download of one file: it goes on where an earlier one ended, retries, and publishes only verified bytes."""

import errno
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from models.hub.bandwidth import BandwidthLimit
from models.hub.blob_source import BlobSources, BlobTransfer
from models.hub.errors import (
    HashMismatchError,
    HubRateLimitedError,
    HubUnreachableError,
    InsufficientDiskError,
)
from models.hub.model_hub import RemoteFile
from models.hub.progress import FetchMonitor
from models.hub.threads import acquire_in_thread, run_in_thread
from models.model_store.partial_file import PartialFile, open_partial
from models.model_store.store import ModelStore

_BACKOFF: Final = Backoff(first_s=1.0, limit_s=60.0)
# How often the file of another fetch is looked at.
_POLL_S: Final = 0.5
# Bytes that are handed to a thread at once.
_WRITE_BYTES: Final = 1 << 20
# A stream that brings less than this in the time is cut: a new one may be faster. An own limit of the rate may be low.
_STALL_S: Final = 300.0
_STALL_BYTES: Final = 16 << 10
# The least that a hub's wish to wait counts for.
_LEAST_WAIT_S: Final = 1.0


@dataclass(kw_only=True)
class FetchRetries:
    """The retries of one fetch: consecutive failures for each file, and a budget of waits for all of them."""

    clock: Clock
    attempts: int
    """Consecutive failures of a request without a new byte before its error counts."""
    rate_limit_wait_s: float
    """Seconds left to wait for rate limits."""
    _paused_until: float = field(default=0.0, init=False)

    def start(self) -> Retries:
        """Return the counter of one request."""
        return Retries(_BACKOFF, self.clock)

    async def wait_after(
        self,
        error: HubRateLimitedError | HubUnreachableError,
        retries: Retries,
        monitor: FetchMonitor,
    ) -> None:
        """Wait before the next attempt; raise the error again if there is none left."""
        if isinstance(error, HubRateLimitedError):
            # Wait as long as the hub asks for, plus a jitter; files that wait at the same time
            # share the budget.
            now = self.clock.monotonic()
            told = max(_LEAST_WAIT_S, error.retry_after_s)
            if now + told > self._paused_until:
                more = now + told - max(now, self._paused_until)
                if more > self.rate_limit_wait_s:
                    raise error
                self.rate_limit_wait_s -= more
                self._paused_until = now + told
            monitor.waiting = f"{error}; the fetch goes on in {told:.0f} s"
            await self.clock.sleep(self._paused_until - now + self.start().next_delay_s())
            monitor.waiting = ""
            return
        delay = retries.next_delay_s()
        if retries.failures >= self.attempts:
            raise error
        monitor.waiting = f"{error}; the next attempt is in {delay:.0f} s"
        await self.clock.sleep(delay)
        monitor.waiting = ""


class _StallGuard:
    """Notices a stream that is alive and brings almost nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock.monotonic()
        self._count = 0

    def is_stalled_after(self, count: int) -> bool:
        """Count bytes; return True if the last minutes brought too few."""
        self._count += count
        now = self._clock.monotonic()
        if now - self._since < _STALL_S:
            return False
        is_stalled = self._count < _STALL_BYTES
        self._since, self._count = now, 0
        return is_stalled


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobDownload:
    """Downloads the files of one commit into the store."""

    sources: BlobSources
    repo: str
    commit: str
    store: ModelStore
    clock: Clock
    monitor: FetchMonitor
    bandwidth: BandwidthLimit
    retries: FetchRetries
    piece_bytes: int

    async def fetch(self, file: RemoteFile) -> None:
        """Return when the file's content is in the store, also if another fetch brought it.

        Raises:
            ModelFetchError: it cannot be had, or has the wrong content.
            OSError: the disk failed.

        """
        counted = 0
        while not await run_in_thread(self.store.has_blob, file.digest):
            part = await acquire_in_thread(partial(self._open, file))
            if part is None:  # another fetch of the same content: follow its file
                counted += self._count(await run_in_thread(self._part_size, file) - counted)
                await self.clock.sleep(_POLL_S)
                continue
            self._count(-counted)
            self.store.growing[file.digest] = part
            try:
                async with self.sources.transfer(file) as transfer:
                    await self._complete(file, part, transfer)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise self._full_disk_error(file) from error
                raise
            finally:
                del self.store.growing[file.digest]
                await run_in_thread(part.close)
            return
        self._count(file.size - counted)

    def _open(self, file: RemoteFile) -> PartialFile | None:
        path = self.store.part_path(file.digest)
        part = open_partial(path, file.digest, size=file.size, piece_bytes=self.piece_bytes)
        if part is not None and self.store.has_blob(file.digest):  # published a moment ago
            part.discard()
            part.close()
            return None
        return part

    def _part_size(self, file: RemoteFile) -> int:
        try:
            return min(file.size, self.store.part_path(file.digest).stat().st_size)
        except OSError:
            return 0

    def _count(self, more: int) -> int:
        self.monitor.present_bytes += more
        return more

    async def _complete(self, file: RemoteFile, part: PartialFile, transfer: BlobTransfer) -> None:
        before = 0
        while await run_in_thread(part.verify_next):
            self.monitor.phase = "Verifying"
            before += self._count(part.offset - before)
        self.monitor.phase = "Downloading"
        is_resumed = part.offset > 0
        await self._receive(file, part, transfer)
        while True:
            try:
                await self._publish(file, part, transfer)
            except HashMismatchError:
                # The bytes of an earlier fetch may be the wrong ones, such as those of a mirror that was mended since.
                if not (await transfer.reject() or is_resumed):
                    raise
                is_resumed = False
            else:
                return
            await self._receive(file, part, transfer)

    async def _receive(self, file: RemoteFile, part: PartialFile, transfer: BlobTransfer) -> None:
        retries = self.retries.start()
        while part.offset < file.size:
            start = part.offset
            try:
                await self._stream(file, part, transfer)
            except (HubRateLimitedError, HubUnreachableError) as error:
                if part.offset > start:
                    retries.reset()
                await self.retries.wait_after(error, retries, self.monitor)

    async def _stream(self, file: RemoteFile, part: PartialFile, transfer: BlobTransfer) -> None:
        """Append what one response brings. What arrived before a failure is kept."""
        pending = bytearray()
        stall = _StallGuard(self.clock)
        try:
            async with transfer.read(part.offset) as chunks:
                async for chunk in chunks:
                    self.monitor.source = transfer.source
                    self.monitor.add_fetched(len(chunk))
                    pending += chunk
                    if part.offset + len(pending) > file.size:
                        raise HashMismatchError(
                            f"{transfer.source} sent more than the {file.size} bytes of {file.path} in {self.repo}"
                        )
                    if stall.is_stalled_after(len(chunk)):
                        raise HubUnreachableError(
                            f"{transfer.source} sends {file.path} of {self.repo} too slowly"
                        )
                    await self.bandwidth.take(len(chunk))
                    if len(pending) >= min(_WRITE_BYTES, part.bytes_to_checkpoint):
                        await self._write(part, pending)
                        pending = bytearray()
        finally:
            if pending and part.offset + len(pending) <= file.size:
                await self._write(part, pending)
        if part.offset < file.size:
            raise HubUnreachableError(
                f"{transfer.source} ended {file.path} of {self.repo} after {part.offset} of {file.size} bytes"
            )

    async def _write(self, part: PartialFile, content: bytearray) -> None:
        start = part.offset
        try:
            await run_in_thread(part.write, content)
        finally:
            self._count(part.offset - start)

    async def _publish(self, file: RemoteFile, part: PartialFile, transfer: BlobTransfer) -> None:
        content_hash = await run_in_thread(part.seal)
        if content_hash.named != file.digest:
            self._count(-part.offset)
            await run_in_thread(part.restart)
            raise HashMismatchError(
                f"{file.path} of {self.repo}@{self.commit[:12]} came from {transfer.source} with {content_hash.named}; "
                f"its list says {file.digest}. Nothing of it was kept: retry, and check the mirror or proxy if it "
                "happens again"
            )
        path = self.store.part_path(file.digest)
        await run_in_thread(self.store.add_blob, path, file.digest, content_hash.sha256)
        await run_in_thread(self.store.write_pieces, content_hash.sha256, part.piece_hashes)
        await run_in_thread(part.finish)

    def _full_disk_error(self, file: RemoteFile) -> InsufficientDiskError:
        return InsufficientDiskError(
            f"the disk of {self.store.root} became full while {file.path} of {self.repo} was written; "
            "free space, and the fetch goes on where it stopped",
            missing_bytes=max(0, file.size - self._part_size(file)),
            collectable_bytes=0,
        )
