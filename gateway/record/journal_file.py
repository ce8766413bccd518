"""The journal on disk: JSON lines, written in batches by a thread. Serving never waits for it.

A disk that is full or hangs costs lines of this file, one line of the log, and nothing else.
"""

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import orjson

from gateway.record.journal import Entry, shown
from machinery.clock import Clock
from machinery.promtext import head

log = logging.getLogger(__name__)

# 64 MB hold some 100,000 requests.
_FILE_BYTES = 64 << 20
_OLD_FILES = 4
_BATCH_S = 1.0
# What may wait for the disk: 10 s of the fastest gateway, some 60 MB.
_WAITING_LIMIT = 50_000
# For the last batch, when the process ends.
_GOODBYE_S = 2.0


class JournalFile:
    """`path` and up to four older ones, `path.1` being the youngest of those. `run()` writes."""

    def __init__(
        self, path: Path, clock: Clock, *, gateway: str, file_bytes: int = _FILE_BYTES
    ) -> None:
        self._path = path
        self._clock = clock
        self._gateway = gateway
        self._file_bytes = file_bytes
        self._waiting: list[Entry] = []
        self._batches: SimpleQueue[list[Entry] | None] = SimpleQueue()
        self._is_failing = False
        # Two numbers, for two threads count.
        self._not_taken = self._not_written = 0

    @property
    def lost(self) -> int:
        """How many requests are not in the file because it could not be written."""
        return self._not_taken + self._not_written

    def lines(self) -> Iterator[str]:
        """Yield Prometheus' text."""
        name = "fleet_gateway_journal_lost_total"
        yield from head(
            name, "Requests that could not be written to the journal's file.", "counter"
        )
        yield f"{name} {self.lost}"

    def add(self, entry: Entry) -> None:
        """Have it written with the next batch."""
        if len(self._waiting) < _WAITING_LIMIT:
            self._waiting.append(entry)
        else:
            self._not_taken += 1

    async def run(self) -> None:
        """Write, for ever; what waits at the end is written as well, if the disk takes it in time."""
        # Not the loop's own threads: the process would wait for one whose disk hangs.
        writer = threading.Thread(target=self._write_all, daemon=True)
        writer.start()
        try:
            while True:
                await self._clock.sleep(_BATCH_S)
                # While the disk hangs they wait here, where they are counted.
                if self._waiting and self._batches.empty():
                    self._hand_over()
        finally:
            self._hand_over()
            self._batches.put(None)
            writer.join(_GOODBYE_S)

    def _hand_over(self) -> None:
        batch, self._waiting = self._waiting, []
        self._batches.put(batch)

    def _write_all(self) -> None:
        while (batch := self._batches.get()) is not None:
            self.write(batch)

    def write(self, batch: list[Entry]) -> None:
        """Write them now; that it fails is told in the log, once until it works again."""
        why = self._written(batch)
        if why is None:
            self._is_failing = False
            return
        self._not_written += len(batch)
        if not self._is_failing:
            self._is_failing = True
            log.error(
                "the journal cannot be written; requests are served without it",
                extra={"path": str(self._path), "why": why},
            )

    def _written(self, batch: list[Entry]) -> str | None:
        """Write them; return why that failed, None if it did not."""
        if not batch:
            return None
        lines = b"".join(orjson.dumps(one) + b"\n" for one in shown(batch, self._gateway))
        try:
            self._make_room()
            # Only its owner: it says who asked what for how long.
            number = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                if os.write(number, lines) != len(lines):
                    return "the disk took a part of it only"
            finally:
                os.close(number)
        except OSError as error:
            return error.strerror or str(error)
        return None

    def _make_room(self) -> None:
        """Begin a new file if the one there is large. Raises OSError."""
        try:
            if self._path.stat().st_size < self._file_bytes:
                return
        except FileNotFoundError:
            return
        for number in range(_OLD_FILES - 1, 0, -1):
            older = self._old(number)
            if older.exists():
                older.replace(self._old(number + 1))
        self._path.replace(self._old(1))

    def _old(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
