"""Journal file: lines that a thread of its own writes, so that a full or hanging disk costs lines and nothing else."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

Entry = TypeVar("Entry")

log = logging.getLogger(__name__)

# Entries that are encoded before other work: some 0.15 ms. Of many at once, more, so that they are encoded in few turns.
_SLICE: Final = 50
_MOST_SLICES: Final = 32
# Time for the last batches when the process ends.
_FLUSH_S: Final = 2.0


class JournalFile(Generic[Entry]):
    """Appends entries to `path`; a full file becomes `path.1`, that one `path.2`, up to `older_files`."""

    def __init__(
        self,
        path: Path,
        encode: Callable[[Sequence[Entry]], bytes],
        *,
        file_bytes: int,
        older_files: int,
        failure: str,
    ) -> None:
        """`encode` returns whole lines; `failure` is logged at the first of successive failures."""
        self._path = path
        self._encode = encode
        self._file_bytes = file_bytes
        self._older_files = older_files
        self._failure = failure
        self._batches: SimpleQueue[tuple[bytes, int] | None] = SimpleQueue()
        """Lines, and the number of their entries."""
        # Not a thread of the event loop's pool: the process would wait for one with a hanging disk.
        self._thread = threading.Thread(target=self._write_all, name="journal-file", daemon=True)
        self._is_failing = False
        self.is_torn = False
        """True if the file may end in the middle of a line."""
        self.lost = 0
        """The number of entries that could not be written. The thread alone counts."""

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """True if no batch waits for the disk."""
        return self._batches.empty()

    async def put(self, entries: Sequence[Entry]) -> None:
        """Encode entries in slices, between other work of the event loop, and hand them to the thread.

        Not in the thread: it would hold the interpreter's lock for milliseconds whenever it has it. A cancelled call
        hands over all entries, too.
        """
        size = max(_SLICE, -(-len(entries) // _MOST_SLICES))
        lines: list[bytes] = []
        rest = entries
        try:
            while len(rest) > size:
                lines.append(self._encode(rest[:size]))
                rest = rest[size:]
                await asyncio.sleep(0)
        finally:
            self.put_at_once(rest, lines, len(entries))

    def put_at_once(
        self, entries: Sequence[Entry], before: Sequence[bytes] = (), count: int = 0
    ) -> None:
        """Encode entries, and hand them to the thread with lines before them; `count`: the entries of all these lines."""
        if entries:
            lines = b"".join((*before, self._encode(entries)))
            self._batches.put((lines, count or len(entries)))

    def close(self) -> None:
        """Write what waits if the disk is fast enough, and end the thread."""
        self._batches.put(None)
        self._thread.join(_FLUSH_S)

    def _write_all(self) -> None:
        while (batch := self._batches.get()) is not None:
            self._write_lines(*batch)

    def write(self, entries: Sequence[Entry]) -> None:
        """Write entries; log the first of successive failures."""
        self._write_lines(self._encode(entries), len(entries))

    def _write_lines(self, lines: bytes, count: int) -> None:
        why = self._append(lines)
        if why is None:
            self._is_failing = False
            return
        self.lost += count
        if not self._is_failing:
            self._is_failing = True
            log.error(self._failure, extra={"path": str(self._path), "why": why})

    def _append(self, lines: bytes) -> str | None:
        """Append lines to the file; return the reason of a failure, else None."""
        try:
            self._make_room()
            # Readable by the owner only: the entries tell which key asked what.
            number = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                data = b"\n" + lines if self.is_torn else lines
                self.is_torn = True
                if os.write(number, data) != len(data):
                    return "the disk took a part of it only"
                self.is_torn = False
            finally:
                os.close(number)
        except OSError as error:
            return error.strerror or str(error)
        return None

    def _make_room(self) -> None:
        """Rotate the files if the current one is full. Raises OSError."""
        try:
            if self._path.stat().st_size < self._file_bytes:
                return
        except FileNotFoundError:
            return
        for number in range(self._older_files - 1, 0, -1):
            older = self._older(number)
            if older.exists():
                older.replace(self._older(number + 1))
        self._path.replace(self._older(1))
        self.is_torn = False

    def _older(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
