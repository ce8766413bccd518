"""The progress of a rollout: the condition Progressing, and the rollout's part of a deployment's status. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from reconciler.deployments.rollout.canary import CanaryProgress
from reconciler.deployments.rollout.revisions import template_hash
from reconciler.deployments.rollout.steps import RolloutPhase, rollout_goal
from reconciler.deployments.views import DeploymentView, ReplicaView
from reconciler.placement.refusals import Unschedulable, summary_line
from schemas import duration
from schemas.deployment import CanaryStatus, ModelDeployment, ModelDeploymentStatus
from schemas.meta import Condition, ConditionStatus, find_condition


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
    if old is None or progressed_at is None or numbers != _numbers(old):
        progressed_at = now
    limit_s = duration.parse(deployment.spec.rollout.progress_deadline)
    left_s = limit_s - (now - progressed_at).total_seconds()
    is_done = _is_done(observed, active, updated, newest, old)
    phase = rollout_goal(observed, deployment).phase
    waits = phase in (RolloutPhase.PAUSED, RolloutPhase.ROLLED_BACK) or (
        phase is RolloutPhase.CANARY and _is_under_way(deployment, canary.status)
    )
    # A large model takes longer to fetch than any deadline; a fetch that stands still has another reason.
    preparing = () if is_done else observed.preparing_nodes()
    waits = waits or bool(preparing) or any(r.is_fetching and not r.is_ready for r in updated)
    if is_done or waits or left_s > 0:
        found = _condition_of(deployment, observed, canary.status, active, is_done=is_done)
        if found.reason in ("RollingOut", "CanaryRunning") and obstacle is not None and not waits:
            message = f"{found.message}; {summary_line(obstacle)}"
            found = found.model_copy(update={"message": message})
        if found.reason in ("RollingOut", "CanaryRunning") and preparing:
            names = ", ".join(node.name for node in preparing)
            message = (
                f"{found.message}; the old replica serves while {names} fetches the new version"
            )
            found = found.model_copy(update={"message": message})
        if found.reason == "CanaryRunning" and canary.count:
            message = f"{found.message}; {canary.count}"
            found = found.model_copy(update={"message": message})
    else:
        why = f"no progress for {duration.show(limit_s)} (progressDeadline)"
        found = _condition(
            ConditionStatus.FALSE, "Stalled", f"{why}: {_obstacle_text(active, obstacle)}"
        )
    stable = old.stable_template if old is not None else ""
    return RolloutProgress(
        condition=found,
        template=newest,
        revision=_number(observed, newest),
        stable_template=newest if found.reason == "RolloutComplete" else stable,
        updated_replicas=len(updated),
        canary=canary.status,
        progressed_at=progressed_at,
        requeue_after_s=(
            left_s if found.reason in ("RollingOut", "CanaryRunning") and not waits else None
        ),
    )


def _is_under_way(deployment: ModelDeployment, canary: CanaryStatus | None) -> bool:
    """Return whether a canary step has its replicas, and waits for time and requests on purpose."""
    plan = deployment.spec.rollout.canary
    if plan is None or canary is None or canary.step >= len(plan.steps):
        return False
    return canary.weight == plan.steps[canary.step].weight


def _is_done(
    observed: DeploymentView,
    active: Sequence[ReplicaView],
    updated: Sequence[ReplicaView],
    newest: str,
    old: ModelDeploymentStatus | None,
) -> bool:
    if len(updated) < len(active):
        return False
    if sum(r.is_ready for r in updated) >= observed.desired_replicas:
        return True
    # A completed rollout stays complete, even if an engine fails later.
    was = find_condition(old.conditions, "Progressing") if old is not None else None
    was_complete = was is not None and was.reason == "RolloutComplete"
    return was_complete and old is not None and old.template == newest


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
            return _condition(
                ConditionStatus.TRUE, "RollingOut", _count_text(observed, active, updated, revision)
            )


def _numbers(old: ModelDeploymentStatus) -> tuple[object, ...]:
    return (old.replicas, old.ready_replicas, old.updated_replicas, old.template, old.canary)


def _number(observed: DeploymentView, hash_: str) -> int:
    """Return the revision number of a version; a version that is not saved yet gets the next number."""
    found = {one.spec.template: one.spec.revision for one in observed.revisions}
    return found.get(hash_) or max(found.values(), default=0) + 1


def _condition(status: ConditionStatus, reason: str, message: str) -> Condition:
    return Condition(type="Progressing", status=status, reason=reason, message=message)


def _count_text(
    observed: DeploymentView,
    active: Sequence[ReplicaView],
    updated: Sequence[ReplicaView],
    revision: int,
) -> str:
    ready = sum(r.is_ready for r in updated)
    text = f"{ready} of {observed.desired_replicas} replicas of revision {revision} are ready"
    old = len(active) - len(updated)
    return (
        f"{text}, {old} of earlier ones {'is' if old == 1 else 'are'} still there" if old else text
    )


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
