"""Reconciles an object of any kind: one at a time is planned and acted for; pools, groups and routes only get a status."""

import asyncio
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime

from machinery.clock import Clock
from machinery.control_loop import Requeue
from reconciler.deployments.events import DeploymentEvents
from reconciler.deployments.execute import Executor
from reconciler.deployments.reconcile import DeploymentReconciler, LeaderState
from reconciler.groups.fabric_checks import (
    FABRIC_HEALTHY,
    FabricCheckView,
    fabric_condition,
    with_check,
)
from reconciler.listers.lister import Lister
from reconciler.nodes.reconcile import NodeReconciler
from schemas.event import ObjectReference
from schemas.meta import (
    ConditionStatus,
    ObjectKey,
    Status,
    find_condition,
    make_condition,
    stamp_conditions,
)
from schemas.pools import NodePool, NodePoolStatus
from schemas.route import ModelRoute, ModelRouteStatus
from schemas.shardgroup import ShardGroup, ShardGroupStatus
from store.events import EventRecorder


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
        *,
        fabric: Callable[[ShardGroup], FabricCheckView],
    ) -> None:
        """`fabric` returns the checks of its cables that the status of a group must take over."""
        self._lister = lister
        self._executor = executor
        self._recorder = recorder
        self._fabric = fabric
        self._clock = clock
        events = DeploymentEvents(lister, recorder)
        self._deployments = DeploymentReconciler(lister, state, executor, events, clock)
        self._nodes = NodeReconciler(
            lister, state.liveness, executor.commit, recorder, clock, state.nodes.version
        )
        self._turn = asyncio.Lock()

    async def reconcile(self, key: ObjectKey) -> Requeue | None:
        """Reconcile one object; return when to do it again though nothing changes."""
        if not self._lister.is_readable(key):
            return None  # the informer logged it; acting on an old version could undo an edit
        if key.kind == "Node":
            return await self._nodes.reconcile(key)  # no plan depends on what it writes
        async with self._turn:
            if key.kind != "ModelDeployment":
                await self._write_status(key)
                return None
            report = await self._deployments.reconcile(key.name)
        return await self._deployments.write(report)

    async def _write_status(self, key: ObjectKey) -> None:
        """Write the status of an object that is only described, never acted on."""
        described, lister = self._lister.spec(key), self._lister
        old, now = lister.status(key), self._clock.now()
        new: Status
        match described:
            case NodePool():
                members = lister.pool_members(described)
                new = pool_status(described, members, lister.ready_nodes(), old=old, now=now)
            case ShardGroup():
                context = GroupContext(
                    members=lister.group_members(described),
                    known=set(lister.node_names()),
                    ready=lister.ready_nodes(),
                    replicas=[replica.name for replica in lister.replicas_on_group(key.name)],
                    fabric=self._fabric(described),
                )
                new = group_status(described, context, old=old, now=now)
            case ModelRoute():
                names = {deployment.name for deployment in lister.deployments()}
                new = route_status(described, names, old=old, now=now)
            case _:
                return
        # A status of a newer release is not overwritten.
        if old == new or lister.is_newer(key):
            return
        await self._executor.write_status(key, new, version=lister.spec_version(key))
        before = None if old is None else find_condition(old.conditions, FABRIC_HEALTHY)
        after = find_condition(new.conditions, FABRIC_HEALTHY)
        was_false = before is not None and before.status is ConditionStatus.FALSE
        if after is not None and after.status is ConditionStatus.FALSE and not was_false:
            about = ObjectReference(kind=key.kind, name=key.name, uid=described.metadata.uid)
            await self._recorder.record(about, after.reason, after.message, type_="Warning")


def pool_status(
    pool: NodePool, members: Sequence[str], ready: set[str], *, old: Status | None, now: datetime
) -> NodePoolStatus:
    """Return the status of a pool."""
    alive = [name for name in members if name in ready]
    message = f"{len(alive)} of {len(members)} nodes ready"
    found = set(members)
    if missing := [name for name in pool.spec.nodes if name not in found]:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        message += f"; of spec.nodes these do not exist: {', '.join(missing[:5])}{more}"
    own = make_condition("Ready", "NodesReady" if alive else "NoNodes", message, holds=bool(alive))
    generation = pool.metadata.generation
    return NodePoolStatus(
        observed_generation=generation,
        nodes=len(members),
        ready_nodes=len(alive),
        conditions=stamp_conditions(old, (own,), generation=generation, now=now),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupContext:
    """The inputs for the status of a ShardGroup besides the group itself."""

    members: Sequence[str]
    """Nodes of the group."""
    known: AbstractSet[str]
    """All nodes that ever joined."""
    ready: AbstractSet[str]
    """Nodes that hold a lease."""
    replicas: Sequence[str] = ()
    """Replicas that run on the group."""
    fabric: FabricCheckView = field(default_factory=FabricCheckView)
    """Checks of its cables that the status does not hold yet."""


def group_status(
    group: ShardGroup, context: GroupContext, *, old: Status | None, now: datetime
) -> ShardGroupStatus:
    """Return the status of a group: ready if as many members are ready as a model is split over."""
    members, known, ready = context.members, context.known, context.ready
    alive = [name for name in members if name in ready]
    unknown = [name for name in members if name not in known]
    away = [name for name in members if name in known and name not in ready]
    size = group.spec.wanted_size
    # Missing members are named even if there are spares.
    notes = [f"no such node: {', '.join(unknown)}"] if unknown else []
    notes += [f"not ready: {', '.join(away)}"] if away else []
    if len(alive) >= size:
        own = make_condition("Ready", "MembersReady", "; ".join(notes), holds=True)
    else:
        notes.insert(0, f"{len(alive)} of {size} members ready")
        reason = "UnknownNode" if unknown else "MemberNotReady"
        own = make_condition("Ready", reason, "; ".join(notes), holds=False)
    checks = old.fabric_checks if isinstance(old, ShardGroupStatus) else ()
    if context.fabric.finished is not None:
        checks = with_check(checks, context.fabric.finished)
    fabric = fabric_condition(group, checks, context.fabric.waits_for)
    found = (own,) if fabric is None else (own, fabric)
    generation = group.metadata.generation
    return ShardGroupStatus(
        observed_generation=generation,
        members=len(members),
        ready_members=len(alive),
        replicas=tuple(context.replicas),
        fabric_checks=checks,
        conditions=stamp_conditions(old, found, generation=generation, now=now),
    )


def route_status(
    route: ModelRoute, deployments: set[str], *, old: Status | None, now: datetime
) -> ModelRouteStatus:
    """Return the status of a route: accepted if all deployments that it names exist."""
    named = dict.fromkeys(route.spec.deployments().values())
    missing = [name for name in named if name not in deployments]
    if missing:
        message = f"no such ModelDeployment: {', '.join(missing)}"
        own = make_condition("Accepted", "BackendNotFound", message, holds=False)
    else:
        own = make_condition("Accepted", "BackendsFound", holds=True)
    generation = route.metadata.generation
    return ModelRouteStatus(
        observed_generation=generation,
        conditions=stamp_conditions(old, (own,), generation=generation, now=now),
    )
