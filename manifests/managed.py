"""Entries of `metadata.managedFields`: what they hold, and what is left of them when somebody else writes. Pure."""

import json
from collections.abc import Iterable
from datetime import datetime
from typing import TypeVar

from manifests import merge3
from manifests.merge3 import Claims, Force
from manifests.said import Said
from manifests.tree import Path, Tree
from schemas.meta import ApiObject, ManagedFields

Obj = TypeVar("Obj", bound=ApiObject)


def claims(entries: tuple[ManagedFields, ...], manager: str, *, force: Force = False) -> Claims:
    """Return who says what besides the manager's manifest."""
    updates = [entry for entry in entries if entry.operation == "Update"]
    applies = [e for e in entries if e.operation == "Apply" and e.manager != manager]
    return Claims(
        updates={f: e.manager for e in updates if e.manager != manager for f in e.fields},
        mine=frozenset(f for e in updates if e.manager == manager for f in e.fields),
        rivals={entry.manager: applied(entry) for entry in applies},
        force=force,
    )


def released(
    entries: Iterable[ManagedFields],
    fields: Iterable[str],
    paths: tuple[Path, ...] = (),
) -> tuple[ManagedFields, ...]:
    """Return the entries of others without fields that somebody else says now, and without those that say nothing."""
    gone = tuple(fields)
    inside = tuple(f"{one}{sign}" for one in gone for sign in ".[")
    left: list[ManagedFields] = []
    for entry in entries:
        if entry.operation == "Apply":
            left.append(_conceded(entry, paths))
            continue
        kept = tuple(f for f in entry.fields if f not in gone and not f.startswith(inside))
        if kept:
            left.append(
                entry if kept == entry.fields else entry.model_copy(update={"fields": kept})
            )
    return tuple(left)


def _conceded(entry: ManagedFields, paths: tuple[Path, ...]) -> ManagedFields:
    """Return what another's manifest said, without what was taken from it."""
    said = applied(entry)
    for path in paths:
        said = merge3.without(said, path)
    text = _text(said)
    return entry if text == entry.applied else entry.model_copy(update={"applied": text})


def entry_of(manager: str, said: Said, now: datetime) -> ManagedFields:
    """Return the entry of a manager whose manifest says this."""
    return ManagedFields(
        manager=manager, operation="Apply", time=now, applied=_text(merge3.brief(said))
    )


def _text(said: Tree) -> str:
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def applied(entry: ManagedFields | None) -> Said:
    """Return what the manifest said; nothing, if there was none."""
    tree = json.loads(entry.applied) if entry is not None else {}
    empty: Said = {"metadata": {"labels": {}, "annotations": {}}, "spec": {}}
    return {**empty, **tree}


def with_entries(obj: Obj, entries: tuple[ManagedFields, ...]) -> Obj:
    metadata = obj.metadata.model_copy(update={"managed_fields": entries})
    return obj.model_copy(update={"metadata": metadata})
