"""Stored responses: bounded in bytes, of each API key and of all, and in time. The oldest go first.

A call blocks on the disk: use it in a thread. A conversation is stored once: each response has its own input and the
id of the response before it.
"""

import shutil
from pathlib import Path
from typing import Final

import msgspec

from machinery.sqlite_file import DatabaseError, SqliteFile
from machinery.state_disk import least_free_bytes

MAX_OWNER_BYTES: Final = 256 << 20
MAX_BYTES: Final = 2 << 30
# As long as OpenAI stores them.
MAX_AGE_S: Final = 30 * 24 * 3600
_MAX_TURNS: Final = 4096


_SCHEMA: Final = """
CREATE TABLE responses (
    id TEXT NOT NULL, owner TEXT NOT NULL, created_s INTEGER NOT NULL, previous TEXT NOT NULL,
    running_until_s INTEGER NOT NULL, input BLOB NOT NULL, body BLOB NOT NULL, size INTEGER NOT NULL,
    PRIMARY KEY (owner, id));
CREATE INDEX response_ages ON responses (created_s, size);
CREATE INDEX response_turns ON responses (owner, id, created_s, previous, size);
CREATE INDEX owner_ages ON responses (owner, created_s, size);
CREATE TABLE response_bytes (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER response_added AFTER INSERT ON responses BEGIN
    INSERT INTO response_bytes VALUES (NEW.owner, NEW.size)
    ON CONFLICT (owner) DO UPDATE SET bytes = bytes + NEW.size; END;
CREATE TRIGGER response_deleted AFTER DELETE ON responses BEGIN
    UPDATE response_bytes SET bytes = bytes - OLD.size WHERE owner = OLD.owner; END;
"""


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One response of an owner."""

    id: str
    owner: str
    """The identity of the API key; empty for clients without one."""
    created_s: int
    previous: str = ""
    """The id of the response that it continues; empty if it begins a conversation."""
    running_until_s: int = 0
    """The time at which a background response counts as failed unless its gateway renews it; 0: it is over."""
    input: bytes
    """Its own input items, as a JSON array."""
    body: bytes
    """The response as the client sees it."""

    @property
    def size(self) -> int:
        """The bytes that count."""
        return len(self.input) + len(self.body)


class ResponseDatabase:
    """The stored responses of a folder."""

    def __init__(
        self, folder: Path, *, max_owner_bytes: int = MAX_OWNER_BYTES, max_bytes: int = MAX_BYTES
    ) -> None:
        """Open the folder, or make it. Raises DatabaseError."""
        self._file = SqliteFile(folder / "responses.db", _SCHEMA)
        self._max_owner_bytes, self._max_bytes = max_owner_bytes, max_bytes

    def add(self, record: StoredResponse, now_s: int) -> None:
        """Add a response, and delete the oldest that it leaves no room for.

        Raises:
            DatabaseError: it is too large, or the disk does not take it.

        """
        if record.size > self._max_owner_bytes:
            raise DatabaseError(
                f"the response has {record.size} bytes; one key may store {self._max_owner_bytes}"
            )
        try:
            usage = shutil.disk_usage(self._file.path.parent)
        except OSError as error:
            raise DatabaseError(str(error)) from error
        if usage.free < least_free_bytes(usage.total) + record.size:
            raise DatabaseError(f"{self._file.path.parent}: the disk is almost full")
        with self._file.transaction() as db:
            oldest_s = now_s - MAX_AGE_S
            db.execute("DELETE FROM responses WHERE created_s < ?", (oldest_s,))
            row = (record.owner, record.id)
            db.execute("DELETE FROM responses WHERE owner = ? AND id = ?", row)
            for owner, limit in ((record.owner, self._max_owner_bytes), (None, self._max_bytes)):
                self._make_room(owner, limit - record.size)
            sql = "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
            db.execute(sql, (*msgspec.structs.astuple(record), record.size))

    def _make_room(self, owner: str | None, limit: int) -> None:
        """Delete the oldest responses of an owner, or of all, until they have so many bytes."""
        with self._file.transaction() as db:
            sql = "SELECT ifnull(sum(bytes), 0) FROM response_bytes WHERE owner = ifnull(?, owner)"
            (used,) = db.execute(sql, (owner,)).fetchone()
            if used <= limit:
                return
            sql = (
                "SELECT rowid, size FROM responses WHERE owner = ifnull(?, owner)"
                " ORDER BY created_s, rowid"
            )
            rows = []
            for rowid, size in db.execute(sql, (owner,)):
                rows.append((rowid,))
                used -= size
                if used <= limit:
                    break
            db.executemany("DELETE FROM responses WHERE rowid = ?", rows)

    def response(self, response_id: str, owner: str, now_s: int) -> StoredResponse | None:
        """Return a response of this owner; None if there is none, or it is too old."""
        with self._file.reading() as db:
            sql = "SELECT * FROM responses WHERE owner = ? AND id = ? AND created_s >= ?"
            row = db.execute(sql, (owner, response_id, now_s - MAX_AGE_S)).fetchone()
        if row is None:
            return None
        names = StoredResponse.__struct_fields__
        return StoredResponse(**dict(zip(names, row[:-1], strict=True)))

    def conversation(self, response_id: str, owner: str, now_s: int) -> tuple[list[str], int, str]:
        """Return the ids of a conversation up to this response, oldest first, their bytes, and the id that is missing."""
        sql = (
            "WITH RECURSIVE turns(id, previous, size, depth) AS ("
            " SELECT id, previous, size, 1 FROM responses WHERE owner = ?1 AND id = ?2 AND created_s >= ?3"
            " UNION ALL SELECT r.id, r.previous, r.size, depth + 1 FROM turns"
            " JOIN responses r ON r.owner = ?1 AND r.id = turns.previous AND r.created_s >= ?3"
            " WHERE depth < ?4)"
            " SELECT id, previous, size FROM turns ORDER BY depth DESC"
        )
        with self._file.reading() as db:
            rows = db.execute(sql, (owner, response_id, now_s - MAX_AGE_S, _MAX_TURNS)).fetchall()
        missing = rows[0][1] if rows else response_id
        return [row[0] for row in rows], sum(row[2] for row in rows), missing

    def delete(self, response_id: str, owner: str) -> bool:
        """Delete a response; return whether there was one."""
        with self._file.transaction() as db:
            sql = "DELETE FROM responses WHERE owner = ? AND id = ?"
            return db.execute(sql, (owner, response_id)).rowcount > 0

    def renew(self, response_id: str, owner: str, until_s: int) -> bool:
        """Say that a background response still runs; return False if it was cancelled or deleted meanwhile."""
        with self._file.transaction() as db:
            sql = (
                "UPDATE responses SET running_until_s = ?"
                " WHERE owner = ? AND id = ? AND running_until_s > 0"
            )
            return db.execute(sql, (until_s, owner, response_id)).rowcount > 0

    def end(self, response_id: str, owner: str, body: bytes, now_s: int) -> None:
        """End a background response with this body, unless it is over."""
        with self._file.transaction():
            record = self.response(response_id, owner, now_s)
            if record is not None and record.running_until_s:
                self.add(msgspec.structs.replace(record, running_until_s=0, body=body), now_s)

    def owners(self) -> set[str]:
        """Return all that own a response."""
        with self._file.reading() as db:
            return {owner for (owner,) in db.execute("SELECT owner FROM response_bytes")}

    def delete_owner(self, owner: str) -> None:
        """Delete the responses of an owner."""
        with self._file.transaction() as db:
            db.execute("DELETE FROM responses WHERE owner = ?", (owner,))
            db.execute("DELETE FROM response_bytes WHERE owner = ?", (owner,))
