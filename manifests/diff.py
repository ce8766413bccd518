"""What an apply would change in one object, and what it would then be. Pure.

What the fleet keeps (status, uid, generation, finalizers...) is never a difference.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from difflib import unified_diff
from typing import TypeVar

from manifests import emit
from manifests.tree import Path, Tree, declared, show_path, spec_of
from schemas.meta import ApiObject, ObjectMeta

Obj = TypeVar("Obj", bound=ApiObject)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """One field; None stands for a field that is not there."""

    path: str
    old: Tree
    new: Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What differs between an object as it is and as it is declared."""

    changes: tuple[FieldChange, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)


def diff(before: ApiObject | None, after: ApiObject) -> Difference:
    """Return the fields that an apply of `after` would change."""
    old: Tree = declared(before) if before is not None else {}
    return Difference(changes=tuple(_changes((), old, declared(after))))


def is_same(before: ApiObject, after: ApiObject) -> bool:
    """Return whether `after` declares nothing new; cheaper than a diff."""
    a, b = before.metadata, after.metadata
    theirs = (a.labels, a.annotations, spec_of(before)), (b.labels, b.annotations, spec_of(after))
    return theirs[0] == theirs[1]


def text(before: ApiObject | None, after: ApiObject) -> str:
    """Return the difference as a unified diff of YAML; empty if there is none."""
    old = emit.dump(declared(before)) if before is not None else ""
    name = f"{after.kind}/{after.name}"
    lines = unified_diff(
        old.splitlines(keepends=True),
        emit.dump(declared(after)).splitlines(keepends=True),
        fromfile=f"{name} (now)" if before is not None else "/dev/null",
        tofile=f"{name} (applied)",
    )
    return "".join(lines)


def merge(existing: Obj | None, desired: Obj, *, now: datetime, uid: str) -> Obj:
    """Return the object to write: declared by the manifest, kept by the fleet.

    `uid` is used for a new object only. The resourceVersion is the one that was read, so that the
    write can be guarded by it. Labels and annotations become exactly the manifest's.
    """
    theirs = desired.metadata
    if existing is None:
        metadata = ObjectMeta(
            name=theirs.name,
            labels=theirs.labels,
            annotations=theirs.annotations,
            uid=uid,
            generation=1,
            creation_timestamp=now,
        )
        return desired.model_copy(update={"metadata": metadata, **_no_status(desired)})
    ours = existing.metadata
    metadata = ours.model_copy(
        update={
            "labels": theirs.labels,
            "annotations": theirs.annotations,
            "generation": ours.generation + (spec_of(existing) != spec_of(desired)),
        }
    )
    return desired.model_copy(update={"metadata": metadata, **_no_status(desired)})


def _no_status(obj: ApiObject) -> dict[str, None]:
    """Return the update that takes a status away; not every kind has one."""
    return {"status": None} if "status" in type(obj).model_fields else {}


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
