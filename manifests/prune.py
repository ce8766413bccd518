"""Deleting what a set's manifests say no more. Decides what may go, and has it deleted; touches nothing else's."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from machinery.clock import Clock
from manifests import applyset, delete, ownership
from manifests.applyset import Members
from manifests.errors import InUseError, NotFoundError
from manifests.tree import key_of
from schemas import kinds
from schemas.meta import ApiObject, ObjectKey
from store import errors
from store.mutate import mutate
from store.port import Transport

# The reverse of the order in which they are applied: who names others goes before them.
ORDER = ("GitSource", "ModelRoute", "ModelDeployment", "ShardGroup", "NodePool", "Node")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surplus:
    """Members of a set that its manifests say no more."""

    doomed: tuple[ApiObject, ...] = ()
    """They are there, and the set's: they are to go, in this order."""
    gone: frozenset[ObjectKey] = frozenset()
    """They are not there, or no more the set's: it need not remember them."""


def surplus(
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
    doomed.sort(key=lambda obj: (ORDER.index(obj.kind), obj.name))
    return Surplus(doomed=tuple(doomed), gone=frozenset(gone))


def is_member(obj: ApiObject, name: str, uid: str) -> bool:
    """Return whether it is the very object that the set holds; a later one of its name may be anybody's."""
    return applyset.set_of(obj) == name and uid in ("", obj.metadata.uid)


async def carry_out(
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
                await _let_go(transport, clock, obj, manager)
            else:
                await delete.delete(transport, obj.kind, obj.name, clock, only_if=is_it)
        except (NotFoundError, errors.NotFoundError):
            continue
        except InUseError as error:
            failed[key] = str(error)
        else:
            pruned.append(key)
    return pruned, failed


async def _let_go(transport: Transport, clock: Clock, node: ApiObject, manager: str) -> None:
    """Take back what manifests said of a node. The node itself is a Mac: no manifest can end it."""

    def withdraw(now: ApiObject) -> ApiObject | None:
        if now.metadata.uid != node.metadata.uid:
            return None
        return applyset.claimed(ownership.withdrawn(now, manager), "")

    await mutate(transport, clock, type(node), node.name, withdraw)
