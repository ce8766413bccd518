"""The reconciler's decision about one deployment: from what is seen to what to do. Pure."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from reconciler.actions import (
    Action,
    CreateReplica,
    DeleteReplica,
    MoveReplica,
    PreemptReplica,
    RemoveDeployment,
    RemoveReplica,
)
from reconciler.observe import Observed, ReplicaView, Tenant
from reconciler.placement.place import Displaces, Placed, Placer, Waits
from reconciler.placement.refusals import Unschedulable
from reconciler.placement.table import Table
from reconciler.placement.want import want_of
from schemas.deployment import ModelDeployment, served_names
from schemas.placement import tolerates
from schemas.replica import replica_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, and why something could not be placed."""

    actions: tuple[Action, ...] = ()
    unschedulable: Unschedulable | None = None
    requeue_after_s: float | None = None


def plan(seen: Observed, table: Table | None = None) -> Plan:
    """Return the actions that bring the deployment's replicas nearer to what is wanted.

    Every action can be done or left undone by itself: planning again from where it stopped goes on.
    `table` are the nodes of `seen` as columns, if somebody has them already.
    """
    wanted = wanted_names(seen.deployment)
    gone = [RemoveReplica(name=r.name, version=r.version) for r in seen.replicas if is_gone(r)]
    kept = [r for r in seen.replicas if not is_gone(r)]
    retired = _retire(seen, kept, wanted)
    placed, unschedulable = _place(seen, wanted, table)
    finished: list[Action] = []
    if seen.deployment is not None and _is_deleting(seen.deployment) and not seen.replicas:
        version = int(seen.deployment.metadata.resource_version or 0)
        finished = [RemoveDeployment(name=seen.name, version=version)]
    return Plan(
        actions=(*gone, *retired, *placed, *finished),
        unschedulable=unschedulable,
        requeue_after_s=seen.next_look_s,
    )


def wanted_names(deployment: ModelDeployment | None) -> tuple[str, ...]:
    """Return the names of the replicas that should be there."""
    if deployment is None or _is_deleting(deployment):
        return ()
    name = deployment.metadata.name
    return tuple(replica_name(name, ordinal) for ordinal in range(deployment.spec.replicas))


def template(deployment: ModelDeployment) -> str:
    """Return a hash of everything an engine is started with: when it moves, replicas must roll."""
    spec = deployment.spec
    parts = [spec.model.path, *served_names(deployment), spec.context_length, spec.concurrency]
    if (
        spec.resources is not None
    ):  # no engine sees it, but what is written down must be what counts
        parts.append(f"memory={spec.resources.memory}")
    return hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:12]


def is_gone(replica: ReplicaView) -> bool:
    """Return whether nothing of a deleted replica runs any more, as far as anybody can know."""
    return replica.is_deleting and (replica.is_stopped or replica.is_node_lost)


def _is_deleting(deployment: ModelDeployment) -> bool:
    return deployment.metadata.deletion_timestamp is not None


def _retire(
    seen: Observed, kept: Sequence[ReplicaView], wanted: Sequence[str]
) -> list[DeleteReplica]:
    """Return the replicas to drain: surplus and driven out ones now, outdated ones a step at a time."""
    deployment = seen.deployment
    active = [r for r in kept if not r.is_deleting]
    surplus = [r for r in active if r.name not in wanted or not r.is_ours]
    retired = [
        DeleteReplica(
            name=r.name, because="ScaledDown" if r.is_ours else "OwnerReplaced", version=r.version
        )
        for r in surplus
    ]
    if deployment is None:
        return retired
    driven_out = _driven_out(seen, deployment)
    # One on a lost node is moved, which renews it.
    stay = [r for r in active if r not in surplus and not r.is_node_lost]
    evicted = [r for r in stay if r.node in driven_out]
    retired.extend(
        DeleteReplica(name=r.name, because="Evicted", version=r.version) for r in evicted
    )
    current = template(deployment)
    outdated = [r for r in stay if r not in evicted and r.replica.spec.template != current]
    # Those that serve go one at a time, and only while all the others serve.
    idle = [r for r in outdated if not r.is_ready]
    serving = [r for r in outdated if r.is_ready]
    others_serve = len(active) == len(wanted) and all(r.is_ready for r in active)
    chosen = idle or (serving[:1] if others_serve else [])
    return [
        *retired,
        *(DeleteReplica(name=r.name, because="Outdated", version=r.version) for r in chosen),
    ]


def _driven_out(seen: Observed, deployment: ModelDeployment) -> set[str]:
    """Return the nodes that are tainted NoExecute without the deployment tolerating it."""
    tolerations = deployment.spec.placement.tolerations
    return {
        node.name
        for node in seen.nodes
        for taint in node.taints
        if taint.effect == "NoExecute" and not tolerates(tolerations, taint)
    }


def _place(
    seen: Observed, wanted: Sequence[str], table: Table | None
) -> tuple[list[Action], Unschedulable | None]:
    """Return placements for missing replicas and moves for those on lost nodes."""
    by_name = {r.name: r for r in seen.replicas}
    missing = [name for name in wanted if name not in by_name or _can_move(by_name[name])]
    if seen.deployment is None or seen.awaits_reports or not missing:
        return [], None
    placer = Placer(table or Table(seen.nodes))
    for rival in seen.rivals:
        for _ in range(rival.missing):
            if isinstance(placer.claim(rival.want), Unschedulable):
                break
    want = want_of(seen.deployment, apart_from=seen.apart_from)
    actions: list[Action] = []
    first: Unschedulable | None = None
    for name in missing:
        outcome = placer.claim(want)
        match outcome:
            case Placed():
                actions.append(_assign(name, by_name.get(name), outcome))
                continue
            case Displaces(victims=victims):
                actions.extend(_preempt(seen, name, victim) for victim in victims)
                first = first or outcome.why
            case Waits():
                first = first or outcome.why
            case Unschedulable():
                return actions, first or outcome
    return actions, first


def _preempt(seen: Observed, name: str, victim: Tenant) -> PreemptReplica:
    assert seen.deployment is not None
    return PreemptReplica(
        name=victim.replica,
        deployment=victim.deployment,
        version=victim.version,
        by=name,
        because=f"{name} has priority {seen.deployment.spec.priority}, "
        f"{victim.replica} has {victim.priority}",
    )


def _can_move(replica: ReplicaView) -> bool:
    return replica.is_node_lost and replica.is_ours and not replica.is_deleting


def _assign(name: str, lost: ReplicaView | None, to: Placed) -> Action:
    if lost is None:
        return CreateReplica(name=name, node=to.node, memory=to.memory)
    return MoveReplica(name=name, node=to.node, memory=to.memory, version=lost.version)
