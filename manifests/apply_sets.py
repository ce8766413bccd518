"""Apply sets: the objects applied under one name, and pruning of those that the manifests no longer contain.

An object of a set carries the set's name as an annotation; the inventory lists the objects. Objects are added to the
inventory before they are written, and removed after they are deleted, so that a kill at any point leaves no object of
the set outside the inventory.
"""

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from machinery.backoff import Backoff
from machinery.clock import Clock
from manifests import delete, ownership
from manifests.errors import InUseError, NotFoundError
from manifests.trees import key_of
from schemas import kinds
from schemas.gitsource import source_of_manager
from schemas.meta import APPLY_SET, ApiObject, ObjectKey
from schemas.records import ApplySet, ApplySetMember
from store import codec, errors, keys
from store.errors import ConflictError, FencedError, TooLargeError, UnavailableError
from store.mutate import mutate
from store.port import Delete, ModRevisionGuard, Operation, Put, Transport

Obj = TypeVar("Obj", bound=ApiObject)
Members: TypeAlias = Mapping[ObjectKey, str]
"""Objects and their uids; empty while the uid is not known."""

_ATTEMPTS = 10
_BACKOFF = Backoff(first_s=0.02, limit_s=1.0)
# etcd takes 1.5 MiB a request.
_MAX_BYTES = 1_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplySetInventory:
    """An apply set as it is in the store."""

    name: str
    manager: str = ""
    """The field manager that applies it; empty if the set does not exist yet."""
    members: Members
    version: int = 0
    """The mod_revision of its key; 0 if it does not exist."""


def apply_set_of(obj: ApiObject) -> str:
    """Return the apply set of an object; empty if it has none."""
    return obj.metadata.annotations.get(APPLY_SET, "")


def assign_to_set(obj: Obj, name: str) -> Obj:
    """Return the object as a member of the set; an empty name removes it from its set."""
    if apply_set_of(obj) == name:
        return obj
    rest = {key: text for key, text in obj.metadata.annotations.items() if key != APPLY_SET}
    annotations = {**rest, APPLY_SET: name} if name else rest
    metadata = obj.metadata.model_copy(update={"annotations": annotations})
    return obj.model_copy(update={"metadata": metadata})


async def read_set(transport: Transport, name: str) -> ApplySetInventory:
    """Return the set; an empty one if it does not exist.

    Raises:
        StoreError: the store did not answer.
        UndecodableError: this process cannot read it.

    """
    item = await transport.get(keys.named(keys.APPLY_SET_PREFIX, name))
    if item is None:
        return ApplySetInventory(name=name, members={})
    apply_set = codec.decode(ApplySet, item)
    members = {ObjectKey(member.kind, member.name): member.uid for member in apply_set.members}
    return ApplySetInventory(
        name=name, manager=apply_set.manager, members=members, version=item.mod_revision
    )


async def git_claims(transport: Transport, absent: Collection[ObjectKey]) -> dict[ObjectKey, str]:
    """Return the sets of GitSources that list these objects, which do not exist: the source creates them again.

    A set that this process cannot read claims nothing. Raises StoreError.
    """
    claims: dict[ObjectKey, str] = {}
    for item in (await transport.list(keys.APPLY_SET_PREFIX)).items if absent else ():
        try:
            apply_set = codec.decode(ApplySet, item)
        except codec.UndecodableError:
            continue
        if source_of_manager(apply_set.manager) is None:
            continue
        # Without a uid it was never written: another source may have been faster.
        listed = (ObjectKey(member.kind, member.name) for member in apply_set.members if member.uid)
        claims |= {key: apply_set.name for key in listed if key in absent}
    return claims


async def change_set(
    transport: Transport,
    clock: Clock,
    name: str,
    manager: str,
    edit: Callable[[Members], Members],
) -> Members:
    """Change the objects of the set; return the new ones. A set without objects is removed.

    `edit` is pure and idempotent, and gets the current objects.

    Raises:
        ConflictError: others kept changing it; FencedError: the right to write is lost.
        TooLargeError: the set has more objects than fit into one document.
        StoreError: the store did not answer.

    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            inventory = await read_set(transport, name)
            wanted = edit(inventory.members)
            if wanted == inventory.members and inventory.manager in ("", manager):
                return wanted
            key = keys.named(keys.APPLY_SET_PREFIX, name)
            guard = ModRevisionGuard(key=key, mod_revision=inventory.version)
            await transport.commit([guard], [_written(key, name, manager, wanted, clock)])
        except FencedError:
            raise
        except (ConflictError, UnavailableError):
            # The next read tells whether a write whose answer was lost was applied.
            if attempt == _ATTEMPTS:
                raise
            await clock.sleep(_BACKOFF.delay_s(attempt, jitter=random.random()))
        else:
            return wanted
    raise AssertionError("unreachable")


def _written(key: str, name: str, manager: str, members: Members, clock: Clock) -> Operation:
    if not members:
        return Delete(key=key)
    ordered = tuple(
        ApplySetMember(kind=kind, name=one, uid=uid) for (kind, one), uid in sorted(members.items())
    )
    value = codec.encode(ApplySet(name=name, manager=manager, updated=clock.now(), members=ordered))
    if len(value) > _MAX_BYTES:
        raise TooLargeError(
            f"the apply set {name} has {len(members):,} objects, whose names take {len(value):,} bytes; at most "
            f"{_MAX_BYTES:,} are allowed. Split the manifests into several sets"
        )
    return Put(key=key, value=value)


def add_members(old: Members, objects: Iterable[ObjectKey]) -> Members:
    """Return the set with these objects added; their uids are unknown before they are written."""
    return {**dict.fromkeys(objects, ""), **old}


# The reverse of the order of an apply: objects that refer to others are deleted before those.
PRUNE_ORDER = (
    "GitSource",
    "ModelPolicy",
    "ModelRoute",
    "ModelDeployment",
    "ShardGroup",
    "NodePool",
    "Node",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surplus:
    """Objects of a set that its manifests no longer contain."""

    doomed: tuple[ApiObject, ...] = ()
    """Objects to delete, in this order."""
    gone: frozenset[ObjectKey] = frozenset()
    """Objects that no longer exist or left the set; they are removed from the inventory."""


def find_surplus(
    members: Members,
    declared: Collection[ObjectKey],
    there: Mapping[ObjectKey, ApiObject],
    *,
    name: str,
    only: Collection[str] | None = None,
) -> Surplus:
    """Return the objects of the set that are not declared; limited to the kinds `only`, if given. Pure."""
    doomed: list[ApiObject] = []
    gone: set[ObjectKey] = set()
    for key in members.keys() - set(declared):
        obj = there.get(key)
        if kinds.by_name(key.kind) is None or (only is not None and key.kind not in only):
            continue
        if (
            obj is None
            or not is_member(obj, name, members[key])
            or obj.metadata.deletion_timestamp is not None
        ):
            gone.add(key)
        else:
            doomed.append(obj)
    doomed.sort(key=lambda obj: (PRUNE_ORDER.index(obj.kind), obj.name))
    return Surplus(doomed=tuple(doomed), gone=frozenset(gone))


def is_member(obj: ApiObject, name: str, uid: str) -> bool:
    """Return whether the object is the one in the set, and not a later object of the same name."""
    return apply_set_of(obj) == name and uid in ("", obj.metadata.uid)


async def prune_objects(
    transport: Transport, clock: Clock, doomed: Sequence[ApiObject], *, name: str, manager: str
) -> tuple[list[ObjectKey], dict[ObjectKey, str]]:
    """Delete these objects of the set; return the deleted ones, and the reasons for the others.

    Raises:
        StoreError: the store did not answer.

    """
    pruned: list[ObjectKey] = []
    failed: dict[ObjectKey, str] = {}
    for obj in doomed:
        key, uid = key_of(obj), obj.metadata.uid

        def is_it(now: ApiObject, uid: str = uid) -> bool:
            return is_member(now, name, uid)

        try:
            if obj.kind == "Node":
                await _release_node(transport, clock, obj, manager)
            else:
                await delete.delete(transport, obj.kind, obj.name, clock, only_if=is_it)
        except (NotFoundError, errors.NotFoundError):
            continue
        except InUseError as error:
            failed[key] = str(error)
        else:
            pruned.append(key)
    return pruned, failed


async def _release_node(transport: Transport, clock: Clock, node: ApiObject, manager: str) -> None:
    """Remove the manifests' fields from a node. The Node itself is kept: it stands for a Mac."""

    def withdraw(now: ApiObject) -> ApiObject | None:
        if now.metadata.uid != node.metadata.uid:
            return None
        return assign_to_set(ownership.withdraw_manifest(now, manager), "")

    await mutate(transport, clock, type(node), node.name, withdraw)
