"""How far a rollout is, as the condition Progressing and what a deployment's status remembers of it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from reconciler.placement.refusals import Unschedulable, summary_line
from reconciler.rollout.revisions import template_hash
from reconciler.rollout.steps import RolloutPhase, rollout_goal
from reconciler.views import DeploymentView, ReplicaView
from schemas import duration
from schemas.deployment import CanaryStatus, ModelDeployment, ModelDeploymentStatus
from schemas.meta import Condition, ConditionStatus, find_condition


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutProgress:
    """What there is to say of a rollout."""

    condition: Condition
    template: str
    """The newest version."""
    revision: int
    stable_template: str
    updated_replicas: int
    canary: CanaryStatus | None
    progressed_at: datetime
    requeue_after_s: float | None = None
    """When the deadline ends."""


def compute_progress(
    deployment: ModelDeployment,
    seen: DeploymentView,
    hindrance: Unschedulable | None,
    *,
    canary: CanaryStatus | None,
    old: ModelDeploymentStatus | None,
    now: datetime,
) -> RolloutProgress:
    """Return how far the rollout is; `canary` is where the trial is by now, `hindrance` what could not be placed."""
    newest = template_hash(deployment)
    active = [r for r in seen.replicas if r.is_ours and not r.is_deleting]
    updated = [r for r in active if r.replica.spec.template == newest]
    progressed_at = None if old is None else old.progressed_at
    numbers = (len(active), sum(r.is_ready for r in active), len(updated), newest, canary)
    if old is None or progressed_at is None or numbers != _numbers(old):
        progressed_at = now
    limit_s = duration.parse(deployment.spec.rollout.progress_deadline)
    left_s = limit_s - (now - progressed_at).total_seconds()
    is_done = _is_done(seen, active, updated, newest, old)
    phase = rollout_goal(seen, deployment).phase
    waits = phase in (RolloutPhase.PAUSED, RolloutPhase.ROLLED_BACK) or (
        phase is RolloutPhase.CANARY and _is_under_way(deployment, canary)
    )
    if is_done or waits or left_s > 0:
        found = _condition_of(deployment, seen, canary, active, is_done=is_done)
        if found.reason in ("RollingOut", "CanaryRunning") and hindrance is not None and not waits:
            message = f"{found.message}; {summary_line(hindrance)}"
            found = found.model_copy(update={"message": message})
    else:
        why = f"no progress for {duration.show(limit_s)} (progressDeadline)"
        found = _condition(
            ConditionStatus.FALSE, "Stalled", f"{why}: {_hindrance(active, hindrance)}"
        )
    stable = old.stable_template if old is not None else ""
    return RolloutProgress(
        condition=found,
        template=newest,
        revision=_number(seen, newest),
        stable_template=newest if found.reason == "RolloutComplete" else stable,
        updated_replicas=len(updated),
        canary=canary,
        progressed_at=progressed_at,
        requeue_after_s=(
            left_s if found.reason in ("RollingOut", "CanaryRunning") and not waits else None
        ),
    )


def _is_under_way(deployment: ModelDeployment, canary: CanaryStatus | None) -> bool:
    """Return whether a step of the trial has its replicas, and waits for time and requests on purpose."""
    plan = deployment.spec.rollout.canary
    if plan is None or canary is None or canary.step >= len(plan.steps):
        return False
    return canary.weight == plan.steps[canary.step].weight


def _is_done(
    seen: DeploymentView,
    active: Sequence[ReplicaView],
    updated: Sequence[ReplicaView],
    newest: str,
    old: ModelDeploymentStatus | None,
) -> bool:
    if len(updated) < len(active):
        return False
    if sum(r.is_ready for r in updated) >= seen.wanted:
        return True
    # Once done a rollout stays done, also if an engine dies later.
    was = find_condition(old.conditions, "Progressing") if old is not None else None
    was_complete = was is not None and was.reason == "RolloutComplete"
    return was_complete and old is not None and old.template == newest


def _condition_of(
    deployment: ModelDeployment,
    seen: DeploymentView,
    canary: CanaryStatus | None,
    active: Sequence[ReplicaView],
    *,
    is_done: bool,
) -> Condition:
    """Return the condition of a rollout that is not stalled."""
    newest, goal = template_hash(deployment), rollout_goal(seen, deployment)
    revision = _number(seen, newest)
    updated = [r for r in active if r.replica.spec.template == newest]
    trial = canary.message if canary is not None else ""
    match goal.phase:
        case RolloutPhase.PAUSED if not is_done:
            said = f"{len(updated)} of {seen.wanted} replicas run revision {revision}"
            return _condition(
                ConditionStatus.UNKNOWN, "Paused", f"spec.rollout.paused is true; {said}"
            )
        case RolloutPhase.ROLLED_BACK:
            back = f"replicas run revision {_number(seen, goal.target)} again"
            return _condition(ConditionStatus.FALSE, "CanaryFailed", f"{trial}; {back}")
        case _ if is_done:
            message = f"every replica runs revision {revision}"
            return _condition(ConditionStatus.TRUE, "RolloutComplete", message)
        case RolloutPhase.CANARY:
            return _condition(ConditionStatus.TRUE, "CanaryRunning", trial)
        case _:
            return _condition(
                ConditionStatus.TRUE, "RollingOut", _count(seen, active, updated, revision)
            )


def _numbers(old: ModelDeploymentStatus) -> tuple[object, ...]:
    return (old.replicas, old.ready_replicas, old.updated_replicas, old.template, old.canary)


def _number(seen: DeploymentView, hash_: str) -> int:
    """Return a version's number; the newest that is not saved yet comes after all others."""
    found = {one.spec.template: one.spec.revision for one in seen.revisions}
    return found.get(hash_) or max(found.values(), default=0) + 1


def _condition(status: ConditionStatus, reason: str, message: str) -> Condition:
    return Condition(type="Progressing", status=status, reason=reason, message=message)


def _count(
    seen: DeploymentView,
    active: Sequence[ReplicaView],
    updated: Sequence[ReplicaView],
    revision: int,
) -> str:
    ready = sum(r.is_ready for r in updated)
    said = f"{ready} of {seen.wanted} replicas of revision {revision} are ready"
    old = len(active) - len(updated)
    return (
        f"{said}, {old} of earlier ones {'is' if old == 1 else 'are'} still there" if old else said
    )


def _hindrance(active: Sequence[ReplicaView], unschedulable: Unschedulable | None) -> str:
    # What was placed and fails says more than what could not be placed after it.
    troubled = next((r for r in active if r.trouble and not r.is_ready), None)
    if troubled is not None:
        return f"{troubled.name} on {troubled.node}: {troubled.trouble}"
    if unschedulable is not None:
        return summary_line(unschedulable)
    waiting = next((r for r in active if not r.is_ready), None)
    if waiting is not None:
        return f"{waiting.name} on {waiting.node} is not ready"
    return "nothing that was to start or to end has done so"
