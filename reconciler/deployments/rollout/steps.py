"""The next step of a rollout: which versions of replicas to create, and which replicas end. Pure.

Counts as Kubernetes' deployment controller: never more than desired plus maxSurge, never fewer ready than desired minus
maxUnavailable. If there is no room for a surge, a replica is replaced in place.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum

from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.deployments.rollout.canary import canary_replicas, next_weight
from reconciler.deployments.rollout.revisions import known_contents, template_hash
from schemas import quantity
from schemas.deployment import ModelDeployment


class RolloutPhase(StrEnum):
    """The phase of a rollout."""

    ROLLING = "Rolling"
    PAUSED = "Paused"
    CANARY = "Canary"
    ROLLED_BACK = "RolledBack"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGoal:
    """The versions that replicas should run."""

    phase: RolloutPhase
    target: str
    """Version of all replicas except the canary's."""
    canary: str = ""
    """Version under canary analysis; empty without one."""
    canary_replicas: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Termination:
    """A replica that must drain and end."""

    replica: ReplicaView
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStep:
    """The largest step towards the goal that the limits allow now."""

    terminations: tuple[Termination, ...] = ()
    creations: tuple[str, ...] = ()
    """Versions of the replicas to create, in order."""


def rollout_goal(observed: DeploymentView, deployment: ModelDeployment) -> RolloutGoal:
    """Return the versions that the deployment's replicas should run."""
    newest, rollout = template_hash(deployment), deployment.spec.rollout
    stable = (
        observed.stable_template if observed.stable_template in known_contents(observed) else ""
    )
    canary = observed.canary if observed.canary and observed.canary.template == newest else None
    if rollout.paused:
        return RolloutGoal(phase=RolloutPhase.PAUSED, target=stable or newest)
    if rollout.canary is None or not observed.desired_replicas or stable in ("", newest):
        return RolloutGoal(phase=RolloutPhase.ROLLING, target=newest)
    if canary is not None and canary.outcome == "Failed":
        return RolloutGoal(phase=RolloutPhase.ROLLED_BACK, target=stable)
    if canary is not None and canary.outcome == "Passed":
        return RolloutGoal(phase=RolloutPhase.ROLLING, target=newest)
    weight = next_weight(rollout.canary, canary, newest)
    return RolloutGoal(
        phase=RolloutPhase.CANARY,
        target=stable,
        canary=newest,
        canary_replicas=canary_replicas(observed.desired_replicas, weight),
    )


def next_step(
    goal: RolloutGoal,
    observed: DeploymentView,
    deployment: ModelDeployment,
    staying: Sequence[ReplicaView],
) -> RolloutStep:
    """Return the next step for the replicas that may stay on their nodes."""
    match goal.phase:
        case RolloutPhase.PAUSED:
            return RolloutStep(
                terminations=_surplus(
                    staying, len(staying) - observed.desired_replicas, keep={goal.target}
                ),
                creations=(goal.target,) * max(0, observed.desired_replicas - len(staying)),
            )
        case RolloutPhase.CANARY:
            return _canary(goal, observed, deployment, staying)
        case RolloutPhase.ROLLING | RolloutPhase.ROLLED_BACK:
            if deployment.spec.rollout.strategy == "Recreate":
                old = [r for r in _by_name(staying) if r.replica.spec.template != goal.target]
                fresh = [r for r in staying if r.replica.spec.template == goal.target]
                is_free = all(r.replica.spec.template == goal.target for r in observed.replicas)
                return RolloutStep(
                    terminations=(
                        *(Termination(replica=r, because="Outdated") for r in old),
                        *_surplus(
                            fresh, len(fresh) - observed.desired_replicas, keep={goal.target}
                        ),
                    ),
                    creations=(goal.target,) * max(0, observed.desired_replicas - len(fresh))
                    if is_free
                    else (),
                )
            return _roll(goal.target, observed.desired_replicas, deployment, staying)


def replaceable_in_place(
    goal: RolloutGoal,
    observed: DeploymentView,
    staying: Sequence[ReplicaView],
    *,
    has_surge: bool,
    is_stuck: bool,
) -> tuple[ReplicaView, ...]:
    """Return the replicas of which one may be replaced in place, because there is no room for a surge.

    Only while all replicas are ready and none ends. With `is_stuck`, a surge could not be placed.
    """
    if goal.phase is RolloutPhase.PAUSED or (has_surge and not is_stuck):
        return ()
    kept = {goal.target} if goal.phase is not RolloutPhase.CANARY else {goal.canary}
    old = [r for r in _by_name(staying) if r.replica.spec.template not in kept]
    # During a canary analysis the old version stays, except on the nodes that the canary needs.
    canaries = len(staying) - len(old)
    if goal.phase is RolloutPhase.CANARY and canaries >= goal.canary_replicas:
        return ()
    # Replicas that are missing for lack of room do not count against it.
    is_full = is_stuck or len(staying) >= observed.desired_replicas
    if not is_full or not all(r.is_ready for r in staying):
        return ()
    return () if any(r.is_deleting for r in observed.replicas) else tuple(old)


def surge_limits(deployment: ModelDeployment, wanted: int) -> tuple[int, int]:
    """Return how many replicas may exist above the desired number, and how many of it may be unready."""
    rollout = deployment.spec.rollout
    surge = quantity.resolve_amount(rollout.max_surge, wanted, round_up=True)
    return surge, min(
        wanted, quantity.resolve_amount(rollout.max_unavailable, wanted, round_up=False)
    )


def version_after_move(goal: RolloutGoal, observed: DeploymentView, replica: ReplicaView) -> str:
    """Return the version that a replica gets when it moves off a lost node."""
    own = replica.replica.spec.template
    if own == goal.canary or (
        goal.phase is RolloutPhase.PAUSED and own in known_contents(observed)
    ):
        return own
    return goal.target


def _canary(
    goal: RolloutGoal,
    observed: DeploymentView,
    deployment: ModelDeployment,
    staying: Sequence[ReplicaView],
) -> RolloutStep:
    canaries = [r for r in staying if r.replica.spec.template == goal.canary]
    others = [r for r in staying if r.replica.spec.template != goal.canary]
    missing = max(0, goal.canary_replicas - len(canaries))
    # If the canary replaced one of them in place, it is not created again: together they are enough.
    desired = min(
        observed.desired_replicas,
        max(len(others), observed.desired_replicas - goal.canary_replicas),
    )
    rest = _roll(goal.target, desired, deployment, others)
    return RolloutStep(
        terminations=(
            *_surplus(canaries, len(canaries) - goal.canary_replicas, keep={goal.canary}),
            *rest.terminations,
        ),
        # The canary comes first, so that the old version does not take the room that was freed for it.
        creations=(*(goal.canary,) * missing, *rest.creations),
    )


def _roll(
    target: str, wanted: int, deployment: ModelDeployment, staying: Sequence[ReplicaView]
) -> RolloutStep:
    surge, unavailable = surge_limits(deployment, wanted)
    old = [r for r in _by_name(staying) if _is_outdated(r, target)]
    fresh = [r for r in staying if not _is_outdated(r, target)]
    surplus = _surplus(fresh, len(fresh) - wanted, keep={target})
    # A replica that serves no requests may end at once.
    idle = [r for r in old if r.is_idle]
    kept = len(staying) - len(idle)
    ending = {termination.replica.name for termination in surplus}
    answering = sum(r.is_ready and r.name not in ending for r in staying)
    spare = max(0, answering - (wanted - unavailable))
    ready = [r for r in old if r.is_ready][:spare]
    because = "Outdated" if wanted else "ScaledDown"
    return RolloutStep(
        terminations=(
            *surplus,
            *(Termination(replica=r, because=because) for r in (*idle, *ready)),
        ),
        creations=(target,) * max(0, min(wanted - len(fresh), wanted + surge - kept)),
    )


def _is_outdated(replica: ReplicaView, target: str) -> bool:
    """Return whether a replica must end for the new version."""
    # A replica on a lost node gets the new version when it moves. With several ranks it keeps its version.
    moves = replica.is_node_lost and replica.epoch is None
    return not moves and replica.replica.spec.template != target


def _surplus(
    replicas: Sequence[ReplicaView], number: int, *, keep: AbstractSet[str]
) -> tuple[Termination, ...]:
    """Return the surplus replicas: first those that do not serve, then outdated ones, then the highest names."""
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
