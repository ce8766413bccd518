"""The file of the history: its schema, opening, transactions, and removal of what is old. Used by one thread.

A file that is damaged is set aside as `history.db.damaged` and a new one begins. Nothing here knows an event loop.
"""

import contextlib
import fcntl
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from dashboard.history.records import (
    BUDGET_STEP_S,
    CHUNK,
    COARSE_S,
    COLUMNS,
    FINE_KEPT_S,
    FINE_S,
    Batch,
    RequestSums,
    end_of,
    model_of,
    pack_values,
)
from schemas.wire.requests import EndedRequest

log = logging.getLogger(__name__)

FILE: Final = "history.db"
DAMAGED: Final = "history.db.damaged"
_LOCK: Final = "history.lock"
_VERSION: Final = 2
_RESTORED: Final = 10_000
_MOST_REQUESTS: Final = 1_000_000
# A row from the future is removed: the clock was wrong when it was written.
_FUTURE_S: Final = 3600.0
_PRUNE_STEPS: Final = 64
# A document is at most as large as etcd's largest request.
_MOST_BYTES: Final = 4 << 20
_DAMAGE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_DICTIONARY: Final = (
    b'{"time":"2026-01-01T00:00:00.000000Z","id":"","gateway":"","model":"","status":"ok","latencyMs":1,"tokens":'
    b'{"prompt":1,"cached":0,"output":1},"queueMs":0.0,"firstTokenMs":null,"worker":"","replica":"","deployment":"",'
    b'"apiKey":null,"path":"/v1/chat/completions","httpStatus":200,"strategy":"least-loaded","streamed":true,'
    b'"resumptions":0,"attempts":[{"replica":"","worker":"","outcome":"ok","ms":1.0,"why":null}],"endpoint":'
    b'"http://127.0.0.1:8000","session":null}'
)
# Words of objects, the most frequent last. It is a part of the format: it must not change.
_OBJECT_DICTIONARY: Final = (
    b'"geometry":{"modelType":"llama","weightsBytes":0,"layers":0,"kvHeads":8,"headDim":128,"kvElementBytes":2,'
    b'"vocabSize":0,"maxContext":0,"groups":[],"replicatedBytes":0,"parameters":0,"hiddenSize":0,"ffnSize":0,"heads":0,'
    b'"prefillBatch":4,"prefillStep":512,"isAttentionFused":true,"unknown":""},"reason":"","message":"",'
    b'"missingBytes":0,"fetchProblem":""}],"adapters":[]}"fabric":{"interfaces":[{"name":"en0","address":"10.0.0.1",'
    b'"isThunderbolt":false,"prefixLength":24,"isWireless":false,"speedMbps":0}],"ports":[],"rdma":[],"thunderbolt":5,'
    b'"osBuild":""},"observedGeneration":1,"conditions":[{"type":"Ready","status":"True","reason":"","message":"",'
    b'"observedGeneration":1,"lastTransitionTime":"2026-01-01T00:00:00.000000Z"}],"uid":"","hostname":"","address":'
    b'"10.0.0.1","agentUrl":"http://10.0.0.1:4001","agentVersion":"0.1.0","os":"macOS","osVersion":"26.1","machine":'
    b'"Mac16,1","chip":"Apple M4 Pro","cpuCores":10,"gpuCores":10,"memoryBytes":68719476736,"allocatableBytes":'
    b'51539607552,"hardwareUuid":"","isPart":false,"mlxVersion":"0.32.0","mlxLmVersion":"0.32.0","diskBytes":0,'
    b'"diskFreeBytes":0,"power":"AC","isOwnerActive":false,"labels":{},"models":[{"path":"","storedVersion":1,'
    b'"apiVersion":"fleet/v1alpha1","kind":"ModelDeployment","metadata":{"name":"","labels":{},"annotations":{},"uid":"",'
    b'"generation":1,"creationTimestamp":"2026-01-01T00:00:00.000000Z","finalizers":[],"ownerReferences":[],'
    b'"managedFields":[]},"spec":{"about":{"kind":"Replica","name":""},"type":"Normal","reason":"","message":"","source":'
    b'"reconciler","count":1,"firstSeen":"2026-01-01T00:00:00.000000Z","lastSeen":"2026-01-01T00:00:00.000000Z"'
)
_SCHEMA: Final = f"""
PRAGMA user_version = {_VERSION};
CREATE TABLE subjects (
    kind TEXT NOT NULL, slot INTEGER NOT NULL, name TEXT NOT NULL, seen_s INTEGER NOT NULL,
    PRIMARY KEY (kind, name)) WITHOUT ROWID;
CREATE TABLE series (
    kind TEXT NOT NULL, tier INTEGER NOT NULL, chunk INTEGER NOT NULL, at INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (kind, tier, chunk, at)) WITHOUT ROWID;
CREATE TABLE sums (
    tier INTEGER NOT NULL, at INTEGER NOT NULL, model TEXT NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (tier, at, model)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS deployments (
    at INTEGER NOT NULL, name TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY (at, name)) WITHOUT ROWID;
CREATE TABLE requests (
    at REAL NOT NULL, gateway TEXT NOT NULL, id TEXT NOT NULL, model TEXT NOT NULL, node TEXT NOT NULL,
    outcome TEXT NOT NULL, key TEXT NOT NULL, ms REAL NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (at, gateway, id)) WITHOUT ROWID;
CREATE TABLE cursors (gateway TEXT PRIMARY KEY, cursor TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE revisions (
    key TEXT NOT NULL, at REAL NOT NULL, revision INTEGER NOT NULL, value BLOB,
    PRIMARY KEY (key, at, revision)) WITHOUT ROWID;
"""
_SECOND: Final = f"""
PRAGMA user_version = {_VERSION};
CREATE TABLE IF NOT EXISTS deployments (
    at INTEGER NOT NULL, name TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY (at, name)) WITHOUT ROWID;
"""
"""The step from version 1, which had no sums of deployments."""
KNOWN_STEPS: Final = (
    "SELECT at FROM series WHERE kind = 'fleet' AND chunk = 0 AND tier = ? AND at >= ? AND at < ?"
    " UNION SELECT at FROM sums WHERE tier = ? AND at >= ? AND at < ? ORDER BY 1"
)
"""The steps of a tier between two times in which a recorder ran, or whose requests were read later."""
_REQUEST: Final = msgspec.json.Decoder(EndedRequest)


class HistoryError(Exception):
    """The history cannot be used; the message says why."""


class DamagedError(HistoryError):
    """The file is no database, or a part of it cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLimits:
    """Limits of age and size."""

    kept_s: float = 24 * 3600.0
    file_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """State that a recorder takes from the history at its start."""

    requests: list[EndedRequest] = field(default_factory=list)
    """The last ended requests, oldest first."""
    macs: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The number of requests of each Mac, and their seconds."""
    sums: list[tuple[int, int, RequestSums]] = field(default_factory=list)
    """Begin and seconds of a step, and the sums of all models in it."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Begin and seconds of every step in which a recorder ran."""
    deployments: list[tuple[int, str, RequestSums]] = field(default_factory=list)
    """Begin of a step of five minutes, deployment, and the sums of its requests."""
    cursors: dict[str, str] = field(default_factory=dict)
    revisions: dict[str, int] = field(default_factory=dict)
    """The last revision of every key that was not deleted."""


class HistoryFile:
    """The open file."""

    def __init__(self, folder: Path, limits: HistoryLimits) -> None:
        """Open the file in a private folder, or begin one.

        Raises:
            HistoryError: it cannot be used.
            DamagedError: it is damaged; see `set_aside`.

        """
        self._limits = limits
        self._slots: dict[tuple[str, str], int] = {}
        with _errors(), contextlib.ExitStack() as opened:
            self._lock = _take_lock(folder / _LOCK)
            opened.callback(os.close, self._lock)
            path = folder / FILE
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(
                path, isolation_level=None, timeout=5.0, check_same_thread=False
            )
            opened.callback(self._db.close)
            db = self._db
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version > _VERSION:
                raise HistoryError(f"a newer mlx-fleet wrote it (version {version}); move it away")
            if version == 0:
                db.execute("PRAGMA page_size = 16384")
                db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            # A power cut may lose the last transactions, and damages nothing.
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA wal_autocheckpoint = 256")
            db.execute(f"PRAGMA journal_size_limit = {8 << 20}")
            if version == 0:
                db.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
            if version == 1:
                db.executescript(f"BEGIN; {_SECOND} COMMIT;")
            for kind, name, slot in db.execute("SELECT kind, name, slot FROM subjects"):
                self._slots[kind, name] = slot
            opened.pop_all()

    def close(self) -> None:
        """Close the file; once is enough."""
        self._db.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def used_bytes(self) -> int:
        """The size of what is kept, without free pages. Raises HistoryError."""
        with _errors():
            pages, free, size = (
                int(self._db.execute(f"PRAGMA {one}").fetchone()[0])
                for one in ("page_count", "freelist_count", "page_size")
            )
        return (pages - free) * size

    def write(self, batch: Batch) -> None:
        """Write a batch, all of it or nothing. Raises HistoryError."""
        with _errors(), self._transaction():
            for sample in batch.samples:
                width, at_s = len(COLUMNS[sample.kind]), sample.at_s
                chunks: dict[int, dict[int, tuple[float, ...]]] = {}
                for name, values in sample.values.items():
                    chunk, place = divmod(self._slot(sample.kind, name, at_s), CHUNK)
                    chunks.setdefault(chunk, {})[place] = tuple(values)
                self._db.executemany(
                    "INSERT OR REPLACE INTO series VALUES (?, ?, ?, ?, ?)",
                    [
                        (sample.kind, sample.tier_s, chunk, at_s, pack_values(slots, width))
                        for chunk, slots in chunks.items()
                    ],
                )
                self._db.executemany(
                    "UPDATE subjects SET seen_s = ? WHERE kind = ? AND name = ?",
                    [(at_s, sample.kind, name) for name in sample.values]
                    if sample.tier_s == COARSE_S
                    else [],
                )
            self._write_requests(batch.requests)
            self._db.executemany(
                "INSERT OR REPLACE INTO cursors VALUES (?, ?, ?)",
                [(gateway, cursor, batch.at_s) for gateway, cursor in batch.cursors.items()],
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO revisions VALUES (?, ?, ?, ?)",
                [
                    (
                        revision.key,
                        revision.at_s,
                        revision.revision,
                        _deflate(revision.value, _OBJECT_DICTIONARY),
                    )
                    for revision in batch.revisions
                ],
            )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        slots = dict(self._slots)
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self._slots = slots
            # The disk may be too full for this as well; closing the file has the same effect.
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def _slot(self, kind: str, name: str, at_s: int) -> int:
        """Return the place of a subject in the rows of its kind; a new one takes the first free place."""
        found = self._slots.get((kind, name))
        if found is None:
            taken = {slot for (other, _), slot in self._slots.items() if other == kind}
            found = next(slot for slot in range(len(taken) + 1) if slot not in taken)
            self._slots[kind, name] = found
            values = (kind, found, name, at_s)
            self._db.execute("INSERT INTO subjects VALUES (?, ?, ?, ?)", values)
        return found

    def _write_requests(self, requests: Iterable[EndedRequest]) -> None:
        added: dict[tuple[int, int, str], RequestSums] = {}
        budgets: dict[tuple[int, str], RequestSums] = {}
        for request in requests:
            end_s, model = end_of(request), model_of(request)
            row = (
                *(
                    end_s,
                    request.gateway,
                    request.id,
                    request.model,
                    request.worker or "",
                    request.outcome,
                ),
                *(
                    request.api_key or "",
                    request.latency_ms,
                    _deflate(msgspec.json.encode(request), _DICTIONARY),
                ),
            )
            sql = "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
            # A request that is there was counted already.
            if self._db.execute(sql, row).rowcount:
                for tier_s in (FINE_S, COARSE_S):
                    step = (tier_s, int(end_s) // tier_s * tier_s, model)
                    added.setdefault(step, RequestSums()).count(request)
                if request.deployment:
                    place = (int(end_s) // BUDGET_STEP_S * BUDGET_STEP_S, request.deployment)
                    budgets.setdefault(place, RequestSums()).count(request)
        for (tier_s, at_s, model), sums in added.items():
            sql = "SELECT data FROM sums WHERE tier = ? AND at = ? AND model = ?"
            if (before := self._db.execute(sql, (tier_s, at_s, model)).fetchone()) is not None:
                sums.add(RequestSums.unpack(before[0]))
            packed = (tier_s, at_s, model, sums.pack())
            self._db.execute("INSERT OR REPLACE INTO sums VALUES (?, ?, ?, ?)", packed)
        for (at_s, name), sums in budgets.items():
            sql = "SELECT data FROM deployments WHERE at = ? AND name = ?"
            if (before := self._db.execute(sql, (at_s, name)).fetchone()) is not None:
                sums.add(RequestSums.unpack(before[0]))
            stored = (at_s, name, sums.pack())
            self._db.execute("INSERT OR REPLACE INTO deployments VALUES (?, ?, ?)", stored)

    def prune(self, now_s: float, *, by_age: bool) -> None:
        """Remove what is older than is kept, and the oldest hours beyond the limit of the size. Raises HistoryError.

        `by_age`: False while the clock cannot be trusted.
        """
        kept_s = self._limits.kept_s
        if by_age:
            self._remove_before(now_s - kept_s, fine_s=now_s - min(FINE_KEPT_S, kept_s))
            self._remove_future(now_s + _FUTURE_S)
        for _ in range(_PRUNE_STEPS):
            if self.used_bytes <= self._limits.file_bytes:
                break
            with _errors():
                oldest = [
                    self._db.execute(f"SELECT min(at) FROM {table}").fetchone()[0]  # noqa: S608 - our own names
                    for table in ("series", "sums", "requests")
                ]
            oldest_s = min((float(at) for at in oldest if at is not None), default=None)
            if oldest_s is None or oldest_s > now_s:
                break
            self._remove_before(
                oldest_s + max(60.0, (now_s - oldest_s) / 12), fine_s=now_s - FINE_KEPT_S
            )
        with _errors():
            # Each step frees one page; `execute` does one step of a statement without columns.
            self._db.executescript("PRAGMA incremental_vacuum(4096)")

    def _remove_before(self, cut_s: float, *, fine_s: float) -> None:
        with _errors(), self._transaction():
            for table in ("series", "sums"):
                sql = f"DELETE FROM {table} WHERE tier = ? AND at < ?"  # noqa: S608 - our own names
                self._db.execute(sql, (COARSE_S, cut_s))
                self._db.execute(sql, (FINE_S, max(cut_s, fine_s)))
            self._db.execute("DELETE FROM requests WHERE at < ?", (cut_s,))
            sql = "SELECT at FROM requests ORDER BY at DESC LIMIT 1 OFFSET ?"
            surplus = self._db.execute(sql, (_MOST_REQUESTS,)).fetchone()
            if surplus is not None:
                self._db.execute("DELETE FROM requests WHERE at <= ?", surplus)
            self._db.execute("DELETE FROM deployments WHERE at < ?", (cut_s,))
            self._db.execute("DELETE FROM cursors WHERE at < ?", (cut_s,))
            # Remove revisions that were replaced before a time; the one that was current then
            # stays, unless deleted.
            self._db.execute(
                "DELETE FROM revisions WHERE at < ? AND EXISTS (SELECT 1 FROM revisions AS later"
                " WHERE later.key = revisions.key AND later.at <= ?"
                " AND (later.at, later.revision) > (revisions.at, revisions.revision))",
                (cut_s, cut_s),
            )
            self._db.execute("DELETE FROM revisions WHERE at < ? AND value IS NULL", (cut_s,))
            self._db.execute("DELETE FROM subjects WHERE seen_s < ?", (cut_s,))
            self._slots = {
                (kind, name): slot
                for kind, name, slot in self._db.execute("SELECT kind, name, slot FROM subjects")
            }

    def _remove_future(self, cut_s: float) -> None:
        with _errors(), self._transaction():
            for table in ("series", "sums", "deployments", "requests", "revisions"):
                self._db.execute(f"DELETE FROM {table} WHERE at > ?", (cut_s,))  # noqa: S608 - our own names

    def restore(self, now_s: float) -> Restored:
        """Return what a recorder starts with. Raises HistoryError."""
        begin_s = now_s - self._limits.kept_s
        with _errors():
            db = self._db
            sql = "SELECT body FROM requests WHERE at >= ? ORDER BY at DESC LIMIT ?"
            rows = db.execute(sql, (begin_s, _RESTORED)).fetchall()
            requests = list(parse_requests(body for (body,) in reversed(rows)))
            sql = "SELECT node, count(*), sum(ms) FROM requests WHERE node != '' AND at >= ? GROUP BY node"
            macs = {node: (count, ms / 1000) for node, count, ms in db.execute(sql, (begin_s,))}
            fine_s = int(now_s - FINE_KEPT_S) // COARSE_S * COARSE_S
            tiers = ((COARSE_S, begin_s, fine_s), (FINE_S, fine_s, now_s + FINE_S))
            sums: dict[tuple[int, int], RequestSums] = {}
            steps: list[tuple[int, int]] = []
            for tier_s, first, end in tiers:
                sql = "SELECT at, data FROM sums WHERE tier = ? AND at >= ? AND at < ? ORDER BY at"
                for at_s, data in db.execute(sql, (tier_s, first, end)):
                    sums.setdefault((at_s, tier_s), RequestSums()).add(RequestSums.unpack(data))
                known = db.execute(KNOWN_STEPS, (tier_s, first, end) * 2)
                steps += [(at_s, tier_s) for (at_s,) in known]
            sql = (
                "SELECT key, revision FROM revisions AS one WHERE value IS NOT NULL AND NOT EXISTS (SELECT 1 FROM"
                " revisions AS later WHERE later.key = one.key AND (later.at, later.revision) > (one.at, one.revision))"
            )
            return Restored(
                requests=requests,
                macs=macs,
                sums=[(at_s, tier_s, one) for (at_s, tier_s), one in sums.items()],
                steps=steps,
                deployments=[
                    (at_s, name, RequestSums.unpack(data))
                    for at_s, name, data in db.execute(
                        "SELECT at, name, data FROM deployments WHERE at >= ?", (begin_s,)
                    )
                ],
                cursors=dict(db.execute("SELECT gateway, cursor FROM cursors")),
                revisions=dict(db.execute(sql)),
            )


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn errors of SQLite and of the disk into HistoryError."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        kind = DamagedError if code in _DAMAGE else HistoryError
        raise kind(str(error)) from error
    except (sqlite3.Error, OSError) as error:
        raise HistoryError(str(error)) from error


def _take_lock(path: Path) -> int:
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        raise HistoryError(f"another fleet-dashboard uses {path.parent}") from None
    except OSError:
        os.close(number)
        raise
    return number


def set_aside(folder: Path) -> Path:
    """Rename a damaged file, in place of an earlier one, so that a new one begins. Raises HistoryError."""
    try:
        for suffix in ("-wal", "-shm"):
            (folder / f"{FILE}{suffix}").unlink(missing_ok=True)
        return (folder / FILE).replace(folder / DAMAGED)
    except OSError as error:
        raise HistoryError(f"the damaged file cannot be set aside: {error}") from error


def _deflate(value: bytes | None, dictionary: bytes) -> bytes | None:
    if value is None:
        return None
    packer = zlib.compressobj(level=6, wbits=-15, zdict=dictionary)
    return packer.compress(value) + packer.flush()


def inflate(value: bytes, dictionary: bytes = _DICTIONARY) -> bytes:
    """Return a stored request. Raises zlib.error."""
    return zlib.decompressobj(wbits=-15, zdict=dictionary).decompress(value, _MOST_BYTES)


def inflate_object(value: bytes) -> bytes:
    """Return a stored document of the store. Raises zlib.error."""
    return inflate(value, _OBJECT_DICTIONARY)


def parse_requests(bodies: Iterable[bytes]) -> Iterator[EndedRequest]:
    """Yield stored requests; those that this release cannot read are left out."""
    for body in bodies:
        with contextlib.suppress(zlib.error, msgspec.MsgspecError):
            yield _REQUEST.decode(inflate(body))
