"""Field ownership: the manifests that managers applied last, and the fields that they changed otherwise. Pure.

An Apply entry of `metadata.managedFields` holds the fields that a manifest applied last, the base of the next three-way
merge. An Update entry holds the fields that a manager changed in another way. A field is in at most one Update entry.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeVar

import orjson
from pydantic import ValidationError

from manifests import declaration, diff, three_way, trees
from manifests.declaration import Fields
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import LoadedObject
from manifests.three_way import Force, OtherManagers
from manifests.trees import ABSENT, Path, Tree, key_of, show_path, spec_of
from schemas.deployment import ModelDeployment, ModelDeploymentSpec, RevisionTemplate
from schemas.gitsource import source_of_manager
from schemas.meta import CHANGE_CAUSE, FLEET_ANNOTATIONS, ApiObject, ManagedFieldsEntry, ObjectKey

Obj = TypeVar("Obj", bound=ApiObject)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldConflict:
    """A field for which another manager set a different value than the manifest: one of both goes."""

    key: ObjectKey
    path: str
    """As users write it: `spec.replicas`."""
    place: Path
    owner: str
    """The other manager, such as `fleetctl-scale`; empty if it is not recorded."""
    applier: str = ""
    """The manager whose manifest has another value, such as `gitsource/fleet`; empty if no manifest has."""
    theirs: Tree
    """The value in the store; None if it is not set."""
    ours: Tree
    """The value in the manifest; None if the manifest unsets it."""

    @property
    def kept_message(self) -> str:
        """The message for a field that keeps the other manager's value."""
        name = f"{self.key.kind.lower()}/{self.key.name}"
        kept = f"{name}: {self.path} stays {show_value(self.theirs)}, set by {self.writer}"
        return f"{kept}; the manifest says {show_value(self.ours)}"

    @property
    def writer(self) -> str:
        return self.owner or "a writer that was not recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedObject:
    """An object after the apply of one manifest."""

    obj: ApiObject
    """The object to write, with the version that was read; the existing object itself if nothing changes."""
    kept_by_others: tuple[FieldConflict, ...] = ()
    """Fields that keep another manager's value: the manifest's own value has not changed."""
    conflicts: tuple[FieldConflict, ...] = ()
    """Fields that both changed; if there are any, `obj` must not be written."""


def show_value(value: Tree) -> str:
    """Return a value on one line, for a message."""
    if value is None:
        return "unset"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def record_update(before: Obj, after: Obj, manager: str, now: datetime) -> Obj:
    """Return `after`, with the fields that differ from `before` recorded as the manager's."""
    old, new = declaration.declarable_fields(before), declaration.declarable_fields(after)
    fields = [show_path(path) for path in trees.changed_paths(old, new)]
    entries = before.metadata.managed_fields
    if has_stale_cause(before, after):
        after, entries = _without_cause(after), release_fields(entries, [_CAUSE])
    if fields:
        own = next((e for e in entries if e.operation == "Update" and e.manager == manager), None)
        others = release_fields((e for e in entries if e is not own), fields)
        earlier = own.fields if own is not None else ()
        owned = tuple(sorted({*earlier, *fields}))
        entry = ManagedFieldsEntry(manager=manager, operation="Update", time=now, fields=owned)
        entries = (*others, entry)
    return with_managed_fields(after, entries)


def field_owner(obj: ApiObject, path: str) -> ManagedFieldsEntry | None:
    """Return the entry of the manager that last wrote the field (`spec.replicas`) or a part of it, if recorded.

    The items of a list belong to the manager that wrote the list.
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
    """Return the object after the manager applies its manifest; `uid` is used for a new object only.

    Raises:
        ManifestErrors: the manifest is invalid together with the fields of other managers.

    """
    ours = declaration.applied_fields(loaded.obj)
    if existing is None:
        own_entry = apply_entry(manager, ours, now)
        made = diff.new_object(loaded.obj, now=now, uid=uid, entries=(own_entry,))
        return MergedObject(obj=made)
    entries = existing.metadata.managed_fields
    own = _apply_entry_of(entries, manager)
    owned, shared = _split_owned(ours, existing, loaded, manager)
    new_entries = (apply_entry(manager, owned, now),) if _has_fields(owned) or not shared else ()
    is_reapplied = _applied_texts(own) == _applied_texts(*new_entries)
    if (is_reapplied or loaded.document.is_printed) and diff.is_same(existing, loaded.obj):
        return MergedObject(obj=existing)  # the usual case of a repeated apply
    theirs = declaration.declarable_fields(existing)
    others = other_managers(entries, manager, force=force)
    # An object without any manifest so far is adopted: its fields count as applied by this manager.
    is_adopted = own is None and not others.applied
    base = trees.subtract(theirs, ours) if is_adopted else trees.overlay(last_applied(own), shared)
    result = three_way.merge(base, ours, theirs, others)
    field_conflicts = tuple(
        _conflict(key_of(existing), disagreement) for disagreement in result.kept_by_others
    )
    conflicts = tuple(_conflict(key_of(existing), conflict) for conflict in result.conflicts)
    if conflicts:
        return MergedObject(obj=existing, kept_by_others=field_conflicts, conflicts=conflicts)
    merged = _merged_object(existing, result)
    if isinstance(merged, ValidationError):
        raise ManifestErrors([_invalid(loaded, merged)]) from merged
    before = tuple(e for e in entries if e is not own)
    remaining = release_fields(before, map(show_path, result.owned), result.owned)
    if merged is existing and is_reapplied and remaining == before:
        return MergedObject(obj=existing, kept_by_others=field_conflicts)
    if CHANGE_CAUSE not in loaded.obj.metadata.annotations and has_stale_cause(existing, merged):
        merged, remaining = _without_cause(merged), release_fields(remaining, [_CAUSE])
    managed = (*remaining, *new_entries)
    return MergedObject(obj=with_managed_fields(merged, managed), kept_by_others=field_conflicts)


_NO_FIELDS: Mapping[str, Tree] = {"metadata": {"labels": {}, "annotations": {}}, "spec": {}}
_CAUSE = show_path(("metadata", "annotations", CHANGE_CAUSE))
ROLLOUT: Final = "fleetctl-rollout"
"""The manager of `fleetctl rollout`. It writes a change cause only together with the version that it belongs to."""
_TEMPLATE = {
    name: field.alias or name
    for name, field in RevisionTemplate.model_fields.items()
    if name in ModelDeploymentSpec.model_fields
}


def has_stale_cause(before: ApiObject, after: ApiObject) -> bool:
    """Return whether a change to a new version keeps a change cause that belongs to an earlier version.

    A cause is meant for the next change, so it is stale if the version changed since it was written, or if it came
    back with an earlier version. A cause that a manifest contains is never stale.
    """
    if not isinstance(before, ModelDeployment) or not isinstance(after, ModelDeployment):
        return False
    cause = before.metadata.annotations.get(CHANGE_CAUSE)
    if cause is None or after.metadata.annotations.get(CHANGE_CAUSE) != cause:
        return False
    if all(getattr(before.spec, name) == getattr(after.spec, name) for name in _TEMPLATE):
        return False
    entries = before.metadata.managed_fields
    path = ("metadata", "annotations", CHANGE_CAUSE)
    applied = [last_applied(entry) for entry in entries if entry.operation == "Apply"]
    if any(trees.value_at(tree, path) is not ABSENT for tree in applied):
        return False
    if any(entry.manager == ROLLOUT and _CAUSE in entry.fields for entry in entries):
        return True
    written = [entry.time for entry in entries if _CAUSE in entry.fields]
    changed = [entry.time for entry in entries if _has_template(entry)]
    return not written or bool(changed and max(written) < max(changed))


def _has_template(entry: ManagedFieldsEntry) -> bool:
    """Return whether an entry owns a field of the version that engines run."""
    if entry.operation == "Apply":
        spec = last_applied(entry)["spec"]
        return isinstance(spec, dict) and not spec.keys().isdisjoint(_TEMPLATE.values())
    heads = {re.split(r"[.\[]", field.removeprefix("spec."))[0] for field in entry.fields}
    return not heads.isdisjoint(_TEMPLATE.values())


def _without_cause(obj: Obj) -> Obj:
    annotations = {k: v for k, v in obj.metadata.annotations.items() if k != CHANGE_CAUSE}
    metadata = obj.metadata.model_copy(update={"annotations": annotations})
    return obj.model_copy(update={"metadata": metadata})


def _applied_texts(*entries: ManagedFieldsEntry | None) -> list[str]:
    return [entry.applied for entry in entries if entry is not None]


def _split_owned(
    ours: Fields, existing: ApiObject, loaded: LoadedObject, manager: str
) -> tuple[Fields, Fields]:
    """Return the fields that the manager owns when it applies them, and those that it leaves to others.

    An apply of the files of a repository changes nothing, and must not make its manager an owner: the next commit
    would conflict with it. The same is true of output of `fleetctl get`, which has every field with its default: the
    manager owns what it owned before and what was edited. GitSources always own what they apply.
    """
    if source_of_manager(manager) is not None:
        return ours, {}
    entries = existing.metadata.managed_fields
    left = [last_applied(entry) for entry in git_entries(entries)]
    fields: Fields = {}
    if loaded.document.is_printed:
        stored = declaration.declarable_fields(existing)
        own = last_applied(_apply_entry_of(entries, manager))
        fields = trees.subtract(own, trees.subtract(stored, ours))
        left.append(stored)
    elif not left:
        return ours, {}
    edited, shared = _split(ours, left)
    return trees.overlay(trees.overlay(_NO_FIELDS, fields), edited), shared


def _split(ours: Mapping[str, Tree], kept: Sequence[Mapping[str, Tree]]) -> tuple[Fields, Fields]:
    own: Fields = {}
    shared: Fields = {}
    for key, value in ours.items():
        theirs = [tree[key] for tree in kept if key in tree]
        if isinstance(value, dict) and value:
            inner = _split(value, [tree for tree in theirs if isinstance(tree, dict)])
            own |= {key: inner[0]} if inner[0] else {}
            shared |= {key: inner[1]} if inner[1] else {}
        elif any(three_way.matches(their, value) for their in theirs):
            shared[key] = three_way.abbreviate(value)
        else:
            own[key] = value
    return own, shared


def _has_fields(tree: Tree) -> bool:
    """Return whether a manifest sets anything: empty mappings of metadata and spec do not count."""
    return any(map(_has_fields, tree.values())) if isinstance(tree, dict) else True


def git_entries(entries: Iterable[ManagedFieldsEntry]) -> list[ManagedFieldsEntry]:
    """Return the Apply entries of GitSources."""
    return [
        entry
        for entry in entries
        if entry.operation == "Apply" and source_of_manager(entry.manager) is not None
    ]


def fields_kept_in_git(before: ApiObject, after: ApiObject) -> dict[str, tuple[str, ...]]:
    """Return the fields that differ although the manifest of a GitSource has them, by the name of the source."""
    applied = {
        entry.manager: last_applied(entry) for entry in git_entries(before.metadata.managed_fields)
    }
    if not applied:
        return {}
    old, new = declaration.declarable_fields(before), declaration.declarable_fields(after)
    changed = list(trees.changed_paths(old, new))
    found = {
        source_of_manager(manager) or "": tuple(
            show_path(path) for path in changed if trees.value_at(tree, path) is not ABSENT
        )
        for manager, tree in applied.items()
    }
    return {source: fields for source, fields in found.items() if fields}


def release_manifest(existing: Obj, manager: str) -> Obj:
    """Return the object without the ownership that the manager has by its manifest; all values stay."""
    entries = existing.metadata.managed_fields
    own = _apply_entry_of(entries, manager)
    if own is None:
        return existing
    return with_managed_fields(existing, tuple(entry for entry in entries if entry is not own))


def withdraw_manifest(existing: Obj, manager: str) -> Obj:
    """Return the object without the fields of the manager's manifest, except those that others changed since."""
    entries = existing.metadata.managed_fields
    own = _apply_entry_of(entries, manager)
    if own is None:
        return existing
    theirs, others = declaration.declarable_fields(existing), other_managers(entries, manager)
    result = three_way.merge(last_applied(own), last_applied(None), theirs, others)
    merged = _merged_object(existing, result)
    obj = existing if isinstance(merged, ValidationError) else merged
    return with_managed_fields(obj, tuple(e for e in entries if e is not own))


def other_managers(
    entries: tuple[ManagedFieldsEntry, ...], manager: str, *, force: Force = False
) -> OtherManagers:
    """Return the field ownership beside the manager's manifest."""
    updates = [entry for entry in entries if entry.operation == "Update"]
    applies = [e for e in entries if e.operation == "Apply" and e.manager != manager]
    return OtherManagers(
        updates={f: e.manager for e in updates if e.manager != manager for f in e.fields},
        own_updates=frozenset(f for e in updates if e.manager == manager for f in e.fields),
        applied={entry.manager: last_applied(entry) for entry in applies},
        force=force,
    )


def release_fields(
    entries: Iterable[ManagedFieldsEntry],
    fields: Iterable[str],
    paths: tuple[Path, ...] = (),
) -> tuple[ManagedFieldsEntry, ...]:
    """Return the entries of other managers without the fields that another manager owns now.

    `fields` are removed from Update entries, which go if they become empty; `paths` from the trees of Apply entries.
    """
    released = tuple(fields)
    inside = tuple(f"{one}{sign}" for one in released for sign in ".[")
    remaining: list[ManagedFieldsEntry] = []
    for entry in entries:
        if entry.operation == "Apply":
            remaining.append(_without_paths(entry, paths))
            continue
        owned = tuple(f for f in entry.fields if f not in released and not f.startswith(inside))
        if owned == entry.fields:
            remaining.append(entry)
        elif owned:
            remaining.append(entry.model_copy(update={"fields": owned}))
    return tuple(remaining)


def apply_entry(manager: str, applied: Fields, now: datetime) -> ManagedFieldsEntry:
    """Return the Apply entry of a manager whose manifest has these fields."""
    text = _json_text(applied)
    if "\\" in text or any(len(part) > three_way.LONG for part in text.split('"')):
        text = _json_text(three_way.abbreviate(applied))
    return ManagedFieldsEntry(manager=manager, operation="Apply", time=now, applied=text)


def last_applied(entry: ManagedFieldsEntry | None) -> Fields:
    """Return the fields of an Apply entry; empty without one."""
    tree = json.loads(entry.applied) if entry is not None else {}
    return {**_NO_FIELDS, **tree}


def with_managed_fields(obj: Obj, entries: tuple[ManagedFieldsEntry, ...]) -> Obj:
    metadata = obj.metadata.model_copy(update={"managed_fields": entries})
    return obj.model_copy(update={"metadata": metadata})


def _apply_entry_of(
    entries: Iterable[ManagedFieldsEntry], manager: str
) -> ManagedFieldsEntry | None:
    return next((e for e in entries if e.operation == "Apply" and e.manager == manager), None)


def _without_paths(entry: ManagedFieldsEntry, paths: tuple[Path, ...]) -> ManagedFieldsEntry:
    """Return another manager's Apply entry without the paths."""
    applied = last_applied(entry)
    for path in paths:
        applied = trees.without(applied, path)
    text = _json_text(applied)
    return entry if text == entry.applied else entry.model_copy(update={"applied": text})


def _json_text(tree: Tree) -> str:
    try:
        return orjson.dumps(tree, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:  # an integer beyond 64 bits
        return json.dumps(tree, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _merged_object(existing: Obj, result: three_way.MergeResult) -> Obj | ValidationError:
    """Return the merged object, the existing one itself if nothing changed, or the error if it is invalid."""
    labels = trees.value_at(dict(result.tree), ("metadata", "labels"))
    annotations = trees.value_at(dict(result.tree), ("metadata", "annotations"))
    assert isinstance(labels, dict)
    assert isinstance(annotations, dict)
    old = existing.metadata
    # Keep the current order, and the fleet's own annotations.
    stay = [k for k in old.annotations if k in annotations or k.startswith(FLEET_ANNOTATIONS)]
    every: Fields = {**{key: old.annotations[key] for key in stay}, **annotations}
    metadata: Fields = {"name": existing.name, "labels": labels, "annotations": every}
    merged = _valid_object(existing, {**result.tree, "metadata": metadata}, result)
    if isinstance(merged, ValidationError):
        return merged
    has_new_spec = spec_of(merged) != spec_of(existing)
    if not has_new_spec and (labels, every) == (old.labels, old.annotations):
        return existing
    update = {
        "labels": merged.metadata.labels,
        "annotations": merged.metadata.annotations,
        "generation": old.generation + has_new_spec,
    }
    merged = merged.model_copy(update={"metadata": old.model_copy(update=update)})
    return diff.without_status(merged)


def _valid_object(
    existing: Obj, tree: Mapping[str, Tree], result: three_way.MergeResult
) -> Obj | ValidationError:
    """Return the merged tree as an object, or the error if no variant of it is valid.

    Two variants are tried. A required field cannot be removed while others keep the mapping around it. And a default
    that no manager owns may contradict the manifest, where a field has several forms.
    """
    first = _read(existing, tree)
    if not isinstance(first, ValidationError):
        return first
    stored = declaration.declarable_fields(existing)
    missing = {error["loc"] for error in first.errors() if error["type"] == "missing"}
    completed, without_defaults = dict(tree), dict(tree)
    for path in result.removed:
        value = trees.value_at(stored, path)
        if path in missing and value is not ABSENT:
            completed = trees.with_value(completed, path, value)
    for path in result.unowned:
        without_defaults = trees.without(without_defaults, path)
    for candidate in (completed, without_defaults):
        obj = _read(existing, candidate)
        if not isinstance(obj, ValidationError):
            return obj
    return first


def _read(existing: Obj, tree: Mapping[str, Tree]) -> Obj | ValidationError:
    whole = {"apiVersion": existing.api_version, "kind": existing.kind, **tree}
    try:
        return type(existing).model_validate_json(json.dumps(whole), by_alias=True, by_name=False)
    except ValidationError as error:
        return error


def _invalid(loaded: LoadedObject, error: ValidationError) -> ManifestError:
    first = error.errors()[0]
    text = first["msg"].removeprefix("Value error, ")
    name = f"{loaded.obj.kind.lower()}/{loaded.obj.name}"
    message = f"is invalid together with fields that others set in the store: {text}"
    hint = (
        f"Change one of them; to see the owners: fleetctl get {name} -o yaml --show-managed-fields"
    )
    return loaded.document.problem(first["loc"], message, hint)


def _paths(tree: Fields) -> set[str]:
    return {show_path(path) for path in trees.iter_paths(tree)}


def _conflict(key: ObjectKey, one: three_way.FieldDisagreement) -> FieldConflict:
    return FieldConflict(
        key=key,
        path=show_path(one.path),
        place=one.path,
        owner=one.owner,
        applier=one.applier,
        theirs=one.theirs,
        ours=one.ours,
    )
