"""The fleet at an earlier moment: caches with the documents that were current then, read from the history."""

import asyncio
import contextlib
import math
import sqlite3
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from dashboard.history.database import inflate_object
from dashboard.history.queries import HistoryReader
from dashboard.history.records import COARSE_S, FINE_S, unpack_values
from insight.fleet_caches import FleetCaches, caches_of
from machinery.clock import Clock
from store import keys
from store.port import KeyValue

_KEYS: Final = (
    "WITH RECURSIVE found(key) AS (SELECT min(key) FROM revisions UNION ALL"
    " SELECT (SELECT min(key) FROM revisions WHERE key > found.key) FROM found WHERE found.key IS NOT NULL)"
    " SELECT key FROM found WHERE key IS NOT NULL"
)
_CURRENT: Final = "SELECT revision, value FROM revisions WHERE key = ? AND at <= ? ORDER BY at DESC, revision DESC LIMIT 1"
_MOST_CHANGES: Final = 500


class NoMomentError(Exception):
    """Nothing is known of a moment; the message says what is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The fleet as it was."""

    at_s: float
    age_s: float | None
    """Seconds from the last time at which the recorder knew the fleet to this moment; None: it never did."""
    revision: int
    """The newest revision of the store among the documents."""
    caches: FleetCaches


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectChange:
    """One recorded change of an object."""

    at_s: float
    revision: int
    part: str
    """`spec` or `status`."""
    document: bytes | None
    """None if it was deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTime:
    """A time in which the recorder knew the fleet, in seconds since 1970."""

    begin_s: int
    end_s: int


@dataclass(slots=True)
class MomentReader:
    """Reads moments. The last one is kept, since a page asks for several views of it."""

    reader: HistoryReader
    clock: Clock
    _last: Moment | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def at(self, at_s: float) -> Moment:
        """Return the fleet at a time.

        Raises:
            NoMomentError: nothing is known of it.
            ReadError: the history cannot be read.

        """
        async with self._lock:
            if self._last is not None and self._last.at_s == at_s:
                return self._last
            items, known_s = await self.reader.read(lambda db: _read_moment(db, at_s))
            if not items:
                raise NoMomentError(await self._what_is_known())
            # Decoding thousands of documents takes a while; the event loop goes on meanwhile.
            caches = await asyncio.to_thread(caches_of, items, self.clock)
            self._last = Moment(
                at_s=at_s,
                age_s=None if known_s is None else max(0.0, at_s - known_s),
                revision=max(item.mod_revision for item in items),
                caches=caches,
            )
            return self._last

    async def _what_is_known(self) -> str:
        begin_s = await self.reader.read(_read_begin)
        if begin_s is None:
            return "No object was recorded yet."
        begin = datetime.fromtimestamp(begin_s, tz=UTC).isoformat(timespec="seconds")
        return f"The record begins at {begin}."

    async def changes(self, kind: str, name: str, begin_s: float) -> list[ObjectChange]:
        """Return the changes of an object since a time, newest first, 500 at most. Raises ReadError."""
        return await self.reader.read(lambda db: list(_read_changes(db, kind, name, begin_s)))

    async def known(self, begin_s: float, end_s: float) -> list[KnownTime]:
        """Return the times in which the recorder knew the fleet, in order. Raises ReadError."""
        return await self.reader.read(lambda db: _read_known(db, begin_s, end_s))

    async def documents(self, prefix: str, begin_s: float) -> list[KeyValue]:
        """Return the last document of every key below a prefix that was written since a time. Raises ReadError."""
        return await self.reader.read(lambda db: list(_read_below(db, prefix, begin_s)))


def _read_moment(db: sqlite3.Connection, at_s: float) -> tuple[list[KeyValue], float | None]:
    # One transaction: a batch that is written meanwhile is in all answers or in none.
    db.execute("BEGIN")
    items: list[KeyValue] = []
    for (key,) in db.execute(_KEYS).fetchall():
        row = db.execute(_CURRENT, (key, at_s)).fetchone()
        if row is not None and row[1] is not None:
            items += _item(key, row[0], row[1])
    return items, _read_known_before(db, at_s)


def _item(key: str, revision: int, value: bytes) -> Iterator[KeyValue]:
    with contextlib.suppress(zlib.error):
        document = inflate_object(value)
        yield KeyValue(key, document, create_revision=revision, mod_revision=revision)


def _read_known_before(db: sqlite3.Connection, at_s: float) -> float | None:
    """Return the end of the last step before a time in which the fleet was known."""
    ends: list[float] = []
    for tier_s in (FINE_S, COARSE_S):
        sql = "SELECT at, data FROM series WHERE kind = 'fleet' AND tier = ? AND chunk = 0 AND at <= ? ORDER BY at DESC"
        for begin_s, data in db.execute(sql, (tier_s, at_s)):
            if not math.isnan(unpack_values(data, 0, 1)[0]):
                ends.append(begin_s + tier_s)
                break
    return max(ends, default=None)


def _read_begin(db: sqlite3.Connection) -> float | None:
    begin: float | None = db.execute("SELECT min(at) FROM revisions").fetchone()[0]
    return begin


def _read_changes(
    db: sqlite3.Connection, kind: str, name: str, begin_s: float
) -> Iterator[ObjectChange]:
    object_changes: list[ObjectChange] = []
    for part, key in (
        ("spec", keys.spec_key(kind, name)),
        ("status", keys.status_key(kind, name)),
    ):
        sql = "SELECT at, revision, value FROM revisions WHERE key = ? AND at >= ? ORDER BY at DESC LIMIT ?"
        for at_s, revision, value in db.execute(sql, (key, begin_s, _MOST_CHANGES)):
            with contextlib.suppress(zlib.error):
                document = None if value is None else inflate_object(value)
                object_changes.append(
                    ObjectChange(at_s=at_s, revision=revision, part=part, document=document)
                )
    object_changes.sort(key=lambda change: change.at_s, reverse=True)
    yield from object_changes[:_MOST_CHANGES]


def _read_known(db: sqlite3.Connection, begin_s: float, end_s: float) -> list[KnownTime]:
    steps: list[tuple[int, int]] = []
    for tier_s in (COARSE_S, FINE_S):
        sql = "SELECT at, data FROM series WHERE kind = 'fleet' AND tier = ? AND chunk = 0 AND at >= ? AND at < ?"
        steps += [
            (at_s, at_s + tier_s)
            for at_s, data in db.execute(sql, (tier_s, begin_s - tier_s, end_s))
            if not math.isnan(unpack_values(data, 0, 1)[0])
        ]
    known_times: list[KnownTime] = []
    for first_s, last_s in sorted(steps):
        if known_times and first_s <= known_times[-1].end_s:
            joined_s = max(known_times[-1].end_s, last_s)
            known_times[-1] = KnownTime(begin_s=known_times[-1].begin_s, end_s=joined_s)
        else:
            known_times.append(KnownTime(begin_s=first_s, end_s=last_s))
    return known_times


def _read_below(db: sqlite3.Connection, prefix: str, begin_s: float) -> Iterator[KeyValue]:
    sql = (
        "SELECT key, revision, value FROM revisions WHERE key >= ? AND key < ? AND at >= ? AND value IS NOT NULL"
        " ORDER BY key, at DESC, revision DESC"
    )
    last = ""
    for key, revision, value in db.execute(sql, (prefix, keys.prefix_end(prefix), begin_s)):
        if key != last:
            last = key
            yield from _item(key, revision, value)
