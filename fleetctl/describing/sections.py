"""The parts of a description as text: titles, tables, documents. Pure."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, cast

from fleetctl import printers
from fleetctl.selector import labels
from manifests import yamlio
from schemas.meta import ApiObject, ManagedFields

# A manifest may say hundreds of fields; those that one writer changed one by one are few.
_FIELDS_SHOWN = 12


def head(obj: ApiObject, now: datetime) -> str:
    """Return what all objects have."""
    meta = obj.metadata
    rows = [
        ("Name:", meta.name),
        ("Kind:", obj.kind),
        ("Labels:", _pairs(labels(obj))),
        ("Annotations:", _pairs(meta.annotations)),
        ("Generation:", str(meta.generation)),
        ("Age:", printers.age(meta.creation_timestamp, now)),
    ]
    if meta.owner_references:
        owners = ", ".join(f"{one.kind.lower()}/{one.name}" for one in meta.owner_references)
        rows.append(("Owned by:", owners))
    if meta.deletion_timestamp is not None:
        waits = f", until {', '.join(meta.finalizers)} is done" if meta.finalizers else ""
        rows.append(("Deleting:", f"since {printers.age(meta.deletion_timestamp, now)}{waits}"))
    return printers.lined_up(rows)


def document(title: str, tree: object) -> str:
    """Return a part of an object as YAML."""
    if not tree:
        return ""
    text = yamlio.dump(cast("dict[str, Any]", tree))
    return f"{title}:\n" + "".join(f"  {line}\n" for line in text.splitlines()).rstrip()


def conditions(obj: ApiObject, now: datetime) -> str:
    """Return what the status says."""
    status = getattr(obj, "status", None)
    if status is None or not status.conditions:
        return ""
    rows = [
        (c.type, c.status, printers.age(c.last_transition_time, now), c.reason, c.message)
        for c in status.conditions
    ]
    return table("Conditions", ("TYPE", "STATUS", "SINCE", "REASON", "MESSAGE"), rows)


def owners(obj: ApiObject, now: datetime) -> str:
    """Return who says which fields: what an apply minds (docs/adr/0028-three-way-apply.md)."""
    rows = [
        (one.manager, one.operation, printers.age(one.time, now), _fields(one))
        for one in sorted(obj.metadata.managed_fields, key=lambda one: (one.operation, one.manager))
    ]
    return table("Field owners", ("MANAGER", "BY", "AGE", "FIELDS"), rows)


def table(title: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows below a title; nothing if there are none."""
    if not rows:
        return ""
    return below(title, printers.lined_up(rows, titles))


def below(title: str, text: str) -> str:
    """Return a text below a title; nothing if there is none."""
    return f"{title}:\n{_indented(text)}" if text else ""


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _pairs(values: dict[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(values.items())) or "<none>"


def _fields(one: ManagedFields) -> str:
    if one.operation == "Apply":
        return "what its manifest says"
    more = len(one.fields) - _FIELDS_SHOWN
    return ", ".join(one.fields[:_FIELDS_SHOWN]) + (f" and {more} more" if more > 0 else "")
