"""Saved journal: the last requests in two files of the state folder, with which a gateway starts after kill -9.

    saved = SavedJournal(folder / "requests.jsonl", journal, clock, size=10_000)
    saved.restore()
    group.create_task(saved.run())

New entries are taken from the journal four times a second, encoded in slices between other work, and written by a
thread. What ended in the last quarter of a second before a kill is lost. A full, hanging or damaged disk costs
entries, one log line and nothing else.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from gateway.telemetry.journal_file import JournalFile
from gateway.telemetry.request_journal import JournalEntry, RequestJournal
from machinery.clock import Clock
from machinery.prometheus import Gauge

log = logging.getLogger(__name__)

_INTERVAL_S: Final = 0.25
_ENTRY_BYTES: Final = 512
_LEAST_BYTES: Final = 256 << 10
_LONGEST_LINE: Final = 64 << 10
_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(JournalEntry)
METRIC: Final = "fleet_gateway_journal_unsaved_total"


class SavedJournal:
    """Restores a journal from its files, and keeps them up to date."""

    def __init__(self, path: Path, journal: RequestJournal, clock: Clock, *, size: int) -> None:
        """`size` is the number of entries that the journal keeps; two files hold at least as many."""
        self._path, self._older = path, path.with_name(f"{path.name}.1")
        self._journal = journal
        self._clock = clock
        self._size = size
        self._file_bytes = max(_LEAST_BYTES, size * _ENTRY_BYTES)
        self._file = JournalFile[JournalEntry](
            path,
            encode_entries,
            file_bytes=self._file_bytes,
            older_files=1,
            failure="cannot save the journal; a restart forgets requests",
        )
        self.write = self._file.write
        """Write entries now; log the first of successive failures."""
        self._cursor = ""
        self._not_queued = 0

    def lines(self) -> Iterator[str]:
        """Yield the metric in Prometheus text format."""
        help_ = "Requests that a restart forgets, because they could not be written to --state-dir."
        return Gauge(METRIC, help_, lambda: self._not_queued + self._file.lost, "counter").lines()

    def restore(self) -> int:
        """Fill the empty journal with the saved entries, oldest first; return their number.

        Lines that are torn, damaged or of another release are skipped; files that cannot be read count as empty.
        """
        entries: list[JournalEntry] = []
        damaged = 0
        for path in (self._older, self._path):
            raw = self._read(path)
            for line in raw.splitlines():
                entry = decode_entry(line)
                if entry is not None:
                    entries.append(entry)
                else:
                    damaged += bool(line)
            self._file.is_torn = bool(raw) and not raw.endswith(b"\n")
        self._journal.restore(entries[-self._size :])
        self._cursor = self._journal.page_after("", 0).cursor
        if damaged:
            log.warning(
                "lines of the saved journal were skipped",
                extra={"path": str(self._path), "lines": damaged, "read": len(entries)},
            )
        return len(entries)

    def _read(self, path: Path) -> bytes:
        """Return the end of a file, at most as much as is kept; empty if it cannot be read."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # A batch is written as a whole, so a file may be a little larger than its limit.
                file.seek(max(0, size - 2 * self._file_bytes))
                return file.read(2 * self._file_bytes)
        except FileNotFoundError:
            return b""
        except OSError as error:
            why = error.strerror or str(error)
            log.warning("cannot read the saved journal", extra={"path": str(path), "why": why})
            return b""

    async def run(self, collect: Callable[[], None] = lambda: None) -> None:
        """Save new entries forever; at the end, save the rest if the disk is fast enough.

        `collect` is called before the last ones are taken, and adds to the journal what is not added yet.
        """
        with suppress(OSError):  # which the first write reports
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file.start()
        try:
            while True:
                await self._clock.sleep(_INTERVAL_S)
                # While the disk hangs, entries wait in the journal, as many as it keeps.
                if self._file.is_idle:
                    await self._file.put(self._take())
        finally:
            collect()
            self._file.put_at_once(self._take())
            self._file.close()

    def _take(self) -> Sequence[JournalEntry]:
        """Return the entries that ended since the last call."""
        page = self._journal.page_after(self._cursor, self._size)
        self._cursor = page.cursor
        self._not_queued += page.lost or 0
        return page.entries


def encode_entries(entries: Sequence[JournalEntry]) -> bytes:
    """Return entries as lines, without prompts; each is an array of the entry's fields."""
    return _ENCODER.encode_lines(entries)


def decode_entry(line: bytes) -> JournalEntry | None:
    """Return the entry of a line; None if the line is damaged or has another form."""
    try:
        return _DECODER.decode(line) if len(line) <= _LONGEST_LINE else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
