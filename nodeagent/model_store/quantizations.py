"""The quantizations that people ask an agent for (`fleetctl models quantize`): one at a time, each in a child process.

The result appears in the store in one step, pinned, or not at all. A job is not stored: after a restart of the agent it is
asked for again, and starts over.
"""

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from machinery.clock import Clock
from machinery.processes import describe_exit
from models import quantization
from models.hub.errors import InsufficientDiskError
from models.hub.threads import acquire_in_thread, run_in_thread
from models.model_files import ModelUnusableError
from models.model_store.admission import FetchReservation, read_intents, reserve
from models.model_store.folder_publication import MAKING_SUFFIX, making_room, publish_folder
from models.model_store.store import ModelStore, StoredModel
from models.quantization import QuantizationOrigin
from nodeagent.model_store.collector import ModelCollector
from schemas import quantity
from schemas.wire import engine_config
from schemas.wire.stored_models import (
    QuantizationPhase,
    QuantizationQuality,
    QuantizationReport,
    QuantizationScheme,
)

log = logging.getLogger(__name__)

_MAX_WAITING: Final = 8
_MAX_KEPT: Final = 50
_POLL_S: Final = 0.5
_END_S: Final = 10.0
_TAIL_BYTES: Final = 4096
# A disk with less is full: estimates of a result are not exact to the last small file.
_FULL_BYTES: Final = 16 << 20


class QuantizationRefusedError(Exception):
    """A quantization cannot start; `status` is the HTTP status of the refusal."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationOrder:
    """The request of a person."""

    source: str
    """The folder of a model in this node's store."""
    scheme: QuantizationScheme
    name: str = ""
    """The name of the result; "" for the derived one."""


@dataclass(kw_only=True)
class _Job:
    order: QuantizationOrder
    origin: QuantizationOrigin
    repo: str
    total_bytes: int
    memory_bytes: int
    reservation: FetchReservation | None = None
    phase: QuantizationPhase = "Queued"
    done_bytes: int = 0
    result: str | None = None
    quality: QuantizationQuality | None = None
    error: str = ""
    task: asyncio.Task[None] | None = None
    words: bytearray = field(default_factory=bytearray)
    """The end of what the converter wrote."""

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()

    def release(self) -> None:
        """Give the room on the disk back."""
        if self.reservation is not None:
            self.reservation.release()

    def report(self) -> QuantizationReport:
        return QuantizationReport(
            repo=self.repo,
            source=self.order.source,
            scheme=self.order.scheme,
            phase=self.phase,
            total_bytes=self.total_bytes,
            done_bytes=min(self.done_bytes, self.total_bytes),
            result=self.result,
            quality=self.quality,
            error=self.error[:2000],
        )


class Quantizations:
    """Quantizes models of one node's store. `run()` must run before one can start."""

    def __init__(
        self,
        collector: ModelCollector,
        clock: Clock,
        *,
        available_bytes: Callable[[], int],
        on_published: Callable[[], None] = lambda: None,
    ) -> None:
        """`available_bytes` returns the memory that a process may take; `on_published` is called after each result."""
        self.available_bytes: Final = available_bytes
        self._collector = collector
        self._clock = clock
        self._on_published = on_published
        self._group: asyncio.TaskGroup | None = None
        self._turn = asyncio.Lock()
        self._admission = asyncio.Lock()
        self._jobs: dict[str, _Job] = {}

    @property
    def _store(self) -> ModelStore:
        return self._collector.store

    @property
    def is_busy(self) -> bool:
        """True if a job runs or waits."""
        return any(job.is_running for job in self._jobs.values())

    @property
    def is_ready(self) -> bool:
        """True if a job can start."""
        return self._group is not None

    async def run(self) -> None:
        """Run the jobs that are started, forever; what a killed agent left half made is removed first."""
        with suppress(OSError):  # a disk that fails is reported by each job
            await run_in_thread(_sweep, self._store)
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                await asyncio.Event().wait()
            finally:
                self._group = None
                for job in self._jobs.values():
                    if job.task is not None:
                        job.task.cancel()

    async def start(self, order: QuantizationOrder) -> QuantizationReport:
        """Start a job, or find the one that runs, or its result.

        Raises:
            QuantizationRefusedError: it cannot start; the message says what to do.
            OSError: the disk failed.

        """
        async with self._admission:  # two requests for the same result at once start one job
            job = await run_in_thread(self._examine, order)
            running = self._jobs.get(job.repo)
            if running is not None and running.task is not None and running.phase == "Cancelled":
                await asyncio.wait([running.task])  # it still cleans up
            if running is not None and running.is_running:
                if running.origin != job.origin:
                    raise QuantizationRefusedError(
                        409, f"{job.repo} is being made of another model; choose another --name"
                    )
                return running.report()
            if job.phase != "Present":
                await self._admit(job)
                assert self._group is not None
                job.task = self._group.create_task(self._run(job))
                # A task that is cancelled before its first step runs no finally block.
                job.task.add_done_callback(lambda _: job.release())
            self._jobs.pop(job.repo, None)
            self._jobs[job.repo] = job
            ended = [repo for repo, one in self._jobs.items() if not one.is_running]
            for repo in ended[: max(0, len(self._jobs) - _MAX_KEPT)]:
                del self._jobs[repo]
            return job.report()

    def cancel(self, name: str) -> QuantizationReport | None:
        """Cancel the job with a result of this name; None if none runs."""
        job = next((one for one in self._jobs.values() if one.repo.partition("/")[2] == name), None)
        if job is None or job.task is None or not job.is_running:
            return None
        job.task.cancel()
        job.phase = "Cancelled"
        return job.report()

    def reports(self) -> Iterator[QuantizationReport]:
        """Yield the state of each job, those that ended lately included."""
        for job in self._jobs.values():
            yield job.report()

    def _examine(self, order: QuantizationOrder) -> _Job:
        """Return the job, with the phase Present if its result is here. Blocks. Raises QuantizationRefusedError."""
        source = self._store.find_by_name(order.source)
        if source is None:
            raise QuantizationRefusedError(404, f"{order.source} is not on this Mac")
        try:
            origin = QuantizationOrigin(repo=source.repo, commit=source.commit, scheme=order.scheme)
            repo = quantization.result_repo(origin, order.name)
            facts = quantization.inspect_source(source.folder)
        except ModelUnusableError as error:
            raise QuantizationRefusedError(409, str(error)) from error
        except (ValueError, ValidationError) as error:
            raise QuantizationRefusedError(400, str(error)) from error
        total = quantization.output_bytes(source.folder, facts, order.scheme)
        job = _Job(
            order=order,
            origin=origin,
            repo=repo,
            total_bytes=total,
            memory_bytes=quantization.needed_memory(source.folder, facts, order.scheme),
        )
        if (made := self._find_result(job)) is not None:
            job.phase, job.result, job.done_bytes = "Present", made.name, total
            job.quality = quantization.read_quality(made.folder)
        return job

    def _find_result(self, job: _Job) -> StoredModel | None:
        """Return the result, if it is here. Raises QuantizationRefusedError if its name has another origin."""
        models = [model for model in self._store.models() if model.repo == job.repo]
        for stored_model in models:
            if quantization.read_origin(stored_model.folder) == job.origin:
                return stored_model
        if models:
            raise QuantizationRefusedError(
                409,
                f"{models[0].name} was made of another model, or by another scheme; choose another --name, or remove it",
            )
        return None

    async def _admit(self, job: _Job) -> None:
        """Reserve room on the disk for the result, and check the memory. Raises QuantizationRefusedError."""
        if (
            self._group is None
            or sum(one.is_running for one in self._jobs.values()) >= _MAX_WAITING
        ):
            raise QuantizationRefusedError(
                429,
                f"{_MAX_WAITING} quantizations wait already, or the agent is starting; try again later",
            )
        self._check_memory(job)
        name, sizes = (
            f"{job.repo.replace('/', '--')}@quantized",
            {making_room(job.repo): job.total_bytes},
        )
        try:
            try:
                job.reservation = await acquire_in_thread(
                    partial(reserve, self._store, name, sizes)
                )
            except InsufficientDiskError as error:
                collectable = await self._collector.make_room(error.missing_bytes)
                again = partial(reserve, self._store, name, sizes, collectable_bytes=collectable)
                job.reservation = await acquire_in_thread(again)
        except InsufficientDiskError as error:
            raise QuantizationRefusedError(409, f"{error.reason}: {error}") from error
        if job.reservation is None:
            raise QuantizationRefusedError(
                409, f"another agent of this machine makes {job.repo} in the same models folder"
            )

    def _check_memory(self, job: _Job) -> None:
        available = self.available_bytes()
        if available < job.memory_bytes:
            raise QuantizationRefusedError(
                409,
                f"InsufficientMemory: the conversion of {job.order.source} needs {quantity.show(job.memory_bytes)}, and "
                f"{quantity.show(available)} are available; choose another Mac with --node, or stop what runs here",
            )

    async def _run(self, job: _Job) -> None:
        """Make the result, and keep the failure for the report."""
        # Its stem is that of the reserved content: a collection leaves it alone while the reservation lives.
        making = self._store.part_path(making_room(job.repo)).with_suffix(MAKING_SUFFIX)
        try:
            async with self._turn:
                await self._make(job, making)
        except asyncio.CancelledError:
            job.phase = "Cancelled"
            raise
        except (QuantizationRefusedError, OSError, ValueError) as error:
            job.phase, job.error = "Failed", str(error) or type(error).__name__
            log.warning("model not quantized", extra={"model": job.repo, "why": job.error})
        finally:
            await run_in_thread(_remove, making)

    async def _make(self, job: _Job, making: Path) -> None:
        await run_in_thread(_remove, making)
        self._check_memory(job)  # another job may have run for an hour
        if not await run_in_thread(self._store.record_load, job.order.source):
            raise OSError(f"{job.order.source} was removed meanwhile")
        job.phase = "Converting"
        # A cancellation kills it. Raises OSError if it fails.
        source = self._store.root / job.order.source
        words = (
            source,
            making,
            job.order.scheme.model_dump_json(by_alias=True),
            job.memory_bytes,
            self.available_bytes(),
            os.getpid(),
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", engine_config.QUANTIZE_MODULE, *map(str, words)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.TaskGroup() as group:
                measuring = group.create_task(self._measure(job, making))
                assert process.stderr is not None
                await _keep_tail(process.stderr, job.words)
                code = await process.wait()
                measuring.cancel()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if code != 0:
            lines = job.words.decode(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no words")
            shortage = await run_in_thread(_shortage, job, making.parent)
            raise OSError(f"the converter {describe_exit(code)}: {last}{shortage}")
        job.phase, job.done_bytes = "Storing", job.total_bytes
        made = await run_in_thread(self._publish, job, making)
        job.quality = await run_in_thread(quantization.read_quality, made.folder)
        job.phase, job.result = "Present", made.name
        log.info("model quantized", extra={"model": made.name, "bytes": made.size_bytes})
        self._on_published()

    def _publish(self, job: _Job, making: Path) -> StoredModel:
        (making / quantization.ORIGIN_FILE).write_text(
            job.origin.model_dump_json(indent=1, by_alias=True, exclude_none=True) + "\n"
        )
        made = publish_folder(self._store, job.repo, making)
        # No hub can give it again.
        self._store.pin(made.name)
        return made

    async def _measure(self, job: _Job, making: Path) -> None:
        """Keep the bytes that the converter has written in the job."""
        while True:
            job.done_bytes = await run_in_thread(_bytes_in, making)
            await self._clock.sleep(_POLL_S)


def _shortage(job: _Job, folder: Path) -> str:
    """Return the words about a disk without room for the rest: mlx and tokenizers do not name the cause."""
    free = shutil.disk_usage(folder).free
    if free >= max(job.total_bytes - job.done_bytes, _FULL_BYTES):
        return ""
    return f"; the disk has {quantity.show(free)} left: free some, and repeat the command"


async def _keep_tail(stream: asyncio.StreamReader, tail: bytearray) -> None:
    while piece := await stream.read(_TAIL_BYTES):
        tail += piece
        del tail[:-_TAIL_BYTES]


def _bytes_in(folder: Path) -> int:
    found = 0
    try:
        for path in folder.iterdir():
            found += path.stat().st_size
    except OSError:
        return found  # it appears, or goes, at this moment
    return found


def _remove(making: Path) -> None:
    shutil.rmtree(making, ignore_errors=True)


def _sweep(store: ModelStore) -> None:
    """Remove the half made results of agents that were killed."""
    if not store.incoming.is_dir():
        return
    with store.locked():
        running = {
            store.part_path(digest).stem
            for intent in read_intents(store)
            if intent.is_running
            for digest in intent.sizes
        }
        for path in store.incoming.glob(f"*{MAKING_SUFFIX}"):
            if path.stem not in running:
                _remove(path)
