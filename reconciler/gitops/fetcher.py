"""Asks the fetching process, and ends it when it takes too long or too much. Reads no Git and writes nothing."""

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil
from pydantic import ValidationError

from machinery.clock import Clock
from manifests.overlay import SourceDocument
from reconciler.gitops.fetch_messages import FetchFailure, FetchRequest, FetchResponse, document_of

log = logging.getLogger(__name__)

# Resident memory; on Linux its address space is limited besides.
_MEMORY = 1536 * 2**20
_LOOK_S = 0.25
# One document of 100,000 values (manifests/yaml/builder.py) with all its places; and all of a source's together.
_LINE = 32 * 2**20
_TOTAL = 256 * 2**20
_WORDS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchResult:
    """What the fetching process answered."""

    answer: FetchResponse
    documents: tuple[SourceDocument, ...]


class _TooLargeError(Exception):
    """The process takes or sends more than it may."""


async def fetch(ask: FetchRequest, clock: Clock) -> FetchResult:
    """Return the answer; whatever happens to the process is one, too."""
    try:
        async with asyncio.timeout(ask.timeout_s), _started() as process:
            return await _talk(process, ask, clock)
    except TimeoutError:
        message = f"{ask.repository} did not answer within {ask.timeout_s:g} s (spec.timeout)"
        return _failed(FetchFailure(reason="TimedOut", message=message))
    except OSError as error:
        message = f"the fetching process cannot be started: {error}"
        return _failed(FetchFailure(reason="FetchingFailed", message=message))
    except _TooLargeError as error:
        message = f"{ask.repository} is too much for the fetching process: {error}"
        return _failed(FetchFailure(reason="TooLarge", message=message))


@asynccontextmanager
async def _started() -> AsyncIterator[Process]:
    """Start the process, and have it gone at the end."""
    # -I would leave out the folder that we were started from in a checkout.
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "reconciler.gitops.fetch_process"),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        limit=_LINE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()


async def _talk(process: Process, ask: FetchRequest, clock: Clock) -> FetchResult:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # it has ended already, and says why
        process.stdin.write(ask.model_dump_json(by_alias=True).encode() + b"\n")
        await process.stdin.drain()
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_watch(process, clock))
            complaints = group.create_task(_words(process))
            found = await _read(process)
            await process.wait()
            watch.cancel()
    except* _TooLargeError as errors:
        raise _TooLargeError(str(errors.exceptions[0])) from errors
    return found or _failed(await _ended(process, complaints.result()))


async def _read(process: Process) -> FetchResult | None:
    """Return the answer; None if the process ended before it was complete."""
    assert process.stdout is not None
    try:
        answer = FetchResponse.model_validate_json(await process.stdout.readline(), by_alias=True)
        lines: list[bytes] = []
        total = 0
        for _ in range(answer.documents):
            lines.append(await process.stdout.readline())
            total += len(lines[-1])
            if not lines[-1].endswith(b"\n"):
                return None
            if total > _TOTAL:
                raise _TooLargeError(f"it sends more than {_TOTAL:,} bytes of manifests")
        # A thread: ten thousand documents are a second's work, and the leader has leases to renew.
        documents = await asyncio.to_thread(lambda: tuple(map(document_of, lines)))
    except ValidationError:
        return None
    except ValueError as error:  # a line longer than the limit
        raise _TooLargeError(str(error)) from error
    return FetchResult(answer=answer, documents=documents)


async def _words(process: Process) -> str:
    """Return the last of what the process complained of; read to the end, so that it never waits for us."""
    assert process.stderr is not None
    kept = b""
    while chunk := await process.stderr.read(_WORDS):
        kept = (kept + chunk)[-_WORDS:]
    lines = kept.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:500] if lines else ""


async def _watch(process: Process, clock: Clock) -> None:
    """End a process that takes more memory than it may."""
    while True:
        await clock.sleep(_LOOK_S)
        try:
            used = psutil.Process(process.pid).memory_info().rss
        except psutil.Error:
            return
        if used > _MEMORY:
            process.kill()
            raise _TooLargeError(f"it used more than {_MEMORY >> 20:,} MiB of memory")


async def _ended(process: Process, complaint: str) -> FetchFailure:
    code = await process.wait()
    log.warning("fetching ended early", extra={"code": code, "said": complaint})
    if code < 0 or "MemoryError" in complaint:
        what = f"signal {-code}" if code < 0 else "want of memory"
        message = f"the fetching process was ended by {what}: what the repository sends is too much for it"
        return FetchFailure(reason="TooLarge", message=f"{message}. {complaint}".rstrip(". "))
    return FetchFailure(reason="FetchingFailed", message=f"the fetching process broke: {complaint}")


def _failed(failure: FetchFailure) -> FetchResult:
    return FetchResult(answer=FetchResponse(failure=failure), documents=())
