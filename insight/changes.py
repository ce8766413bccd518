"""The audit log, read: recorded changes by object, user and time, as rows and as trees."""

from collections.abc import Iterable
from dataclasses import dataclass

from insight.conditions import Row
from schemas.change import ChangedObject, ChangeRecord
from schemas.gitsource import DIFF_REQUESTED, SYNC_REQUESTED
from store import codec, keys
from store.errors import UndecodableError
from store.port import KeyValue
from store.reads import StoreReader

# `fleetctl sync` and `fleetctl diff` ask for something by them, and change nothing.
_REQUESTS = frozenset(f'metadata.annotations["{one}"]' for one in (SYNC_REQUESTED, DIFF_REQUESTED))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedChange:
    """One record and its place in the store."""

    id: str
    revision: int
    """The revision of the write."""
    record: ChangeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeFilter:
    """The wanted changes; empty fields match everything."""

    kind: str = ""
    name: str = ""
    user: str = ""
    """A part of the user or of the account."""
    since_s: float = 0.0
    until_s: float = float("inf")
    has_requests: bool = False
    """True if requests of tools, such as for a sync, are wanted as well."""

    def matches(self, record: ChangeRecord) -> bool:
        """Return whether a record is wanted."""
        at_s = record.time.timestamp()
        who = f"{record.user} {record.account}".lower()
        return (
            self.since_s <= at_s < self.until_s
            and self.user.lower() in who
            and any(self.concerns(obj) for obj in record.objects)
            and (self.has_requests or not all(_is_request(obj) for obj in record.objects))
        )

    def concerns(self, one: ChangedObject) -> bool:
        """Return whether an object of a record is wanted."""
        return self.kind in ("", one.kind) and self.name in ("", one.name)


def _is_request(one: ChangedObject) -> bool:
    fields = {field.path for field in one.fields}
    return bool(fields) and fields <= _REQUESTS and not one.more_fields


def read_change(item: KeyValue) -> RecordedChange | None:
    """Return the record in a document; None if this release cannot read it."""
    try:
        record = codec.decode(ChangeRecord, item)
    except UndecodableError:
        return None
    id_ = item.key.removeprefix(keys.CHANGE_PREFIX)
    return RecordedChange(id=id_, revision=item.mod_revision, record=record)


def select_changes(items: Iterable[KeyValue], wanted: ChangeFilter) -> list[RecordedChange]:
    """Return the wanted changes, oldest first."""
    since_ms = int(wanted.since_s * 1000)
    found = (read_change(item) for item in items if keys.change_time_ms(item.key) >= since_ms)
    chosen = [change for change in found if change is not None and wanted.matches(change.record)]
    # Clocks differ between machines, and two writes may share a millisecond; revisions are in order.
    return sorted(chosen, key=lambda one: one.revision)


async def list_changes(store: StoreReader, wanted: ChangeFilter) -> list[RecordedChange]:
    """Read the wanted changes, oldest first. Raises StoreError."""
    return select_changes((await store.list(keys.CHANGE_PREFIX)).items, wanted)


def change_tree(one: RecordedChange) -> Row:
    """Return a change as a tree."""
    tree = one.record.model_dump(mode="json", by_alias=True, exclude_none=False)
    return {"id": one.id, "revision": one.revision, **tree}


def object_text(one: ChangedObject) -> str:
    """Return an object and what differs, as in `update modeldeployment/qwen: spec.replicas 1 -> 3`."""
    head = f"{one.verb} {one.kind.lower()}/{one.name}"
    parts = [
        f"{field.path} {'<none>' if field.old is None else field.old} -> "
        f"{'<none>' if field.new is None else field.new}"
        for field in one.fields
    ]
    if one.more_fields:
        parts.append(f"and {one.more_fields} more")
    return f"{head}: {', '.join(parts)}" if parts else head
