"""Executes actions and status writes as guarded transactions, many writes in one, fenced by the leadership."""

import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import Any, assert_never
from uuid import NAMESPACE_OID, uuid5

from machinery.clock import Clock
from reconciler.deployments.actions import (
    Action,
    AdoptReplica,
    CreateReplica,
    DeleteReplica,
    EndPreload,
    MoveReplica,
    OrphanReplica,
    PreemptReplica,
    ReformReplica,
    ReleaseRanks,
    RemoveDeployment,
    RemoveReplica,
    RemoveRevision,
    SaveRevision,
    StartPreload,
    StartRanks,
)
from reconciler.deployments.rollout.revisions import content_of, digest
from reconciler.groups.group_view import GroupForm
from reconciler.listers.caches import OwnWrites
from reconciler.metrics import ReconcilerMetrics
from schemas.deployment import (
    ModelDeployment,
    ModelSource,
    Revision,
    RevisionSpec,
    RevisionTemplate,
    hub_names,
)
from schemas.formation import EpochSecret, Formation
from schemas.meta import (
    CHANGE_CAUSE,
    ENDED_BECAUSE,
    ObjectKey,
    ObjectMeta,
    OwnerReference,
    Status,
)
from schemas.model_snapshot import PreloadAssignment
from schemas.replica import RankAssignment, Replica, ReplicaSpec
from store import codec, keys
from store.errors import ConflictError
from store.port import (
    MAX_OPERATIONS,
    Delete,
    Guard,
    KeyValue,
    ModRevisionGuard,
    Operation,
    Put,
    Transport,
)

# etcd refuses requests of more than 1.5 MiB.
_MOST_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedWrite:
    """One change and the guards that must hold for it: all of its operations are done, or none."""

    guards: tuple[Guard, ...]
    operations: tuple[Operation, ...]
    is_assignment: bool = False
    """True if it assigns a rank to a node."""


def split_into_batches(
    writes: Iterable[GuardedWrite], *, shared: int
) -> Iterator[tuple[GuardedWrite, ...]]:
    """Yield the writes in order, as many in each batch as a transaction takes. A write costs a round trip and an fsync.

    `shared` is the number of guards and operations that are added to each batch. No key is written twice in a batch,
    because the store refuses that. A write that is too large alone is a batch of its own.
    """
    batch: list[GuardedWrite] = []
    guards, keys_written, size = set[Guard](), set[str](), 0
    for write in writes:
        own_keys = {operation.key for operation in write.operations}
        own_size = sum(len(one.value) for one in write.operations if isinstance(one, Put))
        new_guards = set(write.guards).difference(guards)
        most = len(guards) + len(new_guards) + len(keys_written) + len(own_keys) + shared
        fits = most <= MAX_OPERATIONS and size + own_size <= _MOST_BYTES
        if batch and not (fits and own_keys.isdisjoint(keys_written)):
            yield tuple(batch)
            batch, guards, keys_written, size = [], set(), set(), 0
        batch.append(write)
        guards.update(write.guards)
        keys_written |= own_keys
        size += own_size
    if batch:
        yield tuple(batch)


def merge_writes(batch: Iterable[GuardedWrite]) -> tuple[list[Guard], list[Operation]]:
    """Return the guards of all writes, each once, and their operations."""
    writes = list(batch)
    guards = list(dict.fromkeys(guard for write in writes for guard in write.guards))
    return guards, [operation for write in writes for operation in write.operations]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteContext:
    """Time and randomness for writes, which plans must not read themselves."""

    now: datetime
    secret: Callable[[], str]
    """Returns a new random secret at each call."""


def make_write(
    action: Action,
    deployment: ModelDeployment | None,
    replicas: Mapping[str, Replica],
    context: WriteContext,
) -> GuardedWrite:
    """Return the write that carries out an action of a deployment; `replicas` contains its replica by name."""
    written: GuardedWrite
    now = context.now
    match action:
        case CreateReplica() | MoveReplica() | ReformReplica():
            assert deployment is not None
            written = _assigned(action, deployment, replicas, context)
        case ReleaseRanks() | StartRanks():
            replica = replicas[action.name]
            update: dict[str, object]
            if isinstance(action, ReleaseRanks):
                update = {"leaving": action.leaving}
            else:
                assert replica.spec.formation is not None
                update = {
                    "formation": replica.spec.formation.model_copy(update={"awaits_files": False})
                }
            spec = replica.spec.model_copy(update=update)
            edited = replica.model_copy(update={"spec": spec})
            written = _replacement(edited, action.version, *_dropped_reports(replica, edited))
        case DeleteReplica(name=name, because=because, version=version):
            written = _mark_deleted(replicas[name], version, because, now)
        case PreemptReplica(name=name, reason=reason, because=why, version=version):
            written = _mark_deleted(replicas[name], version, f"{reason}: {why}", now)
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
            kinds = {RemoveReplica: "Replica", RemoveRevision: "Revision"}
            kind = kinds.get(type(action), "ModelDeployment")
            more = reports_of(replicas[action.name]) if isinstance(action, RemoveReplica) else ()
            key = keys.spec_key(kind, action.name)
            # A revision has no status key.
            status = () if kind == "Revision" else (Delete(key=keys.status_key(kind, action.name)),)
            written = GuardedWrite(
                guards=(ModRevisionGuard(key=key, mod_revision=action.version),),
                operations=(Delete(key=key), *status, *more),
            )
        case StartPreload() | EndPreload():
            written = _preload(action)
        case _:
            assert_never(action)
    return written


def _preload(action: StartPreload | EndPreload) -> GuardedWrite:
    key = keys.preload_key(action.node, action.name)
    operation: Operation = Delete(key=key)
    if isinstance(action, StartPreload):
        preload_assignment = PreloadAssignment(
            deployment=action.name, node=action.node, source=action.source
        )
        operation = Put(key=key, value=codec.encode(preload_assignment))
    guard = ModRevisionGuard(key=key, mod_revision=action.version)
    return GuardedWrite(guards=(guard,), operations=(operation,))


def status_write(key: ObjectKey, status: Status, *, version: int) -> GuardedWrite:
    """Return the write of a status, guarded by the version of the object that it was computed from."""
    # Without the guard, a deleted object would leave a status that a later object of the name inherits.
    return GuardedWrite(
        guards=(ModRevisionGuard(key=keys.spec_key(*key), mod_revision=version),),
        operations=(Put(key=keys.status_key(*key), value=codec.encode(status)),),
    )


def _assigned(
    action: CreateReplica | MoveReplica | ReformReplica,
    deployment: ModelDeployment,
    replicas: Mapping[str, Replica],
    context: WriteContext,
) -> GuardedWrite:
    """Return the write that assigns the ranks of a replica; it removes the reports on ranks that are no more."""
    stale: tuple[Delete, ...] = ()
    if isinstance(action, ReformReplica):
        before = replicas[action.name]
        made = remake_replica(action, before, context, source=deployment.spec.model)
        stale = _dropped_reports(before, made)
    else:
        made = make_replica(action, deployment, context)
        if isinstance(action, MoveReplica):
            stale = reports_of(replicas[action.name])
    version = 0 if isinstance(action, CreateReplica) else action.version
    secrets_by_key = {put.key: put for put in _epoch_secrets(made, context)}
    return GuardedWrite(
        guards=(
            ModRevisionGuard(key=keys.spec_key("Replica", made.name), mod_revision=version),
            # A deployment that was edited or deleted meanwhile is planned again.
            codec.unchanged_guard(deployment),
        ),
        operations=(
            codec.put_spec(made),
            *secrets_by_key.values(),
            # A transaction writes a key once.
            *(delete for delete in stale if delete.key not in secrets_by_key),
        ),
        is_assignment=True,
    )


def _epoch_secrets(replica: Replica, context: WriteContext) -> tuple[Put, ...]:
    """Return the operations that give the ranks of a group the secret of their epoch."""
    formation = replica.spec.formation
    if formation is None:
        return ()
    value = codec.encode(EpochSecret(epoch=formation.epoch, secret=context.secret()))
    nodes = dict.fromkeys(rank.node for rank in replica.spec.ranks)
    return tuple(Put(key=keys.epoch_secret_key(node, replica.name), value=value) for node in nodes)


def _mark_deleted(replica: Replica, version: int, because: str, now: datetime) -> GuardedWrite:
    notes = {**replica.metadata.annotations, ENDED_BECAUSE: because}
    return _edit(replica, version, {"deletion_timestamp": now, "annotations": notes})


def _edit(replica: Replica, version: int, marks: dict[str, Any]) -> GuardedWrite:
    """Return the write of a replica with changed metadata and the same spec."""
    metadata = replica.metadata.model_copy(update=marks)
    return _replacement(replica.model_copy(update={"metadata": metadata}), version)


def _replacement(edited: Replica, version: int, *more: Operation) -> GuardedWrite:
    """Return the write of a changed replica, if it still has that version."""
    key = keys.spec_key("Replica", edited.name)
    return GuardedWrite(
        guards=(ModRevisionGuard(key=key, mod_revision=version),),
        operations=(codec.put_spec(edited), *more),
    )


def _save(action: SaveRevision, deployment: ModelDeployment, now: datetime) -> GuardedWrite:
    metadata = ObjectMeta(
        name=action.name,
        labels=deployment.metadata.labels,
        # The next revision compares: an annotation that was there before is not its cause.
        annotations={
            key: value
            for key, value in deployment.metadata.annotations.items()
            if key == CHANGE_CAUSE
        },
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
            # Its content is that of the deployment which the plan was made from.
            codec.unchanged_guard(deployment),
        ),
        operations=(codec.put_spec(Revision(metadata=metadata, spec=spec)),),
    )


def reports_of(replica: Replica) -> tuple[Delete, ...]:
    """Return the operations that remove the agents' reports on the replica's ranks, and the secrets of a group."""
    there = [(rank.node, number) for number, rank in enumerate(replica.spec.ranks)]
    left = [(rank.node, rank.rank) for rank in replica.spec.leaving]
    reports = [
        Delete(key=keys.rank_key(node, replica.name, number))
        for node, number in dict.fromkeys((*there, *left))
    ]
    members = dict.fromkeys(node for node, _ in there) if replica.spec.formation else ()
    secrets = [Delete(key=keys.epoch_secret_key(node, replica.name)) for node in members]
    return (*reports, *secrets)


def _dropped_reports(before: Replica, after: Replica) -> tuple[Delete, ...]:
    """Return the operations that remove the reports on ranks that a replica no longer has."""
    deletes = reports_of(after)
    return tuple(report for report in reports_of(before) if report not in deletes)


def owner_of(deployment: ModelDeployment) -> OwnerReference:
    """Return the owner reference to a deployment: its replicas and revisions are deleted with it."""
    return OwnerReference(kind="ModelDeployment", name=deployment.name, uid=deployment.metadata.uid)


def make_replica(
    action: CreateReplica | MoveReplica, deployment: ModelDeployment, context: WriteContext
) -> Replica:
    """Return the replica that an action assigns; its uid differs from those of earlier replicas of the name."""
    content, form, now = action.content, action.form, context.now
    model = content.model if form is None else _with_path(content.model, form.model)
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
            model=model,
            served_names=tuple(
                dict.fromkeys((deployment.name, *content.served_names, *hub_names(content.model)))
            ),
            context_length=content.context_length,
            concurrency=_concurrency(content, action.ranks),
            queue_depth=content.queue_depth,
            kv_cache=content.kv_cache,
            prefixes=content.prefixes,
            memory=content.memory,
            sampling=content.sampling,
            unknown_parameters=content.unknown_parameters,
            performance=content.performance,
            ranks=action.ranks,
            formation=None if form is None else _formation(form, model, context),
        ),
    )


def _concurrency(content: RevisionTemplate, ranks: Sequence[RankAssignment]) -> int:
    """Return how many requests the replica works on at once: the number that was proven where it is Auto."""
    if content.concurrency != "Auto":
        return content.concurrency
    return min(rank.memory.concurrency for rank in ranks)


def remake_replica(
    action: ReformReplica,
    before: Replica,
    context: WriteContext,
    *,
    source: ModelSource | None = None,
) -> Replica:
    """Return the replica in its next epoch, possibly with other ranks.

    `source` is the deployment's model, to which a replica with a fallback model may return.
    """
    old = before.spec.formation
    assert old is not None
    is_own = source is not None and source.folder == action.form.model
    model = source if source and is_own else _with_path(before.spec.model, action.form.model)
    formation = _formation(action.form, model, context).model_copy(
        update={
            "epoch": old.epoch + 1,
            "failures": action.failures,
            "because": action.because,
        }
    )
    spec = before.spec.model_copy(
        update={
            "model": model,
            "ranks": action.ranks,
            "formation": formation,
            "leaving": action.leaving,
        }
    )
    # A new generation: conditions about the last epoch do not hold for this one.
    generation = before.metadata.generation + 1
    metadata = before.metadata.model_copy(update={"generation": generation})
    return before.model_copy(update={"metadata": metadata, "spec": spec})


def _with_path(source: ModelSource, path: str) -> ModelSource:
    """Return the source, or that of a group's fallback model if `path` is not the source's own folder."""
    if source.folder == path:
        return source
    return source.model_copy(update={"path": path, "hub": None})


def _formation(form: GroupForm, model: ModelSource, context: WriteContext) -> Formation:
    return Formation(
        group=form.group,
        backend=form.backend,
        parallelism=form.parallelism,
        port=form.port,
        environment=dict(form.environment),
        formed_at=context.now,
        fallback=form.fallback,
        fits_single=form.fits_single,
        golden=form.golden,
        awaits_files=model.hub is not None,
    )


# The fence, and the ledger as guard and as operation.
_SHARED = 3
# Size of the secret that the ranks of an epoch share.
_SECRET_BYTES = 32


class Executor:
    """Writes to the store for the leader; `fence` returns the guard of its leadership.

    Raises the store's errors. A ConflictError means that the plan was made from outdated objects.
    """

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        fence: Callable[[], Guard],
        metrics: ReconcilerMetrics | None = None,
        *,
        own_writes: OwnWrites | None = None,
    ) -> None:
        """Write with the clock's time. Secrets are drawn here, never in a plan."""
        self._own_writes = own_writes or OwnWrites()
        self._transport = transport
        self._metrics = metrics or ReconcilerMetrics(clock)
        self._clock = clock
        self._fence = fence
        self._ledger: KeyValue | None = None
        self._assigned_at = 0

    async def last_assignment(self) -> int:
        """Return the revision that the cache must show before a plan that is made from it may assign anything.

        Each assignment also writes the election key, the ledger, guarded by its known version. An assignment whose
        answer was lost may be carried out late. Because of the ledger, it and an assignment that was planned without
        it cannot both succeed; together they could exceed the memory of a node.
        """
        if self._ledger is None:
            ledger = await self._transport.get(self._fence().key)
            if ledger is None:
                raise ConflictError("this process is no longer the leader")
            if ledger.mod_revision > ledger.create_revision:
                self._assigned_at = (
                    ledger.mod_revision
                )  # by one of our writes, even if its answer was lost
            else:
                # Read after the ledger: an assignment between the two reads makes our next write a conflict.
                replicas = await self._transport.list(keys.spec_prefix("Replica"))
                self._assigned_at = max((item.mod_revision for item in replicas.items), default=0)
            self._ledger = ledger
        return self._assigned_at

    async def do_all(
        self,
        actions: Sequence[Action],
        deployment: ModelDeployment | None,
        replicas: Mapping[str, Replica],
        *,
        own_write_of: str = "",
    ) -> AsyncGenerator[tuple[Sequence[Action], int]]:
        """Execute a plan, many actions in one transaction; yield the done actions and their revision.

        `own_write_of` is the deployment that these writes do not wake (`OwnWrites`); empty: they wake it.
        """
        stamp = WriteContext(
            now=self._clock.now(), secret=lambda: secrets.token_urlsafe(_SECRET_BYTES)
        )
        writes = [make_write(action, deployment, replicas, stamp) for action in actions]
        done = 0
        async with aclosing(self._in_batches(writes, own_write_of)) as batched:
            async for number, revision in batched:
                for action in actions[done : done + number]:
                    self._metrics.actions.add(type(action).__name__)
                yield actions[done : done + number], revision
                done += number

    async def write_status(
        self, key: ObjectKey, status: Status, *, version: int, own_write_of: str = ""
    ) -> int:
        """Write a status if its object has not changed since; return the revision. `own_write_of`: as for `do_all`."""
        return await self._commit((status_write(key, status, version=version),), own_write_of)

    async def write_statuses(
        self, found: Iterable[tuple[ObjectKey, Status, int]], *, own_write_of: str = ""
    ) -> int:
        """Write statuses, each with the version of the object that it was computed from; return the last revision.

        `own_write_of`: as for `do_all`. Without any statuses the revision is 0.
        """
        writes = [status_write(key, status, version=version) for key, status, version in found]
        last = 0
        async with aclosing(self._in_batches(writes, own_write_of)) as batched:
            async for _, revision in batched:
                last = revision
        return last

    async def _in_batches(
        self, writes: Iterable[GuardedWrite], own_write_of: str
    ) -> AsyncGenerator[tuple[int, int]]:
        """Commit the writes in order; yield the number of writes in each transaction and its revision.

        A refused batch is committed write by write until the refused one: the writes before it must not wait for one
        that may never succeed.
        """
        for batch in split_into_batches(writes, shared=_SHARED):
            try:
                revision = await self._commit(batch, own_write_of)
            except ConflictError:
                if len(batch) == 1:
                    raise
                for write in batch:
                    yield 1, await self._commit((write,), own_write_of)
            else:
                yield len(batch), revision

    async def _write(
        self, guards: Sequence[Guard], operations: Sequence[Operation], own_write_of: str = ""
    ) -> int:
        with self._own_writes.writing(own_write_of) as note:
            try:
                revision = await self._transport.commit(guards, operations)
            except ConflictError:
                self._metrics.conflicts.add()
                raise
            self._metrics.writes.add()
            note(revision)
            return revision

    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        """Write something else for the leader; return the revision."""
        return await self._write([self._fence(), *guards], operations)

    async def _commit(self, batch: Sequence[GuardedWrite], own_write_of: str = "") -> int:
        guards, operations = merge_writes(batch)
        guards.insert(0, self._fence())
        if not any(write.is_assignment for write in batch):
            return await self._write(guards, operations, own_write_of)
        ledger, self._ledger = self._ledger, None  # known again when the answer arrives
        if ledger is None:
            raise ConflictError("an assignment that the plan did not count may have been written")
        guards.append(ModRevisionGuard(key=ledger.key, mod_revision=ledger.mod_revision))
        entry = Put(key=ledger.key, value=ledger.value, lease=ledger.lease)
        try:
            self._assigned_at = await self._write(guards, [*operations, entry], own_write_of)
        except ConflictError:
            if len(batch) > 1:
                self._ledger = ledger  # refused for certain: nothing of it can happen late
            raise
        self._ledger = ledger._replace(mod_revision=self._assigned_at)
        return self._assigned_at
