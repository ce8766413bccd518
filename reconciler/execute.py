"""Carries out actions and status writes: each one guarded transaction, fenced by the leadership."""

from collections.abc import Callable
from datetime import datetime
from typing import assert_never
from uuid import NAMESPACE_OID, uuid5

from machinery.clock import Clock
from reconciler.actions import (
    Action,
    CreateReplica,
    DeleteReplica,
    MoveReplica,
    PreemptReplica,
    RemoveDeployment,
    RemoveReplica,
)
from reconciler.plan import template
from schemas.deployment import ModelDeployment, served_names
from schemas.meta import ObjectKey, ObjectMeta, OwnerReference, Status
from schemas.node import Node, NodeSpec
from schemas.replica import RankAssignment, Replica, ReplicaSpec
from store import codec, keys
from store.errors import ConflictError
from store.port import Delete, Guard, KeyValue, Operation, Put, Transport, Unchanged


class Executor:
    """Writes for the leader; `fence` is the guard of its leadership.

    Raises the store's errors; a ConflictError says that the plan was made from old news.
    """

    def __init__(self, transport: Transport, clock: Clock, fence: Callable[[], Guard]) -> None:
        self._transport = transport
        self._clock = clock
        self._fence = fence
        self._ledger: KeyValue | None = None
        self._assigned_at = 0

    async def last_assignment(self) -> int:
        """Return the revision that the cache must show before a plan made from it assigns anything.

        Each assignment also writes the election key, guarded by the version we know. So one whose
        answer was lost, and that is carried out late, and one that was planned without it cannot
        both happen: together they could put more on a node than it has.
        """
        if self._ledger is None:
            ledger = await self._transport.get(self._fence().key)
            if ledger is None:
                raise ConflictError("the lead is lost")
            # After the ledger: what is assigned between the two makes our next write a conflict.
            there = await self._transport.list(keys.spec_prefix("Replica"))
            self._assigned_at = max((item.mod_revision for item in there.items), default=0)
            self._ledger = ledger
        return self._assigned_at

    async def do(
        self, action: Action, deployment: ModelDeployment | None, replicas: dict[str, Replica]
    ) -> int:
        """Carry out one action; return the revision at which it was written."""
        match action:
            case CreateReplica(name=name):
                assert deployment is not None
                return await self._assign(action, deployment, version=0, stale=())
            case MoveReplica(name=name, version=version):
                assert deployment is not None
                stale = reports_of(replicas[name])
                return await self._assign(action, deployment, version=version, stale=stale)
            case (
                DeleteReplica(name=name, version=version)
                | PreemptReplica(name=name, version=version)
            ):
                return await self._mark_deleted(replicas[name], version)
            case RemoveReplica(name=name, version=version):
                return await self._remove("Replica", name, version, *reports_of(replicas[name]))
            case RemoveDeployment(name=name, version=version):
                return await self._remove("ModelDeployment", name, version)
            case _:
                assert_never(action)

    async def _assign(
        self,
        action: CreateReplica | MoveReplica,
        deployment: ModelDeployment,
        *,
        version: int,
        stale: tuple[Operation, ...],
    ) -> int:
        replica = make_replica(action, deployment, self._clock.now())
        ledger, self._ledger = self._ledger, None  # known again when the answer is in
        if ledger is None:
            raise ConflictError("something may have been assigned that the plan did not count")
        guards = [
            self._fence(),
            Unchanged(key=ledger.key, mod_revision=ledger.mod_revision),
            Unchanged(key=keys.spec_key("Replica", action.name), mod_revision=version),
            # A deployment that was edited or deleted meanwhile is planned anew.
            codec.unchanged(deployment),
        ]
        entry = Put(key=ledger.key, value=ledger.value, lease=ledger.lease)
        operations = [codec.put_spec(replica), entry, *stale]
        self._assigned_at = await self._transport.commit(guards, operations)
        self._ledger = ledger._replace(mod_revision=self._assigned_at)
        return self._assigned_at

    async def _mark_deleted(self, replica: Replica, version: int) -> int:
        metadata = replica.metadata.model_copy(update={"deletion_timestamp": self._clock.now()})
        guards = [
            self._fence(),
            Unchanged(key=keys.spec_key("Replica", replica.name), mod_revision=version),
        ]
        marked = replica.model_copy(update={"metadata": metadata})
        return await self._transport.commit(guards, [codec.put_spec(marked)])

    async def _remove(self, kind: str, name: str, version: int, *more: Operation) -> int:
        key = keys.spec_key(kind, name)
        guards = [self._fence(), Unchanged(key=key, mod_revision=version)]
        operations = [Delete(key=key), Delete(key=keys.status_key(kind, name)), *more]
        return await self._transport.commit(guards, operations)

    async def write_status(self, key: ObjectKey, status: Status, *, version: int) -> None:
        """Write a status, if its object is still what it was computed from."""
        # An object that is deleted meanwhile would leave a status behind that its namesake inherits.
        guards = [self._fence(), Unchanged(key=keys.spec_key(*key), mod_revision=version)]
        put = Put(key=keys.status_key(*key), value=codec.encode(status))
        await self._transport.commit(guards, [put])

    async def register_node(self, name: str, uid: str) -> None:
        """Write the spec of a node that joined, unless somebody did."""
        metadata = ObjectMeta(
            name=name, uid=uid, generation=1, creation_timestamp=self._clock.now()
        )
        put = codec.put_spec(Node(metadata=metadata, spec=NodeSpec()))
        guards = [self._fence(), Unchanged(key=put.key, mod_revision=0)]
        await self._transport.commit(guards, [put])


def reports_of(replica: Replica) -> tuple[Delete, ...]:
    """Return the operations that remove what agents said of the replica's ranks."""
    return tuple(
        Delete(key=keys.rank_key(rank.node, replica.name, number))
        for number, rank in enumerate(replica.spec.ranks)
    )


def make_replica(
    action: CreateReplica | MoveReplica, deployment: ModelDeployment, now: datetime
) -> Replica:
    """Return the replica that the action assigns; its uid tells it from earlier ones of the name."""
    owner = OwnerReference(
        kind="ModelDeployment", name=deployment.name, uid=deployment.metadata.uid
    )
    return Replica(
        metadata=ObjectMeta(
            name=action.name,
            labels=deployment.metadata.labels,
            uid=str(uuid5(NAMESPACE_OID, f"Replica/{action.name}/{now.isoformat()}")),
            generation=1,
            creation_timestamp=now,
            owner_references=(owner,),
        ),
        spec=ReplicaSpec(
            deployment=deployment.name,
            template=template(deployment),
            model=deployment.spec.model,
            served_names=served_names(deployment),
            context_length=deployment.spec.context_length,
            concurrency=deployment.spec.concurrency,
            ranks=(RankAssignment(node=action.node, memory=action.memory),),
        ),
    )
