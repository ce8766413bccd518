"""The folder of files and batches: a database and one file of content each. Shared by the gateways of one machine.

A call blocks on the disk: use it in a thread. What a call has written survives kill -9 and power cuts.
"""

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gateway.batches.records import BatchLine, StoredBatch, StoredFile
from machinery import files
from machinery.sqlite_file import SqliteFile

_R = TypeVar("_R", StoredFile, StoredBatch)

_SCHEMA: Final = """
CREATE TABLE files (id TEXT PRIMARY KEY, owner TEXT NOT NULL, created INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created INTEGER NOT NULL, is_over INTEGER NOT NULL,
    record BLOB NOT NULL);
CREATE INDEX open_batches ON batches (is_over, created);
CREATE TABLE lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, model TEXT NOT NULL, state INTEGER NOT NULL, result BLOB,
    PRIMARY KEY (batch, number), UNIQUE (batch, custom_id)) WITHOUT ROWID;
CREATE INDEX waiting_lines ON lines (batch, state, number);
"""
# Longer than any content takes from its first byte to its row.
_LEFTOVER_S: Final = 3600.0
WAITING: Final = 0
COMPLETED: Final = 1
FAILED: Final = 2
_OVER: Final = frozenset({"completed", "failed", "expired", "cancelled"})


class DuplicateIdError(Exception):
    """Two lines of a batch have the same custom id, which is the message."""


class BatchStore:
    """The open folder."""

    def __init__(self, folder: Path) -> None:
        """Open the folder, which is private, or make it.

        Raises:
            DatabaseError: it cannot be used.

        """
        self.folder = folder
        self._file = SqliteFile(folder / "batches.db", _SCHEMA)
        with self._file.reading() as self._db:
            files.make_private_folder(folder / "content")

    def close(self) -> None:
        """Close the database."""
        self._file.close()

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self.folder / "content" / file_id

    def add_file(self, record: StoredFile) -> None:
        """Add a file whose content is in place."""
        with self._file.transaction():
            row = (record.id, record.owner, record.created_s, msgspec.json.encode(record))
            self._db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", row)

    def _records(self, kind: type[_R], sql: str, *values: object) -> list[_R]:
        """Return the records that a query selects."""
        with self._file.reading():
            rows = self._db.execute(sql, values).fetchall()
        return [msgspec.json.decode(row[0], type=kind) for row in rows]

    def file(self, file_id: str, owner: str) -> StoredFile | None:
        """Return a file of this owner."""
        sql = "SELECT record FROM files WHERE id = ? AND owner = ?"
        return next(iter(self._records(StoredFile, sql, file_id, owner)), None)

    def files(self, owner: str, limit: int) -> list[StoredFile]:
        """Return the newest files of an owner."""
        sql = "SELECT record FROM files WHERE owner = ? ORDER BY created DESC, id DESC LIMIT ?"
        return self._records(StoredFile, sql, owner, limit)

    def is_needed(self, record: StoredFile) -> bool:
        """Return whether a batch that is not over reads the file."""
        return any(batch.input_file == record.id for batch in self.open_batches())

    def delete_file(self, record: StoredFile) -> None:
        """Delete a file; once it is forgotten, its content goes."""
        with self._file.transaction():
            self._db.execute("DELETE FROM files WHERE id = ?", (record.id,))
        with self._file.reading():
            self.content(record.id).unlink(missing_ok=True)

    def owners(self) -> set[str]:
        """Return all that own a file or a batch."""
        with self._file.reading():
            rows = self._db.execute("SELECT owner FROM files UNION SELECT owner FROM batches")
            return {owner for (owner,) in rows}

    def delete_owner(self, owner: str) -> None:
        """Delete the files and batches of an owner."""
        with self._file.transaction():
            rows = self._db.execute("SELECT id FROM files WHERE owner = ?", (owner,)).fetchall()
            self._db.execute(
                "DELETE FROM lines WHERE batch IN (SELECT id FROM batches WHERE owner = ?)",
                (owner,),
            )
            self._db.execute("DELETE FROM batches WHERE owner = ?", (owner,))
            self._db.execute("DELETE FROM files WHERE owner = ?", (owner,))
        with self._file.reading():
            for (file_id,) in rows:
                self.content(file_id).unlink(missing_ok=True)

    def delete_leftovers(self, now: datetime) -> None:
        """Delete content of no file: a process was killed while it wrote or deleted one. New content may be in work."""
        oldest_s = now.timestamp() - _LEFTOVER_S
        with self._file.reading():
            known = {found for (found,) in self._db.execute("SELECT id FROM files")}
            for path in (self.folder / "content").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if path.name not in known and path.stat().st_mtime < oldest_s:
                        path.unlink()

    def used_bytes(self, owner: str | None = None) -> int:
        """Return the bytes of all files, or of one owner's."""
        sql = "SELECT record FROM files WHERE owner = ifnull(?, owner)"
        return sum(record.size for record in self._records(StoredFile, sql, owner))

    def add_batch(self, record: StoredBatch) -> None:
        """Add a batch."""
        with self._file.transaction():
            self._put(record)

    def change_batch(
        self, before: StoredBatch, record: StoredBatch, lines: Iterable[BatchLine] = ()
    ) -> None:
        """Change a batch, with its lines once they are known; nothing happens if it was cancelled meanwhile.

        Raises:
            DuplicateIdError: two lines have the same custom id; nothing was written.

        """
        with self._file.transaction():
            stored = self._batch(record.id)
            if stored is None or stored.status != before.status:
                return
            self._put(record)
            for line in lines:
                row = (record.id, line.number, line.custom_id, line.offset, line.length, line.model)
                try:
                    self._db.execute("INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, 0, NULL)", row)
                except sqlite3.IntegrityError:
                    raise DuplicateIdError(line.custom_id) from None

    def _put(self, record: StoredBatch) -> None:
        is_over = int(record.status in _OVER)
        encoded = msgspec.json.encode(record)
        row = (record.id, record.owner, record.created_s, is_over, encoded)
        self._db.execute("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?, ?)", row)

    def _batch(self, batch_id: str) -> StoredBatch | None:
        sql = "SELECT record FROM batches WHERE id = ?"
        return next(iter(self._records(StoredBatch, sql, batch_id)), None)

    def batch(self, batch_id: str, owner: str) -> StoredBatch | None:
        """Return a batch of this owner."""
        record = self._batch(batch_id)
        return record if record is not None and record.owner == owner else None

    def batches(self, owner: str, limit: int) -> list[StoredBatch]:
        """Return the newest batches of an owner."""
        sql = "SELECT record FROM batches WHERE owner = ? ORDER BY created DESC, id DESC LIMIT ?"
        return self._records(StoredBatch, sql, owner, limit)

    def open_batches(self) -> list[StoredBatch]:
        """Return all batches that are not over, oldest first."""
        sql = "SELECT record FROM batches WHERE is_over = 0 ORDER BY created, id"
        return self._records(StoredBatch, sql)

    def cancel(self, batch_id: str, owner: str, now_s: int) -> StoredBatch | None:
        """Ask for the end of a batch, unless it is over; return it as it is now."""
        with self._file.transaction():
            record = self.batch(batch_id, owner)
            if record is not None and record.status in ("validating", "in_progress"):
                record = msgspec.structs.replace(record, status="cancelling", cancelling_s=now_s)
                self._put(record)
            return record

    def waiting_lines(self, batch_id: str, limit: int) -> list[BatchLine]:
        """Return the first lines without a result."""
        with self._file.reading():
            sql = (
                "SELECT number, custom_id, offset, length, model FROM lines"
                " WHERE batch = ? AND state = 0 ORDER BY number LIMIT ?"
            )
            rows = self._db.execute(sql, (batch_id, limit)).fetchall()
        return [BatchLine(*row) for row in rows]

    def end_line(self, batch: StoredBatch, number: int, state: int, result: bytes) -> None:
        """Write the result of a line and count it, unless it has one already."""
        with self._file.transaction():
            done = self._db.execute(
                "UPDATE lines SET state = ?, result = ? WHERE batch = ? AND number = ? AND state = 0",
                (state, result, batch.id, number),
            )
            record = self._batch(batch.id)
            if not done.rowcount or record is None:
                return
            name = "completed" if state == COMPLETED else "failed"
            record = msgspec.structs.replace(record, **{name: getattr(record, name) + 1})
            self._put(record)

    def results(self, batch_id: str, state: int) -> Iterator[bytes]:
        """Yield the results of all lines in a state, in their order."""
        after = 0
        while True:
            with self._file.reading():
                sql = (
                    "SELECT number, result FROM lines WHERE batch = ? AND state = ? AND number > ?"
                    " ORDER BY number LIMIT 200"
                )
                rows = self._db.execute(sql, (batch_id, state, after)).fetchall()
            if not rows:
                return
            for number, result in rows:
                after = number
                yield result

    def drop_lines(self, batch_id: str) -> None:
        """Forget the lines of a batch whose files are written."""
        with self._file.transaction():
            self._db.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
