"""A SQLite database in a private folder, shared by the threads of a process and the processes of a machine.

A call blocks on the disk: use it in a thread. What a transaction has written survives kill -9 and power cuts.
"""

import contextlib
import os
import re
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from machinery import files

_VERSION: Final = 1


class DatabaseError(Exception):
    """The database cannot be used; the message says why."""


class SqliteFile:
    """The open database."""

    def __init__(self, path: Path, schema: str) -> None:
        """Open the file in its folder, which is private, or make both. `schema`: statements that make its tables.

        Raises:
            DatabaseError: it cannot be used.

        """
        self.path = path
        self._lock = threading.RLock()
        try:
            files.make_private_folder(path.parent)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(
                path, isolation_level=None, timeout=10.0, check_same_thread=False
            )
        except (sqlite3.Error, OSError, ValueError) as error:
            raise DatabaseError(f"{path.parent}: {error}") from error
        with self.reading() as db:
            db.execute("PRAGMA journal_mode = WAL")
            # A client that was told of an id finds it after a power cut, too.
            db.execute("PRAGMA synchronous = FULL")
            with self.transaction():
                (version,) = db.execute("PRAGMA user_version").fetchone()
                if version > _VERSION:
                    raise DatabaseError(f"a newer mlx-fleet wrote {path}; move it away")
                if version == 0:
                    # Bodies of triggers are indented.
                    for statement in re.split(r";\n(?! )", schema.strip()):
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {_VERSION}")

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Write all or nothing; a transaction inside another is a part of it. Raises DatabaseError."""
        with self.reading() as db:
            if db.in_transaction:
                yield db
                return
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                # The disk may be too full for this as well; closing the file has the same effect.
                with contextlib.suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Use the database alone among the threads of the process. Raises DatabaseError."""
        try:
            with self._lock:
                yield self._db
        except (sqlite3.Error, OSError) as error:
            raise DatabaseError(f"{self.path}: {error}") from error
