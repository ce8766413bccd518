"""The fleet as the store has it now, for who looks once: the reconciler's caches, filled by listing, without a watch.

Needs no reconciler that leads, and writes nothing. What is not written yet can be supposed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from machinery.clock import Clock
from machinery.version import version
from reconciler import observe
from reconciler.explain import NodeExplanation, explain_nodes, group_name_of, summarize
from reconciler.explain import explain_group_members as explain_group
from reconciler.listers.caches import Caches, make_caches
from reconciler.listers.lister import Lister
from reconciler.nodes.node_views import NodeViewCache, Now
from reconciler.placement.inputs import request_for
from reconciler.placement.refusals import Unschedulable, summary_line
from reconciler.placement.table import NodeTable
from reconciler.placer import (
    Assignment,
    PendingAssignment,
    PlacementOutcome,
    Placer,
    PreemptingAssignment,
)
from reconciler.views import DeploymentView, NodeHold, NodeView
from schemas.deployment import ModelDeployment
from schemas.meta import ApiObject, ConditionStatus, find_condition
from store import codec
from store.port import KeyValue, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOutlook:
    """What there is to say of one more replica of a deployment."""

    observed: DeploymentView
    nodes: tuple[NodeExplanation, ...]
    """Every node, the best first."""
    outcome: PlacementOutcome

    @property
    def line(self) -> str:
        """Return it in one line."""
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
    fleet: Lister
    now: datetime

    def suppose(self, objects: Iterable[ApiObject]) -> None:
        """Have the snapshot show these objects as if they had been written."""
        for obj in objects:
            put, version = codec.put_spec(obj), int(obj.metadata.resource_version or 0)
            self.caches.specs.suppose(
                KeyValue(put.key, put.value, create_revision=version, mod_revision=version)
            )

    def table(self) -> NodeTable:
        """Return all nodes as placement sees them."""
        seen = NodeViewCache(version()).look(self.fleet, Now(now=self.now))
        return NodeTable([self._held_back(node) for node in seen.nodes])

    def _held_back(self, node: NodeView) -> NodeView:
        """Return the node with what only the leader remembers, but writes down: that it comes and goes."""
        life, _ = self.fleet.machines.life(node.name)
        found = None if life is None else find_condition(life.conditions, "Flapping")
        if found is None or found.status is not ConditionStatus.TRUE:
            return node
        hold = NodeHold(reason="NodeFlapping", message=found.message)
        return replace(node, holds=(*node.holds, hold))

    def deployments(self) -> list[ModelDeployment]:
        """Return all deployments by name."""
        found = self.fleet.of_kind("ModelDeployment")
        return [one for one in found if isinstance(one, ModelDeployment)]

    def observe(self, name: str, table: NodeTable) -> DeploymentView:
        """Return what decides about a deployment; nobody knows here for how long a node has been away."""
        return observe.observe(self.fleet, name, observe.Now(now=self.now), nodes=table.nodes)

    def outlook(self, name: str, table: NodeTable) -> PlacementOutlook:
        """Return what placement thinks of the nodes for one more replica of a deployment that is there.

        What of a higher priority misses something has chosen before, as in plan.py.
        """
        observed = self.observe(name, table)
        assert observed.deployment is not None
        placer = Placer(table, observed.groups)
        for rival in observed.rivals:
            for _ in range(rival.missing):
                if isinstance(placer.claim(rival.want), Unschedulable):
                    break
        want = request_for(observed.deployment, apart_from=observed.apart_from)
        nodes = [placer.draft.view(row) for row in range(len(table))]
        outcome = placer.claim(want)
        name = group_name_of(outcome)
        group = next((one for one in observed.groups if one.name == name), None)
        if group is None:
            return PlacementOutlook(
                observed=observed, nodes=explain_nodes(want, nodes), outcome=outcome
            )
        found = explain_group(want, nodes, group, outcome)
        return PlacementOutlook(observed=observed, nodes=found, outcome=outcome)

    def unreadable(self) -> list[str]:
        """Return the keys whose documents this process does not understand."""
        return sorted(self.caches.specs.undecodable | self.caches.statuses.undecodable)


async def take(transport: Transport, clock: Clock) -> FleetSnapshot:
    """Return the fleet as it is now.

    Raises:
        StoreError: the store could not be read.

    """
    caches = make_caches(transport, clock)
    for cache in caches.all():
        await cache.list_once()
    return FleetSnapshot(caches=caches, fleet=Lister(caches), now=clock.now())
