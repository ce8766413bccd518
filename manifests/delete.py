"""Deleting one object, unless others name it. Decides and writes; never deletes what runs.

A ModelDeployment is only marked: its replicas must go first, or be let go, and the reconciler removes the key then
(Kubernetes' foreground and orphan cascading deletion).
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from machinery.clock import Clock
from manifests.errors import InUseError, NotFoundError, RefusedError, names
from manifests.words import did_you_mean
from schemas import kinds
from schemas.deployment import ModelDeployment
from schemas.meta import FOREGROUND, ORPHAN, ApiObject, ObjectKey
from schemas.replica import Replica
from schemas.route import ModelRoute
from store import errors, keys, objects
from store.errors import ConflictError, UnavailableError
from store.mutate import mutate
from store.port import Delete, Transport, Unchanged

_ATTEMPTS = 5
Cascade: TypeAlias = Literal["foreground", "orphan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """The object is gone."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleting:
    """The object is marked; it goes when what was done for it is undone."""

    obj: ApiObject


Deletion: TypeAlias = Deleted | Deleting


async def delete(
    transport: Transport, kind: str, name: str, clock: Clock, *, cascade: Cascade = "foreground"
) -> Deletion:
    """Delete the object, or begin to; beginning again changes nothing.

    `cascade` says what becomes of a deployment's replicas: they end first, or are left running for a later
    deployment of the name. A replica that is deleted while its deployment lives is made anew.

    Raises:
        NotFoundError: there is no such object.
        InUseError: other objects name it.
        RefusedError: the kind is not for users.
        StoreError: the store did not answer, or somebody else kept changing the object.

    """
    found = kinds.by_name(kind)
    if found is None or not (found.written_by_users or found.type is Replica):
        raise RefusedError(f"{kind}/{name} is not for users to delete: the fleet writes it")
    for attempt in range(1, _ATTEMPTS + 1):
        await _refuse_if_used(transport, ObjectKey(kind, name))
        await _refuse_if_alive(transport, ObjectKey(kind, name))
        try:
            if found.type is Replica:
                return await _mark(transport, Replica, name, clock)
            if found.type is ModelDeployment:
                finalizer = ORPHAN if cascade == "orphan" else FOREGROUND
                return await _mark(transport, ModelDeployment, name, clock, finalizer)
            return await _remove(transport, found.type, name)
        except ConflictError as error:
            if attempt == _ATTEMPTS:
                raise ConflictError(
                    f"{kind}/{name} was changed by others {_ATTEMPTS} times in a row; nothing was "
                    "deleted"
                ) from error
    raise AssertionError("unreachable")


async def _mark(
    transport: Transport, kind: type[ApiObject], name: str, clock: Clock, *finalizers: str
) -> Deleting:
    now = clock.now()

    def mark(obj: ApiObject) -> ApiObject | None:
        # How its replicas go was decided when it was marked first.
        if obj.metadata.deletion_timestamp is not None:
            return None
        kept = tuple(dict.fromkeys((*obj.metadata.finalizers, *finalizers)))
        marks = {"deletion_timestamp": now, "finalizers": kept}
        return obj.model_copy(update={"metadata": obj.metadata.model_copy(update=marks)})

    try:
        marked = await mutate(transport, clock, kind, name, mark)
    except errors.NotFoundError:
        raise await _not_found(transport, kind, name) from None
    return Deleting(obj=marked)


async def _remove(transport: Transport, kind: type[ApiObject], name: str) -> Deleted:
    """Delete spec and status in one transaction, guarded by the version of the spec."""
    spec_key = keys.spec_key(kind.__name__, name)
    status_key = keys.status_key(kind.__name__, name)
    spec, status = await transport.get(spec_key), await transport.get(status_key)
    if spec is None and status is None:
        raise await _not_found(transport, kind, name)
    guard = Unchanged(key=spec_key, mod_revision=spec.mod_revision if spec is not None else 0)
    try:
        await transport.commit([guard], [Delete(key=spec_key), Delete(key=status_key)])
    except UnavailableError as error:
        # The answer was lost, not the deed, if the key is gone.
        if not error.ambiguous or await transport.get(spec_key) is not None:
            raise
    return Deleted(kind=kind.__name__, name=name)


async def _refuse_if_used(transport: Transport, key: ObjectKey) -> None:
    users = await _users(transport, key)
    if users:
        raise InUseError(
            f"{key[0]}/{key[1]} is named by {names(users)}. Change or delete "
            f"{'it' if len(users) == 1 else 'them'} first"
        )


async def _refuse_if_alive(transport: Transport, key: ObjectKey) -> None:
    """Refuse to delete a node that is there: it would come back, without its labels and its cordon."""
    if key.kind == "Node" and await transport.get(keys.node_lease_key(key.name)) is not None:
        raise InUseError(
            f"{key} is alive: its agent renews its lease, and would report it again. "
            "Stop the agent first; to keep new work away, set spec.unschedulable"
        )


async def _users(transport: Transport, key: ObjectKey) -> list[ObjectKey]:
    """Return the objects that name this one; what is being deleted itself does not count."""
    kind, name = key
    if kind == "NodePool":
        deployments = await objects.list_all(transport, ModelDeployment)
        return [
            ObjectKey(obj.kind, obj.name)
            for obj in deployments
            if name in obj.spec.placement.pools and obj.metadata.deletion_timestamp is None
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


async def _not_found(transport: Transport, kind: type[ApiObject], name: str) -> NotFoundError:
    listing = await transport.list(keys.spec_prefix(kind.__name__))
    there = [keys.kind_and_name(item.key)[1] for item in listing.items]
    message = f"there is no {kind.__name__} {name}"
    hint = did_you_mean(name, there[:20], "There are")
    return NotFoundError(f"{message}. {hint}" if hint else message)
