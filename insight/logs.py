"""Logs of the fleet's processes: which process has each, how it is addressed and read, and which lines are wanted."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
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

# Longer lines are passed on in parts.
_MAX_LINE_BYTES: Final = 1 << 20
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
class LogRange:
    """The part of a log that its process sends."""

    tail: int | None = None
    """The number of lines from the end; None for all."""
    since: str = ""
    """Maximum age of the lines, such as 5m; "" for any."""
    is_followed: bool = False
    """True to continue with new lines."""

    def params(self) -> dict[str, str]:
        """Return the query parameters."""
        return {
            **({} if self.tail is None else {"tail": str(self.tail)}),
            **({"since": self.since} if self.since else {}),
            **({"follow": "true"} if self.is_followed else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFilter:
    """Selects lines of a log by what they say."""

    text: str = ""
    """Text that lines contain, in any case of letters."""
    about: str = ""
    """An object, a node, a request or a trace that lines name."""

    @property
    def keeps_all(self) -> bool:
        """True if no line is left out."""
        return not (self.text or self.about)

    def keeps(self, line: bytes) -> bool:
        """Return whether a line is wanted."""
        if self.text and self.text.lower() not in line.decode(errors="replace").lower():
            return False
        return not self.about or is_about(line, self.about)


@dataclass(slots=True)
class LineReader:
    """Splits a log that arrives in pieces into lines, and keeps the wanted ones. Pure but for its state."""

    wanted: LineFilter = field(default_factory=LineFilter)
    max_line_bytes: int = _MAX_LINE_BYTES
    _rest: bytes = b""

    def add(self, piece: bytes) -> list[bytes]:
        """Return the wanted lines that the next piece of the log completes, without their ends."""
        *whole, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > self.max_line_bytes:
            whole, self._rest = [*whole, self._rest], b""
        return [line for line in whole if self.wanted.keeps(line)]

    def end(self) -> list[bytes]:
        """Return the unterminated last line, if there is one and it is wanted."""
        rest, self._rest = self._rest, b""
        return [rest] if rest and self.wanted.keeps(rest) else []


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


def open_log(
    address: ProcessAddress, source: LogSource, part: LogRange, *, bearer: str
) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
    """Open a log at its process with a ticket of the store; yields its bytes in pieces. Raises as `open_stream` does."""
    params = {**source.params, **part.params()}
    return process_client.open_stream(address, source.path, bearer=bearer, params=params)


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
        ValueError: it names no log.
        ProcessError: it names a replica, or a rank, that is not known.

    """
    word, _, name = text.partition("/")
    if word in LEASED_HOLDERS and name:
        return process_log(word, name)
    if word == "node" and name:
        return agent_log(name)
    if word == "replica" and name:
        name, _, number = name.partition("/")
        if number and not (number.isdecimal() and number.isascii() and len(number) < 6):
            raise ValueError(f"'{text[:100]}': expected the number of a rank after the second '/'")
        item = caches.objects.specs.items.get(keys.spec_key("Replica", name))
        if not isinstance(item, Replica):
            raise ProcessError(f"there is no replica {name[:200]}, or not any more")
        return engine_log(item, int(number or 0), is_previous=is_previous)
    words = ", ".join(f"{holder}/ID" for holder in LEASED_HOLDERS)
    raise ValueError(f"'{text[:100]}' is not node/NAME, replica/NAME, {words}")


def known_address(caches: FleetCaches, source: LogSource, dialer: Dialer) -> ProcessAddress:
    """Return the address of a log's process as the caches know it. Raises ProcessError."""
    process_address = _cached_address(caches, source, dialer)
    if process_address is None:
        raise ProcessError(f"there is no {source.label} with a log, or not any more")
    if not process_address.url:
        raise ProcessUnreachableError(f"{source.label}: it does not listen on its port yet")
    return process_address


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
            status = caches.objects.statuses.items.get(keys.status_key("Node", name))
            if not isinstance(status, NodeStatus):
                return None
            url = process_client.agent_url(name, status)
            lease = caches.objects.leases.items.get(keys.node_lease_key(name))
            if dialer.has_identity and lease is not None and lease.tls:
                # While the fleet gets its certificates, agents still publish http; they take both.
                url = url.replace("http:", "https:", 1)
            return process_client.agent_address(dialer, name, url)
    return None
