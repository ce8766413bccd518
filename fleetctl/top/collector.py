"""What one look at the fleet saw, as values: what agents, engines and gateways said, and who said nothing. Pure.

Looks at the fleet once: store, agents, engines, gateways, all at the same time. Adds up nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import gateways, process_client
from fleetctl.fleets.process_client import ProcessAddress
from fleetctl.output.columns import field_at
from machinery.clock import Clock
from nodeagent.api import machine_metrics
from reconciler.demand import gateway_metrics
from reconciler.demand.gateway_metrics import GatewaySample
from schemas.records import GatewayLease
from store import object_trees
from store.object_trees import Tree
from store.port import Transport


class RankSample(msgspec.Struct, frozen=True, rename="camel"):
    """One rank of a replica, in the words of an agent's /v1/vitals; None where nobody could tell."""

    replica: str
    rank: int = 0
    state: str = "Ready"
    tokens: float | None = None
    """Made since its engine started."""
    in_flight: float | None = None
    """Sequences that hold a slot."""
    waiting: float | None = None
    """Requests in its queue."""
    active_bytes: float | None = None
    """In MLX's arrays."""
    proven_bytes: int = 0
    why: str = ""
    """Why there are no figures."""


class NodeMemory(msgspec.Struct, frozen=True, rename="camel"):
    """A machine's memory."""

    total_bytes: int
    available_bytes: int
    allocatable_bytes: int
    """What models may use."""


class AgentVitals(msgspec.Struct, frozen=True, rename="camel"):
    """What an agent says."""

    memory: NodeMemory
    ranks: tuple[RankSample, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """One node."""

    name: str
    memory: NodeMemory | None = None
    """None if its agent said nothing."""
    ranks: tuple[RankSample, ...] = ()
    """What runs there; without its agent, what engines said themselves."""
    is_known: bool = False
    """Whether `ranks` are all there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlacement:
    """Where a replica is."""

    deployment: str
    nodes: tuple[str, ...]
    """By rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentCounts:
    """One deployment, as the store has it."""

    name: str
    ready: int
    wanted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSample:
    """Everything as of one moment."""

    at_s: float
    """On a clock that never goes back."""
    nodes: tuple[NodeSample, ...] = ()
    deployments: tuple[DeploymentCounts, ...] = ()
    replicas: Mapping[str, ReplicaPlacement] = field(default_factory=dict)
    gateways: Mapping[str, GatewaySample] = field(default_factory=dict)
    """Those that answered, by id."""
    has_all_gateways: bool = True
    reasons: tuple[str, ...] = ()
    """Why something is not known, a sentence each."""

    def ranks(self) -> dict[tuple[str, int], RankSample]:
        """Return what is known of each rank of each replica."""
        return {(rank.replica, rank.rank): rank for node in self.nodes for rank in node.ranks}


_ANSWER_S = 3.0
_AT_ONCE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetInventory:
    """What the store says there is."""

    nodes: Sequence[Tree]
    deployments: Sequence[Tree]
    replicas: Mapping[str, ReplicaPlacement]
    endpoints: Sequence[Tree]
    gateways: Mapping[str, GatewayLease]

    def holders(self) -> dict[str, ProcessAddress]:
        """Return the agents that can be asked, by their nodes."""
        return {
            name: ProcessAddress(label=f"node/{name}", key=f"Node/{name}", url=url)
            for name, url in (
                (object_trees.name_of(n), field_at(n, "status", "agentUrl")) for n in self.nodes
            )
            if url
        }


async def read_inventory(transport: Transport) -> FleetInventory:
    """Return what there is. Raises StoreError."""
    replicas = await object_trees.list_all(transport, "Replica")
    return FleetInventory(
        nodes=await object_trees.list_all(transport, "Node"),
        deployments=await object_trees.list_all(transport, "ModelDeployment"),
        replicas={object_trees.name_of(tree): _replica_placement(tree) for tree in replicas},
        endpoints=await object_trees.list_all(transport, "Endpoint"),
        gateways=await gateways.list_leases(transport),
    )


def _replica_placement(replica: Tree) -> ReplicaPlacement:
    ranks = field_at(replica, "spec", "ranks") or ()
    return ReplicaPlacement(
        deployment=str(field_at(replica, "spec", "deployment")),
        nodes=tuple(str(rank.get("node")) for rank in ranks),
    )


@asynccontextmanager
async def open_collector(
    transport: Transport, clock: Clock, there: FleetInventory
) -> AsyncIterator["SampleCollector"]:
    """Yield who asks this fleet; its tickets live as long as the block. Raises StoreError."""
    holders = [holder.key for holder in there.holders().values()]
    async with process_client.issue_tickets(transport, holders) as bearers:
        yield SampleCollector(clock, bearers)


@dataclass(slots=True)
class SampleCollector:
    """Asks everybody at once, each for a few seconds at most; who does not answer is told of, not waited for."""

    _clock: Clock
    _bearers: Mapping[str, str]
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))
    is_stale: bool = False
    """Whether an agent refused its ticket: it is new, or the tickets ran out."""

    async def look(self, there: FleetInventory) -> FleetSample:
        """Return what everybody says just now."""
        reasons: list[str] = []
        holders = there.holders()
        async with asyncio.TaskGroup() as group:
            nodes = [
                group.create_task(self._node(node, there, holders, reasons)) for node in there.nodes
            ]
            samples = {
                id_: group.create_task(self._gateway(id_, lease, there, reasons))
                for id_, lease in there.gateways.items()
            }
        told = {id_: task.result() for id_, task in samples.items()}
        heard = {id_: sample for id_, sample in told.items() if sample is not None}
        return FleetSample(
            at_s=self._clock.monotonic(),
            nodes=tuple(task.result() for task in nodes),
            deployments=tuple(map(_deployment_counts, there.deployments)),
            replicas=there.replicas,
            gateways=heard,
            has_all_gateways=len(heard) == len(there.gateways),
            reasons=tuple(sorted(reasons)),
        )

    async def _node(
        self,
        node: Tree,
        there: FleetInventory,
        holders: Mapping[str, ProcessAddress],
        reasons: list[str],
    ) -> NodeSample:
        name = object_trees.name_of(node)
        holder = holders.get(name)
        if not object_trees.is_true(node, "Ready"):
            reasons.append(f"node/{name}: its agent does not renew its lease")
            return NodeSample(name=name)
        if holder is not None:
            try:
                vitals = await self._vitals(holder)
            except FleetctlError as error:
                reasons.append(error.message)
            else:
                # An engine that is not there yet has no figures, and nobody wonders.
                reasons += [
                    f"replica/{rank.replica} on node/{name}: {rank.why}"
                    for rank in vitals.ranks
                    if rank.why and rank.state == "Ready"
                ]
                return NodeSample(
                    name=name, memory=vitals.memory, ranks=vitals.ranks, is_known=True
                )
        else:
            reasons.append(f"node/{name}: its agent says no address; is it of an older release?")
        return NodeSample(name=name, ranks=await self._engines(name, there, reasons))

    async def _vitals(self, holder: ProcessAddress) -> AgentVitals:
        """Return what an agent says. Raises FleetctlError."""
        bearer = self._bearers.get(holder.key)
        if bearer is None:
            self.is_stale = True
            raise FleetctlError(f"{holder.label}: it has just come")
        try:
            async with self._room:
                tree = await process_client.fetch_json(
                    holder, "/v1/vitals", bearer=bearer, limit_s=_ANSWER_S
                )
        except process_client.ProcessRefusedError as error:
            self.is_stale |= error.status in (401, 403)
            raise
        try:
            return msgspec.convert(tree, AgentVitals, strict=False)
        except msgspec.ValidationError as error:
            raise FleetctlError(
                f"{holder.label}: what it says are no vitals ({error}); is it of this release?"
            ) from error

    async def _engines(
        self, node: str, there: FleetInventory, reasons: list[str]
    ) -> tuple[RankSample, ...]:
        """Ask the engines of a node whose agent says nothing: they outlive it."""
        here = [one for one in there.endpoints if field_at(one, "spec", "node") == node]
        found = []
        for one in here:
            name, url = object_trees.name_of(one), str(field_at(one, "spec", "url"))
            holder = ProcessAddress(label=f"replica/{name}", key="", url=url)
            try:
                told = machine_metrics.parse_engine_metrics(
                    (await self._text(holder, "/metrics")).decode()
                )
                found.append(msgspec.convert({"replica": name, **told}, RankSample, strict=False))
            except FleetctlError as error:
                reasons.append(error.message)
            except (ValueError, msgspec.ValidationError) as error:
                reasons.append(f"replica/{name}: what its engine says are no figures ({error})")
        return tuple(found)

    async def _text(self, holder: ProcessAddress, path: str) -> bytes:
        async with self._room:
            return await process_client.fetch(holder, path, limit_s=_ANSWER_S)

    async def _gateway(
        self, id_: str, lease: GatewayLease, there: FleetInventory, reasons: list[str]
    ) -> GatewaySample | None:
        holder = ProcessAddress(label=f"gateway/{id_}", key="", url=lease.url)
        try:
            text = await self._text(holder, "/metrics/demand")
        except FleetctlError as error:
            reasons.append(error.message)
            return None
        needed = {object_trees.name_of(tree) for tree in there.deployments}
        return gateway_metrics.parse(text.decode(errors="replace"), needed)


def _deployment_counts(tree: Tree) -> DeploymentCounts:
    status: dict[str, Any] = tree.get("status") or {}
    is_scaled = field_at(tree, "spec", "autoscaling") is not None and status
    wanted = status.get("desiredReplicas") if is_scaled else field_at(tree, "spec", "replicas")
    return DeploymentCounts(
        name=object_trees.name_of(tree),
        ready=int(status.get("readyReplicas") or 0),
        wanted=int(wanted if wanted is not None else 1),
    )
