"""Deletion of single objects that no other object refers to. Never stops a running replica itself.

A ModelDeployment is only marked: its replicas must end, or be released, before the reconciler deletes it (Kubernetes'
foreground and orphan cascading deletion).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias, TypeVar

from machinery.clock import Clock
from manifests.errors import InUseError, NotFoundError, WriteRefusedError, join_names
from manifests.suggestions import not_found_message
from schemas import kinds
from schemas.deployment import ModelDeployment
from schemas.kinds import Kind
from schemas.meta import FOREGROUND, ORPHAN, ApiObject, ObjectKey
from schemas.node import Node
from schemas.replica import Replica
from schemas.route import ModelRoute
from store import codec, errors, keys, objects
from store.errors import ConflictError, FencedError, UnavailableError
from store.mutate import mutate
from store.port import Delete, ModRevisionGuard, Transport

Obj = TypeVar("Obj", bound=ApiObject)

_ATTEMPTS = 5
Cascade: TypeAlias = Literal["foreground", "orphan"]
OnlyIf: TypeAlias = Callable[[ApiObject], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedObject:
    """The object is deleted."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingDeletion:
    """The object is marked for deletion; it is deleted when its finalizers are gone."""

    obj: ApiObject


Deletion: TypeAlias = DeletedObject | PendingDeletion


def _always(_: ApiObject) -> bool:
    return True


async def delete(
    transport: Transport,
    kind: str,
    name: str,
    clock: Clock,
    *,
    cascade: Cascade = "foreground",
    only_if: OnlyIf = _always,
) -> Deletion:
    """Delete the object, or mark it for deletion; a repeated call changes nothing.

    `cascade` decides about a deployment's replicas: they end first, or are left running for a later deployment of the
    same name. A replica whose deployment exists is created again. `only_if` is called with the current object, because
    another object may have taken the name.

    Raises:
        NotFoundError: the object does not exist, or `only_if` rejects it.
        InUseError: other objects refer to it.
        WriteRefusedError: users may not delete this kind.
        StoreError: the store did not answer, or others kept changing the object.

    """
    found = _kind(ObjectKey(kind, name))
    for attempt in range(1, _ATTEMPTS + 1):
        await check_unused(transport, ObjectKey(kind, name))
        try:
            if found.type is Replica:
                return await _mark(transport, Replica, name, clock, only_if)
            if found.type is ModelDeployment:
                finalizer = ORPHAN if cascade == "orphan" else FOREGROUND
                return await _mark(transport, ModelDeployment, name, clock, only_if, finalizer)
            return await _remove(transport, found.type, name, only_if)
        except FencedError:
            raise
        except ConflictError as error:
            if attempt == _ATTEMPTS:
                raise ConflictError(
                    f"{kind}/{name} was changed by others {_ATTEMPTS} times in a row; nothing was "
                    "deleted"
                ) from error
    raise AssertionError("unreachable")


async def check_exists(transport: Transport, key: ObjectKey) -> None:
    """Check that the object exists and may be deleted, apart from references to it; writes nothing.

    Raises:
        NotFoundError: the object does not exist.
        WriteRefusedError: users may not delete this kind.

    """
    kind = _kind(key).type
    if await transport.get(keys.spec_key(*key)) is None:
        status = await transport.get(keys.status_key(*key))
        if status is None:
            raise await _not_found_error(transport, kind, key.name)


def _kind(key: ObjectKey) -> Kind:
    kind = kinds.by_name(key.kind)
    if kind is None or not (kind.written_by_users or kind.type is Replica):
        raise WriteRefusedError(
            f"{key} cannot be deleted: only the fleet creates and removes such objects"
        )
    return kind


async def check_unused(
    transport: Transport, key: ObjectKey, *, going: Collection[ObjectKey] = ()
) -> None:
    """Check that nothing refers to the object, as if `going` were deleted already; writes nothing.

    Raises:
        InUseError: other objects refer to it.

    """
    users = [user for user in await _users(transport, key) if user not in going]
    if users:
        raise InUseError(
            f"{key[0]}/{key[1]} is used by {join_names(users)}. Change or delete "
            f"{'it' if len(users) == 1 else 'them'} first"
        )
    # Refuse to delete a live node: its agent would report it again, without its labels and its
    # cordon.
    if key.kind == "Node" and await transport.get(keys.node_lease_key(key.name)) is not None:
        raise InUseError(
            f"{key} is alive: its agent would register it again, without its labels, taints and cordon. To keep new "
            f"replicas away: `fleetctl cordon {key.name}`; to move them away: `fleetctl drain {key.name}`; to remove the "
            "Mac, stop its agent first"
        )


async def _mark(
    transport: Transport,
    kind: type[ApiObject],
    name: str,
    clock: Clock,
    only_if: OnlyIf,
    *finalizers: str,
) -> PendingDeletion:
    now = clock.now()

    def mark(obj: ApiObject) -> ApiObject | None:
        if not only_if(obj):
            raise _replaced_error(kind, name)
        return with_deletion_mark(obj, now, *finalizers)

    try:
        marked = await mutate(transport, clock, kind, name, mark)
    except errors.NotFoundError:
        raise await _not_found_error(transport, kind, name) from None
    return PendingDeletion(obj=marked)


def with_deletion_mark(obj: Obj, now: datetime, *finalizers: str) -> Obj | None:
    """Return the object marked for deletion; None if it is already: the first mark decides how replicas end. Pure."""
    if obj.metadata.deletion_timestamp is not None:
        return None
    kept = tuple(dict.fromkeys((*obj.metadata.finalizers, *finalizers)))
    marks = {"deletion_timestamp": now, "finalizers": kept}
    return obj.model_copy(update={"metadata": obj.metadata.model_copy(update=marks)})


async def _remove(
    transport: Transport, kind: type[ApiObject], name: str, only_if: OnlyIf
) -> DeletedObject:
    """Delete spec and status in one transaction, guarded by the version of the spec."""
    spec_key = keys.spec_key(kind.__name__, name)
    status_key = keys.status_key(kind.__name__, name)
    spec, status = await transport.get(spec_key), await transport.get(status_key)
    if spec is None and status is None:
        raise await _not_found_error(transport, kind, name)
    # Without a condition the document is not decoded, so that a broken one can be deleted.
    if only_if is not _always and (spec is None or not only_if(codec.decode_object(kind, spec))):
        raise _replaced_error(kind, name)
    guards = [
        ModRevisionGuard(key=spec_key, mod_revision=spec.mod_revision if spec is not None else 0)
    ]
    if kind is Node:
        # An agent that joins after the check above would have its node taken away, and register it again.
        guards.append(ModRevisionGuard(key=keys.node_lease_key(name), mod_revision=0))
    try:
        await transport.commit(guards, [Delete(key=spec_key), Delete(key=status_key)])
    except UnavailableError as error:
        # If the key is gone, only the answer was lost.
        if not error.ambiguous or await transport.get(spec_key) is not None:
            raise
    return DeletedObject(kind=kind.__name__, name=name)


async def _users(transport: Transport, key: ObjectKey) -> list[ObjectKey]:
    """Return the objects that refer to this one; objects that are being deleted do not count."""
    kind, name = key
    if kind == "NodePool":
        deployments = await objects.list_all(transport, ModelDeployment)
        return [
            ObjectKey(obj.kind, obj.name)
            for obj in deployments
            if name in _pools_of(obj) and obj.metadata.deletion_timestamp is None
        ]
    if kind == "ShardGroup":
        deployments = await objects.list_all(transport, ModelDeployment)
        return [
            ObjectKey(obj.kind, obj.name)
            for obj in deployments
            if obj.spec.sharding == name and obj.metadata.deletion_timestamp is None
        ]
    if kind == "ModelDeployment":
        routes = await objects.list_all(transport, ModelRoute)
        return [
            ObjectKey(obj.kind, obj.name)
            for obj in routes
            if name in obj.spec.deployments().values()
        ]
    return []


def _replaced_error(kind: type[ApiObject], name: str) -> NotFoundError:
    return NotFoundError(f"{kind.__name__} {name} was replaced by another object")


async def _not_found_error(transport: Transport, kind: type[ApiObject], name: str) -> NotFoundError:
    listing = await transport.list(keys.spec_prefix(kind.__name__))
    there = [keys.kind_and_name(item.key)[1] for item in listing.items]
    found = kinds.by_name(kind.__name__)
    assert found is not None  # the kind has a class
    return NotFoundError(not_found_message(found, name, there))


def _pools_of(deployment: ModelDeployment) -> tuple[str, ...]:
    preload = deployment.spec.preload
    return deployment.spec.placement.pools + (() if preload is None else preload.pools)
