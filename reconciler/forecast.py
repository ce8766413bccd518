"""What the planner would come to, step after step, if every step went well: for people who ask before. Pure.

The reconciler itself decides one step at a time (plan.py); this counts them through with the same placer, in order
of priority, and supposes that what drains ends and what starts becomes ready.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from reconciler import plan
from reconciler.placement.inputs import PlacementRequest, request_for
from reconciler.placement.refusals import Unschedulable
from reconciler.placement.table import NodeTable
from reconciler.placer import Assignment, PlacementOutcome, Placer
from reconciler.rollout import steps
from reconciler.rollout.revisions import known_contents, template_hash, with_content
from reconciler.rollout.steps import RolloutPhase
from reconciler.views import Allocation, DeploymentView, ReplicaView
from schemas.deployment import ModelDeployment
from schemas.replica import MemoryProof, replica_name

_PARTS: Final = tuple(MemoryProof.model_fields)


class ForecastKind(StrEnum):
    """What becomes of a replica."""

    NEW = "New"
    REPLACED = "Replaced"
    """Another one takes its place: it runs an old version, or its node is given up."""
    IN_PLACE = "ReplacedInPlace"
    """As before, but it has to end first: there is no room for both."""
    KEPT = "Kept"
    """It runs an old version, and goes on: the new one would fit nowhere."""
    ENDS = "Ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastStep:
    """One replica, and what becomes of it."""

    deployment: str
    replica: str
    kind: ForecastKind
    before: str = ""
    """The node where it is; of several ranks, all of them in their order."""
    outcome: PlacementOutcome | None = None
    """Where it goes, or why nowhere; None for what ends."""
    memory: MemoryProof | None = None
    """What it needs where it goes, all its ranks together."""
    because: str = ""


def forecast(observations: Sequence[DeploymentView], table: NodeTable) -> tuple[ForecastStep, ...]:
    """Return what becomes of every replica that does not stay as it is; who is higher chooses first."""
    groups = {group.name: group for seen in observations for group in seen.groups}
    placer = Placer(table, list(groups.values()))
    order = sorted(observations, key=lambda seen: (-_priority(seen), seen.name))
    return tuple(
        step for seen in order for step in _DeploymentForecast(seen, placer, table).steps()
    )


def _priority(seen: DeploymentView) -> int:
    return 0 if seen.deployment is None else seen.deployment.spec.priority


class _DeploymentForecast:
    """One deployment, counted through."""

    def __init__(self, seen: DeploymentView, placer: Placer, table: NodeTable) -> None:
        self._seen = seen
        self._placer = placer
        self._table = table
        self._rows = {node.name: row for row, node in enumerate(table.nodes)}
        self._fallen: Unschedulable | None = None

    def steps(self) -> Iterator[ForecastStep]:
        """Yield what becomes of the deployment's replicas."""
        seen = self._seen
        active = [r for r in seen.replicas if not r.is_deleting]
        ours = [r for r in active if r.is_ours and not seen.is_ending]
        for one in (r for r in active if r not in ours):
            yield self._end(one, "its deployment is gone or being deleted")
        if seen.deployment is None or seen.is_ending:
            return
        target = self._target(seen.deployment)
        want = self._want(seen.deployment, target)
        surplus = sorted(
            ours, key=lambda r: (r.is_ready, r.replica.spec.template == target, -r.ordinal)
        )[: max(0, len(ours) - seen.wanted)]
        for one in surplus:
            yield self._end(one, f"{seen.wanted} are wanted")
        kept = [r for r in ours if r not in surplus]
        found = plan.group_by_eviction(seen, seen.deployment, kept)
        for one in sorted((*found.leaving, *found.driven_out), key=lambda r: r.ordinal):
            yield self._leave(one, want, found)
        for one in sorted(found.staying, key=lambda r: r.ordinal):
            if one.replica.spec.template != target:
                yield self._replace(one, want, seen.deployment)
        names = self._free_names()
        for _ in range(seen.wanted - len(kept)):
            outcome = self._claim(want)
            yield ForecastStep(
                deployment=seen.name,
                replica=next(names),
                kind=ForecastKind.NEW,
                outcome=outcome,
                memory=_memory(outcome),
            )

    def _target(self, deployment: ModelDeployment) -> str:
        """Return the version that the replicas are to have in the end, if a trial of it goes well."""
        goal = steps.rollout_goal(self._seen, deployment)
        return template_hash(deployment) if goal.phase is RolloutPhase.CANARY else goal.target

    def _want(self, deployment: ModelDeployment, target: str) -> PlacementRequest:
        content = known_contents(self._seen)[target]
        return request_for(with_content(deployment, content), apart_from=self._seen.apart_from)

    def _claim(self, want: PlacementRequest) -> PlacementOutcome:
        # What does not fit once does not fit again.
        outcome = self._fallen or self._placer.claim(want)
        if isinstance(outcome, Unschedulable):
            self._fallen = outcome
        return outcome

    def _end(self, one: ReplicaView, because: str) -> ForecastStep:
        """Have a replica end: its memory is on its way back, and others may wait for it."""
        for row, tenant in self._tenants(one):
            if not tenant.is_ending and tenant.replica not in self._placer.draft.victims:
                self._placer.draft.end(row, tenant)
        return self._step(one, ForecastKind.ENDS, because)

    def _leave(
        self, one: ReplicaView, want: PlacementRequest, found: plan.EvictionGroups
    ) -> ForecastStep:
        """Have a replica leave its node: another one first, for which nobody is displaced."""
        outcome = self._placer.place(want)
        is_driven = one in found.driven_out
        if isinstance(outcome, Assignment) or is_driven:
            self._free(one)
        leaves = (node.leave for node in self._table.nodes if node.name in one.nodes)
        why = "its node is tainted NoExecute" if is_driven else next(filter(None, leaves), "")
        step = self._step(one, ForecastKind.REPLACED, why)
        return replace(step, outcome=outcome, memory=_memory(outcome))

    def _replace(
        self, one: ReplicaView, want: PlacementRequest, deployment: ModelDeployment
    ) -> ForecastStep:
        because = "it runs an older version"
        surge, _ = steps.surge_limits(deployment, self._seen.wanted)
        if surge and deployment.spec.rollout.strategy == "RollingUpdate":
            outcome = self._placer.place(want)
            if isinstance(outcome, Assignment):
                self._free(one)
                step = self._step(one, ForecastKind.REPLACED, because)
                return replace(step, outcome=outcome, memory=_memory(outcome))
        self._free(one)
        claimed = self._claim(want)
        if isinstance(claimed, Unschedulable) and deployment.spec.rollout.strategy != "Recreate":
            self._take_back(one)
            return replace(self._step(one, ForecastKind.KEPT, because), outcome=claimed)
        step = self._step(one, ForecastKind.IN_PLACE, because)
        return replace(step, outcome=claimed, memory=_memory(claimed))

    def _free(self, one: ReplicaView) -> None:
        """Count a replica's memory as free again; it is nobody's victim any more."""
        for row, tenant in self._tenants(one):
            self._placer.draft.release(row, tenant.deployment, tenant.bytes)
            self._placer.draft.victims.add(tenant.replica)

    def _take_back(self, one: ReplicaView) -> None:
        """Undo what `_free` did."""
        for row, tenant in self._tenants(one):
            self._placer.draft.assign(row, tenant.deployment, tenant.bytes)
            self._placer.draft.victims.discard(tenant.replica)

    def _tenants(self, one: ReplicaView) -> Iterator[tuple[int, Allocation]]:
        for name in sorted(one.nodes):
            row = self._rows.get(name)
            for tenant in self._table.nodes[row].allocations if row is not None else ():
                if row is not None and tenant.replica == one.name:
                    yield row, tenant

    def _step(self, one: ReplicaView, kind: ForecastKind, because: str) -> ForecastStep:
        return ForecastStep(
            deployment=self._seen.name,
            replica=one.name,
            kind=kind,
            before=",".join(rank.node for rank in one.replica.spec.ranks),
            because=because,
        )

    def _free_names(self) -> Iterator[str]:
        taken = {r.name for r in self._seen.replicas}
        ordinal = 0
        while True:
            name = replica_name(self._seen.name, ordinal)
            if name not in taken:
                yield name
            ordinal += 1


def _memory(outcome: PlacementOutcome) -> MemoryProof | None:
    """Return what all ranks of a replica need together; None if they have no place."""
    if isinstance(outcome, Unschedulable):
        return None
    first, *others = (rank.memory for rank in outcome.ranks)
    if not others:
        return first
    sizes = {name: sum(getattr(one, name) for one in (first, *others)) for name in _PARTS}
    return MemoryProof.model_validate(sizes)
