"""Logs of the fleet's processes: which process has each, and how it is addressed. Both doors read them with tickets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import orjson

from identity.dialer import Dialer
from identity.log_access import log_path
from insight import process_client
from insight.errors import ProcessError, ProcessUnreachableError
from insight.fleet_caches import FleetCaches
from insight.process_client import ProcessAddress
from schemas.node import NodeStatus
from schemas.replica import Replica
from store import keys
from store.port import Transport

LogHolder: TypeAlias = Literal["Node", "Gateway", "Reconciler", "Dashboard"]
LEASED_HOLDERS: Final[Mapping[str, LogHolder]] = {
    "gateway": "Gateway",
    "reconciler": "Reconciler",
    "dashboard": "Dashboard",
}
"""The processes with an id and a log of their own, by the word that names them."""


_NAMING_FIELDS: Final = (
    *("key", "deployment", "replica", "group", "source", "model"),
    *("node", "nodes", "gateway", "request_id", "trace_id", "user"),
)
"""The fields of a line that name what it is about (docs/operations/monitoring.md, Logs)."""


def is_about(line: bytes, name: str) -> bool:
    """Return whether a line names an object (`qwen`, `ModelDeployment/qwen`), a node, a request or a trace."""
    if name.encode() not in line:
        return False
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False  # output of a library, or text
    if not isinstance(fields, dict):
        return False
    named = [part for one in _NAMING_FIELDS for part in str(fields.get(one, "")).split(",")]
    return any(name in (part, part.rpartition("/")[2]) for part in named)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """A log and the process that serves it."""

    label: str
    """Its name, such as `replica/qwen-0/rank-1`, `node/mac-1` or `reconciler/9c0d`."""
    holder: LogHolder
    name: str
    """Name of the node, or id of the process."""
    path: str
    params: Mapping[str, str] = field(default_factory=dict)

    @property
    def ticket_holder(self) -> str:
        """The process as tickets name it."""
        return f"{self.holder}/{self.name}"


def agent_log(node: str) -> LogSource:
    """Return the log of a Mac's agent."""
    return LogSource(label=f"node/{node}", holder="Node", name=node, path=log_path("agent"))


def process_log(word: str, id_: str) -> LogSource:
    """Return the log of a `gateway`, `reconciler` or `dashboard`."""
    return LogSource(
        label=f"{word}/{id_}", holder=LEASED_HOLDERS[word], name=id_, path=log_path(word)
    )


def engine_log(replica: Replica, rank: int = 0, *, is_previous: bool = False) -> LogSource:
    """Return the log of a replica's engine, or of its run before.

    Raises:
        ProcessError: the replica has no such rank.

    """
    ranks = replica.spec.ranks
    if not 0 <= rank < len(ranks):
        ranks_text = "rank 0 only" if len(ranks) == 1 else f"ranks 0 to {len(ranks) - 1}"
        raise ProcessError(f"replica/{replica.name} has no rank {rank}: it has {ranks_text}")
    return LogSource(
        label=f"replica/{replica.name}/rank-{rank}",
        holder="Node",
        name=ranks[rank].node,
        path=f"/v1/logs/replicas/{replica.name}",
        params={"rank": str(rank), **({"previous": "true"} if is_previous else {})},
    )


async def read_address(
    transport: Transport, holder: LogHolder, name: str, dialer: Dialer | None
) -> ProcessAddress:
    """Return the address of a process from the store. Raises ProcessError, StoreError."""
    if holder == "Node":
        return await process_client.find_agent(transport, name, dialer)
    return await process_client.find_process(transport, holder, name, dialer)


def known_source(caches: FleetCaches, text: str, *, is_previous: bool = False) -> LogSource:
    """Return the log that `node/NAME`, `replica/NAME[/RANK]`, `gateway/ID`, `reconciler/ID` or `dashboard/ID` names.

    Raises:
        ProcessError: it names no log, or a replica that is not known.

    """
    word, _, name = text.partition("/")
    if word in LEASED_HOLDERS and name:
        return process_log(word, name)
    if word == "node" and name:
        return agent_log(name)
    if word == "replica" and name:
        name, _, number = name.partition("/")
        found = caches.objects.specs.items.get(keys.spec_key("Replica", name))
        if not isinstance(found, Replica):
            raise ProcessError(f"there is no replica {name[:200]}, or not any more")
        rank = int(number) if number.isdecimal() and len(number) < 6 else 0
        return engine_log(found, rank, is_previous=is_previous)
    words = ", ".join(f"{one}/ID" for one in LEASED_HOLDERS)
    raise ValueError(f"'{text[:100]}' is not node/NAME, replica/NAME, {words}")


def known_address(caches: FleetCaches, source: LogSource, dialer: Dialer) -> ProcessAddress:
    """Return the address of a log's process as the caches know it. Raises ProcessError."""
    found = _cached_address(caches, source, dialer)
    if found is None:
        raise ProcessError(f"there is no {source.label} with a log, or not any more")
    if not found.url:
        raise ProcessUnreachableError(f"{source.label}: it does not listen on its port yet")
    return found


def _cached_address(
    caches: FleetCaches, source: LogSource, dialer: Dialer
) -> ProcessAddress | None:
    name = source.name
    match source.holder:
        case "Gateway":
            gateway = caches.gateways.items.get(keys.named(keys.GATEWAY_LEASE_PREFIX, name))
            if gateway is not None:
                return process_client.gateway_address(dialer, name, gateway)
        case "Reconciler":
            key = keys.named(keys.RECONCILER_LEASE_PREFIX, name)
            reconciler = caches.reconcilers.items.get(key)
            if reconciler is not None:
                return process_client.reconciler_address(dialer, name, reconciler)
        case "Dashboard":
            key = keys.named(keys.DASHBOARD_LEASE_PREFIX, name)
            dashboard = caches.dashboards.items.get(key)
            if dashboard is not None:
                return process_client.dashboard_address(dialer, name, dashboard)
        case "Node":
            return _agent_address(caches, name, dialer)
    return None


def _agent_address(caches: FleetCaches, name: str, dialer: Dialer) -> ProcessAddress | None:
    status = caches.objects.statuses.items.get(keys.status_key("Node", name))
    url = status.agent_url if isinstance(status, NodeStatus) else ""
    if not url:
        return None
    lease = caches.objects.leases.items.get(keys.node_lease_key(name))
    if dialer.has_identity and lease is not None and lease.tls:
        # While the fleet gets its certificates, agents still publish http; they take both.
        url = url.replace("http:", "https:", 1)
    return process_client.agent_address(dialer, name, url)
