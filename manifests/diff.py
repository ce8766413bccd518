"""The differences that an apply makes to one object, and the object after it. Pure.

Fields that the fleet maintains (status, uid, generation, finalizers, annotations below `fleet/`...) never differ.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from difflib import unified_diff
from typing import TypeVar

from manifests.trees import Path, Tree, declared_tree, show_path, spec_of
from manifests.yaml import core_schema
from schemas.meta import FLEET_ANNOTATIONS, ApiObject, ManagedFieldsEntry, ObjectMeta

Obj = TypeVar("Obj", bound=ApiObject)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """One changed field; None stands for an absent field."""

    path: str
    old: Tree
    new: Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The fields that differ between an object and its declaration."""

    changes: tuple[FieldChange, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)


def diff(before: ApiObject | None, after: ApiObject) -> Difference:
    """Return the fields that an apply of `after` would change."""
    if before is None:
        return Difference(changes=changed_fields({}, declared_tree(after)))
    return Difference(
        changes=changed_fields(
            declared_tree(before), declared_tree(_with_kept_annotations(before, after))
        )
    )


def changed_fields(old: Tree, new: Tree) -> tuple[FieldChange, ...]:
    """Return the differences between two trees, field by field."""
    return tuple(_changes((), old, new))


def is_same(before: ApiObject, after: ApiObject) -> bool:
    """Return whether `after` declares nothing new; cheaper than a diff."""
    a, b = before.metadata, after.metadata
    annotations = merge_annotations(a.annotations, b.annotations)
    theirs = (a.labels, a.annotations, spec_of(before)), (b.labels, annotations, spec_of(after))
    return theirs[0] == theirs[1]


def merge_annotations(existing: Mapping[str, str], declared: Mapping[str, str]) -> dict[str, str]:
    """Return the annotations after an apply: the manifest's, and those that manifests do not set.

    Annotations below `fleet/` are written by verbs such as `fleetctl rollout restart`. A manifest without them must
    not remove them: every apply would restart the engines.
    """
    # Keep the current order: a diff shows lines, and a moved line would look like a change.
    stay = [key for key in existing if key in declared or key.startswith(FLEET_ANNOTATIONS)]
    return {**{key: existing[key] for key in stay}, **declared}


def overridden_annotations(existing: Mapping[str, str], declared: Mapping[str, str]) -> list[str]:
    """Return the annotations below `fleet/` that a manifest would change; the current value is allowed."""
    return sorted(
        key
        for key, text in declared.items()
        if key.startswith(FLEET_ANNOTATIONS) and existing.get(key) != text
    )


def diff_text(before: ApiObject | None, after: ApiObject | None) -> str:
    """Return a unified diff of YAML; empty without differences. None stands for no object."""
    named = after or before
    assert named is not None
    name = f"{named.kind}/{named.name}"
    if before is not None and after is not None:
        after = _with_kept_annotations(before, after)
    lines = unified_diff(
        _lines(before),
        _lines(after),
        fromfile=f"{name} (now)" if before is not None else "/dev/null",
        tofile=f"{name} (applied)" if after is not None else "/dev/null",
    )
    return "".join(lines)


def _lines(obj: ApiObject | None) -> list[str]:
    return core_schema.dump(declared_tree(obj)).splitlines(keepends=True) if obj is not None else []


def new_object(
    desired: Obj, *, now: datetime, uid: str, entries: tuple[ManagedFieldsEntry, ...] = ()
) -> Obj:
    """Return a new object for its first write: the declared fields, and the metadata that the fleet sets."""
    theirs = desired.metadata
    metadata = ObjectMeta(
        name=theirs.name,
        labels=theirs.labels,
        annotations=theirs.annotations,
        uid=uid,
        generation=1,
        creation_timestamp=now,
        managed_fields=entries,
    )
    return without_status(desired, metadata)


def _with_kept_annotations(before: ApiObject, after: Obj) -> Obj:
    """Return `after` with the annotations that an apply keeps."""
    annotations = merge_annotations(before.metadata.annotations, after.metadata.annotations)
    metadata = after.metadata.model_copy(update={"annotations": annotations})
    return after.model_copy(update={"metadata": metadata})


def without_status(obj: Obj, metadata: ObjectMeta | None = None) -> Obj:
    """Return the object without a status (some kinds have none), and with other metadata if they are given."""
    has_one = "status" in type(obj).model_fields
    update = {"metadata": metadata or obj.metadata, **({"status": None} if has_one else {})}
    return obj.model_copy(update=update)


def _changes(path: Path, old: Tree, new: Tree) -> Iterator[FieldChange]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            yield from _changes((*path, key), old.get(key), new.get(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _changes((*path, index), a, b)
    elif isinstance(new, dict) and old is None and new:
        yield from _changes(path, {}, new)
    elif isinstance(old, dict) and new is None and old:
        yield from _changes(path, old, {})
    elif old != new:
        yield FieldChange(path=show_path(path), old=old, new=new)
