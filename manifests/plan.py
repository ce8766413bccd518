"""What an apply has to write, in which order and in which transactions. Pure; writes nothing."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias
from uuid import NAMESPACE_URL, uuid5

from manifests import diff
from manifests.errors import ManifestError
from manifests.load import Loaded
from manifests.tree import key_of
from schemas.meta import ApiObject, ObjectKey
from store import codec
from store.port import MAX_OPERATIONS

# What is named comes before what names it, so that a reader never sees a name without its object.
ORDER = ("NodePool", "ShardGroup", "Node", "ModelDeployment", "ModelRoute", "GitSource")

# Below the port's limit, because guards count beside operations in some builds of etcd.
MAX_OBJECTS = min(100, MAX_OPERATIONS)
# etcd takes 1.5 MiB a request; as base64 in JSON this stays below 1 MiB, from where on the HTTP
# client warns that it blocks the event loop.
MAX_BYTES = 700 * 2**10

UidOf: TypeAlias = Callable[[str, str, datetime], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """The object is new."""

    obj: ApiObject
    """What to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """The object is there and becomes another."""

    obj: ApiObject
    """What to write."""
    before: ApiObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchanged:
    """The object is there as it is declared: nothing is written."""

    obj: ApiObject
    """What is there."""


Change: TypeAlias = Created | Configured | Unchanged
Write: TypeAlias = Created | Configured


def uid_of(kind: str, name: str, now: datetime) -> str:
    """Return the uid of an object that is created now: another than that of its predecessor."""
    return str(uuid5(NAMESPACE_URL, f"mlx-fleet:{kind}/{name}/{now.isoformat()}"))


def plan_changes(
    loaded: Iterable[Loaded],
    existing: Mapping[ObjectKey, ApiObject],
    *,
    now: datetime,
    uid_of: UidOf = uid_of,
) -> list[Change]:
    """Return what becomes of each object, in the order in which they may be written.

    Objects that `refusals` names must not get here.
    """
    changes: list[Change] = []
    for item in sorted(loaded, key=lambda item: ORDER.index(item.obj.kind)):
        before = existing.get(item.key)
        if before is not None and diff.is_same(before, item.obj):
            changes.append(Unchanged(obj=before))
            continue
        uid = uid_of(item.obj.kind, item.obj.name, now)
        obj = diff.merge(before, item.obj, now=now, uid=uid)
        changes.append(Created(obj=obj) if before is None else Configured(obj=obj, before=before))
    return changes


def refusals(
    loaded: Iterable[Loaded], existing: Mapping[ObjectKey, ApiObject]
) -> list[ManifestError]:
    """Return the objects that cannot be written as things are in the store."""
    problems: list[ManifestError] = []
    for item in loaded:
        before = existing.get(item.key)
        if before is not None and before.metadata.deletion_timestamp is not None:
            what = f"{item.obj.kind.lower()}/{item.obj.name}"
            problems.append(
                item.document.problem(
                    ("metadata", "name"),
                    "is being deleted",
                    f"Wait for it, then apply again: fleetctl wait {what} --for=delete",
                )
            )
        if before is not None:
            problems.extend(_not_for_manifests(item, before.metadata.annotations))
        size = weight(item.obj)
        if size > MAX_BYTES:
            message = f"takes {size:,} bytes in the store; at most {MAX_BYTES:,} are allowed"
            problems.append(item.document.problem((), message, "Shorten its annotations"))
    return problems


def _not_for_manifests(item: Loaded, there: Mapping[str, str]) -> Iterator[ManifestError]:
    """Yield the annotations that would undo what a verb wrote; an old `get -o yaml` has such."""
    for key in diff.overridden(there, item.obj.metadata.annotations):
        now = f"{there[key]} now" if key in there else "not set now"
        yield item.document.problem(
            ("metadata", "annotations", key),
            f"is written by fleetctl's verbs, and is {now}",
            "Remove it from the manifest: what is there stays as it is",
        )


def waves(changes: Sequence[Change]) -> list[list[list[Write]]]:
    """Return the writes as transactions in waves; a wave may begin when the one before is done.

    What fits into one transaction is one, of whatever kinds: then all of it is written, or nothing.
    """
    writes = [change for change in changes if not isinstance(change, Unchanged)]
    together = _transactions(writes)
    if len(together) <= 1:
        return [together] if together else []
    by_kind = ([w for w in writes if w.obj.kind == kind] for kind in ORDER)
    return [_transactions(same) for same in by_kind if same]


def _transactions(writes: Iterable[Write]) -> list[list[Write]]:
    found: list[list[Write]] = []
    total = 0
    for write in writes:
        size = weight(write.obj)
        if not found or len(found[-1]) >= MAX_OBJECTS or total + size > MAX_BYTES:
            found.append([])
            total = 0
        found[-1].append(write)
        total += size
    return found


def weight(obj: ApiObject) -> int:
    """Return the bytes that writing the object takes: its document, and its key in put and guard."""
    put = codec.put_spec(obj)
    return len(put.value) + 2 * len(put.key)


def keys_of(changes: Iterable[Change]) -> list[ObjectKey]:
    return [key_of(change.obj) for change in changes]
