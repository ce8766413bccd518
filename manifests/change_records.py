"""Records of the audit log: which objects a transaction writes, and which fields differ. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import orjson

from manifests import diff
from schemas.change import MAX_REASON, ChangedField, ChangedObject, ChangeRecord
from store import codec
from store.port import KeyValue

if TYPE_CHECKING:  # it imports this module when the first record is made
    from manifests.change_log import ChangeAuthor

_DECLARED: Final = ("labels", "annotations", "deletionTimestamp")
_DELETION: Final = "metadata.deletionTimestamp"
_MOST_FIELDS: Final = 40
_LONGEST_VALUE: Final = 300
# Of all fields in one record; a transaction has 1.5 MB.
_MOST_TEXT: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWrite:
    """One write of an object."""

    kind_and_name: tuple[str, str]
    before: KeyValue | None
    """The document that it is based on, if it was read."""
    after: bytes | None
    """None for a deletion."""
    from_revision: int
    """The revision that its guard names; 0: a new object, or no guard."""


def encode_record(author: "ChangeAuthor", now: datetime, writes: Sequence[RecordedWrite]) -> bytes:
    """Return the document of a record."""
    left = _MOST_TEXT
    changed_objects: list[ChangedObject] = []
    for write in writes:
        changed_object = _changed_object(write, left)
        left -= sum(map(_size, changed_object.fields))
        changed_objects.append(changed_object)
    record = ChangeRecord(
        time=now,
        user=author.user,
        account=author.account,
        manager=author.manager,
        command=author.command,
        reason=author.reason[:MAX_REASON],
        objects=tuple(changed_objects),
    )
    return codec.encode(record)


def _changed_object(write: RecordedWrite, most_text: int) -> ChangedObject:
    kind, name = write.kind_and_name
    before, revision = write.before, write.from_revision
    if before is not None:
        revision = before.mod_revision
    if write.after is None:
        return ChangedObject(verb="delete", kind=kind, name=name, from_revision=revision)
    if before is None:
        return ChangedObject(
            verb="update" if revision else "create", kind=kind, name=name, from_revision=revision
        )
    fields = changed_fields(before.value, write.after)
    # Deleting a deployment marks it; the reconciler removes it when its replicas are gone. The verb says so already.
    is_deletion = any(field.path == _DELETION and field.old is None for field in fields)
    if is_deletion:
        fields = [field for field in fields if field.path != _DELETION]
    kept = fit_fields(fields, most_text)
    return ChangedObject(
        verb="delete" if is_deletion else "update",
        kind=kind,
        name=name,
        from_revision=revision,
        fields=tuple(kept),
        more_fields=len(fields) - len(kept),
    )


def changed_fields(before: bytes, after: bytes) -> list[ChangedField]:
    """Return what users see differ between two documents: spec, labels, annotations, deletion."""
    return [
        ChangedField(path=field.path, old=_text(field.old), new=_text(field.new))
        for field in diff.changed_fields(_declared(before), _declared(after))
    ]


def _declared(document: bytes) -> dict[str, Any]:
    tree = orjson.loads(document)
    metadata = {part: v for part, v in tree.get("metadata", {}).items() if part in _DECLARED}
    return {"metadata": metadata, "spec": tree.get("spec", {})}


def _text(value: object) -> str | None:
    if value is None:
        return None
    text = orjson.dumps(value).decode()
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def fit_fields(fields: Sequence[ChangedField], most_text: int) -> list[ChangedField]:
    """Return the first fields, as many as a record may hold."""
    kept: list[ChangedField] = []
    for field in fields[:_MOST_FIELDS]:
        most_text -= _size(field)
        if most_text < 0:
            break
        kept.append(field)
    return kept


def _size(one: ChangedField) -> int:
    return len(one.path) + len(one.old or "") + len(one.new or "")
