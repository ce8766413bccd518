"""The view of the store on a Mac's services while they restart: leases, versions, endpoints."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from nodeagent.doctor.readers import try_connect
from schemas.node import NodeLease
from schemas.records import GatewayLease, ReconcilerLease
from schemas.replica import Replica
from store import codec, keys, objects
from store.errors import StoreError
from store.port import Transport

_POLL: Final = Backoff(first_s=0.2, limit_s=1.0)


class NotReadyError(Exception):
    """A service did not become Ready in time; the message says what was missing."""


class _AgentReport(BaseModel):
    """The part of a node's status that is read here: a newer agent reports more than this release knows."""

    model_config = ConfigDict(alias_generator=to_camel, extra="ignore")

    agent_version: str = ""
    agent_url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A Mac before its service restarts."""

    session: str = ""
    """The session of its agent; "" without a lease."""
    endpoints: frozenset[str] = field(default=frozenset())
    leases: frozenset[tuple[str, int]] = field(default=frozenset())
    """The leases of all gateways and reconcilers: key and lease."""
    is_reachable: bool = False
    """True if its agent took a connection from this machine."""


@dataclass(frozen=True, slots=True)
class FleetWatch:
    """Reads the store until a service is what it should be."""

    transport: Transport
    clock: Clock

    async def look(self, node: str) -> Sighting:
        """Return the Mac as it is now. Raises StoreError."""
        lease = await self.transport.get(keys.node_lease_key(node))
        endpoints = await self.transport.list(f"{keys.ENDPOINT_PREFIX}{node}/")
        return Sighting(
            session="" if lease is None else codec.decode(NodeLease, lease).session,
            endpoints=frozenset(item.key for item in endpoints.items),
            leases=frozenset(
                [
                    (item.key, item.lease)
                    for prefix in (keys.GATEWAY_LEASE_PREFIX, keys.RECONCILER_LEASE_PREFIX)
                    for item in (await self.transport.list(prefix)).items
                ]
            ),
            is_reachable=await self._is_reachable(await self._report(node)),
        )

    async def _report(self, node: str) -> "_AgentReport":
        item = await self.transport.get(keys.status_key("Node", node))
        return _AgentReport() if item is None else _AgentReport.model_validate_json(item.value)

    @staticmethod
    async def _is_reachable(report: "_AgentReport") -> bool:
        url = urlsplit(report.agent_url)
        return bool(url.hostname and url.port) and (
            await try_connect(url.hostname or "", url.port or 0) is None
        )

    async def wait_ready(
        self, node: str, part: str, version: str, *, before: Sighting, limit_s: float
    ) -> None:
        """Wait until the service of a Mac runs the release and works.

        Raises:
            NotReadyError: it does not in time.

        """
        checks: dict[str, Callable[[], Awaitable[str]]] = {
            "nodeagent": lambda: self._lacks_agent(node, version, before),
            "gateway": lambda: self._lacks_gateway(version, before),
            "reconciler": lambda: self._lacks_reconciler(version, before),
        }
        await self.wait(checks[part], limit_s=limit_s)

    async def wait(self, lacks: Callable[[], Awaitable[str]], *, limit_s: float) -> None:
        """Wait until nothing is lacking. Outages of the store are waited through. Raises NotReadyError."""
        retries, missing = Retries(_POLL, self.clock), "the store does not answer"
        deadline = self.clock.monotonic() + limit_s
        while True:
            try:
                async with asyncio.timeout(max(0.1, deadline - self.clock.monotonic())):
                    missing = await lacks()
            except (StoreError, TimeoutError) as error:
                missing = str(error) or missing
            if not missing:
                return
            if self.clock.monotonic() >= deadline:
                raise NotReadyError(f"{missing}, {limit_s:g} s after the restart")
            await retries.wait()

    async def _lacks_agent(self, node: str, version: str, before: Sighting) -> str:
        now = await self.look(node)
        if now.session in ("", before.session):
            return "its new agent holds no lease"
        report = await self._report(node)
        if report.agent_version != version:
            return f"its agent reports version {report.agent_version or '(none)'}"
        if before.is_reachable and not now.is_reachable:
            return (
                f"this machine no longer reaches its agent at {report.agent_url}: the firewall of the Mac may not let its new "
                "program through (`fleetctl doctor --local` there)"
            )
        gone = [key for key in before.endpoints - now.endpoints if await self._is_here(key, node)]
        return f"{len(gone)} of {len(before.endpoints)} endpoints are missing" if gone else ""

    async def _is_here(self, endpoint: str, node: str) -> bool:
        """Return whether the replica of an endpoint is still assigned to the node."""
        obj = await objects.get(self.transport, Replica, keys.replica_of(endpoint))
        if obj is None or obj.metadata.deletion_timestamp is not None:
            return False
        return any(rank.node == node for rank in obj.spec.ranks)

    async def _lacks_gateway(self, version: str, before: Sighting) -> str:
        for item in (await self.transport.list(keys.GATEWAY_LEASE_PREFIX)).items:
            is_new = (item.key, item.lease) not in before.leases
            if is_new and codec.decode(GatewayLease, item).version == version:
                return ""
        return f"no new gateway of {version} is registered"

    async def _lacks_reconciler(self, version: str, before: Sighting) -> str:
        if await self.transport.get(keys.ELECTION_RECONCILER) is None:
            return "no reconciler leads"
        for item in (await self.transport.list(keys.RECONCILER_LEASE_PREFIX)).items:
            is_new = (item.key, item.lease) not in before.leases
            release = codec.decode(ReconcilerLease, item).identity.partition(" ")[2]
            if is_new and release == version:
                return ""
        return f"no new reconciler of {version} is there"
