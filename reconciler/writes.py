"""Many guarded writes in few transactions: a round trip and an fsync are what a write costs, not what is in it. Pure.

What each action writes, and what must still hold for it. Pure: doing it is execute.py's job.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, assert_never
from uuid import NAMESPACE_OID, uuid5

from reconciler.actions import (
    Action,
    AdoptReplica,
    CreateReplica,
    DeleteReplica,
    MoveReplica,
    OrphanReplica,
    PreemptReplica,
    ReformReplica,
    ReleaseRanks,
    RemoveDeployment,
    RemoveReplica,
    RemoveRevision,
    SaveRevision,
)
from reconciler.groups.group_view import GroupForm
from reconciler.rollout.revisions import content_of, digest
from schemas.deployment import ModelDeployment, ModelSource, Revision, RevisionSpec
from schemas.formation import Formation
from schemas.meta import ENDED_BECAUSE, ObjectKey, ObjectMeta, OwnerReference, Status
from schemas.replica import LeavingRank, Replica, ReplicaSpec
from store import codec, keys
from store.port import MAX_OPERATIONS, Delete, Guard, ModRevisionGuard, Operation, Put

# etcd refuses requests of more than 1.5 MiB.
_MOST_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedWrite:
    """One change and what it was planned on: done if all of its guards hold, else left undone."""

    guards: tuple[Guard, ...]
    operations: tuple[Operation, ...]
    is_assignment: bool = False
    """Whether it gives a node something to run."""


def split_into_batches(
    writes: Iterable[GuardedWrite], *, shared: int
) -> Iterator[tuple[GuardedWrite, ...]]:
    """Yield the writes in their order, as many at once as a transaction takes.

    `shared` is how many guards and operations are added to each batch. No key is written twice in
    one: the store refuses that. A write that is too big by itself is a batch by itself.
    """
    batch: list[GuardedWrite] = []
    for write in writes:
        if batch and not _fits([*batch, write], shared):
            yield tuple(batch)
            batch = []
        batch.append(write)
    if batch:
        yield tuple(batch)


def guards_of(batch: Iterable[GuardedWrite]) -> tuple[Guard, ...]:
    """Return what has to hold for all of them, each guard once."""
    return tuple(dict.fromkeys(guard for write in batch for guard in write.guards))


def operations_of(batch: Iterable[GuardedWrite]) -> tuple[Operation, ...]:
    return tuple(operation for write in batch for operation in write.operations)


def _fits(batch: Sequence[GuardedWrite], shared: int) -> bool:
    operations = operations_of(batch)
    size = sum(len(one.value) for one in operations if isinstance(one, Put))
    return (
        len(guards_of(batch)) + len(operations) + shared <= MAX_OPERATIONS
        and size <= _MOST_BYTES
        and len({one.key for one in operations}) == len(operations)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteContext:
    """What a write needs that no plan may draw or read itself."""

    now: datetime
    secret: Callable[[], str]
    """Returns another word each time, which nobody can guess."""


def make_write(
    action: Action,
    deployment: ModelDeployment | None,
    replicas: Mapping[str, Replica],
    stamp: WriteContext,
) -> GuardedWrite:
    """Return what carries out one action for a deployment; `replicas` are those it may be about."""
    written: GuardedWrite
    now = stamp.now
    match action:
        case CreateReplica() | MoveReplica() | ReformReplica():
            assert deployment is not None
            written = _assigned(action, deployment, replicas, stamp)
        case ReleaseRanks(name=name, leaving=leaving, version=version):
            written = _release(replicas[name], leaving, version)
        case DeleteReplica(name=name, because=because, version=version):
            written = _mark_deleted(replicas[name], version, because, now)
        case PreemptReplica(name=name, because=why, version=version):
            written = _mark_deleted(replicas[name], version, f"Preempted: {why}", now)
        case OrphanReplica(name=name, version=version):
            written = _edit(replicas[name], version, {"owner_references": ()})
        case AdoptReplica(name=name, version=version):
            assert deployment is not None
            owners = (owner_of(deployment),)
            written = _edit(replicas[name], version, {"owner_references": owners})
        case SaveRevision():
            assert deployment is not None
            written = _save(action, deployment, now)
        case RemoveReplica() | RemoveRevision() | RemoveDeployment():
            written = _forget(action, replicas)
        case _:
            assert_never(action)
    return written


def _forget(
    action: RemoveReplica | RemoveRevision | RemoveDeployment, replicas: Mapping[str, Replica]
) -> GuardedWrite:
    match action:
        case RemoveReplica(name=name, version=version):
            return _remove("Replica", name, version, *reports_of(replicas[name]))
        case RemoveRevision(name=name, version=version):
            return _remove("Revision", name, version)
        case RemoveDeployment(name=name, version=version):
            return _remove("ModelDeployment", name, version)


def status_write(key: ObjectKey, status: Status, *, version: int) -> GuardedWrite:
    """Return what writes a status, if its object is still what it was computed from."""
    # An object that is deleted meanwhile would leave a status behind that its namesake inherits.
    return GuardedWrite(
        guards=(ModRevisionGuard(key=keys.spec_key(*key), mod_revision=version),),
        operations=(Put(key=keys.status_key(*key), value=codec.encode(status)),),
    )


def _assigned(
    action: CreateReplica | MoveReplica | ReformReplica,
    deployment: ModelDeployment,
    replicas: Mapping[str, Replica],
    stamp: WriteContext,
) -> GuardedWrite:
    match action:
        case CreateReplica():
            return _assign(make_replica(action, deployment, stamp), deployment, version=0)
        case MoveReplica(name=name, version=version):
            made = make_replica(action, deployment, stamp)
            stale = reports_of(replicas[name])
            return _assign(made, deployment, version=version, stale=stale)
        case ReformReplica(name=name, version=version):
            made = remake_replica(action, replicas[name], stamp)
            stale = _no_more(replicas[name], made)
            return _assign(made, deployment, version=version, stale=stale)


def _assign(
    replica: Replica,
    deployment: ModelDeployment,
    *,
    version: int,
    stale: tuple[Operation, ...] = (),
) -> GuardedWrite:
    return GuardedWrite(
        guards=(
            ModRevisionGuard(key=keys.spec_key("Replica", replica.name), mod_revision=version),
            # A deployment that was edited or deleted meanwhile is planned anew.
            codec.unchanged_guard(deployment),
        ),
        operations=(codec.put_spec(replica), *stale),
        is_assignment=True,
    )


def _mark_deleted(replica: Replica, version: int, because: str, now: datetime) -> GuardedWrite:
    notes = {**replica.metadata.annotations, ENDED_BECAUSE: because}
    return _edit(replica, version, {"deletion_timestamp": now, "annotations": notes})


def _edit(replica: Replica, version: int, marks: dict[str, Any]) -> GuardedWrite:
    """Write a replica with other metadata; what it runs stays as it is."""
    metadata = replica.metadata.model_copy(update=marks)
    edited = replica.model_copy(update={"metadata": metadata})
    return GuardedWrite(
        guards=(
            ModRevisionGuard(key=keys.spec_key("Replica", replica.name), mod_revision=version),
        ),
        operations=(codec.put_spec(edited),),
    )


def _release(replica: Replica, leaving: tuple[LeavingRank, ...], version: int) -> GuardedWrite:
    """Write a replica without the ranks that have ended, and forget what their agents said of them."""
    spec = replica.spec.model_copy(update={"leaving": leaving})
    edited = replica.model_copy(update={"spec": spec})
    return GuardedWrite(
        guards=(
            ModRevisionGuard(key=keys.spec_key("Replica", replica.name), mod_revision=version),
        ),
        operations=(codec.put_spec(edited), *_no_more(replica, edited)),
    )


def _save(action: SaveRevision, deployment: ModelDeployment, now: datetime) -> GuardedWrite:
    metadata = ObjectMeta(
        name=action.name,
        labels=deployment.metadata.labels,
        generation=1,
        creation_timestamp=now,
        owner_references=(owner_of(deployment),),
    )
    spec = RevisionSpec(
        deployment=deployment.name,
        template=action.template,
        revision=action.number,
        content=content_of(deployment),
        change_cause=action.cause,
    )
    key = keys.spec_key("Revision", action.name)
    return GuardedWrite(
        guards=(
            ModRevisionGuard(key=key, mod_revision=action.version),
            # Its content is the deployment's as it was planned from.
            codec.unchanged_guard(deployment),
        ),
        operations=(codec.put_spec(Revision(metadata=metadata, spec=spec)),),
    )


def _remove(kind: str, name: str, version: int, *more: Operation) -> GuardedWrite:
    key = keys.spec_key(kind, name)
    # A revision has no status, and the key where it would be is not ours to write.
    status = () if kind == "Revision" else (Delete(key=keys.status_key(kind, name)),)
    return GuardedWrite(
        guards=(ModRevisionGuard(key=key, mod_revision=version),),
        operations=(Delete(key=key), *status, *more),
    )


def reports_of(replica: Replica) -> tuple[Delete, ...]:
    """Return the operations that remove what agents said of the replica's ranks."""
    there = [(rank.node, number) for number, rank in enumerate(replica.spec.ranks)]
    left = [(rank.node, rank.rank) for rank in replica.spec.leaving]
    return tuple(
        Delete(key=keys.rank_key(node, replica.name, number))
        for node, number in dict.fromkeys((*there, *left))
    )


def _no_more(before: Replica, after: Replica) -> tuple[Delete, ...]:
    """Return what removes the reports of ranks that a replica had, and is not to have any more."""
    kept = reports_of(after)
    return tuple(one for one in reports_of(before) if one not in kept)


def owner_of(deployment: ModelDeployment) -> OwnerReference:
    """Return the reference by which what is made for the deployment goes with it."""
    return OwnerReference(kind="ModelDeployment", name=deployment.name, uid=deployment.metadata.uid)


def make_replica(
    action: CreateReplica | MoveReplica, deployment: ModelDeployment, stamp: WriteContext
) -> Replica:
    """Return the replica that the action assigns; its uid tells it from earlier ones of the name."""
    content, form, now = action.content, action.form, stamp.now
    return Replica(
        metadata=ObjectMeta(
            name=action.name,
            labels=deployment.metadata.labels,
            uid=str(uuid5(NAMESPACE_OID, f"Replica/{action.name}/{now.isoformat()}")),
            generation=1,
            creation_timestamp=now,
            owner_references=(owner_of(deployment),),
        ),
        spec=ReplicaSpec(
            deployment=deployment.name,
            template=digest(content),
            model=content.model if form is None else _with_path(content.model, form.model),
            served_names=tuple(dict.fromkeys((deployment.name, *content.served_names))),
            context_length=content.context_length,
            concurrency=content.concurrency,
            queue_depth=content.queue_depth,
            kv_cache=content.kv_cache,
            ranks=action.ranks,
            formation=None if form is None else _formation(form, stamp),
        ),
    )


def remake_replica(action: ReformReplica, before: Replica, stamp: WriteContext) -> Replica:
    """Return the replica in its next epoch: the same one, with other ranks maybe."""
    old = before.spec.formation
    assert old is not None
    formation = _formation(action.form, stamp).model_copy(
        update={
            "epoch": old.epoch + 1,
            "failures": action.failures,
            "because": action.because,
        }
    )
    spec = before.spec.model_copy(
        update={
            "model": _with_path(before.spec.model, action.form.model),
            "ranks": action.ranks,
            "formation": formation,
            "leaving": action.leaving,
        }
    )
    # Its spec is another: what was written about the epoch before does not speak of this one.
    generation = before.metadata.generation + 1
    metadata = before.metadata.model_copy(update={"generation": generation})
    return before.model_copy(update={"metadata": metadata, "spec": spec})


def _with_path(source: ModelSource, path: str) -> ModelSource:
    return source if source.path == path else source.model_copy(update={"path": path})


def _formation(form: GroupForm, stamp: WriteContext) -> Formation:
    return Formation(
        group=form.group,
        backend=form.backend,
        parallelism=form.parallelism,
        port=form.port,
        environment=dict(form.environment),
        secret=stamp.secret(),
        formed_at=stamp.now,
        fallback=form.fallback,
        fits_single=form.fits_single,
        golden=form.golden,
    )
