"""Samples of the whole fleet at one moment, taken from the store, agents, engines and gateways in parallel."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from identity.dialer import Dialer
from insight import process_client
from insight.errors import ProcessError, ProcessRefusedError
from insight.process_client import ProcessAddress
from insight.tickets import issue_tickets
from machinery.clock import Clock
from nodeagent.engines import engine_metrics
from reconciler.deployments.demand import gateway_metrics
from reconciler.deployments.demand.gateway_metrics import GatewaySample
from schemas.records import GatewayLease
from store import object_trees
from store.object_trees import Tree, field_at
from store.port import Transport


class RankSample(msgspec.Struct, frozen=True, rename="camel"):
    """One rank of a replica, as an agent's /v1/vitals reports it; None marks a value that is unknown."""

    replica: str
    rank: int = 0
    state: str = "Ready"
    tokens: float | None = None
    """Tokens generated since the engine's start."""
    in_flight: float | None = None
    """Sequences that occupy a batch slot."""
    waiting: float | None = None
    """Requests in the engine's queue."""
    active_bytes: float | None = None
    """Memory in MLX arrays."""
    proven_bytes: int = 0
    why: str = ""
    """Reason for missing metrics."""


class NodeMemory(msgspec.Struct, frozen=True, rename="camel"):
    """Memory of a node."""

    total_bytes: int
    available_bytes: int
    allocatable_bytes: int
    """Memory that models may use."""


class AgentVitals(msgspec.Struct, frozen=True, rename="camel"):
    """Response of an agent's /v1/vitals."""

    memory: NodeMemory
    ranks: tuple[RankSample, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """Sample of one node."""

    name: str
    memory: NodeMemory | None = None
    """None if the agent did not answer."""
    ranks: tuple[RankSample, ...] = ()
    """Ranks on the node; if the agent did not answer, those whose engines did."""
    is_complete: bool = False
    """True if `ranks` contains all ranks of the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlacement:
    """Placement of a replica."""

    deployment: str
    nodes: tuple[str, ...]
    """Nodes by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentCounts:
    """Replica counts of a deployment, from the store."""

    name: str
    ready: int
    wanted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSample:
    """Sample of the fleet at one moment."""

    at_s: float
    """Time on a monotonic clock, in seconds."""
    nodes: tuple[NodeSample, ...] = ()
    deployments: tuple[DeploymentCounts, ...] = ()
    replicas: Mapping[str, ReplicaPlacement] = field(default_factory=dict)
    gateways: Mapping[str, GatewaySample] = field(default_factory=dict)
    """Samples of the gateways that answered, by id."""
    has_all_gateways: bool = True
    node_reasons: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Reasons for unknown values by the node that they are about, one sentence each."""
    gateway_reasons: tuple[str, ...] = ()
    """Reasons why gateways did not answer, one sentence each."""

    def ranks(self) -> dict[tuple[str, int], RankSample]:
        """Return the samples of all ranks, by replica name and rank."""
        return {(rank.replica, rank.rank): rank for node in self.nodes for rank in node.ranks}


_RESPONSE_S = 3.0
_MAX_PARALLEL = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetInventory:
    """Nodes, deployments, replicas, endpoints and gateways that are in the store."""

    nodes: Sequence[Tree]
    deployments: Sequence[Tree]
    replicas: Mapping[str, ReplicaPlacement]
    endpoints: Sequence[Tree]
    gateways: Mapping[str, GatewayLease]
    dialer: Dialer = field(default_factory=Dialer)
    """Decides how to dial agents and gateways."""

    def agents(self) -> dict[str, ProcessAddress]:
        """Return the addresses of reachable agents, by node name."""
        return {
            name: process_client.agent_address(self.dialer, name, url)
            for name, url in (
                (object_trees.name_of(n), field_at(n, "status", "agentUrl")) for n in self.nodes
            )
            if url
        }


async def read_inventory(transport: Transport, dialer: Dialer | None = None) -> FleetInventory:
    """Read the inventory from the store. Raises StoreError."""
    replicas = await object_trees.list_all(transport, "Replica")
    return FleetInventory(
        nodes=await object_trees.list_all(transport, "Node"),
        deployments=await object_trees.list_all(transport, "ModelDeployment"),
        replicas={object_trees.name_of(tree): _replica_placement(tree) for tree in replicas},
        endpoints=await object_trees.list_all(transport, "Endpoint"),
        gateways=await process_client.list_gateway_leases(transport),
        dialer=dialer or Dialer(),
    )


def _replica_placement(replica: Tree) -> ReplicaPlacement:
    ranks = field_at(replica, "spec", "ranks") or ()
    return ReplicaPlacement(
        deployment=str(field_at(replica, "spec", "deployment")),
        nodes=tuple(str(rank.get("node")) for rank in ranks),
    )


@asynccontextmanager
async def open_collector(
    transport: Transport, clock: Clock, inventory: FleetInventory
) -> AsyncIterator["SampleCollector"]:
    """Yield a collector for this inventory; its tickets are valid within the block. Raises StoreError."""
    agents = [address.key for address in inventory.agents().values()]
    holders = [*agents, *(f"Gateway/{id_}" for id_ in inventory.gateways)]
    async with issue_tickets(transport, holders) as bearers:
        yield SampleCollector(clock, bearers)


SamplePair: TypeAlias = tuple[FleetSample, FleetSample]
"""Two samples; rates are computed between them."""


async def sample_pair(
    transport: Transport, clock: Clock, dialer: Dialer, *, over_s: float
) -> SamplePair:
    """Return two samples of the fleet that are `over_s` seconds apart. Raises StoreError."""
    inventory = await read_inventory(transport, dialer)
    async with open_collector(transport, clock, inventory) as collector:
        before = await collector.sample(inventory)
        await clock.sleep(over_s)
        return before, await collector.sample(inventory)


@dataclass(slots=True)
class SampleCollector:
    """Collector that queries all processes in parallel, a few seconds each; silence becomes a reason."""

    _clock: Clock
    _bearers: Mapping[str, str]
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_PARALLEL))
    is_stale: bool = False
    """True if an agent refused its ticket: the agent is new, or the tickets expired."""

    async def sample(self, inventory: FleetInventory) -> FleetSample:
        """Return a sample of the fleet."""
        node_reasons: dict[str, list[str]] = {}
        gateway_reasons: list[str] = []
        agents = inventory.agents()
        async with asyncio.TaskGroup() as group:
            nodes = [
                group.create_task(
                    self._node(
                        node,
                        inventory,
                        agents,
                        node_reasons.setdefault(object_trees.name_of(node), []),
                    )
                )
                for node in inventory.nodes
            ]
            samples = {
                id_: group.create_task(self._gateway(id_, lease, inventory, gateway_reasons))
                for id_, lease in inventory.gateways.items()
            }
        results = {id_: task.result() for id_, task in samples.items()}
        answered = {id_: sample for id_, sample in results.items() if sample is not None}
        return FleetSample(
            at_s=self._clock.monotonic(),
            nodes=tuple(task.result() for task in nodes),
            deployments=tuple(map(_deployment_counts, inventory.deployments)),
            replicas=inventory.replicas,
            gateways=answered,
            has_all_gateways=len(answered) == len(inventory.gateways),
            node_reasons={name: tuple(sorted(found)) for name, found in node_reasons.items()},
            gateway_reasons=tuple(sorted(gateway_reasons)),
        )

    async def _node(
        self,
        node: Tree,
        inventory: FleetInventory,
        agents: Mapping[str, ProcessAddress],
        reasons: list[str],
    ) -> NodeSample:
        name = object_trees.name_of(node)
        address = agents.get(name)
        if not object_trees.is_true(node, "Ready"):
            reasons.append(f"node/{name}: its agent does not renew its lease")
            return NodeSample(name=name)
        if address is not None:
            try:
                vitals = await self._vitals(address)
            except ProcessError as error:
                reasons.append(error.message)
            else:
                # An engine that is not ready yet has no metrics; that needs no warning.
                reasons += [
                    f"replica/{rank.replica} on node/{name}: {rank.why}"
                    for rank in vitals.ranks
                    if rank.why and rank.state == "Ready"
                ]
                return NodeSample(
                    name=name, memory=vitals.memory, ranks=vitals.ranks, is_complete=True
                )
        else:
            reasons.append(f"node/{name}: its agent reports no address; is it an older release?")
        return NodeSample(name=name, ranks=await self._engines(name, inventory, reasons))

    async def _vitals(self, address: ProcessAddress) -> AgentVitals:
        """Return the vitals of an agent. Raises ProcessError."""
        bearer = self._bearers.get(address.key)
        if bearer is None:
            self.is_stale = True
            raise ProcessError(
                f"{address.label}: it joined a moment ago, so there is no ticket for it yet"
            )
        try:
            async with self._slots:
                tree = await process_client.fetch_json(
                    address, "/v1/vitals", bearer=bearer, limit_s=_RESPONSE_S
                )
        except ProcessRefusedError as error:
            self.is_stale |= error.status in (401, 403)
            raise
        try:
            return msgspec.convert(tree, AgentVitals, strict=False)
        except msgspec.ValidationError as error:
            raise ProcessError(
                f"{address.label}: its vitals are invalid ({error}); is it this release?"
            ) from error

    async def _engines(
        self, node: str, inventory: FleetInventory, reasons: list[str]
    ) -> tuple[RankSample, ...]:
        """Query the engines of a node directly, because engines outlive their agent."""
        endpoints = [
            endpoint
            for endpoint in inventory.endpoints
            if field_at(endpoint, "spec", "node") == node
        ]
        samples = []
        for endpoint in endpoints:
            name, url = object_trees.name_of(endpoint), str(field_at(endpoint, "spec", "url"))
            address = ProcessAddress(label=f"replica/{name}", key="", url=url)
            try:
                metrics = engine_metrics.parse_engine_metrics(
                    (await self._fetch(address, "/metrics")).decode()
                )
                samples.append(
                    msgspec.convert({"replica": name, **metrics}, RankSample, strict=False)
                )
            except ProcessError as error:
                reasons.append(error.message)
            except (ValueError, msgspec.ValidationError) as error:
                reasons.append(f"replica/{name}: the metrics of its engine are invalid ({error})")
        return tuple(samples)

    async def _fetch(self, address: ProcessAddress, path: str) -> bytes:
        bearer = self._bearers.get(address.key, "")
        # A gateway without a ticket is new.
        self.is_stale |= bool(address.key) and not bearer
        async with self._slots:
            return await process_client.fetch(address, path, bearer=bearer, limit_s=_RESPONSE_S)

    async def _gateway(
        self, id_: str, lease: GatewayLease, inventory: FleetInventory, reasons: list[str]
    ) -> GatewaySample | None:
        address = process_client.gateway_address(inventory.dialer, id_, lease)
        try:
            text = await self._fetch(address, "/metrics/demand")
        except ProcessError as error:
            reasons.append(error.message)
            return None
        needed = {object_trees.name_of(tree) for tree in inventory.deployments}
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
