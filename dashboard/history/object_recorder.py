"""Recorder of objects: every change of a spec, and of a status at most once in ten seconds, with its time.

A secret is never written: the one of a Replica's group is replaced before.
"""

from dataclasses import dataclass, field
from typing import Final

from pydantic import BaseModel

from dashboard.history.records import KeyRevision
from dashboard.history.writer import HistoryWriter
from insight.fleet_caches import FleetCaches
from machinery.clock import Clock
from schemas.meta import ApiObject
from store import codec, keys

_PERIOD_S: Final = 1.0
_STATUS_EVERY_S: Final = 10.0
# Documents that are encoded between two turns of the event loop.
_AT_ONCE: Final = 200
# Each change of these is written; others, such as statuses, may change many times a second.
_EVERY_CHANGE: Final = (
    *(keys.SPEC_PREFIX, keys.LEASE_PREFIX, keys.ENDPOINT_PREFIX, keys.ELECTION_PREFIX),
    keys.SNAPSHOT_PREFIX,
)
# Tiny differences of the clock must not put a later change before an earlier one.
_LEAST_STEP_S: Final = 0.001


@dataclass(slots=True)
class ObjectRecorder:
    """Writes changed documents of the store into the history. Run `run()` in a task group."""

    caches: FleetCaches
    writer: HistoryWriter
    clock: Clock
    _dirty: dict[str, None] = field(default_factory=dict)
    """Keys that changed and are not written yet, in the order of their changes."""
    _written_s: dict[str, float] = field(default_factory=dict)
    """The time of the last written revision of each key that is there."""

    async def run(self) -> None:
        """Write what changes forever, beginning with what changed while no recorder ran."""
        self.caches.on_change(self._note)
        await self.caches.wait_synced()
        restored = await self.writer.opened()
        # Note the keys that differ from their last written revisions.
        known = {} if restored is None else restored.revisions
        # The first list noted every key.
        self._dirty.clear()
        self._written_s = dict.fromkeys(known, 0.0)
        present: set[str] = set()
        for cache in self.caches.informers():
            for key in cache.items:
                present.add(key)
                if known.get(key) != cache.version(key):
                    self._note(key)
        for gone in known.keys() - present:
            self._note(gone)
        while True:
            self._flush()
            await self.clock.sleep(0 if self._is_due() and self.writer.room else _PERIOD_S)

    def _note(self, key: str) -> None:
        self._dirty[key] = None

    def _is_due(self) -> bool:
        now_s = self.clock.now().timestamp()
        return any(self._may_write(key, now_s) for key in self._dirty)

    def _may_write(self, key: str, now_s: float) -> bool:
        if key.startswith(_EVERY_CHANGE):
            return True
        # A clock that was set back must not silence a key.
        return not 0 <= now_s - self._written_s.get(key, 0.0) < _STATUS_EVERY_S

    def _flush(self) -> None:
        """Hand due changes to the writer, as many as it has room for."""
        now_s, room = self.clock.now().timestamp(), min(self.writer.room, _AT_ONCE)
        due: list[str] = []
        for key in self._dirty:
            if len(due) >= room:
                break
            if self._may_write(key, now_s):
                due.append(key)
        for key in due:
            del self._dirty[key]
        revisions = [
            revision for key in due if (revision := self._revision(key, now_s)) is not None
        ]
        self.writer.add_revisions(revisions)

    def _revision(self, key: str, now_s: float) -> KeyRevision | None:
        """Return what the cache holds of a key; None if it came and went without being written."""
        cache = next(
            (informer for informer in self.caches.informers() if key.startswith(informer.prefix)),
            None,
        )
        if cache is None:
            return None
        value = cache.items.get(key)
        if value is None and key not in self._written_s:
            return None
        at_s = now_s
        before_s = self._written_s.get(key, 0.0)
        if now_s <= before_s < now_s + 1:
            at_s = before_s + _LEAST_STEP_S
        if value is None:
            del self._written_s[key]
            return KeyRevision(key=key, at_s=at_s, revision=cache.revision, value=None)
        self._written_s[key] = at_s
        return KeyRevision(
            key=key, at_s=at_s, revision=cache.version(key), value=document_of(value)
        )


def document_of(value: object) -> bytes:
    """Return a cached value as the document that the store has of it. Pure."""
    if isinstance(value, ApiObject):
        return codec.encode_spec(value)
    if isinstance(value, BaseModel):
        return codec.encode(value)
    return str(value).encode()
