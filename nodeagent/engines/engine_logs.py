"""The log file of one engine: where each of its runs begins, rotation, and reading it while it grows.

Runs are appended to one file, which is rotated when it is large, also while the engine runs. Where they begin is stored
beside it, in `engine.runs`, so no line of an engine can be taken for the beginning of a run.
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from machinery import log_rotation
from machinery.clock import Clock
from machinery.files import write_atomically
from machinery.process_log import LogSelection, lines_backwards, start_position

LOG_FILE = "engine.log"
_ROTATED_FILE, _RUNS_FILE = "engine.log.1", "engine.runs"
_LIMIT_BYTES = log_rotation.LIMIT_BYTES
_PIECE_BYTES = 64 << 10
_POLL_S = 0.25
# A follower that is this far behind when the log is rotated loses lines.
_MAX_CAUGHT_UP_BYTES = 1 << 20


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
    log = folder / LOG_FILE
    is_rotated = log_rotation.rotate(log, limit_bytes=_LIMIT_BYTES)
    runs = _read_runs(folder)
    if is_rotated:
        runs = _moved(runs)
    _write_runs(folder, [*runs, EngineRun(file=LOG_FILE, start=_size(log))])
    return log


def rotate_all(folder: Path) -> None:
    """Rotate the large logs of all engines below an agent's folder, while they run.

    The part of a run that was rotated away stays in the older file; `find_run` returns the rest.

    Raises:
        OSError: a log cannot be rotated; the others are.

    """
    failure: OSError | None = None
    for log in folder.glob(f"*/{LOG_FILE}"):
        try:
            _rotate_running(log.parent)
        except OSError as error:
            failure = error
    if failure is not None:
        raise failure


def _rotate_running(folder: Path) -> None:
    def move_runs() -> None:
        runs = _read_runs(folder)
        _write_runs(folder, [*_moved(runs)[:-1], EngineRun(file=LOG_FILE, start=0)])

    log_rotation.rotate(folder / LOG_FILE, limit_bytes=_LIMIT_BYTES, before_truncate=move_runs)


def _moved(runs: Sequence[EngineRun]) -> list[EngineRun]:
    """Return the runs of the log file as they are found in the rotated file."""
    starts = [run.start for run in runs if run.file == LOG_FILE]
    return [
        EngineRun(file=_ROTATED_FILE, start=start, end=end)
        for start, end in zip(starts, [*starts[1:], None], strict=False)
    ]


def _write_runs(folder: Path, runs: Sequence[EngineRun]) -> None:
    with suppress(OSError):
        places = [[run.file, run.start, run.end] for run in runs[-2:]]
        write_atomically(folder / _RUNS_FILE, json.dumps(places))


def find_run(folder: Path, *, previous: bool) -> EngineRun | None:
    """Return the last run, or the one before it; None if there was none."""
    runs = _read_runs(folder)
    if previous:
        if len(runs) < 2:
            return None
        before, last = runs[-2:]
        same_file = before.file == last.file
        return EngineRun(
            file=before.file, start=before.start, end=last.start if same_file else before.end
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
            EngineRun(file=str(file), start=int(start), end=None if end is None else int(end))
            for file, start, end in ([*run, None][:3] for run in tree)
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
        rotation = _rotation_id(path)
        while True:
            # The rotated file is new only after the log was truncated.
            if run.end is None and rotation != (rotation := _rotation_id(path)):
                rest = await asyncio.to_thread(_read_rotated, path, at)
                at = 0
                if rest:
                    yield rest
            left = _PIECE_BYTES if run.end is None else min(_PIECE_BYTES, run.end - at)
            piece = await asyncio.to_thread(_read, file, at, left)
            if piece:
                at += len(piece)
                yield piece
            elif not follow:
                return
            else:
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


def _rotation_id(path: Path) -> int:
    """Return a number that changes when the log is rotated; 0 before the first time."""
    try:
        result = log_rotation.rotated_path(path).stat()
    except OSError:
        return 0
    return hash((result.st_ino, result.st_mtime_ns))


def _read_rotated(path: Path, at: int) -> bytes:
    """Return what was rotated away before it was read, from an offset of the log on; at most `_MAX_CAUGHT_UP_BYTES`."""
    try:
        with log_rotation.rotated_path(path).open("rb") as file:
            return _read(file, at, _MAX_CAUGHT_UP_BYTES)
    except OSError:
        return b""
