"""Sets of manifests: which objects were applied under one name. Reads and writes the inventory; deletes nothing else.

An object of a set carries its name as an annotation; the inventory says where to look for those that manifests say
no more. It is widened before objects are written and narrowed after others are gone, so that a kill at any point
leaves no object of the set outside of it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from machinery.backoff import Backoff
from machinery.clock import Clock
from schemas.applyset import ApplySet, Member
from schemas.meta import APPLY_SET, ApiObject, ObjectKey
from store import codec, keys
from store.errors import ConflictError, FencedError, TooLargeError, UnavailableError
from store.port import Delete, Operation, Put, Transport, Unchanged

Obj = TypeVar("Obj", bound=ApiObject)
Members: TypeAlias = Mapping[ObjectKey, str]
"""Objects to their uids; an empty one is not known yet."""

_ATTEMPTS = 10
_BACKOFF = Backoff(first_s=0.02, limit_s=1.0)
# etcd takes 1.5 MiB a request.
_MAX_BYTES = 1_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """A set as the store has it."""

    name: str
    manager: str = ""
    """Whose it is; empty if there is none of the name yet."""
    members: Members
    version: int = 0
    """The revision of the key; 0 if there is none."""


def set_of(obj: ApiObject) -> str:
    """Return the set that an object is of; empty if it is of none."""
    return obj.metadata.annotations.get(APPLY_SET, "")


def claimed(obj: Obj, name: str) -> Obj:
    """Return the object as one of the set; empty stands for none."""
    if set_of(obj) == name:
        return obj
    rest = {key: text for key, text in obj.metadata.annotations.items() if key != APPLY_SET}
    annotations = {**rest, APPLY_SET: name} if name else rest
    metadata = obj.metadata.model_copy(update={"annotations": annotations})
    return obj.model_copy(update={"metadata": metadata})


async def read(transport: Transport, name: str) -> Inventory:
    """Return the set; an empty one if there is none of the name.

    Raises:
        StoreError: the store did not answer.
        UndecodableError: this process does not understand it.

    """
    item = await transport.get(keys.named(keys.APPLY_SET_PREFIX, name))
    if item is None:
        return Inventory(name=name, members={})
    found = codec.decode(ApplySet, item)
    members = {ObjectKey(one.kind, one.name): one.uid for one in found.members}
    return Inventory(name=name, manager=found.manager, members=members, version=item.mod_revision)


async def change(
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
            found = await read(transport, name)
            wanted = edit(found.members)
            if wanted == found.members and found.manager in ("", manager):
                return wanted
            key = keys.named(keys.APPLY_SET_PREFIX, name)
            guard = Unchanged(key=key, mod_revision=found.version)
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
        Member(kind=kind, name=one, uid=uid) for (kind, one), uid in sorted(members.items())
    )
    value = codec.encode(ApplySet(name=name, manager=manager, updated=clock.now(), members=ordered))
    if len(value) > _MAX_BYTES:
        raise TooLargeError(
            f"the apply set {name} has {len(members):,} objects, whose names take {len(value):,} bytes; at most "
            f"{_MAX_BYTES:,} are allowed. Split the manifests into several sets"
        )
    return Put(key=key, value=value)


def united(old: Members, objects: Iterable[ObjectKey]) -> Members:
    """Return the set with these objects in it; their uids are not known before they are written."""
    return {**dict.fromkeys(objects, ""), **old}
