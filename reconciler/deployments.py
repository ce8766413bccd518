"""One look at one deployment: observe, plan, execute, status."""

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace

from machinery.clock import Clock
from machinery.loop import Again
from reconciler import status, views
from reconciler.actions import Action, PreemptReplica
from reconciler.autoscaling.autoscaler import Autoscaler
from reconciler.autoscaling.decision import Decision
from reconciler.demand.watch import DemandWatch
from reconciler.execute import Executor
from reconciler.known.caches import Caches
from reconciler.known.fleet import Fleet
from reconciler.nodes.circumstances import Moment
from reconciler.nodes.life import NodeLife
from reconciler.nodes.views import NodeViews
from reconciler.observe import Observed
from reconciler.patience import Patience
from reconciler.placement.table import Table
from reconciler.plan import Plan, plan
from reconciler.replica_status import replica_status
from reconciler.rollout import progress
from reconciler.rollout.canary import CanaryBook, advance
from reconciler.rollout.revisions import template
from reconciler.rollout.steps import Phase, goal_of
from reconciler.telling import Teller
from schemas.deployment import CanaryStatus, ModelDeployment, ModelDeploymentStatus
from schemas.meta import ObjectKey, Status
from schemas.replica import Replica
from store import keys
from store.errors import UnavailableError

_CATCH_UP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Senses:
    """What the leader knows beside the caches."""

    life: NodeLife
    nodes: NodeViews
    autoscaler: Autoscaler
    demand: DemandWatch
    book: CanaryBook
    short_of_room: set[str]
    """Deployments that would go on if there were more room."""

    def moment(self, clock: Clock) -> Moment:
        """Return what decides about nodes now, beside what is written of them."""
        now = clock.now()
        return Moment(now=now, flapping=self.life.flapping(clock.monotonic(), now))


class Deployments:
    """Brings one deployment nearer to its spec at a time. Needs leadership."""

    def __init__(
        self, caches: Caches, senses: Senses, executor: Executor, teller: Teller, clock: Clock
    ) -> None:
        self._caches = caches
        self._fleet = Fleet(caches)
        self._senses = senses
        self._executor = executor
        self._teller = teller
        self._clock = clock
        self._patience = Patience()
        self._table = Table(())

    async def reconcile(self, key: ObjectKey) -> Again | None:
        """Look at one deployment and act; it may be gone, and only replicas of it left."""
        await self._catch_up(await self._executor.last_assignment())
        scaled = self._scaled(key.name)
        seen = self._observe(key.name, scaled)
        decided = plan(seen, self._table)
        if decided.unschedulable or decided.stuck:
            self._senses.short_of_room.add(key.name)
        else:
            self._senses.short_of_room.discard(key.name)
        await self._act(decided, seen)
        if decided.actions:
            seen = self._observe(key.name, scaled)
        await self._replica_statuses(seen)
        looks = [decided.requeue_after_s, scaled.look_again_s if scaled is not None else None]
        if seen.deployment is not None and not seen.is_ending:
            looks.append(await self._status(key, seen.deployment, seen, decided))
        else:
            self._senses.autoscaler.forget(key.name)
            self._senses.book.forget(key.name)
        after_s = min((look for look in looks if look is not None), default=None)
        return None if after_s is None else Again(after_s=after_s)

    async def _act(self, decided: Plan, seen: Observed) -> None:
        replicas = {r.name: r.replica for r in seen.replicas} | self._victims(decided.actions)
        work = self._executor.do_all(decided.actions, seen.deployment, replicas)
        async with aclosing(work) as steps:
            async for done, revision in steps:
                for action in done:
                    await self._teller.told(action, seen)
                await self._catch_up(revision)

    def _victims(self, actions: Iterable[Action]) -> dict[str, Replica]:
        """Return the replicas of others that are to make room."""
        names = {action.name for action in actions if isinstance(action, PreemptReplica)}
        if not names:
            return {}
        return {found.name: found for found in self._fleet.replicas() if found.name in names}

    def _scaled(self, name: str) -> Decision | None:
        """Return how many replicas load and schedule ask for; None where the spec says it."""
        found = self._fleet.spec(ObjectKey("ModelDeployment", name))
        if not isinstance(found, ModelDeployment) or found.spec.autoscaling is None:
            self._senses.autoscaler.forget(name)
            return None
        return self._senses.autoscaler.desired(
            found,
            self._fleet.wishes.status(name),
            self._senses.demand.demand(name),
            self._clock.now(),
            self._clock.monotonic(),
        )

    def _observe(self, name: str, scaled: Decision | None) -> Observed:
        now = self._clock.monotonic()
        moment = self._senses.moment(self._clock)
        mine = [rank.node for r in self._fleet.replicas_of(name) for rank in r.spec.ranks]
        self._table = self._senses.nodes.look(self._fleet, moment)
        looks = (
            self._senses.life.next_look_s(mine, now),
            self._senses.life.next_release_s(now),
            self._senses.nodes.next_change_s(moment),
        )
        looked = views.Looked(
            now=moment.now,
            # Who is back is not lost, also if nobody has taken note of it yet.
            lost=frozenset(n for n in self._senses.life.lost(now) if not self._fleet.is_ready(n)),
            next_look_s=min((s for s in looks if s is not None), default=None),
        )
        seen = views.observe(self._fleet, name, looked, nodes=self._table.nodes)
        if scaled is not None:
            seen = replace(seen, desired=scaled.desired, scaling=status.of_scaling(scaled))
        if seen.deployment is None:
            return seen
        source = seen.deployment.spec.model
        is_incomplete = any(node.is_ready and not node.has_looked_at(source) for node in seen.nodes)
        left_s = self._patience.left_s(source, is_incomplete=is_incomplete, now=now)
        if left_s == 0:
            return seen
        next_look_s = min(left_s, seen.next_look_s or left_s)
        return replace(seen, awaits_reports=True, next_look_s=next_look_s)

    async def _catch_up(self, revision: int) -> None:
        """Wait until a write is in the cache, ours or our predecessor's: the next plan must count it."""
        try:
            async with asyncio.timeout(_CATCH_UP_S):
                await self._caches.specs.reached(revision)
        except TimeoutError:
            raise UnavailableError("the watch does not keep up with our own writes") from None

    async def _replica_statuses(self, seen: Observed) -> None:
        news: list[tuple[ObjectKey, Status, int]] = []
        for view in seen.replicas:
            key = ObjectKey("Replica", view.name)
            old = self._fleet.status(key)
            reports = self._fleet.ranks(view.replica)
            new = replica_status(view, reports, old=old, now=self._clock.now())
            if old != new and not self._fleet.is_newer(key):
                news.append((key, new, view.version))
                await self._teller.told_replica(seen, old, new)
        await self._executor.write_statuses(news)

    async def _status(
        self,
        key: ObjectKey,
        deployment: ModelDeployment,
        seen: Observed,
        decided: Plan,
    ) -> float | None:
        """Write what is so; return when to look again though nothing changed."""
        now, old = self._clock.now(), self._fleet.wishes.status(key.name)
        trial, look_s = self._trial(deployment, seen)
        unschedulable = decided.unschedulable
        hindrance = unschedulable or decided.stuck
        moved = progress.of(deployment, seen, hindrance, canary=trial, old=old, now=now)
        new = status.of_deployment(deployment, seen, unschedulable, moved, old=old, now=now)
        if old == new or self._fleet.is_newer(key):
            return min((s for s in (look_s, moved.look_again_s) if s is not None), default=None)
        version = self._caches.specs.version(keys.spec_key(*key))
        revision = await self._executor.write_status(key, new, version=version)
        await self._teller.told_status(deployment, old, new, unschedulable)
        if _steers(old) != _steers(new):
            # The next look goes by what this one wrote.
            await self._remembered(revision)
            return 0.0
        return min((s for s in (look_s, moved.look_again_s) if s is not None), default=None)

    def _trial(
        self, deployment: ModelDeployment, seen: Observed
    ) -> tuple[CanaryStatus | None, float | None]:
        """Return where the trial of the newest version is, and when to look at it again."""
        goal, canary = goal_of(seen, deployment), deployment.spec.rollout.canary
        if canary is None or goal.phase is not Phase.CANARY:
            self._senses.book.forget(deployment.name)
            was = seen.canary if canary is not None else None
            return (was if was and was.template == template(deployment) else None), None
        ready = [r for r in seen.replicas if r.is_ready and r.replica.spec.template == goal.trial]
        total = self._senses.demand.measured(deployment.name, goal.trial)
        return advance(
            canary,
            seen.canary,
            goal.trial,
            is_new_ready=len(ready) >= goal.trial_replicas,
            measured=self._senses.book.measured(deployment.name, seen.canary, total),
            now=self._clock.now(),
        )

    async def _remembered(self, revision: int) -> None:
        try:
            async with asyncio.timeout(_CATCH_UP_S):
                await self._caches.statuses.reached(revision)
        except TimeoutError:
            raise UnavailableError("the watch does not keep up with our own writes") from None


def _steers(found: ModelDeploymentStatus | None) -> tuple[object, ...]:
    """Return what of a status later plans go by."""
    if found is None:
        return (None, "", 0)
    return (found.canary, found.stable_template, found.desired_replicas)
