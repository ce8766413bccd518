"""Entries of `metadata.managedFields`: what they hold, and what is left of them when somebody else writes. Pure.

Who says what of an object: the last words of manifests, and the fields that others wrote. Pure.

An Apply entry of `metadata.managedFields` holds what a manifest said last, the base of the next three-way merge; an
Update entry names the fields that a writer changed. A field is in one Update entry at most.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from pydantic import ValidationError

from manifests import declaration, diff, three_way
from manifests.declaration import Fields
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import LoadedObject
from manifests.three_way import ABSENT, Force, OtherManagers
from manifests.trees import Path, Tree, key_of, show_path, spec_of
from schemas.meta import FLEET_ANNOTATIONS, ApiObject, ManagedFieldsEntry, ObjectKey

Obj = TypeVar("Obj", bound=ApiObject)


def other_managers(
    entries: tuple[ManagedFieldsEntry, ...], manager: str, *, force: Force = False
) -> OtherManagers:
    """Return who says what besides the manager's manifest."""
    updates = [entry for entry in entries if entry.operation == "Update"]
    applies = [e for e in entries if e.operation == "Apply" and e.manager != manager]
    return OtherManagers(
        updates={f: e.manager for e in updates if e.manager != manager for f in e.fields},
        mine=frozenset(f for e in updates if e.manager == manager for f in e.fields),
        rivals={entry.manager: last_applied(entry) for entry in applies},
        force=force,
    )


def release_fields(
    entries: Iterable[ManagedFieldsEntry],
    fields: Iterable[str],
    paths: tuple[Path, ...] = (),
) -> tuple[ManagedFieldsEntry, ...]:
    """Return the entries of others without fields that somebody else says now, and without those that say nothing."""
    gone = tuple(fields)
    inside = tuple(f"{one}{sign}" for one in gone for sign in ".[")
    left: list[ManagedFieldsEntry] = []
    for entry in entries:
        if entry.operation == "Apply":
            left.append(_without_paths(entry, paths))
            continue
        kept = tuple(f for f in entry.fields if f not in gone and not f.startswith(inside))
        if kept:
            left.append(
                entry if kept == entry.fields else entry.model_copy(update={"fields": kept})
            )
    return tuple(left)


def _without_paths(entry: ManagedFieldsEntry, paths: tuple[Path, ...]) -> ManagedFieldsEntry:
    """Return what another's manifest said, without what was taken from it."""
    said = last_applied(entry)
    for path in paths:
        said = three_way.without(said, path)
    text = _text(said)
    return entry if text == entry.applied else entry.model_copy(update={"applied": text})


def apply_entry(manager: str, said: Fields, now: datetime) -> ManagedFieldsEntry:
    """Return the entry of a manager whose manifest says this."""
    return ManagedFieldsEntry(
        manager=manager, operation="Apply", time=now, applied=_text(three_way.abbreviate(said))
    )


def _text(said: Tree) -> str:
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def last_applied(entry: ManagedFieldsEntry | None) -> Fields:
    """Return what the manifest said; nothing, if there was none."""
    tree = json.loads(entry.applied) if entry is not None else {}
    empty: Fields = {"metadata": {"labels": {}, "annotations": {}}, "spec": {}}
    return {**empty, **tree}


def with_managed_fields(obj: Obj, entries: tuple[ManagedFieldsEntry, ...]) -> Obj:
    metadata = obj.metadata.model_copy(update={"managed_fields": entries})
    return obj.model_copy(update={"metadata": metadata})


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldConflict:
    """A field of an object that another writer set otherwise than the manifest says."""

    key: ObjectKey
    path: str
    """As people write it: `spec.replicas`."""
    place: Path
    owner: str
    """Who set it, such as `fleetctl-scale`; empty if that was not recorded."""
    theirs: Tree
    """What is in the store; None if it is not set."""
    ours: Tree
    """What the manifest says; None if it says that it is not set."""

    @property
    def kept(self) -> str:
        """In words, for a field that stays as the other set it."""
        what = (
            f"{self.key.kind.lower()}/{self.key.name}: {self.path} stays {show_value(self.theirs)}"
        )
        return f"{what}, set by {self.writer}; the manifest says {show_value(self.ours)}"

    @property
    def writer(self) -> str:
        return self.owner or "a writer that was not recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedObject:
    """What an apply of one manifest makes of an object."""

    obj: ApiObject
    """What to write, with the version that was read; the very object that is there if nothing is to be written."""
    kept: tuple[FieldConflict, ...] = ()
    """What stays as others set it, though the manifest says (and said before) something else."""
    conflicts: tuple[FieldConflict, ...] = ()
    """What both changed; if there are any, `obj` is not to be written."""


def show_value(value: Tree) -> str:
    """Return a value in one line, for a message."""
    if value is None:
        return "unset"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def record_update(before: Obj, after: Obj, manager: str, now: datetime) -> Obj:
    """Return `after`, with every field in which it differs from `before` recorded as the manager's."""
    fields = [
        show_path(path)
        for path in three_way.changed_paths(
            declaration.declarable_fields(before), declaration.declarable_fields(after)
        )
    ]
    entries = before.metadata.managed_fields
    if fields:
        own = next((e for e in entries if e.operation == "Update" and e.manager == manager), None)
        rest = release_fields((e for e in entries if e is not own), fields)
        kept = own.fields if own is not None else ()
        every = tuple(sorted({*kept, *fields}))
        entry = ManagedFieldsEntry(manager=manager, operation="Update", time=now, fields=every)
        entries = (*rest, entry)
    metadata = after.metadata.model_copy(update={"managed_fields": entries})
    return after.model_copy(update={"metadata": metadata})


def field_owner(obj: ApiObject, path: str) -> ManagedFieldsEntry | None:
    """Return who wrote the field at the path (`spec.replicas`) last, or something in it; None if nobody is known to.

    What is in a list belongs to whoever wrote the list.
    """
    path = re.sub(r"\[\d+\].*$", "", path)
    inside = (f"{path}.", f"{path}[")
    entries = sorted(obj.metadata.managed_fields, key=lambda entry: entry.time, reverse=True)
    updates = [entry for entry in entries if entry.operation == "Update"]
    exact = next((entry for entry in updates if path in entry.fields), None)
    within = (e for e in updates if any(field.startswith(inside) for field in e.fields))
    applied = (e for e in entries if e.operation == "Apply" and path in _paths(last_applied(e)))
    return exact or next(within, None) or next(applied, None)


def merge_manifest(
    existing: ApiObject | None,
    loaded: LoadedObject,
    *,
    manager: str,
    force: Force,
    now: datetime,
    uid: str,
) -> MergedObject:
    """Return what becomes of the object when the manager applies its manifest; `uid` is for a new object only.

    Raises:
        ManifestErrors: the manifest and what others set are not valid together.

    """
    ours = declaration.applied_fields(loaded.obj)
    if existing is None:
        made = diff.new_object(loaded.obj, now=now, uid=uid)
        return MergedObject(obj=with_managed_fields(made, (apply_entry(manager, ours, now),)))
    entries = existing.metadata.managed_fields
    own = next((e for e in entries if e.operation == "Apply" and e.manager == manager), None)
    entry = apply_entry(manager, ours, now)
    if own is not None and own.applied == entry.applied and diff.is_same(existing, loaded.obj):
        return MergedObject(obj=existing)  # as almost all of many are
    there, claims = (
        declaration.declarable_fields(existing),
        other_managers(entries, manager, force=force),
    )
    is_adopted = own is None and not claims.rivals
    base = three_way.subtract(there, ours) if is_adopted else last_applied(own)
    found = three_way.merge(base, ours, there, claims)
    kept = tuple(_conflict(key_of(existing), one) for one in found.kept)
    conflicts = tuple(_conflict(key_of(existing), one) for one in found.conflicts)
    if conflicts:
        return MergedObject(obj=existing, kept=kept, conflicts=conflicts)
    merged = _object(existing, found)
    if isinstance(merged, ValidationError):
        raise ManifestErrors([_invalid(loaded, merged)]) from merged
    left = release_fields(
        (e for e in entries if e is not own), map(show_path, found.taken), found.taken
    )
    is_news = merged is not existing or own is None or own.applied != entry.applied
    if not is_news and left == tuple(e for e in entries if e is not own):
        return MergedObject(obj=existing, kept=kept)
    return MergedObject(obj=with_managed_fields(merged, (*left, entry)), kept=kept)


def withdraw_manifest(existing: Obj, manager: str) -> Obj:
    """Return the object without what the manager's manifest said, but for what others have changed since."""
    entries = existing.metadata.managed_fields
    own = next((e for e in entries if e.operation == "Apply" and e.manager == manager), None)
    if own is None:
        return existing
    base, empty = last_applied(own), last_applied(None)
    found = three_way.merge(
        base, empty, declaration.declarable_fields(existing), other_managers(entries, manager)
    )
    made = _object(existing, found)
    left = existing if isinstance(made, ValidationError) else made
    return with_managed_fields(left, tuple(e for e in entries if e is not own))


def _object(existing: Obj, found: three_way.MergeResult) -> Obj | ValidationError:
    """Return the object as the merge made it, the very one that is there if it is that; or why there is no such."""
    labels = three_way.value_at(dict(found.tree), ("metadata", "labels"))
    annotations = three_way.value_at(dict(found.tree), ("metadata", "annotations"))
    assert isinstance(labels, dict)
    assert isinstance(annotations, dict)
    ours = existing.metadata
    stay = [k for k in ours.annotations if k in annotations or k.startswith(FLEET_ANNOTATIONS)]
    every: Fields = {**{key: ours.annotations[key] for key in stay}, **annotations}
    named: Fields = {"name": existing.name, "labels": labels, "annotations": every}
    made = _valid(existing, {**found.tree, "metadata": named}, found)
    if isinstance(made, ValidationError):
        return made
    is_other = spec_of(made) != spec_of(existing)
    if not is_other and (labels, every) == (ours.labels, ours.annotations):
        return existing
    metadata = ours.model_copy(
        update={
            "labels": made.metadata.labels,
            "annotations": made.metadata.annotations,
            "generation": ours.generation + is_other,
        }
    )
    return diff.without_status(made.model_copy(update={"metadata": metadata}))


def _valid(
    existing: Obj, tree: Mapping[str, Tree], found: three_way.MergeResult
) -> Obj | ValidationError:
    """Return the merged tree as an object, or what is wrong with it.

    A field that must be there cannot go while others keep what it is in; and a default that nobody says may be what
    does not go with the manifest (one of several ways to say the same).
    """
    first = _read(existing, tree)
    if not isinstance(first, ValidationError):
        return first
    there = declaration.declarable_fields(existing)
    missing = {one["loc"] for one in first.errors() if one["type"] == "missing"}
    completed, fresh = dict(tree), dict(tree)
    for path in found.removed:
        value = three_way.value_at(there, path)
        if path in missing and value is not ABSENT:
            completed = three_way.with_value(completed, path, value)
    for path in found.unsaid:
        fresh = three_way.without(fresh, path)
    for candidate in (completed, fresh):
        made = _read(existing, candidate)
        if not isinstance(made, ValidationError):
            return made
    return first


def _read(existing: Obj, tree: Mapping[str, Tree]) -> Obj | ValidationError:
    whole = {"apiVersion": existing.api_version, "kind": existing.kind, **tree}
    try:
        return type(existing).model_validate_json(json.dumps(whole), by_alias=True, by_name=False)
    except ValidationError as error:
        return error


def _invalid(loaded: LoadedObject, error: ValidationError) -> ManifestError:
    one = error.errors()[0]
    text = one["msg"].removeprefix("Value error, ")
    name = f"{loaded.obj.kind.lower()}/{loaded.obj.name}"
    hint = f"Change one of both; who set what: fleetctl get {name} -o yaml --show-managed-fields"
    message = f"does not go with what others set in the store: {text}"
    return loaded.document.problem(one["loc"], message, hint)


def _paths(tree: Fields) -> set[str]:
    return {show_path(path) for path in three_way.iter_paths(tree)}


def _conflict(key: ObjectKey, one: three_way.FieldDisagreement) -> FieldConflict:
    return FieldConflict(
        key=key,
        path=show_path(one.path),
        place=one.path,
        owner=one.owner,
        theirs=one.theirs,
        ours=one.ours,
    )
