"""The log file of one engine: where each of its runs begins, rotation, and reading it while it grows.

Runs are appended to one file, which is rotated when it is large. Where they begin is stored beside it, in `engine.runs`,
so no line of an engine can be taken for the beginning of a run.
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from machinery.clock import Clock
from machinery.files import write_atomically
from machinery.process_log import LogSelection, lines_backwards, start_position

LOG_FILE = "engine.log"
_ROTATED_FILE, _RUNS_FILE = "engine.log.1", "engine.runs"
_LIMIT_BYTES = 16 * 2**20
_PIECE_BYTES = 64 << 10
_POLL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """The place of one run's log: file and offsets."""

    file: str
    start: int
    end: int | None = None
    """None: the end of the file, which may grow."""


def new_run(folder: Path) -> Path:
    """Record that a run begins, and return its log file.

    A large file is rotated first. An engine is started even if the record cannot be written.

    Raises:
        OSError: the large file cannot be rotated.

    """
    log, runs = folder / LOG_FILE, _read_runs(folder)
    size = _size(log)
    if size > _LIMIT_BYTES:
        log.replace(folder / _ROTATED_FILE)
        runs = [
            EngineRun(file=_ROTATED_FILE, start=run.start) for run in runs if run.file == LOG_FILE
        ]
        size = 0
    runs = [*runs, EngineRun(file=LOG_FILE, start=size)][-2:]
    with suppress(OSError):
        starts = [[run.file, run.start] for run in runs]
        write_atomically(folder / _RUNS_FILE, json.dumps(starts))
    return log


def find_run(folder: Path, *, previous: bool) -> EngineRun | None:
    """Return the last run, or the one before it; None if there was none."""
    runs = _read_runs(folder)
    if previous:
        if len(runs) < 2:
            return None
        before, last = runs[-2:]
        same_file = before.file == last.file
        return EngineRun(
            file=before.file, start=before.start, end=last.start if same_file else None
        )
    if not (folder / LOG_FILE).exists():
        return None
    # A file that is shorter than the recorded start is another one: read all of it.
    start = runs[-1].start if runs and runs[-1].file == LOG_FILE else 0
    return EngineRun(file=LOG_FILE, start=start if start <= _size(folder / LOG_FILE) else 0)


def _read_runs(folder: Path) -> list[EngineRun]:
    try:
        tree = json.loads((folder / _RUNS_FILE).read_text())
        return [
            EngineRun(file=str(file), start=int(start))
            for file, start in tree
            if file in (LOG_FILE, _ROTATED_FILE)
        ]
    except (OSError, ValueError, TypeError):
        return []


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


async def stream_run(
    path: Path,
    run: EngineRun,
    selection: LogSelection,
    clock: Clock,
    *,
    follow: bool,
    is_over: Callable[[], Awaitable[bool]],
) -> AsyncGenerator[bytes]:
    """Yield the selected part of a run; with `follow` also later output and runs, until `is_over` returns true.

    `path` is the file of the run; it is opened before the first piece. Raises OSError.
    """
    file = await asyncio.to_thread(path.open, "rb")
    try:
        end = os.fstat(file.fileno()).st_size if run.end is None else run.end
        at = await asyncio.to_thread(_first_offset, file, run.start, end, selection)
        while True:
            left = _PIECE_BYTES if run.end is None else min(_PIECE_BYTES, run.end - at)
            piece = await asyncio.to_thread(_read, file, at, left)
            if piece:
                at += len(piece)
                yield piece
            elif not follow:
                return
            elif _is_rotated(path, file):
                file.close()
                file, at = await asyncio.to_thread(path.open, "rb"), 0
            else:
                at = min(at, os.fstat(file.fileno()).st_size)
                await clock.sleep(_POLL_S)
            if await is_over():
                return
    finally:
        file.close()


def _first_offset(file: BinaryIO, start: int, end: int, selection: LogSelection) -> int:
    def backwards() -> Iterator[tuple[int, bytes]]:
        return lines_backwards(file, start, end)

    found = start_position(backwards, selection, end=end)
    return start if found is None else found


def _read(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)


def _is_rotated(path: Path, file: BinaryIO) -> bool:
    """Return whether the file was rotated and a new one exists."""
    with suppress(OSError):
        return path.stat().st_ino != os.fstat(file.fileno()).st_ino
    return False
