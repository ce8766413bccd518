"""Runs the fetch process, and ends it when it exceeds its time, memory or output. Reads no Git and writes nothing."""

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pydantic import ValidationError

from machinery.clock import Clock
from machinery.footprint import footprint_bytes
from manifests.documents import Document
from reconciler.services.gitops.fetch_messages import (
    FetchFailure,
    FetchRequest,
    FetchResponse,
    document_of,
)

log = logging.getLogger(__name__)

# Resident memory; on Linux the process also limits its own address space.
_MEMORY = 1536 * 2**20
_MEMORY_CHECK_S = 0.25
# Limits: one document of 100,000 values (manifests/yaml/builder.py) with the positions of its fields; all documents of a source.
_LINE = 32 * 2**20
_TOTAL = 256 * 2**20
_STDERR_BYTES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchResult:
    """The response of the fetch process with its documents."""

    answer: FetchResponse
    documents: tuple[Document, ...]


class _TooLargeError(Exception):
    """The process uses or sends more than it may."""


async def fetch(request: FetchRequest, clock: Clock) -> FetchResult:
    """Fetch a commit; every failure of the process becomes a response, too."""
    try:
        async with asyncio.timeout(request.timeout_s), _started() as process:
            assert process.stdin is not None
            with contextlib.suppress(
                ConnectionError
            ):  # it has ended already, and its response says why
                process.stdin.write(request.model_dump_json(by_alias=True).encode() + b"\n")
                await process.stdin.drain()
            try:
                async with asyncio.TaskGroup() as group:
                    watch = group.create_task(_watch(process, clock))
                    stderr = group.create_task(_read_stderr(process))
                    result = await _read(process)
                    await process.wait()
                    watch.cancel()
            except* _TooLargeError as errors:
                raise _TooLargeError(str(errors.exceptions[0])) from errors
            return result or _failed(await _early_end(process, stderr.result()))
    except TimeoutError:
        message = (
            f"{request.repository} did not answer within {request.timeout_s:g} s (spec.timeout)"
        )
        return _failed(FetchFailure(reason="TimedOut", message=message))
    except OSError as error:
        message = f"the fetch process cannot be started: {error}"
        return _failed(FetchFailure(reason="FetchingFailed", message=message))
    except _TooLargeError as error:
        message = f"{request.repository} is too large for the fetch process: {error}"
        return _failed(FetchFailure(reason="TooLarge", message=message))


@asynccontextmanager
async def _started() -> AsyncIterator[Process]:
    """Start the process, and kill it at the end."""
    # Without -I: it would remove the current folder, which holds the code in a checkout.
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "reconciler.services.gitops.fetch_process"),
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


async def _read(process: Process) -> FetchResult | None:
    """Return the response; None if the process ended before it was complete."""
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
        # In a thread: ten thousand documents take a second, and the leader must renew its leases.
        documents = await asyncio.to_thread(lambda: tuple(map(document_of, lines)))
    except ValidationError:
        return None
    except ValueError as error:  # a line longer than the limit
        raise _TooLargeError(str(error)) from error
    return FetchResult(answer=answer, documents=documents)


async def _read_stderr(process: Process) -> str:
    """Return the last line of stderr; reads all of it, so that the process never blocks."""
    assert process.stderr is not None
    kept = b""
    while chunk := await process.stderr.read(_STDERR_BYTES):
        kept = (kept + chunk)[-_STDERR_BYTES:]
    lines = kept.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:500] if lines else ""


async def _watch(process: Process, clock: Clock) -> None:
    """Kill the process if it uses more memory than it may."""
    while True:
        await clock.sleep(_MEMORY_CHECK_S)
        used = footprint_bytes(process.pid)
        if used is None:
            return
        if used > _MEMORY:
            process.kill()
            raise _TooLargeError(f"fetching used more than {_MEMORY >> 20:,} MiB of memory")


async def _early_end(process: Process, last_line: str) -> FetchFailure:
    code = await process.wait()
    log.warning("the fetch process ended early", extra={"exit_code": code, "stderr": last_line})
    if code < 0 or "MemoryError" in last_line:
        cause = f"signal {-code}" if code < 0 else "lack of memory"
        message = f"the fetch process was ended by {cause}: the repository sends too much data"
        return FetchFailure(reason="TooLarge", message=f"{message}. {last_line}".rstrip(". "))
    return FetchFailure(reason="FetchingFailed", message=f"the fetch process failed: {last_line}")


def _failed(failure: FetchFailure) -> FetchResult:
    return FetchResult(answer=FetchResponse(failure=failure), documents=())
