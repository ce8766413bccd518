"""Looks at the fleet once: store, agents, engines, gateways, all at the same time. Adds up nothing."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fleetctl import agents, documents, gateways, tickets
from fleetctl.agents import Holder
from fleetctl.columns.cells import at
from fleetctl.documents import Tree
from fleetctl.errors import FleetctlError
from fleetctl.top.seen import Deployed, Look, NodeSeen, Placed, Rank, Vitals
from machinery.clock import Clock
from nodeagent.api import figures
from reconciler.demand import exposition
from reconciler.demand.exposition import Sample
from schemas.gateway import GatewayLease
from store.port import Transport

_ANSWER_S = 3.0
_AT_ONCE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What the store says there is."""

    nodes: Sequence[Tree]
    deployments: Sequence[Tree]
    replicas: Mapping[str, Placed]
    endpoints: Sequence[Tree]
    gateways: Mapping[str, GatewayLease]

    def holders(self) -> dict[str, Holder]:
        """Return the agents that can be asked, by their nodes."""
        return {
            name: Holder(label=f"node/{name}", key=f"Node/{name}", url=url)
            for name, url in (
                (documents.name_of(n), at(n, "status", "agentUrl")) for n in self.nodes
            )
            if url
        }


async def fleet(transport: Transport) -> Fleet:
    """Return what there is. Raises StoreError."""
    replicas = await documents.list_all(transport, "Replica")
    return Fleet(
        nodes=await documents.list_all(transport, "Node"),
        deployments=await documents.list_all(transport, "ModelDeployment"),
        replicas={documents.name_of(tree): _placed(tree) for tree in replicas},
        endpoints=await documents.list_all(transport, "Endpoint"),
        gateways=await gateways.registered(transport),
    )


def _placed(replica: Tree) -> Placed:
    ranks = at(replica, "spec", "ranks") or ()
    return Placed(
        deployment=str(at(replica, "spec", "deployment")),
        nodes=tuple(str(rank.get("node")) for rank in ranks),
    )


@asynccontextmanager
async def asking(transport: Transport, clock: Clock, there: Fleet) -> AsyncIterator["Asker"]:
    """Yield who asks this fleet; its tickets live as long as the block. Raises StoreError."""
    holders = [holder.key for holder in there.holders().values()]
    async with tickets.several(transport, holders) as bearers:
        yield Asker(clock, bearers)


@dataclass(slots=True)
class Asker:
    """Asks everybody at once, each for a few seconds at most; who does not answer is told of, not waited for."""

    _clock: Clock
    _bearers: Mapping[str, str]
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))
    is_stale: bool = False
    """Whether an agent refused its ticket: it is new, or the tickets ran out."""

    async def look(self, there: Fleet) -> Look:
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
        return Look(
            at_s=self._clock.monotonic(),
            nodes=tuple(task.result() for task in nodes),
            deployments=tuple(map(_deployed, there.deployments)),
            replicas=there.replicas,
            gateways=heard,
            has_all_gateways=len(heard) == len(there.gateways),
            reasons=tuple(sorted(reasons)),
        )

    async def _node(
        self, node: Tree, there: Fleet, holders: Mapping[str, Holder], reasons: list[str]
    ) -> NodeSeen:
        name = documents.name_of(node)
        holder = holders.get(name)
        if not documents.is_true(node, "Ready"):
            reasons.append(f"node/{name}: its agent does not renew its lease")
            return NodeSeen(name=name)
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
                return NodeSeen(name=name, memory=vitals.memory, ranks=vitals.ranks, is_known=True)
        else:
            reasons.append(f"node/{name}: its agent says no address; is it of an older release?")
        return NodeSeen(name=name, ranks=await self._engines(name, there, reasons))

    async def _vitals(self, holder: Holder) -> Vitals:
        """Return what an agent says. Raises FleetctlError."""
        bearer = self._bearers.get(holder.key)
        if bearer is None:
            self.is_stale = True
            raise FleetctlError(f"{holder.label}: it has just come")
        try:
            async with self._room:
                tree = await agents.ask_json(holder, "/v1/vitals", bearer=bearer, limit_s=_ANSWER_S)
        except agents.NoAnswerError as error:
            self.is_stale |= error.status in (401, 403)
            raise
        try:
            return msgspec.convert(tree, Vitals, strict=False)
        except msgspec.ValidationError as error:
            raise FleetctlError(
                f"{holder.label}: what it says are no vitals ({error}); is it of this release?"
            ) from error

    async def _engines(self, node: str, there: Fleet, reasons: list[str]) -> tuple[Rank, ...]:
        """Ask the engines of a node whose agent says nothing: they outlive it."""
        here = [one for one in there.endpoints if at(one, "spec", "node") == node]
        found = []
        for one in here:
            name, url = documents.name_of(one), str(at(one, "spec", "url"))
            holder = Holder(label=f"replica/{name}", key="", url=url)
            try:
                told = figures.parsed((await self._text(holder, "/metrics")).decode())
                found.append(msgspec.convert({"replica": name, **told}, Rank, strict=False))
            except FleetctlError as error:
                reasons.append(error.message)
            except (ValueError, msgspec.ValidationError) as error:
                reasons.append(f"replica/{name}: what its engine says are no figures ({error})")
        return tuple(found)

    async def _text(self, holder: Holder, path: str) -> bytes:
        async with self._room:
            return await agents.ask(holder, path, limit_s=_ANSWER_S)

    async def _gateway(
        self, id_: str, lease: GatewayLease, there: Fleet, reasons: list[str]
    ) -> Sample | None:
        holder = Holder(label=f"gateway/{id_}", key="", url=lease.url)
        try:
            text = await self._text(holder, "/metrics/demand")
        except FleetctlError as error:
            reasons.append(error.message)
            return None
        needed = {documents.name_of(tree) for tree in there.deployments}
        return exposition.parse(text.decode(errors="replace"), needed)


def _deployed(tree: Tree) -> Deployed:
    status: dict[str, Any] = tree.get("status") or {}
    is_scaled = at(tree, "spec", "autoscaling") is not None and status
    wanted = status.get("desiredReplicas") if is_scaled else at(tree, "spec", "replicas")
    return Deployed(
        name=documents.name_of(tree),
        ready=int(status.get("readyReplicas") or 0),
        wanted=int(wanted if wanted is not None else 1),
    )
