"""Reconciles one object at a time: observe, plan, execute, status. The control loop calls it with keys."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from machinery.clock import Clock
from machinery.control_loop import Requeue
from reconciler.deployments import status
from reconciler.deployments.actions import Action, PreemptReplica
from reconciler.deployments.autoscaling.autoscaler import Autoscaler, ScalingDecision
from reconciler.deployments.demand.scraper import DemandScraper
from reconciler.deployments.events import DeploymentEvents
from reconciler.deployments.execute import Executor
from reconciler.deployments.lookup_problems import LookupProblems
from reconciler.deployments.observe import ReplicaViewCache, observe, soonest_s
from reconciler.deployments.plan import DeploymentPlan, plan
from reconciler.deployments.preload import preload_status
from reconciler.deployments.rollout import progress
from reconciler.deployments.rollout.canary import CanaryBaselines, advance, conclude, count_text
from reconciler.deployments.rollout.revisions import template_hash
from reconciler.deployments.rollout.steps import RolloutPhase, rollout_goal
from reconciler.deployments.views import DeploymentView, ReplicaView
from reconciler.groups.fabric_checks import FABRIC_HEALTHY, FabricCheckView
from reconciler.listers.caches import wait_for_revision
from reconciler.listers.lister import Lister
from reconciler.nodes.liveness import NodeLiveness, Now
from reconciler.nodes.node_state import NodeContext, evaluate_node
from reconciler.nodes.node_views import NodeContextCache, NodeViewCache
from reconciler.placement.refusals import Unschedulable, summary_line
from reconciler.placement.table import NodeTable
from schemas.deployment import CanaryStatus, ModelDeployment, ModelDeploymentStatus, ModelSource
from schemas.event import ObjectReference
from schemas.meta import ApiObject, Condition, ConditionStatus, ObjectKey, Status, find_condition
from schemas.node import NodeLifeStatus
from schemas.pools import NodePool
from schemas.replica import Replica
from schemas.rollout import canary_decision
from schemas.route import ModelRoute
from schemas.shardgroup import ShardGroup
from store.events import EventRecorder

# Agents report within tens of milliseconds; one that hangs must not delay placement for long.
_REPORT_GRACE_S = 2.0


class ReportGrace:
    """Delays placement of a new model until all ready nodes have reported on it, for two seconds at most.

    Without the delay, the first agent that reports a new model would get every replica of it.
    """

    def __init__(self) -> None:
        self._since: dict[ModelSource, float] = {}

    def remaining_s(self, source: ModelSource, *, is_incomplete: bool, now: float) -> float:
        """Return the seconds to wait for reports on the model; 0 to place now."""
        if not is_incomplete:
            self._since.pop(source, None)
            return 0.0
        return max(0.0, self._since.setdefault(source, now) + _REPORT_GRACE_S - now)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderState:
    """The leader's memory: what it has seen over time and what no cache holds. A new leader starts empty."""

    liveness: NodeLiveness
    nodes: NodeViewCache
    autoscaler: Autoscaler
    demand: DemandScraper
    baselines: CanaryBaselines
    fabric: Callable[[ShardGroup], FabricCheckView]
    """Returns the checks of its cables that the status of a group must take over."""
    waiting_for_room: set[str]
    """Deployments that go on as soon as there is more room."""
    lookups: LookupProblems = field(default_factory=LookupProblems)
    """Hub models that could not be resolved."""

    def now(self, lister: Lister, clock: Clock) -> Now:
        """Return the time with the state of nodes that depends on it."""
        now, wall = clock.monotonic(), clock.now()
        # A node that is back is not lost, even if its return is not recorded yet.
        lost = frozenset(name for name in self.liveness.lost(now) if not lister.is_ready(name))
        return Now(time=wall, flapping=self.liveness.flapping(now, wall), lost=lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChanges:
    """The statuses that a reconcile of a deployment has to write."""

    key: ObjectKey
    owner: str
    """The deployment whose reconcile these writes are no news for (`OwnWrites`)."""
    writes: tuple[tuple[ObjectKey, Status, int], ...]
    """Statuses, each with the version of the object that it was computed from."""
    deployment: ModelDeployment | None = None
    """The deployment if its own status, the last of the writes, changed."""
    old: ModelDeploymentStatus | None = None
    new: ModelDeploymentStatus | None = None
    unschedulable: Unschedulable | None = None
    requeue_after_s: float | None = None


class _Settled(NamedTuple):
    """The view of a replica, and the status that was right for it."""

    view: ReplicaView
    status: Status | None


class DeploymentReconciler:
    """Moves one deployment towards its spec. Needs leadership."""

    def __init__(
        self,
        lister: Lister,
        state: LeaderState,
        executor: Executor,
        events: DeploymentEvents,
        clock: Clock,
    ) -> None:
        self._lister = lister
        self._state = state
        self._executor = executor
        self._events = events
        self._clock = clock
        self._report_grace = ReportGrace()
        self._table = NodeTable(())
        self._views = ReplicaViewCache()
        self._settled: dict[str, dict[str, _Settled]] = {}
        """By deployment and name, the replicas whose status was right when they were looked at last."""

    async def converge(self, key: ObjectKey) -> StatusChanges:
        """Plan and act for one deployment, which may be gone while replicas of it are left; return what to report."""
        await self._wait_for_specs(await self._executor.last_assignment())
        scaling = self._scaling(key.name)
        observed = self._observe(key.name, scaling)
        decided = plan(observed, self._table)
        _log_decisions(key, decided, scaling)
        await self._execute(decided, observed, _owner_of_writes(observed))
        if decided.actions:
            observed = self._observe(key.name, scaling)
            # What remains to be done: the changes that were made just now queue nothing.
            decided = plan(observed, self._table)
        if decided.unschedulable or decided.stuck or any(r.cannot_start for r in observed.replicas):
            self._state.waiting_for_room.add(key.name)
        else:
            self._state.waiting_for_room.discard(key.name)
        if observed.deployment is None or observed.is_ending:
            self._state.autoscaler.forget(key.name)
            self._state.baselines.forget(key.name)
        after_s = soonest_s(
            0.0 if decided.actions else decided.requeue_after_s,
            scaling.requeue_after_s if scaling is not None else None,
        )
        return await self._status_changes(key, observed, decided, after_s)

    async def report(self, changes: StatusChanges) -> Requeue | None:
        """Write the statuses; return when to reconcile the deployment again though nothing changes."""
        # Together: a transaction costs more than what is in it.
        revision = await self._executor.write_statuses(changes.writes, owner=changes.owner)
        after_s, old, new = changes.requeue_after_s, changes.old, changes.new
        if changes.deployment is not None and new is not None:
            await self._events.record_status(changes.deployment, old, new, changes.unschedulable)
            before = _planning_inputs(old, changes.deployment)
            if before != _planning_inputs(new, changes.deployment):
                # The next plan depends on this status.
                await wait_for_revision(self._lister.caches.statuses, revision)
                after_s = 0.0
        return None if after_s is None else Requeue(after_s=after_s)

    def _scaling(self, name: str) -> ScalingDecision | None:
        """Return the autoscaler's decision; None for a deployment without autoscaling."""
        deployment = self._lister.deployment(name)
        if deployment is None or deployment.spec.autoscaling is None:
            self._state.autoscaler.forget(name)
            return None
        return self._state.autoscaler.desired(
            deployment,
            self._lister.deployment_status(name),
            self._state.demand.demand(name),
            self._clock.now(),
            self._clock.monotonic(),
        )

    def _observe(self, name: str, scaling: ScalingDecision | None) -> DeploymentView:
        monotonic, now = self._clock.monotonic(), self._state.now(self._lister, self._clock)
        own_nodes = [rank.node for r in self._lister.replicas_of(name) for rank in r.spec.ranks]
        self._table = self._state.nodes.refresh(self._lister, now)
        after_s = soonest_s(
            self._state.liveness.requeue_after_s(own_nodes, monotonic),
            self._state.liveness.next_release_s(monotonic),
            self._state.nodes.next_change_s(now),
        )
        now = replace(now, requeue_after_s=after_s)
        observed = observe(self._lister, name, now, nodes=self._table.nodes, views=self._views)
        if scaling is not None:
            condition = status.scaling_condition(scaling)
            observed = replace(observed, autoscaled_replicas=scaling.desired, scaling=condition)
        if observed.deployment is None:
            return observed
        source = observed.deployment.spec.model
        observed = replace(observed, unresolved=self._unresolved(name))
        if not observed.has_model:
            return observed
        is_incomplete = self._table.awaits_reports(source)
        grace_s = self._report_grace.remaining_s(source, is_incomplete=is_incomplete, now=monotonic)
        if grace_s == 0:
            return observed
        after_s = min(grace_s, observed.requeue_after_s or grace_s)
        return replace(observed, awaits_reports=True, requeue_after_s=after_s)

    def _unresolved(self, name: str) -> Condition | None:
        """Return the condition of a hub model that is not resolved; None if it is."""
        declared = self._lister.declared(name)
        if declared is None or self._lister.is_resolved(declared):
            return None
        problem = self._state.lookups.find(declared)
        if problem is None:
            label = declared.spec.model.label
            return status.resolved_condition("Resolving", f"the hub is asked for {label}")
        return status.resolved_condition(problem.reason, problem.message)

    async def _execute(self, decided: DeploymentPlan, observed: DeploymentView, owner: str) -> None:
        replicas = {r.name: r.replica for r in observed.replicas} | self._victims(decided.actions)
        work = self._executor.do_all(decided.actions, observed.deployment, replicas, owner=owner)
        async with aclosing(work) as steps:
            async for done, revision in steps:
                for action in done:
                    await self._events.record_action(action, observed)
                await self._wait_for_specs(revision)

    def _victims(self, actions: Iterable[Action]) -> dict[str, Replica]:
        """Return the replicas of other deployments that the plan preempts."""
        names = {action.name for action in actions if isinstance(action, PreemptReplica)}
        if not names:
            return {}
        return {found.name: found for found in self._lister.replicas() if found.name in names}

    async def _wait_for_specs(self, revision: int) -> None:
        """Wait until the cache shows a write of this or the previous leader: the next plan must count it."""
        await wait_for_revision(self._lister.caches.specs, revision)

    async def _status_changes(
        self,
        key: ObjectKey,
        observed: DeploymentView,
        decided: DeploymentPlan,
        after_s: float | None,
    ) -> StatusChanges:
        """Return the statuses that changed, of replicas and of the deployment; record events of the replicas."""
        replicas = tuple(await self._replica_statuses(observed))
        changes = StatusChanges(
            key=key,
            owner=_owner_of_writes(observed),
            writes=replicas,
            requeue_after_s=after_s,
        )
        if observed.deployment is None or observed.is_ending:
            return changes
        deployment, old = observed.deployment, self._lister.deployment_status(key.name)
        new, status_after_s = self._deployment_status(deployment, observed, decided, old)
        changes = replace(changes, requeue_after_s=soonest_s(after_s, status_after_s))
        if old == new or self._lister.is_newer(key):
            return changes
        return replace(
            changes,
            writes=(*replicas, (key, new, self._lister.spec_version(key))),
            deployment=deployment,
            old=old,
            new=new,
            unschedulable=decided.unschedulable,
        )

    async def _replica_statuses(
        self, observed: DeploymentView
    ) -> list[tuple[ObjectKey, Status, int]]:
        """Return the statuses of replicas that changed, with the versions of the replicas; record their events."""
        changed: list[tuple[ObjectKey, Status, int]] = []
        before, settled = self._settled.pop(observed.name, {}), dict[str, _Settled]()
        for view in observed.replicas:
            key = ObjectKey("Replica", view.name)
            old, seen = self._lister.status(key), before.get(view.name)
            if seen is not None and seen.view is view and seen.status is old:
                settled[view.name] = seen
                continue
            reports = self._lister.ranks(view.replica)
            new = status.replica_status(view, reports, old=old, now=self._clock.now())
            if old == new:
                settled[view.name] = _Settled(view, old)
            elif not self._lister.is_newer(key):
                changed.append((key, new, view.version))
                await self._events.record_replica_status(view.name, observed, old, new)
        if settled:
            self._settled[observed.name] = settled
        return changed

    def _deployment_status(
        self,
        deployment: ModelDeployment,
        observed: DeploymentView,
        decided: DeploymentPlan,
        old: ModelDeploymentStatus | None,
    ) -> tuple[ModelDeploymentStatus, float | None]:
        """Return the deployment's status, and the seconds until it may change by itself."""
        now = self._clock.now()
        preload = preload_status(observed, self._table)
        if preload is not None:
            observed = replace(observed, preload=preload[0], preloaded=preload[1])
        canary, canary_after_s, count = self._advance_canary(deployment, observed)
        unschedulable = decided.unschedulable
        obstacle = unschedulable or decided.stuck
        rollout = progress.compute_progress(
            deployment, observed, obstacle, canary=canary, old=old, now=now
        )
        rollout = progress.with_count(rollout, count)
        # A status is about the nodes of its replicas: going through all nodes took longer than the rest.
        own = sorted({name for one in observed.replicas for name in one.nodes})
        observed = replace(observed, nodes=tuple(self._table.named(own)))
        new = status.deployment_status(
            deployment, observed, unschedulable, rollout, old=old, now=now
        )
        return new, soonest_s(canary_after_s, rollout.requeue_after_s)

    def _advance_canary(
        self, deployment: ModelDeployment, observed: DeploymentView
    ) -> tuple[CanaryStatus | None, float | None, str]:
        """Return the state of the canary analysis, the seconds until it may change, and the count of its requests."""
        goal, canary = rollout_goal(observed, deployment), deployment.spec.rollout.canary
        if canary is None or goal.phase is not RolloutPhase.CANARY:
            self._state.baselines.forget(deployment.name)
            last = observed.canary if canary is not None else None
            is_current = last is not None and last.template == template_hash(deployment)
            return (last if is_current else None), None, ""
        now, meta = self._clock.now(), deployment.metadata
        decision = canary_decision(meta.annotations, meta.generation)
        if decision is not None:
            return conclude(canary, observed.canary, goal.canary, decision, now), None, ""
        ready = [
            r for r in observed.replicas if r.is_ready and r.replica.spec.template == goal.canary
        ]
        total = self._state.demand.measured(deployment.name, goal.canary)
        measured = self._state.baselines.since_step(deployment.name, observed.canary, total)
        found, after_s = advance(
            canary,
            observed.canary,
            goal.canary,
            is_new_ready=len(ready) >= goal.canary_replicas,
            measured=measured,
            now=now,
        )
        # The figures of the step before tell nothing about one that began now.
        is_same_step = found is observed.canary
        return found, after_s, count_text(canary, found, measured) if is_same_step else ""


def _owner_of_writes(observed: DeploymentView) -> str:
    """Return the deployment if its reconcile need not run again because of its own writes; empty if it must.

    The next plan for a shard group reads the state of its epoch from the statuses of its replicas.
    """
    has_epochs = any(one.replica.spec.formation is not None for one in observed.replicas)
    return "" if observed.groups or has_epochs else observed.name


def _planning_inputs(
    found: ModelDeploymentStatus | None, deployment: ModelDeployment
) -> tuple[object, ...]:
    """Return the fields of a status that later plans depend on."""
    if found is None:
        return (None, "", 0)
    # Without an autoscaler the number is that of the spec.
    desired = 0 if deployment.spec.autoscaling is None else found.desired_replicas
    return (found.canary, found.stable_template, desired)


class NodeReconciler:
    """Registers nodes that join, and keeps the reconciler's documents about nodes. Needs leadership."""

    def __init__(
        self,
        lister: Lister,
        state: LeaderState,
        executor: Executor,
        recorder: EventRecorder,
        clock: Clock,
    ) -> None:
        self._lister = lister
        self._executor = executor
        self._recorder = recorder
        self._state = state
        self._clock = clock
        self._contexts = NodeContextCache(state.nodes.version)

    async def reconcile(self, key: ObjectKey) -> Requeue | None:
        """Reconcile one node, and the nodes that are or were the same machine."""
        node_status = self._lister.node_status(key.name)
        if node_status is not None and self._lister.spec(key) is None:
            # Without a lease its agent has ended: it is registered when it comes back, which queues the key again.
            if self._lister.is_ready(key.name):
                described, held = self._lister.node_versions(key.name)
                await self._executor.register_node(
                    key.name, node_status.uid, described=described, held=held
                )
            return None  # the write queues the key again
        now = self._state.now(self._lister, self._clock)
        self._contexts.update(self._lister.pools(), now)
        names = {key.name} | self._contexts.same_hardware(self._lister, [key.name])
        after_s = soonest_s(*[await self._write_life(name, now) for name in sorted(names)])
        return None if after_s is None else Requeue(after_s=after_s)

    async def _write_life(self, name: str, now: Now) -> float | None:
        """Write the document about a node if it changed; return the seconds until it may change again."""
        node = self._lister.node(name)
        old, version = self._lister.node_life(name)
        if node.status is None or self._lister.spec(ObjectKey("Node", name)) is None:
            if version:
                await self._wait_for_lives(await self._executor.remove_life(name, version=version))
            return None
        context = self._contexts.context_of(self._lister, node)
        new = status.node_life_status(
            node,
            evaluate_node(node, node.status, context),
            context,
            is_ready=self._lister.is_ready(name),
            old=old,
            now=now.time,
        )
        if new != old and not self._lister.is_node_life_newer(name):
            registered = self._lister.spec_version(ObjectKey("Node", name))
            revision = await self._executor.write_life(
                name, new, version=version, registered=registered
            )
            await self._record_events(name, node.metadata.uid, old, new)
            await self._wait_for_lives(revision)
        return self._requeue_after_s(context, now)

    def _requeue_after_s(self, context: NodeContext, now: Now) -> float | None:
        flapping, has_policy = context.flapping, any(p.spec.policy for p in context.pools)
        after_s = soonest_s(
            None if flapping is None else flapping.until - self._clock.monotonic(),
            self._contexts.next_change_s(now) if has_policy else None,
        )
        return None if after_s is None else max(0.0, after_s)

    async def _record_events(
        self, name: str, uid: str, old: NodeLifeStatus | None, new: NodeLifeStatus
    ) -> None:
        """Record conditions that became true; the controller records NodeReady and NodeNotReady."""
        about = ObjectReference(kind="Node", name=name, uid=uid)
        for found in new.conditions:
            before = None if old is None else find_condition(old.conditions, found.type)
            was_true = before is not None and before.status is ConditionStatus.TRUE
            if found.type != "Ready" and found.status is ConditionStatus.TRUE and not was_true:
                await self._recorder.record(about, found.type, found.message, type_="Warning")

    async def _wait_for_lives(self, revision: int) -> None:
        """Wait until the cache shows the write: otherwise it would be written again."""
        await wait_for_revision(self._lister.caches.lives, revision)


class Reconciler:
    """Reconciles an object of any kind. Needs leadership.

    One object at a time is planned and acted for. Documents about nodes need no turn, nor do the statuses of a
    deployment, on which no other plan depends: while the store takes them, the next object has its turn.
    """

    def __init__(
        self,
        lister: Lister,
        state: LeaderState,
        executor: Executor,
        recorder: EventRecorder,
        clock: Clock,
    ) -> None:
        self._lister = lister
        self._executor = executor
        self._recorder = recorder
        self._fabric = state.fabric
        self._clock = clock
        events = DeploymentEvents(lister, recorder)
        self._deployments = DeploymentReconciler(lister, state, executor, events, clock)
        self._nodes = NodeReconciler(lister, state, executor, recorder, clock)
        self._turn = asyncio.Lock()

    async def reconcile(self, key: ObjectKey) -> Requeue | None:
        """Reconcile one object; return when to do it again though nothing changes."""
        if not self._lister.is_readable(key):
            return None  # the informer logged it; acting on an old version could undo an edit
        if key.kind == "Node":
            return await self._nodes.reconcile(key)  # no plan depends on what it writes
        async with self._turn:
            if key.kind != "ModelDeployment":
                found = self._lister.spec(key)
                if found is not None:
                    await self._write_status(key, found)
                return None
            changes = await self._deployments.converge(key)
        return await self._deployments.report(changes)

    async def _write_status(self, key: ObjectKey, found: ApiObject) -> None:
        old, new = self._lister.status(key), self._status_of(key, found)
        # A status of a newer release is not overwritten.
        if new is None or old == new or self._lister.is_newer(key):
            return
        await self._executor.write_status(key, new, version=self._lister.spec_version(key))
        if isinstance(found, ShardGroup):
            await self._record_fabric_event(found, old, new)

    async def _record_fabric_event(
        self, group: ShardGroup, old: Status | None, new: Status
    ) -> None:
        """Record that the cables of the group became unhealthy."""
        before = None if old is None else find_condition(old.conditions, FABRIC_HEALTHY)
        after = find_condition(new.conditions, FABRIC_HEALTHY)
        was_false = before is not None and before.status is ConditionStatus.FALSE
        if after is not None and after.status is ConditionStatus.FALSE and not was_false:
            about = ObjectReference(kind="ShardGroup", name=group.name, uid=group.metadata.uid)
            await self._recorder.record(about, after.reason, after.message, type_="Warning")

    def _status_of(self, key: ObjectKey, found: ApiObject) -> Status | None:
        """Return the status of an object that is only described, never acted on."""
        lister, old, now = self._lister, self._lister.status(key), self._clock.now()
        match found:
            case NodePool():
                members, ready = lister.pool_members(found), lister.ready_nodes()
                return status.pool_status(found, members, ready, old=old, now=now)
            case ShardGroup():
                context = status.GroupContext(
                    members=lister.group_members(found),
                    known=set(lister.node_names()),
                    ready=lister.ready_nodes(),
                    replicas=[one.name for one in lister.replicas_on_group(found.name)],
                    fabric=self._fabric(found),
                )
                return status.group_status(found, context, old=old, now=now)
            case ModelRoute():
                names = {deployment.name for deployment in lister.deployments()}
                return status.route_status(found, names, old=old, now=now)
            case _:
                return None


def _log_decisions(
    key: ObjectKey, decided: DeploymentPlan, scaling: ScalingDecision | None
) -> None:
    """Log what was decided for a deployment, and why, at debug level."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    about = {"key": str(key)}
    if scaling is not None:
        extra = {**about, "replicas": scaling.desired, "reason": scaling.reason}
        log.debug("scaling decided", extra={**extra, "why": scaling.message})
    for action in decided.actions:
        nodes = [rank.node for rank in getattr(action, "ranks", ())]
        extra = {**about, "action": type(action).__name__, "replica": action.name}
        extra |= {"nodes": ",".join(nodes)} if nodes else {}
        because = getattr(action, "because", "")
        log.debug("action decided", extra=extra | ({"why": because} if because else {}))
    for stopped, message in (
        (decided.unschedulable, "replicas cannot be placed"),
        (decided.stuck, "a rollout cannot go on"),
    ):
        if stopped is None:
            continue
        log.debug(message, extra={**about, "why": summary_line(stopped)})
        for node, rejected in stopped.refusals:
            extra = {**about, "node": node, "reason": rejected.reason, "why": rejected.message}
            log.debug(message, extra=extra)
