"""Fetches the files of a model into the store: resumable, verified, and each file once at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from machinery.clock import Clock
from models import weight_headers
from models.hub.bandwidth import BandwidthLimit
from models.hub.blob_download import BlobDownload, FetchRetries
from models.hub.blob_source import BlobSources, HubOnly
from models.hub.errors import HubRateLimitedError, HubUnreachableError, InsufficientDiskError
from models.hub.file_selection import DEFAULT_PATTERNS, check_patterns, select_files
from models.hub.model_hub import ModelHub, RemoteFile, folder_name
from models.hub.progress import FetchMonitor
from models.hub.threads import acquire_in_thread, run_in_thread
from models.model_store.admission import FetchReservation, is_reserved, reserve
from models.model_store.store import ModelStore, StoredModel
from models.partial_model import AbsentFile, PartialMark
from models.weight_headers import WeightHeaders

# How often the end of another fetch of the same model is looked for.
_POLL_S: Final = 0.5
# With four files at a time a kill costs at most 64 MiB, and a flush each 16 MiB costs little on an SSD.
_PIECE_BYTES: Final = 16 << 20


MakeRoom: TypeAlias = Callable[[int], Awaitable[int]]
"""Frees so many bytes of the disk, or nothing if it cannot; returns the bytes that unused models still have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """The part of a model that one rank of a Pipeline needs."""

    files: frozenset[str]
    """The weight files of its layers (models/layer_files.py)."""
    headers: WeightHeaders
    """The headers of all weight files of the commit."""

    @property
    def left_out(self) -> frozenset[str]:
        """Return the weight files that the rank does not need."""
        return frozenset(self.headers.files) - self.files


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """The files to fetch: those of one commit that match the patterns."""

    repo: str
    commit: str
    """Whole commit; `ModelHub.resolve` turns a branch into one."""
    patterns: tuple[str, ...] = DEFAULT_PATTERNS
    part: ModelPart | None = None
    """The part of the weight files that is needed; None for all of them."""

    def is_met_by(self, model: StoredModel) -> bool:
        """Return whether a stored model has all that is asked for."""
        if not set(self.patterns) <= set(model.patterns):
            return False
        return not model.absent.keys() & self.part.files if self.part else not model.is_partial


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Limits of a fetcher."""

    parallel_files: int = 4
    """Files that one fetch reads at a time."""
    piece_bytes: int = _PIECE_BYTES
    """Bytes after which a file is flushed to disk and recorded: what a kill costs at most for each file."""
    bytes_per_s: float | None = None
    """Bytes a second of all fetches together; None for no limit."""
    attempts: int = 8
    """Consecutive failures of one file without a new byte before the fetch ends with the last error."""
    rate_limit_wait_s: float = 1800.0
    """Seconds that one fetch waits for a hub's rate limits in all before it ends with HubRateLimitedError."""


class ModelFetcher:
    """Fetches models into one store. Cancel the task of a fetch to stop it: what is on the disk stays."""

    def __init__(
        self,
        store: ModelStore,
        clock: Clock,
        *,
        limits: FetchLimits | None = None,
        make_room: MakeRoom | None = None,
    ) -> None:
        """`make_room` is asked for room before a full disk refuses a fetch."""
        self.store = store
        self.clock = clock
        self.limits = limits or FetchLimits()
        self.bandwidth = BandwidthLimit(clock, bytes_per_s=self.limits.bytes_per_s)
        self._make_room = make_room

    async def fetch(
        self,
        hub: ModelHub,
        request: FetchRequest,
        *,
        monitor: FetchMonitor | None = None,
        sources: BlobSources | None = None,
    ) -> StoredModel:
        """Return the model of the store, after what is missing of it has been fetched and verified.

        A model that is present is returned without a request to the hub. `sources` are those of the files' bytes; the
        list of files is the hub's.

        Raises:
            ModelFetchError: one of `models.hub.errors`; nothing that is not verified has been published.
            FileExistsError: the model's folder exists and is not the store's.
            OSError: the disk failed.
            ValueError: the repository, the commit or a pattern is malformed.

        """
        monitor = monitor or FetchMonitor(self.clock)
        check_patterns(request.patterns)
        name = folder_name(request.repo, request.commit)
        await run_in_thread(self.store.check_owner, request.repo, request.commit)
        retries = FetchRetries(
            clock=self.clock,
            attempts=self.limits.attempts,
            rate_limit_wait_s=self.limits.rate_limit_wait_s,
        )
        while True:
            if present := await self._find_present(request, monitor):
                return present
            listed = await self._list(hub, request, monitor, retries)
            left_out = _left_out(listed, request.part)
            chosen = tuple(file for file in listed if file.path not in left_out)
            reservation = await self._admit(name, chosen)
            if reservation is not None:
                break
            # Wait until another fetch of the same model has ended, as it may have brought
            # everything.
            monitor.phase = "Queued"
            monitor.waiting = "another fetch of the same model runs on this machine"
            while await run_in_thread(is_reserved, self.store, name):
                await self.clock.sleep(_POLL_S)
            monitor.waiting = ""
        with reservation:
            await self._download_all(
                request,
                chosen,
                sources or HubOnly(hub, request.repo, request.commit),
                monitor,
                retries,
            )
            present = await run_in_thread(
                self.store.publish,
                request.repo,
                request.commit,
                {file.path: file.digest for file in chosen},
                request.patterns,
                partial=_mark(left_out, request.part),
            )
        monitor.phase = "Present"
        return present

    async def _admit(self, name: str, files: tuple[RemoteFile, ...]) -> FetchReservation | None:
        """Reserve the room, after unused models have made some if need be."""
        sizes = {file.digest: file.size for file in files}
        try:
            return await acquire_in_thread(partial(reserve, self.store, name, sizes))
        except InsufficientDiskError as error:
            if self._make_room is None:
                raise
            collectable = await self._make_room(error.missing_bytes)
        again = partial(reserve, self.store, name, sizes, collectable_bytes=collectable)
        return await acquire_in_thread(again)

    async def _find_present(
        self, request: FetchRequest, monitor: FetchMonitor
    ) -> StoredModel | None:
        stored_model = await run_in_thread(self.store.find, request.repo, request.commit)
        if stored_model is None or not request.is_met_by(stored_model):
            return None
        if not await run_in_thread(self.store.record_want, stored_model):
            return None  # a collection was faster
        monitor.phase = "Present"
        monitor.total_bytes = monitor.present_bytes = stored_model.size_bytes
        monitor.files = monitor.files_present = len(stored_model.files)
        return stored_model

    async def _list(
        self, hub: ModelHub, request: FetchRequest, monitor: FetchMonitor, retries: FetchRetries
    ) -> tuple[RemoteFile, ...]:
        monitor.phase, monitor.source = "Listing", hub.name
        attempts = retries.start()
        while True:
            try:
                listed = await hub.files(request.repo, request.commit)
            except (HubRateLimitedError, HubUnreachableError) as error:
                await retries.wait_after(error, attempts, monitor)
                continue
            return select_files(listed, request.patterns)

    async def _download_all(
        self,
        request: FetchRequest,
        files: tuple[RemoteFile, ...],
        sources: BlobSources,
        monitor: FetchMonitor,
        retries: FetchRetries,
    ) -> None:
        monitor.phase = "Downloading"
        monitor.total_bytes = sum(file.size for file in files)
        monitor.files = len(files)
        download = BlobDownload(
            sources=sources,
            repo=request.repo,
            commit=request.commit,
            store=self.store,
            clock=self.clock,
            monitor=monitor,
            bandwidth=self.bandwidth,
            retries=retries,
            piece_bytes=self.limits.piece_bytes,
        )
        # Small files first: with them placement can judge a model whose weights are still on their way.
        small = self.limits.piece_bytes

        def turn(file: RemoteFile) -> tuple[bool, str, int, str]:
            order = sources.order(file) if file.size > small else ""
            return file.size > small, order, file.size, file.path

        waiting = iter(sorted(files, key=turn))

        async def work() -> None:
            for file in waiting:
                await download.fetch(file)
                monitor.files_present += 1

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.limits.parallel_files, len(files))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            # The first to fail cancelled the others: it is the reason.
            raise errors.exceptions[0] from None


def _left_out(files: tuple[RemoteFile, ...], part: ModelPart | None) -> dict[str, AbsentFile]:
    """Return the listed weight files that a part does not need.

    A file that the hub lists without a SHA-256 is not left out: the ranks of a group compare files by it.
    """
    unneeded = part.left_out if part is not None else frozenset()
    return {
        file.path: AbsentFile(size=file.size, sha256=file.digest.hex)
        for file in files
        if file.path in unneeded and file.digest.algorithm == "sha256"
    }


def _mark(left_out: dict[str, AbsentFile], part: ModelPart | None) -> PartialMark | None:
    if part is None or not left_out:
        return None
    return PartialMark(absent=left_out, headers=weight_headers.pack(part.headers))
