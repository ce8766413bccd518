"""Reconciles one deployment in four steps: scale, observe, converge, report. Each step returns a value of its own type.

`scale` decides the number of replicas, `observe` makes the frozen view that plans are computed from, `converge` plans
and acts until nothing is left to do now, and `report` computes the statuses to write.
"""

import logging
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from machinery.clock import Clock
from machinery.control_loop import Requeue, soonest_s
from reconciler.deployments import status
from reconciler.deployments.actions import PreemptReplica
from reconciler.deployments.autoscaling.autoscaler import Autoscaler, ScalingDecision
from reconciler.deployments.autoscaling.idle_replicas import (
    find_idle_replicas,
    has_given_way,
    waiting_at_zero,
)
from reconciler.deployments.demand.gateway_metrics import DemandTotals
from reconciler.deployments.demand.scraper import DemandScraper
from reconciler.deployments.events import DeploymentEvents
from reconciler.deployments.execute import Executor
from reconciler.deployments.lookup_problems import LookupProblems
from reconciler.deployments.observe import DeploymentView, LeaderFacts, observe
from reconciler.deployments.plan import DeploymentPlan, plan
from reconciler.deployments.preload import preload_status
from reconciler.deployments.rollout.canary import (
    CanaryBaselines,
    CanaryProgress,
    advance,
    conclude,
    count_text,
)
from reconciler.deployments.rollout.revisions import template_hash
from reconciler.deployments.rollout.steps import RolloutPhase, rollout_goal
from reconciler.listers.caches import wait_for_revision
from reconciler.listers.lister import Lister
from reconciler.nodes.liveness import NodeLiveness
from reconciler.nodes.node_views import NodeViewCache
from reconciler.placement.load_times import LoadTimes
from reconciler.placement.refusals import Unschedulable, summary_line
from reconciler.placement.swap import IdleReplica
from schemas.deployment import ModelDeployment, ModelDeploymentStatus, ModelSource
from schemas.meta import ObjectKey, Status
from schemas.rollout import canary_decision

log = logging.getLogger(__name__)

# Agents report within tens of milliseconds; one that hangs must not delay placement for long.
_REPORT_GRACE_S = 2.0
# A model at zero looks so often for a replica that became idle: gateways are scraped as often.
_SWAP_S = 1.0
# Value of `Demand.released` while an operator unloads the model.
_UNLOADED = 2


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderState:
    """The leader's memory: what it has seen over time and what no cache holds. A new leader starts empty."""

    liveness: NodeLiveness
    nodes: NodeViewCache
    demand: DemandScraper | DemandTotals
    waiting_for_room: set[str]
    """Deployments that go on as soon as there is more room."""
    lookups: LookupProblems = field(default_factory=LookupProblems)
    """Hub models that could not be resolved."""
    autoscaler: Autoscaler = field(default_factory=Autoscaler)
    baselines: CanaryBaselines = field(default_factory=CanaryBaselines)
    report_grace: ReportGrace = field(default_factory=ReportGrace)
    load_times: LoadTimes = field(default_factory=LoadTimes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Converged:
    """A deployment after the actions of a reconcile: what is, and what the plan says is left to do."""

    observed: DeploymentView
    plan: DeploymentPlan
    requeue_after_s: float | None
    """Seconds until the next plan may differ though nothing changes."""

    @property
    def own_write_of(self) -> str:
        """The deployment, if its own writes do not wake it again; empty if they do.

        The next plan for a shard group reads the state of its epoch from the statuses of its replicas.
        """
        return _own_write_of(self.observed)


class StatusChange(NamedTuple):
    """A status to write."""

    key: ObjectKey
    status: Status
    version: int
    """Version of the object that it was computed from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentReport:
    """The statuses that a reconcile of a deployment has to write."""

    own_write_of: str
    """The deployment whose reconcile is not queued again by these writes (`OwnWrites`)."""
    changes: tuple[StatusChange, ...]
    deployment: ModelDeployment | None = None
    """The deployment if its own status, the last of the changes, changed."""
    old: ModelDeploymentStatus | None = None
    new: ModelDeploymentStatus | None = None
    unschedulable: Unschedulable | None = None
    requeue_after_s: float | None = None


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
        self._settled: dict[str, dict[str, tuple[object, ...]]] = {}
        """By deployment and replica, what a written status was computed from: 1 ms of a bind beside 20 replicas."""

    async def reconcile(self, name: str) -> DeploymentReport:
        """Plan and act for one deployment, which may be gone while replicas of it are left; return what to write."""
        # The cache must show what this or the previous leader assigned: the plan must count it.
        assigned = await self._executor.last_assignment()
        await wait_for_revision(self._lister.caches.specs, assigned)
        return await self.report(await self.converge(name, self.scale(name)))

    def scale(self, name: str) -> ScalingDecision | None:
        """Return the autoscaler's decision; None for a deployment without autoscaling."""
        deployment = self._lister.deployment(name)
        if deployment is None or deployment.spec.autoscaling is None:
            self._state.autoscaler.histories.pop(name, None)
            return None
        autoscaler, demand = self._state.autoscaler, self._state.demand.demand(name)
        decided = autoscaler.desired(
            deployment,
            self._lister.deployment_status(name),
            demand,
            self._clock.now(),
            self._clock.monotonic(),
        )
        if demand is not None and demand.released >= _UNLOADED:
            return autoscaler.after_unload(name, decided)
        replicas = self._lister.replicas_of(name)
        asleep = self._state.liveness.asleep(self._lister)
        sleeping = sum(asleep.issuperset(rank.node for rank in r.spec.ranks) for r in replicas)
        if decided.reason in ("Idle", "ScaledDown") and decided.desired < sleeping:
            # They cost nothing, and go on without a load once their Mac is woken.
            message = "idle replicas sleep with their Macs"
            decided = replace(decided, desired=sleeping, reason="Asleep", message=message)
        if (demand is not None and demand.requests) or not has_given_way(replicas):
            return decided
        remaining = sum(replica.metadata.deletion_timestamp is None for replica in replicas)
        return autoscaler.after_swap(name, decided, remaining=remaining)

    def observe(self, name: str, scaling: ScalingDecision | None) -> DeploymentView:
        """Return everything that the plan depends on, as of now."""
        lister, state, monotonic = self._lister, self._state, self._clock.monotonic()
        now = state.liveness.now(lister, self._clock)
        table = state.nodes.refresh(lister, now)
        deployment, declared = lister.deployment(name), lister.declared(name)
        unresolved, grace_s = None, 0.0
        if declared is not None and not lister.is_resolved(declared):
            problem = state.lookups.find(declared)
            unresolved = (
                status.resolved_condition(
                    "Resolving", f"the hub is asked for {declared.spec.model.label}"
                )
                if problem is None
                else status.resolved_condition(problem.reason, problem.message)
            )
        if deployment is not None and deployment.spec.model.folder:
            source = deployment.spec.model
            grace_s = state.report_grace.remaining_s(
                source, is_incomplete=table.awaits_reports(source), now=monotonic
            )
        has_autoscaled = bool(state.autoscaler.histories)
        waiting = waiting_at_zero(lister, state.autoscaler) if has_autoscaled else ()
        idle = dict[str, IdleReplica]()
        if waiting:
            now_both = now.time, monotonic
            idle = find_idle_replicas(
                lister, state.autoscaler, state.demand.demand, table, now_both, state.load_times
            )
        own = lister.replicas_of(name)
        if scaling is not None:
            for replica in own:
                state.load_times.note(replica, lister.start_seconds(replica))
        own_nodes = [rank.node for r in own for rank in r.spec.ranks]
        after_s = soonest_s(
            state.liveness.requeue_after_s(own_nodes, monotonic),
            state.liveness.next_release_s(monotonic),
            state.nodes.next_change_s(now),
            grace_s or None,
            _SWAP_S if name in waiting else None,
        )
        facts = LeaderFacts(
            autoscaled_replicas=None if scaling is None else scaling.desired,
            scaling=None if scaling is None else status.scaling_condition(scaling),
            unresolved=unresolved,
            awaits_reports=grace_s > 0,
            waiting_at_zero=waiting,
            idle=idle,
            load_times=state.load_times.of(
                "" if deployment is None else deployment.spec.model.folder
            ),
            requeue_after_s=after_s,
        )
        return observe(lister, name, now, table=table, facts=facts)

    async def converge(self, name: str, scaling: ScalingDecision | None) -> Converged:
        """Plan and act; then plan again, because the changes of this reconcile queue nothing."""
        observed = self.observe(name, scaling)
        decided = plan(observed)
        acted = decided.actions
        _log_decisions(name, decided, scaling)
        if acted:
            await self._act(observed, decided)
            observed = self.observe(name, scaling)
            decided = plan(observed)
        if decided.unschedulable or decided.stuck or any(r.cannot_start for r in observed.replicas):
            self._state.waiting_for_room.add(name)
        else:
            self._state.waiting_for_room.discard(name)
        if observed.deployment is None or observed.is_ending:
            self._state.autoscaler.histories.pop(name, None)
            self._state.baselines.forget(name)
        return Converged(
            observed=observed,
            plan=decided,
            requeue_after_s=soonest_s(
                0.0 if decided.actions else decided.requeue_after_s,
                None if scaling is None else scaling.requeue_after_s,
            ),
        )

    async def _act(self, observed: DeploymentView, decided: DeploymentPlan) -> None:
        """Carry out a plan, and wait until the caches show it."""
        replicas = {replica.name: replica.replica for replica in observed.replicas}
        victims = {action.name for action in decided.actions if isinstance(action, PreemptReplica)}
        if victims:
            replicas |= {r.name: r for r in self._lister.replicas() if r.name in victims}
        batches = self._executor.do_all(
            decided.actions, observed.deployment, replicas, own_write_of=_own_write_of(observed)
        )
        async with aclosing(batches):
            async for actions, revision in batches:
                for action in actions:
                    await self._events.record_action(action, observed)
                await wait_for_revision(self._lister.caches.specs, revision)

    async def report(self, converged: Converged) -> DeploymentReport:
        """Return the statuses that changed, of replicas and of the deployment; record events of the replicas."""
        observed, lister, now = converged.observed, self._lister, self._clock.now()
        changes: list[StatusChange] = []
        last, settled = self._settled.pop(observed.name, {}), dict[str, tuple[object, ...]]()
        for view in observed.replicas:
            key = ObjectKey("Replica", view.name)
            before, reports = lister.status(key), lister.ranks(view.replica)
            if last.get(view.name) == (view, reports, before):
                settled[view.name] = last[view.name]
                continue
            after = status.replica_status(view, reports, old=before, now=now)
            if before == after:
                settled[view.name] = view, reports, before
            elif not lister.is_newer(key):
                changes.append(StatusChange(key, after, view.version))
                await self._events.record_replica_status(view, observed, before, after)
        if settled:
            self._settled[observed.name] = settled
        deployment, after_s = observed.deployment, converged.requeue_after_s
        if deployment is None or observed.is_ending:
            return DeploymentReport(
                own_write_of=converged.own_write_of, changes=tuple(changes), requeue_after_s=after_s
            )
        key, old = (
            ObjectKey("ModelDeployment", observed.name),
            lister.deployment_status(observed.name),
        )
        canary = self._advance_canary(deployment, observed)
        unschedulable = converged.plan.unschedulable
        rollout = status.compute_progress(
            observed, unschedulable or converged.plan.stuck, canary=canary, old=old, now=now
        )
        preload = None if deployment.spec.preload is None else preload_status(observed)
        new = status.deployment_status(observed, unschedulable, rollout, preload, old=old, now=now)
        has_changed = old != new and not lister.is_newer(key)
        if has_changed:
            changes.append(StatusChange(key, new, lister.spec_version(key)))
        return DeploymentReport(
            own_write_of=converged.own_write_of,
            changes=tuple(changes),
            deployment=deployment if has_changed else None,
            old=old,
            new=new,
            unschedulable=unschedulable,
            requeue_after_s=soonest_s(after_s, canary.requeue_after_s, rollout.requeue_after_s),
        )

    async def write(self, report: DeploymentReport) -> Requeue | None:
        """Write the statuses; return when to reconcile the deployment again though nothing changes."""
        # Together: a transaction costs more than what is in it.
        revision = await self._executor.write_statuses(
            report.changes, own_write_of=report.own_write_of
        )
        after_s, old, new = report.requeue_after_s, report.old, report.new
        if report.deployment is not None and new is not None:
            await self._events.record_status(report.deployment, old, new, report.unschedulable)
            if _planning_inputs(old, report.deployment) != _planning_inputs(new, report.deployment):
                # The next plan depends on this status.
                await wait_for_revision(self._lister.caches.statuses, revision)
                after_s = 0.0
        return None if after_s is None else Requeue(after_s=after_s)

    def _advance_canary(
        self, deployment: ModelDeployment, observed: DeploymentView
    ) -> CanaryProgress:
        """Return the state of the canary analysis after the requests so far."""
        goal, canary = rollout_goal(observed, deployment), deployment.spec.rollout.canary
        if canary is None or goal.phase is not RolloutPhase.CANARY:
            last = observed.canary if canary is not None else None
            is_current = last is not None and last.template == template_hash(deployment)
            return CanaryProgress(status=last if is_current else None)
        now, meta = self._clock.now(), deployment.metadata
        decision = canary_decision(meta.annotations, meta.generation)
        if decision is not None:
            concluded = conclude(canary, observed.canary, goal.canary, decision, now)
            return CanaryProgress(status=concluded)
        ready = [
            r for r in observed.replicas if r.is_ready and r.replica.spec.template == goal.canary
        ]
        total = self._state.demand.measured(deployment.name, goal.canary)
        measured = self._state.baselines.since_step(deployment.name, observed.canary, total)
        advanced, after_s = advance(
            canary,
            observed.canary,
            goal.canary,
            is_new_ready=len(ready) >= goal.canary_replicas,
            measured=measured,
            now=now,
        )
        # The figures of the step before tell nothing about one that began now.
        is_same_step = advanced is observed.canary
        return CanaryProgress(
            status=advanced,
            requeue_after_s=after_s,
            count=count_text(canary, advanced, measured) if is_same_step else "",
        )


def _own_write_of(observed: DeploymentView) -> str:
    has_epochs = any(view.replica.spec.formation is not None for view in observed.replicas)
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


def _log_decisions(name: str, decided: DeploymentPlan, scaling: ScalingDecision | None) -> None:
    """Log what was decided for a deployment, and why, at debug level."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    about = {"key": f"ModelDeployment/{name}"}
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
