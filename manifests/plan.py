"""The writes of an apply: the changed objects, their order, and their transactions. Pure."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import sha256
from types import MappingProxyType
from typing import TypeAlias, assert_never
from uuid import NAMESPACE_URL, uuid5

from manifests import apply_sets, diff, ownership
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import LoadedObject
from manifests.ownership import FieldConflict, MergedObject
from manifests.three_way import Force
from manifests.trees import Tree, object_tree, show_path
from schemas.gitsource import source_of_manager
from schemas.meta import APPLY_SET, ApiObject, ObjectKey
from store import codec
from store.port import MAX_OPERATIONS, Put

# Objects that others refer to come first, so that a reader never sees a reference without its object.
ORDER = (
    "NodePool",
    "ShardGroup",
    "Node",
    "ModelDeployment",
    "ModelRoute",
    "ModelPolicy",
    "GitSource",
)

# Below the port's limit, because some builds of etcd count guards as operations.
MAX_OBJECTS = min(100, MAX_OPERATIONS)
# etcd takes 1.5 MiB a request. As base64 in JSON this stays below 1 MiB, from which on the HTTP client warns that it
# blocks the event loop.
MAX_BYTES = 700 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOptions:
    """The field manager of an apply, and its options."""

    manager: str = "fleetctl"
    """The field manager of the manifests: `fleetctl`, `gitsource/<name>`."""
    force: Force = False
    """Let the manifests win over fields that others changed, and over other manifests; "drift" restores
    fields that others changed, but respects other manifests."""
    apply_set: str = ""
    """The apply set of the objects; empty means none."""
    prune: bool = False
    """Delete objects of the set that the manifests no longer contain."""
    prune_kinds: Collection[str] | None = None
    """The kinds that may be pruned; None means all."""
    server_dry_run: bool = False
    """Check everything, and write nothing."""
    expected_plan: str = ""
    """`plan_id` of the preview that was agreed to: nothing else is written, also after a conflict. Empty: none was."""

    @property
    def is_git_source(self) -> bool:
        return source_of_manager(self.manager) is not None

    @property
    def takes_over(self) -> bool:
        """True if objects of other sets are taken over. Never for a GitSource: two of them would alternate forever."""
        return self.force is True and not self.is_git_source


_BY_FLEETCTL = ApplyOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedObject:
    """An object that does not exist yet."""

    obj: ApiObject
    """The object to write."""
    put: Put
    """The operation that writes it."""
    kept_by_others: tuple[FieldConflict, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredObject:
    """An object that exists and changes."""

    obj: ApiObject
    """The object to write."""
    put: Put
    """The operation that writes it."""
    before: ApiObject
    kept_by_others: tuple[FieldConflict, ...] = ()
    """Fields that keep another writer's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnchangedObject:
    """An object that is as declared: nothing is written."""

    obj: ApiObject
    """The object in the store."""
    kept_by_others: tuple[FieldConflict, ...] = ()
    """Fields that keep another writer's value."""


Change: TypeAlias = CreatedObject | ConfiguredObject | UnchangedObject
Write: TypeAlias = CreatedObject | ConfiguredObject


def uid_of(kind: str, name: str, now: datetime) -> str:
    """Return the uid of an object that is created now; it differs from that of an earlier object of the name."""
    return str(uuid5(NAMESPACE_URL, f"mlx-fleet:{kind}/{name}/{now.isoformat()}"))


def plan_changes(
    loaded: Iterable[LoadedObject],
    existing: Mapping[ObjectKey, ApiObject],
    *,
    now: datetime,
    options: ApplyOptions = _BY_FLEETCTL,
) -> list[Change]:
    """Return the change of each object, in the order in which they may be written.

    Objects that `find_refusals` reports must not be passed.

    Raises:
        ManifestErrors: manifests conflict with other writers' fields, are invalid together with them, or are too
            large for the store.

    """
    changes: list[Change] = []
    problems: list[ManifestError] = []
    for item in sorted(loaded, key=lambda item: ORDER.index(item.obj.kind)):
        before = existing.get(item.key)
        uid = uid_of(item.obj.kind, item.obj.name, now) if before is None else ""
        try:
            merged = ownership.merge_manifest(
                before, item, manager=options.manager, force=options.force, now=now, uid=uid
            )
        except ManifestErrors as errors:
            problems.extend(errors.problems)
            continue
        problems.extend(_conflict(item, conflict, options) for conflict in merged.conflicts)
        change = _change(before, merged, options.apply_set)
        changes.append(change)
        if not isinstance(change, UnchangedObject):
            problems.extend(_too_large(item, change))
    if problems:
        raise ManifestErrors(problems)
    return changes


def _change(before: ApiObject | None, merged: MergedObject, apply_set: str) -> Change:
    obj = merged.obj
    if apply_set or before is None:
        obj = apply_sets.assign_to_set(obj, apply_set)
    if before is None:
        return CreatedObject(obj=obj, put=codec.put_spec(obj))
    if obj is before:
        return UnchangedObject(obj=before, kept_by_others=merged.kept_by_others)
    put = codec.put_spec(obj)
    return ConfiguredObject(obj=obj, put=put, before=before, kept_by_others=merged.kept_by_others)


def _conflict(item: LoadedObject, one: FieldConflict, options: ApplyOptions) -> ManifestError:
    ours, theirs = ownership.show_value(one.ours), ownership.show_value(one.theirs)
    message = f"is {theirs}, set by {one.writer}; the manifest says {ours}"
    problem = item.document.problem(one.place, message, _conflict_hint(item, one, options))
    return replace(problem, path=show_path(one.place))


def _conflict_hint(item: LoadedObject, one: FieldConflict, options: ApplyOptions) -> str:
    """Return the ways out of a conflict: for a GitSource, and for an apply by a person."""
    if options.is_git_source:
        take = "To use the manifest's value, set spec.force of the GitSource"
        if one.applier and source_of_manager(one.applier) is None:
            flag = "" if one.applier == "fleetctl" else f" --field-manager={one.applier}"
            name = f"{item.key.kind.lower()}/{item.key.name}"
            take = f"To use the manifest's value, run: fleetctl apply --release {name}{flag}"
        return f"{take}; to keep the current one, remove the field here"
    if source_of_manager(one.applier) is not None:
        return (
            f"Change it in the repository of {one.applier}, which keeps this object; --force-conflicts "
            f"takes the field, and stalls {one.applier}"
        )
    return (
        "To use the manifest's value, give --force-conflicts; to keep the current one, remove the field "
        "from the manifest"
    )


def _too_large(item: LoadedObject, write: Write) -> Iterator[ManifestError]:
    size = _stored_bytes(write.put)
    if size > MAX_BYTES:
        message = f"takes {size:,} bytes in the store; at most {MAX_BYTES:,} are allowed"
        yield item.document.problem((), message, "Shorten its annotations")


def find_refusals(
    loaded: Iterable[LoadedObject],
    existing: Mapping[ObjectKey, ApiObject],
    options: ApplyOptions = _BY_FLEETCTL,
    claims: Mapping[ObjectKey, str] = MappingProxyType({}),
) -> list[ManifestError]:
    """Return the problems of objects that cannot be written in the current state of the store.

    `claims` are the apply sets of objects that do not exist, but that a GitSource creates again.
    """
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
        problems.extend(_of_another_set(item, before, options, claims.get(item.key, "")))
    return problems


def _of_another_set(
    item: LoadedObject, before: ApiObject | None, options: ApplyOptions, claim: str
) -> Iterator[ManifestError]:
    """Yield a problem if the object belongs to another set, or if its manifest claims one."""
    if before is None:
        # Output of `get -o yaml` contains the set, which is no claim.
        is_said = APPLY_SET in item.obj.metadata.annotations
        if is_said and not item.document.text_at("metadata", "uid"):
            place = ("metadata", "annotations", APPLY_SET)
            hint = "Remove it; fleetctl apply --applyset NAME writes it"
            yield item.document.problem(place, "is written by fleetctl's verbs", hint)
    owner = claim if before is None else apply_sets.apply_set_of(before)
    if options.apply_set and owner not in ("", options.apply_set) and not options.takes_over:
        message = f"belongs to the apply set {owner}; the apply set {options.apply_set} cannot have it too"
        hint = (
            f"Remove it from the manifests of one of them. If it is removed from those of {owner}, the "
            "next prune there deletes it, unless another GitSource of the same repository has it"
        )
        yield item.document.problem(("metadata", "name"), message, hint)


def _not_for_manifests(item: LoadedObject, there: Mapping[str, str]) -> Iterator[ManifestError]:
    """Yield the annotations that would revert the effect of a verb; old output of `get -o yaml` has them."""
    for key in diff.overridden_annotations(there, item.obj.metadata.annotations):
        now = f"currently {there[key]}" if key in there else "currently not set"
        yield item.document.problem(
            ("metadata", "annotations", key),
            f"is written by fleetctl's verbs, and is {now}",
            "Remove it from the manifest: the current value is kept",
        )


def plan_waves(changes: Sequence[Change]) -> list[list[list[Write]]]:
    """Return the writes as transactions in waves; a wave may start when the one before is done.

    Writes of all kinds that fit into one transaction are one: then all or none of them are written.
    """
    writes = [change for change in changes if not isinstance(change, UnchangedObject)]
    together = _transactions(writes)
    if len(together) <= 1:
        return [together] if together else []
    by_kind = ([w for w in writes if w.obj.kind == kind] for kind in ORDER)
    return [_transactions(same) for same in by_kind if same]


def _transactions(writes: Iterable[Write]) -> list[list[Write]]:
    transactions: list[list[Write]] = []
    total = 0
    for write in writes:
        size = _stored_bytes(write.put)
        if not transactions or len(transactions[-1]) >= MAX_OBJECTS or total + size > MAX_BYTES:
            transactions.append([])
            total = 0
        transactions[-1].append(write)
        total += size
    return transactions


def _stored_bytes(put: Put) -> int:
    """Return the bytes of writing an object: its document, and its key in put and guard."""
    return len(put.value) + 2 * len(put.key)


def change_text(change: Change) -> str:
    """Return a change as a unified diff; empty if nothing changes."""
    if isinstance(change, UnchangedObject):
        return ""
    before = change.before if isinstance(change, ConfiguredObject) else None
    return diff.diff_text(before, change.obj)


def change_tree(change: Change) -> dict[str, Tree]:
    """Return a change as a tree: what happens, and each field that differs with both values; null: it is absent."""
    match change:
        case CreatedObject(obj=obj):
            before, done = None, "created"
        case ConfiguredObject(obj=obj, before=before):
            done = "configured"
        case UnchangedObject(obj=obj):
            before, done = obj, "unchanged"
        case _:
            assert_never(change)
    return {
        "kind": obj.kind,
        "name": obj.name,
        "change": done,
        "fields": [
            {"path": field_change.path, "old": field_change.old, "new": field_change.new}
            for field_change in diff.diff(before, obj).changes
        ],
        "keptByOthers": [
            {
                "path": conflict.path,
                "value": conflict.theirs,
                "manifest": conflict.ours,
                "manager": conflict.writer,
            }
            for conflict in change.kept_by_others
        ],
        "diff": change_text(change),
    }


def pruned_tree(obj: ApiObject) -> dict[str, Tree]:
    """Return the deletion of an object that its manifests no longer have, in the form of `change_tree`."""
    return {
        "kind": obj.kind,
        "name": obj.name,
        "change": "pruned",
        "fields": [],
        "keptByOthers": [],
        "diff": diff.diff_text(obj, None),
    }


def plan_id(changes: Iterable[Change]) -> str:
    """Return a digest of changes: the versions that they are based on, and what would be written.

    Times, uids and the record of field managers do not count: two previews of the same store have one id.
    """
    digest = sha256()
    for change in changes:
        before = "" if isinstance(change, CreatedObject) else change.obj.metadata.resource_version
        tree = object_tree(change.obj)
        metadata = tree.pop("metadata")
        assert isinstance(metadata, dict)
        kept = {name: metadata.get(name) for name in ("name", "labels", "annotations")}
        digest.update(json.dumps([before, kept, tree], sort_keys=True).encode())
    return digest.hexdigest()
