"""A snapshot of the fleet for commands: the reconciler's caches, filled once by listing, without a watch.

Works without a leading reconciler and writes nothing. Objects that are not written yet can be supposed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from machinery.clock import Clock
from machinery.version import version
from reconciler.deployments.explain import (
    NodeExplanation,
    explain_group_members,
    explain_nodes,
    group_name_of,
    summarize,
)
from reconciler.deployments.observe import DeploymentView, observe
from reconciler.deployments.placer import (
    Assignment,
    PendingAssignment,
    PlacementOutcome,
    Placer,
    PreemptingAssignment,
)
from reconciler.listers.caches import Caches, make_caches
from reconciler.listers.lister import Lister
from reconciler.nodes.liveness import Now
from reconciler.nodes.node_views import NodeViewCache
from reconciler.placement.inputs import NodeView, Rejection, request_for
from reconciler.placement.refusals import Unschedulable, summary_line
from reconciler.placement.table import NodeTable
from schemas.deployment import ModelDeployment
from schemas.meta import ApiObject, ConditionStatus, find_condition
from schemas.model_snapshot import ModelSnapshot
from store import codec, keys
from store.port import KeyValue, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOutlook:
    """The outcome of placing one more replica of a deployment, with every node explained."""

    observed: DeploymentView
    nodes: tuple[NodeExplanation, ...]
    """Every node, the best first."""
    outcome: PlacementOutcome

    @property
    def line(self) -> str:
        """Return the outcome in one line."""
        match self.outcome:
            case Assignment():
                return summary_line(summarize(self.nodes))
            case PendingAssignment(why=why) | PreemptingAssignment(why=why):
                return summary_line(why)
            case Unschedulable():
                return summary_line(self.outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """The fleet at one moment."""

    caches: Caches
    lister: Lister
    now: datetime

    def suppose(self, objects: Iterable[ApiObject]) -> None:
        """Add objects to the snapshot as if they had been written."""
        for obj in objects:
            put, version = codec.put_spec(obj), int(obj.metadata.resource_version or 0)
            self.caches.specs.suppose(
                KeyValue(put.key, put.value, create_revision=version, mod_revision=version)
            )

    def unresolved(self) -> list[ModelDeployment]:
        """Return the deployments whose hub model has no commit yet, by name."""
        declared = self.lister.declared_deployments()
        return [deployment for deployment in declared if not self.lister.is_resolved(deployment)]

    def suppose_model(self, found: ModelSnapshot) -> None:
        """Add what a hub says of a model, as if the leader had asked it."""
        key = keys.named(keys.SNAPSHOT_PREFIX, found.deployment)
        self.caches.snapshots.suppose(
            KeyValue(key, codec.encode(found), create_revision=0, mod_revision=0)
        )

    def table(self) -> NodeTable:
        """Return all nodes as placement sees them."""
        table = NodeViewCache(version()).refresh(self.lister, Now(time=self.now))
        return NodeTable([self._with_flapping(node) for node in table.nodes])

    def _with_flapping(self, node: NodeView) -> NodeView:
        """Return the node with the hold for flapping, which the leader remembers and writes to the store."""
        life, _ = self.lister.node_life(node.name)
        condition = None if life is None else find_condition(life.conditions, "Flapping")
        if condition is None or condition.status is not ConditionStatus.TRUE:
            return node
        hold = Rejection(reason="NodeFlapping", message=condition.message)
        return replace(node, holds=(*node.holds, hold))

    def deployments(self) -> list[ModelDeployment]:
        """Return all deployments by name."""
        return self.lister.deployments()

    def observe(self, name: str, table: NodeTable) -> DeploymentView:
        """Return the view of a deployment; away nodes count as not lost, because only the leader knows since when."""
        return observe(self.lister, name, Now(time=self.now), table=table)

    def outlook(self, name: str, table: NodeTable) -> PlacementOutlook:
        """Place one more replica of an existing deployment, and explain every node.

        Deployments of a higher priority place their missing replicas before, as in plan.py.
        """
        observed = self.observe(name, table)
        assert observed.deployment is not None
        placer = Placer(table, observed.groups)
        for rival in observed.rivals:
            placer.claim_missing(rival, observed.idle)
        request = request_for(observed.deployment, apart_from=observed.apart_from)
        nodes = [placer.assumed.view(row) for row in range(len(table))]
        outcome = placer.claim(request)
        group_name = group_name_of(outcome)
        group = next((view for view in observed.groups if view.name == group_name), None)
        if group is None:
            return PlacementOutlook(
                observed=observed, nodes=explain_nodes(request, nodes), outcome=outcome
            )
        group_members = explain_group_members(request, nodes, group, outcome)
        return PlacementOutlook(observed=observed, nodes=group_members, outcome=outcome)

    def unreadable(self) -> list[str]:
        """Return the keys whose documents this release cannot decode."""
        return sorted(self.caches.specs.undecodable | self.caches.statuses.undecodable)


async def take(transport: Transport, clock: Clock) -> FleetSnapshot:
    """Read the fleet as it is now.

    Raises:
        StoreError: the store could not be read.

    """
    caches = make_caches(transport, clock)
    for cache in caches.all():
        await cache.list_once()
    return FleetSnapshot(caches=caches, lister=Lister(caches), now=clock.now())
