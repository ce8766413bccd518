"""One look at one object: observe, plan, execute, status. Called by the loop, one key at a time."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from machinery.clock import Clock
from machinery.loop import Again
from reconciler import status, views
from reconciler.actions import (
    Action,
    CreateReplica,
    DeleteReplica,
    MoveReplica,
    PreemptReplica,
    RemoveDeployment,
    RemoveReplica,
)
from reconciler.caches import Caches
from reconciler.execute import Executor
from reconciler.fleet import Fleet
from reconciler.nodelife import NodeLife
from reconciler.nodeviews import NodeViews
from reconciler.observe import Observed
from reconciler.patience import Patience
from reconciler.placement.refusals import Unschedulable
from reconciler.placement.table import Table
from reconciler.plan import plan
from schemas import quantity
from schemas.deployment import ModelDeployment
from schemas.event import ObjectReference
from schemas.meta import ApiObject, ObjectKey, Status, find_condition
from schemas.pools import NodePool, ShardGroup
from schemas.replica import Replica
from schemas.route import ModelRoute
from store import keys
from store.errors import UnavailableError
from store.events import EventRecorder

_CATCH_UP_S = 5.0


class Reconciler:
    """Brings one object nearer to its spec at a time. Needs leadership."""

    def __init__(
        self,
        caches: Caches,
        life: NodeLife,
        executor: Executor,
        recorder: EventRecorder,
        clock: Clock,
    ) -> None:
        self._caches = caches
        self._fleet = Fleet(caches)
        self._life = life
        self._executor = executor
        self._recorder = recorder
        self._clock = clock
        self._patience = Patience()
        self._nodes = NodeViews()
        self._table = Table(())

    async def reconcile(self, key: ObjectKey) -> Again | None:
        """Look at one object and act."""
        if not self._fleet.is_readable(key):
            return None  # the informer has said so; acting on an old copy could undo an edit
        if key.kind == "ModelDeployment":
            return await self._deployment(key)
        if key.kind == "Node":
            await self._node(key)
            return None
        found = self._fleet.spec(key)
        if found is not None:
            await self._simple_status(key, found)
        return None

    async def _deployment(self, key: ObjectKey) -> Again | None:
        await self._catch_up(await self._executor.last_assignment())
        seen = self._observe(key.name)
        decided = plan(seen, self._table)
        replicas = {r.name: r.replica for r in seen.replicas} | self._victims(decided.actions)
        for action in decided.actions:
            revision = await self._executor.do(action, seen.deployment, replicas)
            await self._told(action, seen)
            await self._catch_up(revision)
        if decided.actions:
            seen = self._observe(key.name)
        await self._replica_statuses(seen)
        if seen.deployment is not None:
            await self._deployment_status(key, seen.deployment, seen, decided.unschedulable)
        after_s = decided.requeue_after_s
        return None if after_s is None else Again(after_s=after_s)

    def _victims(self, actions: Iterable[Action]) -> dict[str, Replica]:
        """Return the replicas of others that are to make room."""
        names = {action.name for action in actions if isinstance(action, PreemptReplica)}
        return {found.name: found for found in self._fleet.replicas() if found.name in names}

    def _observe(self, name: str) -> Observed:
        now = self._clock.monotonic()
        mine = [r.spec.ranks[0].node for r in self._fleet.replicas_of(name)]
        self._table = self._nodes.look(self._fleet)
        seen = views.observe(
            self._fleet,
            name,
            lost=self._life.lost(now),
            next_look_s=self._life.next_look_s(mine, now),
            seen=self._table.nodes,
        )
        if seen.deployment is None:
            return seen
        path = seen.deployment.spec.model.path
        is_incomplete = any(node.is_ready and path not in node.models for node in seen.nodes)
        left_s = self._patience.left_s(path, is_incomplete=is_incomplete, now=now)
        if left_s == 0:
            return seen
        next_look_s = min(left_s, seen.next_look_s or left_s)
        return replace(seen, awaits_reports=True, next_look_s=next_look_s)

    async def _catch_up(self, revision: int) -> None:
        """Wait until a write is in the cache, ours or our predecessor's: the next plan must count it."""
        try:
            async with asyncio.timeout(_CATCH_UP_S):
                await self._caches.specs.reached(revision)
        except TimeoutError:
            raise UnavailableError("the watch does not keep up with our own writes") from None

    async def _told(self, action: Action, seen: Observed) -> None:
        """Record what was done as an event of the deployment."""
        uid = seen.deployment.metadata.uid if seen.deployment is not None else ""
        about = ObjectReference(kind="ModelDeployment", name=seen.name, uid=uid)
        match action:
            case CreateReplica(name=name, node=node, memory=memory):
                said = ", as spec.resources.memory says" if memory.overridden else ""
                need = quantity.show(memory.total_bytes)
                message = f"{name} goes to {node} and needs {need}{said}"
                await self._recorder.record(about, "ReplicaPlaced", message)
            case MoveReplica(name=name, node=node):
                message = f"{name} goes to {node}: its node is lost"
                await self._recorder.record(about, "ReplicaMoved", message, type_="Warning")
            case DeleteReplica(name=name, because=because):
                await self._recorder.record(about, because, f"{name} is to drain and end")
            case PreemptReplica(name=name, deployment=deployment, because=why):
                # It is the victim's people who will ask.
                theirs = self._fleet.spec(ObjectKey("ModelDeployment", deployment))
                uid = theirs.metadata.uid if theirs is not None else ""
                about = ObjectReference(kind="ModelDeployment", name=deployment, uid=uid)
                message = f"{name} is to drain and end: {why}"
                await self._recorder.record(about, "Preempted", message, type_="Warning")
            case RemoveReplica(name=name):
                await self._recorder.record(about, "ReplicaRemoved", f"{name} has ended")
            case RemoveDeployment():
                pass  # there is nothing left to hang an event on
            case _:
                assert_never(action)

    async def _replica_statuses(self, seen: Observed) -> None:
        for view in seen.replicas:
            key = ObjectKey("Replica", view.name)
            old = self._fleet.status(key)
            new = status.of_replica(
                view.replica,
                self._fleet.rank(view.replica),
                is_serving=view.is_ready,
                old=old,
                now=self._clock.now(),
            )
            await self._write_if_changed(key, old, new)

    async def _deployment_status(
        self,
        key: ObjectKey,
        deployment: ModelDeployment,
        seen: Observed,
        unschedulable: Unschedulable | None,
    ) -> None:
        old = self._fleet.status(key)
        new = status.of_deployment(deployment, seen, unschedulable, old=old, now=self._clock.now())
        changed = await self._write_if_changed(key, old, new)
        if changed and unschedulable is not None and _placed(old) != _placed(new):
            await self._explain(deployment, new, unschedulable)

    async def _explain(
        self, deployment: ModelDeployment, new: Status, unschedulable: Unschedulable
    ) -> None:
        about = ObjectReference(
            kind="ModelDeployment", name=deployment.name, uid=deployment.metadata.uid
        )
        await self._recorder.record(about, "Unschedulable", _placed(new), type_="Warning")
        for node, why in unschedulable.refusals:
            message = f"{node}: {why.message}"
            await self._recorder.record(about, why.reason, message, type_="Warning")

    async def _write_if_changed(self, key: ObjectKey, old: Status | None, new: Status) -> bool:
        if old == new or self._fleet.is_newer(key):
            return False  # a newer reconciler's words are not ours to overwrite
        version = self._caches.specs.version(keys.spec_key(*key))
        await self._executor.write_status(key, new, version=version)
        return True

    async def _node(self, key: ObjectKey) -> None:
        node = self._fleet.node_status(key.name)
        if node is not None and self._fleet.spec(key) is None:
            await self._executor.register_node(key.name, node.uid)

    async def _simple_status(self, key: ObjectKey, found: ApiObject) -> None:
        old, now, ready = self._fleet.status(key), self._clock.now(), self._fleet.ready_nodes()
        new: Status
        if isinstance(found, NodePool):
            new = status.of_pool(
                found, views.pool_members(self._fleet, found), ready, old=old, now=now
            )
        elif isinstance(found, ShardGroup):
            new = status.of_group(found, self._fleet.node_names(), ready, old=old, now=now)
        elif isinstance(found, ModelRoute):
            names = {deployment.name for deployment in self._fleet.of_kind("ModelDeployment")}
            new = status.of_route(found, names, old=old, now=now)
        else:
            return
        await self._write_if_changed(key, old, new)


def _placed(found: Status | None) -> str:
    placed = None if found is None else find_condition(found.conditions, "Placed")
    return "" if placed is None else placed.message
