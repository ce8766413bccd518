"""Reconciles one node: registers it when its agent joined, and keeps the reconciler's document about it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime

from machinery.clock import Clock
from machinery.control_loop import Requeue, soonest_s
from reconciler.listers.caches import wait_for_revision
from reconciler.listers.lister import Lister
from reconciler.nodes.liveness import NodeLiveness, Now
from reconciler.nodes.node_state import NodeContext, NodeState, evaluate_node, flap_message
from reconciler.nodes.node_views import NodeContextCache
from reconciler.nodes.wired_limits import wired_limit_condition
from schemas.event import ObjectReference
from schemas.meta import (
    ConditionStatus,
    ObjectKey,
    ObjectMeta,
    Status,
    is_true,
    make_condition,
    stamp_conditions,
)
from schemas.node import Node, NodeLifeStatus, NodeSpec
from store import codec, keys
from store.events import EventRecorder
from store.port import Delete, Guard, ModRevisionGuard, Operation, Put


class NodeReconciler:
    """Registers nodes that join, and keeps the reconciler's documents about nodes. Needs leadership."""

    def __init__(
        self,
        lister: Lister,
        liveness: NodeLiveness,
        commit: Callable[[Sequence[Guard], Sequence[Operation]], Awaitable[int]],
        recorder: EventRecorder,
        clock: Clock,
        version: str,
    ) -> None:
        """`commit` writes for the leader; `version` is the reconciler's own, empty to accept agents of every version."""
        self._lister = lister
        self._commit = commit
        self._recorder = recorder
        self._liveness = liveness
        self._clock = clock
        self._contexts = NodeContextCache(version)

    async def reconcile(self, key: ObjectKey) -> Requeue | None:
        """Reconcile one node, and the nodes that are or were the same machine."""
        node_status = self._lister.node_status(key.name)
        if node_status is not None and self._lister.spec(key) is None:
            # Without a lease its agent has ended: it is registered when it comes back, which queues the key again.
            if self._lister.is_ready(key.name):
                await self._register(key.name, node_status.uid)
            return None  # the write queues the key again
        now = self._liveness.now(self._lister, self._clock)
        self._contexts.update(self._lister.pools(), now)
        names = {key.name} | self._contexts.same_hardware(self._lister, [key.name])
        after_s = soonest_s(*[await self._write_life(name, now) for name in sorted(names)])
        return None if after_s is None else Requeue(after_s=after_s)

    async def _register(self, name: str, uid: str) -> None:
        """Write an empty spec for a node that joined.

        A node that was deleted meanwhile, or whose agent has ended, must not come back.
        """
        described, held = self._lister.node_versions(name)
        metadata = ObjectMeta(
            name=name, uid=uid, generation=1, creation_timestamp=self._clock.now()
        )
        put = codec.put_spec(Node(metadata=metadata, spec=NodeSpec()))
        guards = [
            ModRevisionGuard(key=put.key, mod_revision=0),
            ModRevisionGuard(key=keys.status_key("Node", name), mod_revision=described),
            ModRevisionGuard(key=keys.node_lease_key(name), mod_revision=held),
        ]
        await self._commit(guards, [put])

    async def _write_life(self, name: str, now: Now) -> float | None:
        """Write the document about a node if it changed; return the seconds until it may change again."""
        node = self._lister.node(name)
        old, version = self._lister.node_life(name)
        life_key = keys.node_life_key(name)
        if node.status is None or self._lister.spec(ObjectKey("Node", name)) is None:
            if version:
                unchanged = ModRevisionGuard(key=life_key, mod_revision=version)
                await self._wait_for_lives(await self._commit([unchanged], [Delete(key=life_key)]))
            return None
        context = replace(
            self._contexts.context_of(self._lister, node),
            asleep=self._liveness.sleep_conditions.get(name),
        )
        new = node_life_status(
            node,
            evaluate_node(node, node.status, context),
            context,
            is_ready=self._lister.is_ready(name),
            old=old,
            now=now.time,
        )
        if new != old and not self._lister.is_node_life_newer(name):
            registered = self._lister.spec_version(ObjectKey("Node", name))
            guards = [
                ModRevisionGuard(key=life_key, mod_revision=version),
                ModRevisionGuard(key=keys.spec_key("Node", name), mod_revision=registered),
            ]
            put = Put(key=life_key, value=codec.encode(new))
            revision = await self._commit(guards, [put])
            await self._record_events(name, node.metadata.uid, old, new)
            await self._wait_for_lives(revision)
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
        for now in new.conditions:
            was_true = old is not None and is_true(old.conditions, now.type)
            if (
                now.type not in ("Ready", "Asleep")
                and now.status is ConditionStatus.TRUE
                and not was_true
            ):
                await self._recorder.record(about, now.type, now.message, type_="Warning")

    async def _wait_for_lives(self, revision: int) -> None:
        """Wait until the cache shows the write: otherwise it would be written again."""
        await wait_for_revision(self._lister.caches.lives, revision)


def node_life_status(
    node: Node,
    state: NodeState,
    context: NodeContext,
    *,
    is_ready: bool,
    old: Status | None,
    now: datetime,
) -> NodeLifeStatus:
    """Return the reconciler's document about a node; equal to `old` if nothing changed.

    Its condition Ready records since when; whether a node is ready is decided by its lease.
    """
    no_lease = "its agent does not renew its lease"
    conditions = [make_condition("Ready", "LeaseHeld", holds=True)]
    if not is_ready:
        conditions = [make_condition("Ready", "LeaseLost", no_lease, holds=False)]
    if context.asleep is not None:
        conditions.append(context.asleep)
        if not is_ready and context.asleep.status is ConditionStatus.TRUE:
            reason, message = context.asleep.reason, context.asleep.message
            conditions[0] = make_condition("Ready", reason, message, holds=False)
    if context.flapping is None:
        conditions.append(make_condition("Flapping", "Steady", holds=False))
    else:
        message = flap_message(context.flapping)
        conditions.append(make_condition("Flapping", "CameBackTooOften", message, holds=True))
    if not state.skew:
        conditions.append(make_condition("VersionSkew", "VersionsAgree", holds=False))
    else:
        reason = "AgentVersion" if state.hold("VersionSkew") is not None else "MlxLmVersion"
        conditions.append(make_condition("VersionSkew", reason, state.skew, holds=True))
    clone, withheld = state.hold("DuplicateHardware"), state.hold("NodeWithheld")
    conditions.append(
        make_condition("DuplicateHardware", "NothingFound", holds=False)
        if clone is None
        else make_condition("DuplicateHardware", "SameHardware", clone.message, holds=True)
    )
    conditions.append(
        make_condition("Withheld", "NothingFound", holds=False)
        if withheld is None
        else make_condition("Withheld", "PoolPolicy", withheld.message, holds=True)
    )
    if node.status is not None:
        limit = wired_limit_condition(node, node.status, context.pools)
        conditions += [limit] if limit is not None else []
    generation = node.metadata.generation
    return NodeLifeStatus(
        observed_generation=generation,
        conditions=stamp_conditions(old, conditions, generation=generation, now=now),
    )
