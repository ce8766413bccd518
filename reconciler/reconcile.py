"""How long placement waits for nodes that have not looked at a model yet. Time is an argument.

One look at one deployment: observe, plan, execute, status.

One look at one node: it is registered when it joins, and what the leader found out about it is written down.

One look at one object, whatever its kind. Called by the loop, one key at a time.
"""

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace

from machinery.clock import Clock
from machinery.control_loop import Requeue
from reconciler import observe, status
from reconciler.actions import Action, PreemptReplica
from reconciler.autoscaling.autoscaler import Autoscaler, ScalingDecision
from reconciler.demand.scraper import DemandScraper
from reconciler.events import DeploymentEvents
from reconciler.execute import Executor
from reconciler.listers import lister
from reconciler.listers.caches import Caches
from reconciler.listers.lister import Lister
from reconciler.nodes.liveness import NodeLiveness
from reconciler.nodes.node_state import NodeContext, evaluate_node
from reconciler.nodes.node_views import NodeContextCache, NodeViewCache, Now
from reconciler.placement.table import NodeTable
from reconciler.plan import DeploymentPlan, plan
from reconciler.rollout import progress
from reconciler.rollout.canary import CanaryBaselines, advance
from reconciler.rollout.revisions import template_hash
from reconciler.rollout.steps import RolloutPhase, rollout_goal
from reconciler.status import node_life_status, replica_status
from reconciler.views import DeploymentView
from schemas.deployment import CanaryStatus, ModelDeployment, ModelDeploymentStatus, ModelSource
from schemas.event import ObjectReference
from schemas.meta import ApiObject, ConditionStatus, ObjectKey, Status, find_condition
from schemas.node import NodeLifeStatus
from schemas.pools import NodePool
from schemas.replica import Replica
from schemas.route import ModelRoute
from schemas.shardgroup import ShardGroup
from store import keys
from store.errors import UnavailableError
from store.events import EventRecorder

# Agents answer within tens of milliseconds; one that hangs must not hold up the others for long.
_WAIT_S = 2.0


class ReportGrace:
    """Remembers since when reports about each model are awaited.

    Without it, the first agent to report a new model would be given every replica of it.
    """

    def __init__(self) -> None:
        self._since: dict[ModelSource, float] = {}

    def left_s(self, source: ModelSource, *, is_incomplete: bool, now: float) -> float:
        """Return how many seconds more to wait for reports about the model; 0 to go ahead."""
        if not is_incomplete:
            self._since.pop(source, None)
            return 0.0
        return max(0.0, self._since.setdefault(source, now) + _WAIT_S - now)


_CATCH_UP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderState:
    """What the leader knows beside the caches."""

    life: NodeLiveness
    nodes: NodeViewCache
    autoscaler: Autoscaler
    demand: DemandScraper
    book: CanaryBaselines
    waiting_for_room: set[str]
    """Deployments that would go on if there were more room."""

    def moment(self, clock: Clock) -> Now:
        """Return what decides about nodes now, beside what is written of them."""
        now = clock.now()
        return Now(now=now, flapping=self.life.flapping(clock.monotonic(), now))


class DeploymentReconciler:
    """Brings one deployment nearer to its spec at a time. Needs leadership."""

    def __init__(
        self,
        caches: Caches,
        senses: LeaderState,
        executor: Executor,
        teller: DeploymentEvents,
        clock: Clock,
    ) -> None:
        self._caches = caches
        self._fleet = Lister(caches)
        self._senses = senses
        self._executor = executor
        self._teller = teller
        self._clock = clock
        self._patience = ReportGrace()
        self._table = NodeTable(())

    async def reconcile(self, key: ObjectKey) -> Requeue | None:
        """Look at one deployment and act; it may be gone, and only replicas of it left."""
        await self._catch_up(await self._executor.last_assignment())
        scaled = self._scaled(key.name)
        seen = self._observe(key.name, scaled)
        decided = plan(seen, self._table)
        if decided.unschedulable or decided.stuck:
            self._senses.waiting_for_room.add(key.name)
        else:
            self._senses.waiting_for_room.discard(key.name)
        await self._act(decided, seen)
        if decided.actions:
            seen = self._observe(key.name, scaled)
        await self._replica_statuses(seen)
        looks = [decided.requeue_after_s, scaled.requeue_after_s if scaled is not None else None]
        if seen.deployment is not None and not seen.is_ending:
            looks.append(await self._status(key, seen.deployment, seen, decided))
        else:
            self._senses.autoscaler.forget(key.name)
            self._senses.book.forget(key.name)
        after_s = min((look for look in looks if look is not None), default=None)
        return None if after_s is None else Requeue(after_s=after_s)

    async def _act(self, decided: DeploymentPlan, seen: DeploymentView) -> None:
        replicas = {r.name: r.replica for r in seen.replicas} | self._victims(decided.actions)
        work = self._executor.do_all(decided.actions, seen.deployment, replicas)
        async with aclosing(work) as steps:
            async for done, revision in steps:
                for action in done:
                    await self._teller.told(action, seen)
                await self._catch_up(revision)

    def _victims(self, actions: Iterable[Action]) -> dict[str, Replica]:
        """Return the replicas of others that are to make room."""
        names = {action.name for action in actions if isinstance(action, PreemptReplica)}
        if not names:
            return {}
        return {found.name: found for found in self._fleet.replicas() if found.name in names}

    def _scaled(self, name: str) -> ScalingDecision | None:
        """Return how many replicas load and schedule ask for; None where the spec says it."""
        found = self._fleet.spec(ObjectKey("ModelDeployment", name))
        if not isinstance(found, ModelDeployment) or found.spec.autoscaling is None:
            self._senses.autoscaler.forget(name)
            return None
        return self._senses.autoscaler.desired(
            found,
            self._fleet.wishes.status(name),
            self._senses.demand.demand(name),
            self._clock.now(),
            self._clock.monotonic(),
        )

    def _observe(self, name: str, scaled: ScalingDecision | None) -> DeploymentView:
        now = self._clock.monotonic()
        moment = self._senses.moment(self._clock)
        mine = [rank.node for r in self._fleet.replicas_of(name) for rank in r.spec.ranks]
        self._table = self._senses.nodes.look(self._fleet, moment)
        looks = (
            self._senses.life.requeue_after_s(mine, now),
            self._senses.life.next_release_s(now),
            self._senses.nodes.next_change_s(moment),
        )
        looked = observe.Now(
            now=moment.now,
            # Who is back is not lost, also if nobody has taken note of it yet.
            lost=frozenset(n for n in self._senses.life.lost(now) if not self._fleet.is_ready(n)),
            requeue_after_s=min((s for s in looks if s is not None), default=None),
        )
        seen = observe.observe(self._fleet, name, looked, nodes=self._table.nodes)
        if scaled is not None:
            seen = replace(seen, desired=scaled.desired, scaling=status.scaling_condition(scaled))
        if seen.deployment is None:
            return seen
        source = seen.deployment.spec.model
        is_incomplete = any(node.is_ready and not node.has_looked_at(source) for node in seen.nodes)
        left_s = self._patience.left_s(source, is_incomplete=is_incomplete, now=now)
        if left_s == 0:
            return seen
        requeue_after_s = min(left_s, seen.requeue_after_s or left_s)
        return replace(seen, awaits_reports=True, requeue_after_s=requeue_after_s)

    async def _catch_up(self, revision: int) -> None:
        """Wait until a write is in the cache, ours or our predecessor's: the next plan must count it."""
        try:
            async with asyncio.timeout(_CATCH_UP_S):
                await self._caches.specs.reached(revision)
        except TimeoutError:
            raise UnavailableError("the watch does not keep up with our own writes") from None

    async def _replica_statuses(self, seen: DeploymentView) -> None:
        news: list[tuple[ObjectKey, Status, int]] = []
        for view in seen.replicas:
            key = ObjectKey("Replica", view.name)
            old = self._fleet.status(key)
            reports = self._fleet.ranks(view.replica)
            new = replica_status(view, reports, old=old, now=self._clock.now())
            if old != new and not self._fleet.is_newer(key):
                news.append((key, new, view.version))
                await self._teller.told_replica(seen, old, new)
        await self._executor.write_statuses(news)

    async def _status(
        self,
        key: ObjectKey,
        deployment: ModelDeployment,
        seen: DeploymentView,
        decided: DeploymentPlan,
    ) -> float | None:
        """Write what is so; return when to look again though nothing changed."""
        now, old = self._clock.now(), self._fleet.wishes.status(key.name)
        trial, look_s = self._trial(deployment, seen)
        unschedulable = decided.unschedulable
        hindrance = unschedulable or decided.stuck
        moved = progress.compute_progress(
            deployment, seen, hindrance, canary=trial, old=old, now=now
        )
        new = status.deployment_status(deployment, seen, unschedulable, moved, old=old, now=now)
        if old == new or self._fleet.is_newer(key):
            return min((s for s in (look_s, moved.requeue_after_s) if s is not None), default=None)
        version = self._caches.specs.version(keys.spec_key(*key))
        revision = await self._executor.write_status(key, new, version=version)
        await self._teller.told_status(deployment, old, new, unschedulable)
        if _planning_inputs(old) != _planning_inputs(new):
            # The next look goes by what this one wrote.
            await self._remembered(revision)
            return 0.0
        return min((s for s in (look_s, moved.requeue_after_s) if s is not None), default=None)

    def _trial(
        self, deployment: ModelDeployment, seen: DeploymentView
    ) -> tuple[CanaryStatus | None, float | None]:
        """Return where the trial of the newest version is, and when to look at it again."""
        goal, canary = rollout_goal(seen, deployment), deployment.spec.rollout.canary
        if canary is None or goal.phase is not RolloutPhase.CANARY:
            self._senses.book.forget(deployment.name)
            was = seen.canary if canary is not None else None
            return (was if was and was.template == template_hash(deployment) else None), None
        ready = [r for r in seen.replicas if r.is_ready and r.replica.spec.template == goal.trial]
        total = self._senses.demand.measured(deployment.name, goal.trial)
        return advance(
            canary,
            seen.canary,
            goal.trial,
            is_new_ready=len(ready) >= goal.trial_replicas,
            measured=self._senses.book.measured(deployment.name, seen.canary, total),
            now=self._clock.now(),
        )

    async def _remembered(self, revision: int) -> None:
        try:
            async with asyncio.timeout(_CATCH_UP_S):
                await self._caches.statuses.reached(revision)
        except TimeoutError:
            raise UnavailableError("the watch does not keep up with our own writes") from None


def _planning_inputs(found: ModelDeploymentStatus | None) -> tuple[object, ...]:
    """Return what of a status later plans go by."""
    if found is None:
        return (None, "", 0)
    return (found.canary, found.stable_template, found.desired_replicas)


class NodeReconciler:
    """Keeps the documents about nodes. Needs leadership."""

    def __init__(
        self,
        caches: Caches,
        senses: LeaderState,
        executor: Executor,
        recorder: EventRecorder,
        clock: Clock,
    ) -> None:
        self._caches = caches
        self._fleet = Lister(caches)
        self._executor = executor
        self._recorder = recorder
        self._senses = senses
        self._clock = clock
        self._circumstances = NodeContextCache(senses.nodes.version)

    async def reconcile(self, key: ObjectKey) -> Requeue | None:
        """Look at one node, and at those that are the same machine, or were until now."""
        status = self._fleet.node_status(key.name)
        if status is not None and self._fleet.spec(key) is None:
            await self._executor.register_node(key.name, status.uid)
            return None  # what was written brings us back
        moment = self._senses.moment(self._clock)
        pools = [pool for pool in self._fleet.of_kind("NodePool") if isinstance(pool, NodePool)]
        self._circumstances.move(pools, moment)
        looks = [
            await self._describe(name, moment)
            for name in sorted({key.name} | self._circumstances.doubles(self._fleet, [key.name]))
        ]
        after_s = min((look for look in looks if look is not None), default=None)
        return None if after_s is None else Requeue(after_s=after_s)

    async def _describe(self, name: str, moment: Now) -> float | None:
        """Write what is true of the node, if that is new; return in how many seconds it may be another."""
        node = self._fleet.node(name)
        old, version = self._fleet.machines.life(name)
        if node.status is None or self._fleet.spec(ObjectKey("Node", name)) is None:
            if version:
                await self._catch_up(await self._executor.remove_life(name, version=version))
            return None
        around = self._circumstances.around(self._fleet, node)
        new = node_life_status(
            node,
            evaluate_node(node, node.status, around),
            around,
            is_ready=self._fleet.is_ready(name),
            old=old,
            now=moment.now,
        )
        if new != old and not self._fleet.machines.is_newer(name):
            registered = self._caches.specs.version(keys.spec_key("Node", name))
            revision = await self._executor.write_life(
                name, new, version=version, registered=registered
            )
            await self._tell(name, node.metadata.uid, old, new)
            await self._catch_up(revision)
        return self._next_look_s(around, moment)

    def _next_look_s(self, around: NodeContext, moment: Now) -> float | None:
        flap = around.flap
        looks = [None if flap is None else flap.until - self._clock.monotonic()]
        if any(pool.spec.policy is not None for pool in around.pools):
            looks.append(self._circumstances.next_change_s(moment))
        return min((max(0.0, look) for look in looks if look is not None), default=None)

    async def _tell(
        self, name: str, uid: str, old: NodeLifeStatus | None, new: NodeLifeStatus
    ) -> None:
        """Record as events what is wrong with the node since now; that it is away is told elsewhere."""
        about = ObjectReference(kind="Node", name=name, uid=uid)
        for found in new.conditions:
            before = None if old is None else find_condition(old.conditions, found.type)
            was_so = before is not None and before.status is ConditionStatus.TRUE
            if found.type != "Ready" and found.status is ConditionStatus.TRUE and not was_so:
                await self._recorder.record(about, found.type, found.message, type_="Warning")

    async def _catch_up(self, revision: int) -> None:
        """Wait until the cache shows our own write: it would be written again otherwise."""
        try:
            async with asyncio.timeout(_CATCH_UP_S):
                await self._caches.lives.reached(revision)
        except TimeoutError:
            raise UnavailableError("the watch does not keep up with our own writes") from None


class Reconciler:
    """Brings one object nearer to its spec at a time. Needs leadership."""

    def __init__(
        self,
        caches: Caches,
        senses: LeaderState,
        executor: Executor,
        recorder: EventRecorder,
        clock: Clock,
    ) -> None:
        self._caches = caches
        self._fleet = Lister(caches)
        self._executor = executor
        self._clock = clock
        self._deployments = DeploymentReconciler(
            caches, senses, executor, DeploymentEvents(self._fleet, recorder), clock
        )
        self._nodes = NodeReconciler(caches, senses, executor, recorder, clock)

    async def reconcile(self, key: ObjectKey) -> Requeue | None:
        """Look at one object and act."""
        if not self._fleet.is_readable(key):
            return None  # the informer has said so; acting on an old copy could undo an edit
        if key.kind == "ModelDeployment":
            return await self._deployments.reconcile(key)
        if key.kind == "Node":
            return await self._nodes.reconcile(key)
        found = self._fleet.spec(key)
        if found is not None:
            await self._simple_status(key, found)
        return None

    def _around(self, group: ShardGroup, ready: set[str]) -> status.GroupContext:
        return status.GroupContext(
            members=lister.group_members(self._fleet, group),
            known=set(self._fleet.node_names()),
            ready=ready,
            replicas=[one.name for one in lister.replicas_on_group(self._fleet, group.name)],
        )

    async def _write_if_changed(self, key: ObjectKey, old: Status | None, new: Status) -> bool:
        if old == new or self._fleet.is_newer(key):
            return False  # a newer reconciler's words are not ours to overwrite
        version = self._caches.specs.version(keys.spec_key(*key))
        await self._executor.write_status(key, new, version=version)
        return True

    async def _simple_status(self, key: ObjectKey, found: ApiObject) -> None:
        old, now, ready = self._fleet.status(key), self._clock.now(), self._fleet.ready_nodes()
        new: Status
        if isinstance(found, NodePool):
            new = status.pool_status(
                found, observe.pool_members(self._fleet, found), ready, old=old, now=now
            )
        elif isinstance(found, ShardGroup):
            new = status.group_status(found, self._around(found, ready), old=old, now=now)
        elif isinstance(found, ModelRoute):
            names = {deployment.name for deployment in self._fleet.of_kind("ModelDeployment")}
            new = status.route_status(found, names, old=old, now=now)
        else:
            return
        await self._write_if_changed(key, old, new)
