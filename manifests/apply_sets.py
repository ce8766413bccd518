"""Sets of manifests: which objects were applied under one name. Reads and writes the inventory; deletes nothing else.

An object of a set carries its name as an annotation; the inventory says where to look for those that manifests say
no more. It is widened before objects are written and narrowed after others are gone, so that a kill at any point
leaves no object of the set outside of it.

Deleting what a set's manifests say no more. Decides what may go, and has it deleted; touches nothing else's.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from machinery.backoff import Backoff
from machinery.clock import Clock
from manifests import delete, ownership
from manifests.errors import InUseError, NotFoundError
from manifests.trees import key_of
from schemas import kinds
from schemas.meta import APPLY_SET, ApiObject, ObjectKey
from schemas.records import ApplySet, ApplySetMember
from store import codec, errors, keys
from store.errors import ConflictError, FencedError, TooLargeError, UnavailableError
from store.mutate import mutate
from store.port import Delete, ModRevisionGuard, Operation, Put, Transport

Obj = TypeVar("Obj", bound=ApiObject)
Members: TypeAlias = Mapping[ObjectKey, str]
"""Objects to their uids; an empty one is not known yet."""

_ATTEMPTS = 10
_BACKOFF = Backoff(first_s=0.02, limit_s=1.0)
# etcd takes 1.5 MiB a request.
_MAX_BYTES = 1_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplySetInventory:
    """A set as the store has it."""

    name: str
    manager: str = ""
    """Whose it is; empty if there is none of the name yet."""
    members: Members
    version: int = 0
    """The revision of the key; 0 if there is none."""


def apply_set_of(obj: ApiObject) -> str:
    """Return the set that an object is of; empty if it is of none."""
    return obj.metadata.annotations.get(APPLY_SET, "")


def assign_to_set(obj: Obj, name: str) -> Obj:
    """Return the object as one of the set; empty stands for none."""
    if apply_set_of(obj) == name:
        return obj
    rest = {key: text for key, text in obj.metadata.annotations.items() if key != APPLY_SET}
    annotations = {**rest, APPLY_SET: name} if name else rest
    metadata = obj.metadata.model_copy(update={"annotations": annotations})
    return obj.model_copy(update={"metadata": metadata})


async def read_set(transport: Transport, name: str) -> ApplySetInventory:
    """Return the set; an empty one if there is none of the name.

    Raises:
        StoreError: the store did not answer.
        UndecodableError: this process does not understand it.

    """
    item = await transport.get(keys.named(keys.APPLY_SET_PREFIX, name))
    if item is None:
        return ApplySetInventory(name=name, members={})
    found = codec.decode(ApplySet, item)
    members = {ObjectKey(one.kind, one.name): one.uid for one in found.members}
    return ApplySetInventory(
        name=name, manager=found.manager, members=members, version=item.mod_revision
    )


async def change_set(
    transport: Transport,
    clock: Clock,
    name: str,
    manager: str,
    edit: Callable[[Members], Members],
) -> Members:
    """Change what the set holds; return what it holds then. What holds nothing any more is removed.

    `edit` (pure, and such that doing it twice is doing it once) gets what it holds by then.

    Raises:
        ConflictError: others kept changing it; FencedError: the right to write is gone.
        TooLargeError: the set has more members than the store takes in one document.
        StoreError: the store did not answer.

    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            found = await read_set(transport, name)
            wanted = edit(found.members)
            if wanted == found.members and found.manager in ("", manager):
                return wanted
            key = keys.named(keys.APPLY_SET_PREFIX, name)
            guard = ModRevisionGuard(key=key, mod_revision=found.version)
            await transport.commit([guard], [_written(key, name, manager, wanted, clock)])
        except FencedError:
            raise
        except (ConflictError, UnavailableError) as error:
            # Looking again tells whether a write whose answer was lost was carried out.
            if attempt == _ATTEMPTS:
                raise
            pause_s = _BACKOFF.delay_s(attempt)
            await clock.sleep(pause_s if isinstance(error, UnavailableError) else pause_s / 2)
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
    """Return the set with these objects in it; their uids are not known before they are written."""
    return {**dict.fromkeys(objects, ""), **old}


# The reverse of the order in which they are applied: who names others goes before them.
PRUNE_ORDER = ("GitSource", "ModelRoute", "ModelDeployment", "ShardGroup", "NodePool", "Node")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surplus:
    """Members of a set that its manifests say no more."""

    doomed: tuple[ApiObject, ...] = ()
    """They are there, and the set's: they are to go, in this order."""
    gone: frozenset[ObjectKey] = frozenset()
    """They are not there, or no more the set's: it need not remember them."""


def find_surplus(
    members: Members,
    declared: Collection[ObjectKey],
    there: Mapping[ObjectKey, ApiObject],
    *,
    name: str,
    only: Collection[str] | None = None,
) -> Surplus:
    """Return what the set holds and nobody declares; of these kinds `only`, if it is given. Pure."""
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
    """Return whether it is the very object that the set holds; a later one of its name may be anybody's."""
    return apply_set_of(obj) == name and uid in ("", obj.metadata.uid)


async def prune_objects(
    transport: Transport, clock: Clock, doomed: Sequence[ApiObject], *, name: str, manager: str
) -> tuple[list[ObjectKey], dict[ObjectKey, str]]:
    """Delete these members of the set; return which went, and why others did not.

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
    """Take back what manifests said of a node. The node itself is a Mac: no manifest can end it."""

    def withdraw(now: ApiObject) -> ApiObject | None:
        if now.metadata.uid != node.metadata.uid:
            return None
        return assign_to_set(ownership.withdraw_manifest(now, manager), "")

    await mutate(transport, clock, type(node), node.name, withdraw)
