"""Forecasts what becomes of every replica if all steps of the plans succeed, for `fleetctl plan`. Pure.

plan.py decides one step at a time. The forecast goes through all steps with the same placer, in order of priority, and
supposes that draining replicas end and new ones become ready.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from reconciler.deployments import plan
from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.deployments.placer import Assignment, PlacementOutcome, Placer
from reconciler.deployments.plan import free_names
from reconciler.deployments.rollout import steps
from reconciler.deployments.rollout.revisions import known_contents, template_hash
from reconciler.deployments.rollout.steps import RolloutPhase
from reconciler.placement.inputs import Allocation, PlacementRequest, request_for
from reconciler.placement.refusals import Unschedulable
from reconciler.placement.table import NodeTable
from schemas.deployment import ModelDeployment, with_content
from schemas.replica import MemoryProof

_PARTS: Final = tuple(name for name in MemoryProof.model_fields if name.endswith("_bytes"))


class ForecastKind(StrEnum):
    """The fate of a replica."""

    NEW = "New"
    REPLACED = "Replaced"
    """Another one replaces it: it runs an old version, or must leave its node."""
    IN_PLACE = "ReplacedInPlace"
    """It is replaced, but has to end first: there is no room for both."""
    KEPT = "Kept"
    """It runs an old version and stays: the new version fits nowhere."""
    ENDS = "Ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastStep:
    """One replica and its fate."""

    deployment: str
    replica: str
    kind: ForecastKind
    before: str = ""
    """Its node; with several ranks, all nodes in rank order, joined by commas."""
    outcome: PlacementOutcome | None = None
    """Its destination, or the reason it has none; None for a replica that ends."""
    memory: MemoryProof | None = None
    """Memory that it needs there, all ranks together."""
    fetch_bytes: int = 0
    """Bytes of its model that its nodes fetch first."""
    because: str = ""


def forecast(observations: Sequence[DeploymentView], table: NodeTable) -> tuple[ForecastStep, ...]:
    """Return a step for every replica that does not stay as it is; the highest priority places first."""
    groups = {group.name: group for observed in observations for group in observed.groups}
    placer = Placer(table, list(groups.values()))
    order = sorted(observations, key=lambda observed: (-_priority(observed), observed.name))
    return tuple(
        step for observed in order for step in _DeploymentForecast(observed, placer, table).steps()
    )


def _priority(observed: DeploymentView) -> int:
    return 0 if observed.deployment is None else observed.deployment.spec.priority


class _DeploymentForecast:
    """The forecast of one deployment."""

    def __init__(self, observed: DeploymentView, placer: Placer, table: NodeTable) -> None:
        self._observed = observed
        self._placer = placer
        self._table = table
        self._rows = {node.name: row for row, node in enumerate(table.nodes)}
        self._unschedulable: Unschedulable | None = None

    def steps(self) -> Iterator[ForecastStep]:
        """Yield the steps of the deployment's replicas."""
        observed = self._observed
        active = [r for r in observed.replicas if not r.is_deleting]
        owned = [r for r in active if r.is_owned and not observed.is_ending]
        for replica in (r for r in active if r not in owned):
            yield self._end(replica, "its deployment is gone or being deleted")
        if observed.deployment is None or observed.is_ending:
            return
        goal = steps.rollout_goal(self._observed, observed.deployment)
        target = (
            template_hash(observed.deployment) if goal.phase is RolloutPhase.CANARY else goal.target
        )
        content = known_contents(self._observed)[target]
        request = request_for(
            with_content(observed.deployment, content), apart_from=self._observed.apart_from
        )
        surplus = sorted(
            owned, key=lambda r: (r.is_ready, r.replica.spec.template == target, -r.ordinal)
        )[: max(0, len(owned) - observed.desired_replicas)]
        for view in surplus:
            yield self._end(view, f"the deployment needs {observed.desired_replicas}")
        views = [r for r in owned if r not in surplus]
        groups = plan.group_by_eviction(observed.deployment, views, self._table)
        for rank in sorted((*groups.leaving, *groups.evicted), key=lambda r: r.ordinal):
            yield self._leave(rank, request, groups)
        for view in sorted(groups.staying, key=lambda r: r.ordinal):
            if view.replica.spec.template != target:
                yield self._replace(view, request, observed.deployment)
        names = free_names(observed)
        for _ in range(observed.desired_replicas - len(views)):
            step = ForecastStep(
                deployment=observed.name, replica=next(names), kind=ForecastKind.NEW
            )
            yield self._to(step, self._claim(request), request)

    def _claim(self, request: PlacementRequest) -> PlacementOutcome:
        # A version that does not fit once does not fit again.
        outcome = self._unschedulable or self._placer.claim(request)
        if isinstance(outcome, Unschedulable):
            self._unschedulable = outcome
        return outcome

    def _end(self, one: ReplicaView, because: str) -> ForecastStep:
        """End a replica: count its memory as ending, so that others can wait for it."""
        for row, allocation in self._allocations(one):
            if not allocation.is_ending and allocation.replica not in self._placer.assumed.victims:
                self._placer.assumed.end(row, allocation)
        return self._step(one, ForecastKind.ENDS, because)

    def _leave(
        self, one: ReplicaView, request: PlacementRequest, found: plan.EvictionGroups
    ) -> ForecastStep:
        """Move a replica off its node: its replacement starts first and preempts nothing."""
        outcome = self._placer.place(request)
        is_evicted = one in found.evicted
        if isinstance(outcome, Assignment) or is_evicted:
            self._free(one)
        reasons = (node.leave_reason for node in self._table.nodes if node.name in one.nodes)
        why = "its node is tainted NoExecute" if is_evicted else next(filter(None, reasons), "")
        return self._to(self._step(one, ForecastKind.REPLACED, why), outcome, request)

    def _replace(
        self, one: ReplicaView, request: PlacementRequest, deployment: ModelDeployment
    ) -> ForecastStep:
        because = "it runs an older version"
        surge, _ = steps.surge_limits(deployment, self._observed.desired_replicas)
        if surge and deployment.spec.rollout.strategy == "RollingUpdate":
            outcome = self._placer.place(request)
            if isinstance(outcome, Assignment):
                self._free(one)
                return self._to(self._step(one, ForecastKind.REPLACED, because), outcome, request)
        self._free(one)
        claimed = self._claim(request)
        if isinstance(claimed, Unschedulable) and deployment.spec.rollout.strategy != "Recreate":
            # Undo `_free`.
            for row, allocation in self._allocations(one):
                self._placer.assumed.assign(row, allocation.deployment, allocation.bytes)
                self._placer.assumed.victims.discard(allocation.replica)
            return replace(self._step(one, ForecastKind.KEPT, because), outcome=claimed)
        return self._to(self._step(one, ForecastKind.IN_PLACE, because), claimed, request)

    def _free(self, one: ReplicaView) -> None:
        """Count a replica's memory as free, and never choose it as a victim."""
        for row, allocation in self._allocations(one):
            self._placer.assumed.release(row, allocation.deployment, allocation.bytes)
            self._placer.assumed.victims.add(allocation.replica)

    def _allocations(self, one: ReplicaView) -> Iterator[tuple[int, Allocation]]:
        for name in sorted(one.nodes):
            row = self._rows.get(name)
            for allocation in self._table.nodes[row].allocations if row is not None else ():
                if row is not None and allocation.replica == one.name:
                    yield row, allocation

    def _step(self, one: ReplicaView, kind: ForecastKind, because: str) -> ForecastStep:
        return ForecastStep(
            deployment=self._observed.name,
            replica=one.name,
            kind=kind,
            before=",".join(rank.node for rank in one.replica.spec.ranks),
            because=because,
        )

    def _to(
        self, step: ForecastStep, outcome: PlacementOutcome, request: PlacementRequest
    ) -> ForecastStep:
        """Return the step with its destination, and with what that needs."""
        ranks = () if isinstance(outcome, Unschedulable) else outcome.ranks
        nodes = (self._table.nodes[self._rows[rank.node]] for rank in ranks)
        return replace(
            step,
            outcome=outcome,
            memory=_memory(outcome),
            fetch_bytes=sum(node.missing_bytes(request.path) for node in nodes),
        )


def _memory(outcome: PlacementOutcome) -> MemoryProof | None:
    """Return the memory of all ranks together; None if they have no nodes."""
    if isinstance(outcome, Unschedulable):
        return None
    first, *others = (rank.memory for rank in outcome.ranks)
    if not others:
        return first
    sizes = {name: sum(getattr(proof, name) for proof in (first, *others)) for name in _PARTS}
    return first.model_copy(update=sizes)
