"""Computes the statuses of a deployment and of its replicas from what is observed, as conditions. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from reconciler.deployments.autoscaling.autoscaler import ScalingDecision
from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.deployments.rollout.canary import CanaryProgress
from reconciler.deployments.rollout.revisions import template_hash
from reconciler.deployments.rollout.steps import RolloutPhase, rollout_goal
from reconciler.groups.epochs import Epoch, next_attempt_text
from reconciler.placement.load_times import load_s
from reconciler.placement.memory_proof import override_shortfall, proof_corrections
from reconciler.placement.refusals import CRASH_LOOPING, Unschedulable, is_crash_loop, summary_line
from schemas import duration
from schemas.autoscaling import LoadForecast
from schemas.deployment import (
    CanaryStatus,
    ModelDeployment,
    ModelDeploymentStatus,
    NodeRefusal,
    PreloadStatus,
)
from schemas.formation import Formation
from schemas.meta import (
    ENDED_BECAUSE,
    Condition,
    ConditionStatus,
    Status,
    find_condition,
    make_condition,
    stamp_conditions,
)
from schemas.replica import (
    MODEL_PRESENT,
    PREFIXES_PINNED,
    RankStatus,
    ReplicaStatus,
    order_of_reason,
)

# Start of the annotation `ENDED_BECAUSE` on a preempted replica.
_PREEMPTED = "Preempted: "
_SHOWN_VICTIMS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutProgress:
    """The progress of a rollout."""

    condition: Condition
    template: str
    """Hash of the newest version."""
    revision: int
    stable_template: str
    updated_replicas: int
    canary: CanaryStatus | None
    progressed_at: datetime
    requeue_after_s: float | None = None
    """Seconds until progressDeadline; None if it does not run."""


def deployment_status(
    observed: DeploymentView,
    unschedulable: Unschedulable | None,
    progress: RolloutProgress,
    preload: tuple[PreloadStatus, Condition] | None = None,
    *,
    old: ModelDeploymentStatus | None,
    now: datetime,
) -> ModelDeploymentStatus:
    """Return the status of a deployment; `preload` is the state of spec.preload with its condition."""
    assert observed.deployment is not None
    placed = [r for r in observed.replicas if r.is_owned and not r.is_deleting]
    ready = [r for r in placed if r.is_ready]
    conditions = [
        _available_condition(observed, ready, placed, unschedulable),
        _placed_condition(observed.desired_replicas, placed, unschedulable),
        progress.condition,
    ]
    optional = (
        observed.scaling,
        observed.unresolved,
        preload[1] if preload is not None else None,
        _preempted_condition(observed, placed, old),
    )
    conditions += [condition for condition in optional if condition is not None]
    generation = observed.deployment.metadata.generation
    own_nodes = sorted({name for replica in placed for name in replica.nodes})
    refusals = unschedulable.refusals if unschedulable is not None else ()
    # What limits the requests at once is told of the replica that takes the fewest.
    slowest = min((r.replica.spec for r in placed), key=lambda r: r.concurrency, default=None)
    return ModelDeploymentStatus(
        observed_generation=generation,
        replicas=len(placed),
        desired_replicas=observed.desired_replicas,
        updated_replicas=progress.updated_replicas,
        ready_replicas=len(ready),
        concurrency=slowest.concurrency if slowest is not None else 0,
        concurrency_limit=slowest.ranks[0].memory.concurrency_limit if slowest is not None else "",
        loading=_load_forecast(observed, unschedulable, placed, old=old, now=now),
        preload=preload[0] if preload is not None else None,
        revision=progress.revision,
        template=progress.template,
        stable_template=progress.stable_template,
        canary=progress.canary,
        progressed_at=progress.progressed_at,
        refusals=tuple(
            NodeRefusal(node=node, reason=why.reason, message=why.message) for node, why in refusals
        ),
        node_priorities={
            node.name: node.pool_priority
            for node in observed.table.named(own_nodes)
            if node.pool_priority
        },
        conditions=stamp_conditions(old, conditions, generation=generation, now=now),
    )


# A status changes only if the expected end moves by more than people notice.
_FORECAST_S, _FORECAST_PART = 2.0, 0.2


def _load_forecast(
    observed: DeploymentView,
    unschedulable: Unschedulable | None,
    placed: Sequence[ReplicaView],
    *,
    old: ModelDeploymentStatus | None,
    now: datetime,
) -> LoadForecast | None:
    """Return the expected wait for the first replica; None if one serves, none is wanted, or it is not known."""
    if not observed.desired_replicas or any(replica.is_ready for replica in placed):
        return None
    forecast = None
    if placed:
        forecasts = [_forecast_of(observed, replica, now) for replica in placed]
        known = [one for one in forecasts if one is not None]
        forecast = min(known, key=lambda one: one.remaining_s(now), default=None)
    elif unschedulable is not None and unschedulable.wait is not None:
        wait = unschedulable.wait
        forecast = LoadForecast(
            seconds=round(wait.seconds, 1), since=now, gives_way=wait.gives_way[:_SHOWN_VICTIMS]
        )
    before = None if old is None else old.loading
    if before is None or forecast is None or _key(before) != _key(forecast):
        return forecast
    moved_s = abs(before.remaining_s(now) - forecast.remaining_s(now))
    is_same = moved_s <= max(_FORECAST_S, _FORECAST_PART * forecast.seconds)
    return before if is_same else forecast


def _key(forecast: LoadForecast) -> tuple[object, ...]:
    """Return the parts of which every change is told."""
    return forecast.gives_way, forecast.fetch_bytes, forecast.fetched_bytes


def _forecast_of(
    observed: DeploymentView, replica: ReplicaView, now: datetime
) -> LoadForecast | None:
    """Return the expected wait for a replica that fetches or loads its model; None while its fetch stands still."""
    disks = {node.name: node.disk_gbps for node in observed.table.named(replica.nodes)}
    seconds = max(
        load_s(
            rank.memory.weights_bytes,
            disks.get(rank.node, 0.0),
            observed.load_times.get(rank.node, 0.0),
        )
        for rank in replica.replica.spec.ranks
    )
    fetch = replica.fetch
    if fetch is not None:
        if fetch.eta_seconds is None:
            return None
        return LoadForecast(
            seconds=round(fetch.eta_seconds + seconds, 1),
            since=now,
            fetch_bytes=fetch.total_bytes,
            fetched_bytes=fetch.present_bytes,
        )
    since = replica.loads_since or now
    return LoadForecast(seconds=round(seconds, 1), since=since)


def scaling_condition(decided: ScalingDecision) -> Condition:
    """Return the condition Scaling, which explains the autoscaler's decision."""
    truth = ConditionStatus.UNKNOWN if decided.reason == "DemandUnknown" else ConditionStatus.TRUE
    return Condition(type="Scaling", status=truth, reason=decided.reason, message=decided.message)


def resolved_condition(reason: str, message: str) -> Condition:
    """Return the condition ModelResolved of a deployment whose hub model has no commit yet."""
    return make_condition("ModelResolved", reason, message, holds=False)


def _available_condition(
    observed: DeploymentView,
    ready: Sequence[ReplicaView],
    placed: Sequence[ReplicaView],
    unschedulable: Unschedulable | None,
) -> Condition:
    desired, unresolved = observed.desired_replicas, observed.unresolved
    surplus = len(ready) - desired
    count = f"{min(len(ready), desired)} of {desired} replicas ready"
    if surplus > 0:  # during a rollout, or until the replicas of a scale-down have ended
        count = f"{count}, {surplus} more {'is' if surplus == 1 else 'are'} serving"
    if len(ready) >= desired:
        reason = "AllReplicasReady" if desired else "ScaledToZero"
        return make_condition("Available", reason, count, holds=True)
    if unresolved is not None and not observed.has_model:
        message = f"{count}; {unresolved.message}"
        return make_condition("Available", unresolved.reason, message, holds=False)
    failing = next((r for r in placed if r.problem and not r.is_ready), None)
    if unschedulable is not None and is_crash_loop(unschedulable):
        return make_condition(
            "Available", "CrashLooping", f"{count}; {summary_line(unschedulable)}", holds=False
        )
    if unschedulable is not None:
        return make_condition(
            "Available", "Unschedulable", f"{count}; {summary_line(unschedulable)}", holds=False
        )
    if failing is not None:
        where = failing.name if len(failing.nodes) > 1 else f"{failing.name} on {failing.node}"
        message = f"{count}; {where}: {failing.problem}"
        is_asleep = not ready and any(replica.is_asleep for replica in placed)
        reason = "Asleep" if is_asleep else "ReplicaNotReady"
        return make_condition("Available", reason, message, holds=False)
    return make_condition("Available", "ReplicasStarting", count, holds=False)


def _placed_condition(
    desired: int, placed: Sequence[ReplicaView], unschedulable: Unschedulable | None
) -> Condition:
    if unschedulable is not None and not is_crash_loop(unschedulable):
        return make_condition("Placed", "Unschedulable", summary_line(unschedulable), holds=False)
    if len(placed) < desired:
        message = f"{len(placed)} of {desired} replicas have a node"
        return make_condition("Placed", "Placing", message, holds=False)
    return make_condition("Placed", "AllPlaced", holds=True)


def _preempted_condition(
    observed: DeploymentView, placed: Sequence[ReplicaView], old: ModelDeploymentStatus | None
) -> Condition | None:
    """Return the condition Preempted: which replicas were preempted, until all have a node again."""
    before = find_condition(old.conditions, "Preempted") if old is not None else None
    notes = [r.replica.metadata.annotations.get(ENDED_BECAUSE, "") for r in observed.replicas]
    reasons = [note.removeprefix(_PREEMPTED) for note in notes if note.startswith(_PREEMPTED)]
    if reasons:
        return make_condition("Preempted", "HigherPriority", "; ".join(reasons), holds=True)
    if before is None:
        return None
    if before.status is ConditionStatus.TRUE and len(placed) < observed.desired_replicas:
        return before
    return make_condition("Preempted", "NotPreempted", holds=False)


# Ends of an engine whose cause may be too little memory.
_MEMORY_REASONS = frozenset({"ModelUnusable", "EngineEnded", "MemoryExceeded"})


def replica_status(
    view: ReplicaView,
    reports: Sequence[RankStatus | None],
    *,
    old: Status | None,
    now: datetime,
) -> ReplicaStatus:
    """Return the status of a replica; `reports` are the reports on its ranks in this epoch."""
    conditions = [_replica_ready(view, reports)]
    conditions += _model_present(view, reports)
    if reports[0] is not None and (c := find_condition(reports[0].conditions, PREFIXES_PINNED)):
        conditions.append(c)
    corrected = proof_corrections(view.replica, reports) if view.is_ready else ""
    if corrected:
        conditions.append(make_condition("ProofCorrected", "MeasuredMore", corrected, holds=True))
    formation = view.replica.spec.formation
    if formation is not None and view.epoch is not None:
        conditions += _epoch_conditions(formation, view.epoch)
    generation = view.replica.metadata.generation
    return ReplicaStatus(
        observed_generation=generation,
        fetches=tuple(
            report.fetch
            for report in reports
            if report is not None and report.fetch is not None
            if report.node not in view.away_nodes
        ),
        conditions=stamp_conditions(old, conditions, generation=generation, now=now),
    )


def _model_present(view: ReplicaView, reports: Sequence[RankStatus | None]) -> Iterator[Condition]:
    """Yield ModelPresent of a hub model: that of the first rank without its files, else true once all have them."""
    present = [
        (number, report.node, condition)
        for number, report in enumerate(reports)
        if report is not None and (condition := find_condition(report.conditions, MODEL_PRESENT))
    ]
    missing = [rank for rank in present if rank[2].status is not ConditionStatus.TRUE]
    missing.sort(key=lambda rank: order_of_reason(rank[2].reason))
    if not missing and len(present) < len(reports):
        return
    for number, node, condition in (missing or present)[:1]:
        is_one_of_many = len(view.replica.spec.ranks) > 1 and missing
        head = f"rank {number} on {node}: " if is_one_of_many and condition.message else ""
        yield condition.model_copy(update={"message": f"{head}{condition.message}"})


def _replica_ready(view: ReplicaView, reports: Sequence[RankStatus | None]) -> Condition:
    """Return the condition Ready: Serving, or the reason of the first rank that is not ready."""
    if view.is_ready:
        return make_condition("Ready", "Serving", holds=True)
    if view.epoch is not None and view.epoch.over:
        return make_condition("Ready", view.epoch.over, view.epoch.message, holds=False)
    ranks = view.replica.spec.ranks
    pairs = list(zip(ranks, reports, strict=True))
    # The last report of an agent that is away is about the time before.
    away = [r.node for r, report in pairs if report is not None and r.node in view.away_nodes]
    reported = [
        (number, condition)
        for number, report in enumerate(reports)
        if report is not None and (condition := find_condition(report.conditions, "Ready"))
    ]
    reported.sort(key=lambda rank: order_of_reason(rank[1].reason))
    for number, condition in () if away else reported:
        if condition.status is not ConditionStatus.TRUE:
            prefix = f"rank {number} on {ranks[number].node}: "
            head = prefix if len(ranks) > 1 and condition.message else ""
            shortfall = override_shortfall(ranks[number].memory, len(ranks))
            cause = f"{shortfall}; " if shortfall and condition.reason in _MEMORY_REASONS else ""
            message = f"{cause}{head}{condition.message}"
            return make_condition("Ready", condition.reason, message, holds=False)
    if not away and reports[0] is not None and reported:
        away = [view.node]
    if away and view.is_asleep:
        message = f"{', '.join(away)} sleeps; a request wakes it"
        return make_condition("Ready", "Asleep", message, holds=False)
    if away:
        message = f"its agent on {', '.join(away)} is away; the engine may still serve"
        return make_condition("Ready", "AgentAway", message, holds=False)
    silent = ", ".join(rank.node for rank, report in pairs if report is None)
    agent = "its agent" if len(ranks) == 1 else f"the agent on {silent}"
    return make_condition("Ready", "WaitingForAgent", f"{agent} has not reported yet", holds=False)


def _epoch_conditions(formation: Formation, epoch: Epoch) -> Iterator[Condition]:
    """Yield the conditions of an epoch, which later reconciles read back."""
    number = f"epoch {formation.epoch}"
    if epoch.over:
        yield make_condition("EpochOver", epoch.over, f"{number}: {epoch.message}", holds=True)
    else:
        yield make_condition("EpochOver", "GoesOn", number, holds=False)
    yield make_condition(
        "Steady", "Served" if epoch.is_steady else "New", number, holds=epoch.is_steady
    )
    if epoch.is_given_up:
        message = f"{epoch.message}. {next_attempt_text(formation, epoch)}"
        yield make_condition(CRASH_LOOPING, "TriedEverything", message, holds=True)
    else:
        yield make_condition(CRASH_LOOPING, "MayGoOn", holds=False)


def compute_progress(
    observed: DeploymentView,
    obstacle: Unschedulable | None,
    *,
    canary: CanaryProgress,
    old: ModelDeploymentStatus | None,
    now: datetime,
) -> RolloutProgress:
    """Return the progress; `obstacle` is a replica that could not be placed."""
    deployment = observed.deployment
    assert deployment is not None
    newest = template_hash(deployment)
    active = [r for r in observed.replicas if r.is_owned and not r.is_deleting]
    updated = [r for r in active if r.replica.spec.template == newest]
    progressed_at = None if old is None else old.progressed_at
    numbers = (len(active), sum(r.is_ready for r in active), len(updated), newest, canary.status)
    before = None
    if old is not None:
        before = old.replicas, old.ready_replicas, old.updated_replicas, old.template, old.canary
    if progressed_at is None or numbers != before:
        progressed_at = now
    limit_s = duration.parse(deployment.spec.rollout.progress_deadline)
    left_s = limit_s - (now - progressed_at).total_seconds()
    # A completed rollout stays complete, even if an engine fails later.
    last = find_condition(old.conditions, "Progressing") if old is not None else None
    was_complete = last is not None and last.reason == "RolloutComplete"
    is_done = len(updated) == len(active) and (
        sum(r.is_ready for r in updated) >= observed.desired_replicas
        or (was_complete and old is not None and old.template == newest)
    )
    phase = rollout_goal(observed, deployment).phase
    waits = phase in (RolloutPhase.PAUSED, RolloutPhase.ROLLED_BACK) or (
        phase is RolloutPhase.CANARY and _is_under_way(deployment, canary.status)
    )
    # A large model takes longer to fetch than any deadline; a fetch that stands still has another reason.
    preparing = () if is_done else observed.preparing_nodes()
    waits = waits or bool(preparing) or any(r.is_fetching and not r.is_ready for r in updated)
    if is_done or waits or left_s > 0:
        condition = _condition_of(deployment, observed, canary.status, active, is_done=is_done)
        notes = [condition.message]
        if condition.reason in ("RollingOut", "CanaryRunning"):
            if obstacle is not None and not waits:
                notes.append(summary_line(obstacle))
            if preparing:
                names = ", ".join(node.name for node in preparing)
                notes.append(f"the old replica serves while {names} fetches the new version")
        if condition.reason == "CanaryRunning" and canary.count:
            notes.append(canary.count)
        condition = condition.model_copy(update={"message": "; ".join(notes)})
    else:
        why = f"no progress for {duration.show(limit_s)} (progressDeadline)"
        condition = _condition(
            ConditionStatus.FALSE, "Stalled", f"{why}: {_obstacle_text(active, obstacle)}"
        )
    stable = old.stable_template if old is not None else ""
    return RolloutProgress(
        condition=condition,
        template=newest,
        revision=_number(observed, newest),
        stable_template=newest if condition.reason == "RolloutComplete" else stable,
        updated_replicas=len(updated),
        canary=canary.status,
        progressed_at=progressed_at,
        requeue_after_s=(
            left_s if condition.reason in ("RollingOut", "CanaryRunning") and not waits else None
        ),
    )


def _is_under_way(deployment: ModelDeployment, canary: CanaryStatus | None) -> bool:
    """Return whether a canary step has its replicas, and waits for time and requests on purpose."""
    plan = deployment.spec.rollout.canary
    if plan is None or canary is None or canary.step >= len(plan.steps):
        return False
    return canary.weight == plan.steps[canary.step].weight


def _condition_of(
    deployment: ModelDeployment,
    observed: DeploymentView,
    canary: CanaryStatus | None,
    active: Sequence[ReplicaView],
    *,
    is_done: bool,
) -> Condition:
    """Return the condition of a rollout that is not stalled."""
    newest, goal = template_hash(deployment), rollout_goal(observed, deployment)
    revision = _number(observed, newest)
    updated = [r for r in active if r.replica.spec.template == newest]
    analysis = canary.message if canary is not None else ""
    match goal.phase:
        case RolloutPhase.PAUSED if not is_done:
            count = (
                f"{len(updated)} of {observed.desired_replicas} replicas run revision {revision}"
            )
            return _condition(
                ConditionStatus.UNKNOWN, "Paused", f"spec.rollout.paused is true; {count}"
            )
        case RolloutPhase.ROLLED_BACK:
            back = f"replicas run revision {_number(observed, goal.target)} again"
            return _condition(ConditionStatus.FALSE, "CanaryFailed", f"{analysis}; {back}")
        case _ if is_done:
            message = f"every replica runs revision {revision}"
            return _condition(ConditionStatus.TRUE, "RolloutComplete", message)
        case RolloutPhase.CANARY:
            return _condition(ConditionStatus.TRUE, "CanaryRunning", analysis)
        case _:
            ready, earlier = sum(r.is_ready for r in updated), len(active) - len(updated)
            message = (
                f"{ready} of {observed.desired_replicas} replicas of revision {revision} are ready"
            )
            if earlier:
                are = "is" if earlier == 1 else "are"
                message = f"{message}, {earlier} of earlier ones {are} still there"
            return _condition(ConditionStatus.TRUE, "RollingOut", message)


def _number(observed: DeploymentView, hash_: str) -> int:
    """Return the revision number of a version; a version that is not saved yet gets the next number."""
    numbers = {revision.spec.template: revision.spec.revision for revision in observed.revisions}
    return numbers.get(hash_) or max(numbers.values(), default=0) + 1


def _condition(status: ConditionStatus, reason: str, message: str) -> Condition:
    return Condition(type="Progressing", status=status, reason=reason, message=message)


def _obstacle_text(active: Sequence[ReplicaView], unschedulable: Unschedulable | None) -> str:
    # A placed replica that fails explains more than one that could not be placed after it.
    failing = next((r for r in active if r.problem and not r.is_ready), None)
    if failing is not None:
        return f"{failing.name} on {failing.node}: {failing.problem}"
    if unschedulable is not None:
        return summary_line(unschedulable)
    waiting = next((r for r in active if not r.is_ready), None)
    if waiting is not None:
        return f"{waiting.name} on {waiting.node} is not ready"
    return "no replica has started or ended as planned"
