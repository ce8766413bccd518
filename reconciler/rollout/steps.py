"""How replicas get from one version of their deployment to the next: who is made, who ends. Pure.

As Kubernetes' deployment controller counts: never more than wanted plus maxSurge, never fewer that answer than
wanted minus maxUnavailable, by what is done here. Where there is no room for one more, one is replaced in place.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum

from reconciler.rollout.canary import canary_replicas, next_weight
from reconciler.rollout.revisions import known_contents, template_hash
from reconciler.views import DeploymentView, ReplicaView
from schemas import quantity
from schemas.deployment import ModelDeployment


class RolloutPhase(StrEnum):
    """What a rollout is doing."""

    ROLLING = "Rolling"
    PAUSED = "Paused"
    CANARY = "Canary"
    ROLLED_BACK = "RolledBack"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGoal:
    """Which versions there should be."""

    phase: RolloutPhase
    target: str
    """What replicas are to run, but for those on trial."""
    trial: str = ""
    """The version that is tried, while it is."""
    trial_replicas: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Termination:
    """A replica that is to drain."""

    replica: ReplicaView
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStep:
    """What brings the replicas nearer to the goal, as far as is allowed now."""

    endings: tuple[Termination, ...] = ()
    makes: tuple[str, ...] = ()
    """The versions of replicas to make, in order."""


def rollout_goal(seen: DeploymentView, deployment: ModelDeployment) -> RolloutGoal:
    """Return which versions of the deployment there should be."""
    newest, rollout = template_hash(deployment), deployment.spec.rollout
    stable = seen.stable if seen.stable in known_contents(seen) else ""
    trial = seen.canary if seen.canary and seen.canary.template == newest else None
    if rollout.paused:
        return RolloutGoal(phase=RolloutPhase.PAUSED, target=stable or newest)
    if rollout.canary is None or not seen.wanted or stable in ("", newest):
        return RolloutGoal(phase=RolloutPhase.ROLLING, target=newest)
    if trial is not None and trial.outcome == "Failed":
        return RolloutGoal(phase=RolloutPhase.ROLLED_BACK, target=stable)
    if trial is not None and trial.outcome == "Passed":
        return RolloutGoal(phase=RolloutPhase.ROLLING, target=newest)
    weight = next_weight(rollout.canary, trial, newest)
    return RolloutGoal(
        phase=RolloutPhase.CANARY,
        target=stable,
        trial=newest,
        trial_replicas=canary_replicas(seen.wanted, weight),
    )


def next_step(
    goal: RolloutGoal,
    seen: DeploymentView,
    deployment: ModelDeployment,
    staying: Sequence[ReplicaView],
) -> RolloutStep:
    """Return the next step for the replicas that may stay where they are."""
    match goal.phase:
        case RolloutPhase.PAUSED:
            return _paused(goal, seen, staying)
        case RolloutPhase.CANARY:
            return _canary(goal, seen, deployment, staying)
        case RolloutPhase.ROLLING | RolloutPhase.ROLLED_BACK:
            if deployment.spec.rollout.strategy == "Recreate":
                return _recreate(goal, seen, staying)
            return _roll(goal.target, seen.wanted, deployment, staying)


def replaceable_in_place(
    goal: RolloutGoal,
    seen: DeploymentView,
    staying: Sequence[ReplicaView],
    *,
    has_surge: bool,
    is_stuck: bool,
) -> tuple[ReplicaView, ...]:
    """Return the replicas of which one may be replaced where it is, because there is no room for one more.

    Only while all of them answer and nothing ends already. `is_stuck`: one more could not be placed.
    """
    if goal.phase is RolloutPhase.PAUSED or (has_surge and not is_stuck):
        return ()
    kept = {goal.target} if goal.phase is not RolloutPhase.CANARY else {goal.trial}
    old = [r for r in _by_name(staying) if r.replica.spec.template not in kept]
    # While a version is tried the others stay, but for those whose places the trial needs.
    tried = len(staying) - len(old)
    if goal.phase is RolloutPhase.CANARY and tried >= goal.trial_replicas:
        return ()
    # Those that are missing for want of room would be missing anyway.
    is_full = is_stuck or len(staying) >= seen.wanted
    if not is_full or not all(r.is_ready for r in staying):
        return ()
    return () if any(r.is_deleting for r in seen.replicas) else tuple(old)


def surge_limits(deployment: ModelDeployment, wanted: int) -> tuple[int, int]:
    """Return how many replicas there may be above the wanted number, and how many of it may be missing."""
    rollout = deployment.spec.rollout
    surge = quantity.resolve_amount(rollout.max_surge, wanted, round_up=True)
    return surge, min(
        wanted, quantity.resolve_amount(rollout.max_unavailable, wanted, round_up=False)
    )


def version_after_move(goal: RolloutGoal, seen: DeploymentView, replica: ReplicaView) -> str:
    """Return the version that a replica gets when it is moved off a lost node."""
    own = replica.replica.spec.template
    if own == goal.trial or (goal.phase is RolloutPhase.PAUSED and own in known_contents(seen)):
        return own
    return goal.target


def _paused(goal: RolloutGoal, seen: DeploymentView, staying: Sequence[ReplicaView]) -> RolloutStep:
    return RolloutStep(
        endings=_surplus(staying, len(staying) - seen.wanted, keep={goal.target}),
        makes=(goal.target,) * max(0, seen.wanted - len(staying)),
    )


def _recreate(
    goal: RolloutGoal, seen: DeploymentView, staying: Sequence[ReplicaView]
) -> RolloutStep:
    old = [r for r in _by_name(staying) if r.replica.spec.template != goal.target]
    fresh = [r for r in staying if r not in old]
    is_free = all(r.replica.spec.template == goal.target for r in seen.replicas)
    return RolloutStep(
        endings=(
            *(Termination(replica=r, because="Outdated") for r in old),
            *_surplus(fresh, len(fresh) - seen.wanted, keep={goal.target}),
        ),
        makes=(goal.target,) * max(0, seen.wanted - len(fresh)) if is_free else (),
    )


def _canary(
    goal: RolloutGoal,
    seen: DeploymentView,
    deployment: ModelDeployment,
    staying: Sequence[ReplicaView],
) -> RolloutStep:
    tried = [r for r in staying if r.replica.spec.template == goal.trial]
    others = [r for r in staying if r not in tried]
    missing = max(0, goal.trial_replicas - len(tried))
    # Where the trial took a place of theirs they need not get it back: together they are enough.
    wanted = min(seen.wanted, max(len(others), seen.wanted - goal.trial_replicas))
    rest = _roll(goal.target, wanted, deployment, others)
    return RolloutStep(
        endings=(
            *_surplus(tried, len(tried) - goal.trial_replicas, keep={goal.trial}),
            *rest.endings,
        ),
        # What is tried comes first, or a place that was made for it would be given back.
        makes=(*(goal.trial,) * missing, *rest.makes),
    )


def _roll(
    target: str, wanted: int, deployment: ModelDeployment, staying: Sequence[ReplicaView]
) -> RolloutStep:
    surge, unavailable = surge_limits(deployment, wanted)
    # One on a lost node is moved, which renews it; one of several ranks begins another epoch of the same version.
    moved = [r for r in staying if r.is_node_lost and r.epoch is None]
    old = [r for r in _by_name(staying) if r.replica.spec.template != target and r not in moved]
    fresh = [r for r in staying if r not in old]
    surplus = _surplus(fresh, len(fresh) - wanted, keep={target})
    # What serves nobody is missed by nobody.
    idle = [r for r in old if r.is_idle]
    kept = len(staying) - len(idle)
    ending = {one.replica.name for one in surplus}
    answering = sum(r.is_ready and r.name not in ending for r in staying)
    spare = max(0, answering - (wanted - unavailable))
    ready = [r for r in old if r.is_ready][:spare]
    because = "Outdated" if wanted else "ScaledDown"
    return RolloutStep(
        endings=(*surplus, *(Termination(replica=r, because=because) for r in (*idle, *ready))),
        makes=(target,) * max(0, min(wanted - len(fresh), wanted + surge - kept)),
    )


def _surplus(
    replicas: Sequence[ReplicaView], number: int, *, keep: AbstractSet[str]
) -> tuple[Termination, ...]:
    """Return those that are too many: rather what does not answer, what is outdated, and the highest."""
    if number <= 0:
        return ()
    order = sorted(
        replicas,
        key=lambda r: (
            not r.is_node_lost,
            not r.is_idle,
            r.is_ready,
            r.replica.spec.template in keep,
            -r.ordinal,
        ),
    )
    return tuple(Termination(replica=r, because="ScaledDown") for r in order[:number])


def _by_name(replicas: Sequence[ReplicaView]) -> list[ReplicaView]:
    return sorted(replicas, key=lambda r: r.ordinal)
