"""Stop orders to the agents of a fleet: all at once, each with its own limit, also while etcd is away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from fleetctl.cli.errors import FleetctlError
from identity.dialer import Dialer
from insight import process_client
from insight.errors import ProcessError, ProcessRefusedError
from insight.process_client import ProcessAddress
from insight.tickets import issue_tickets
from schemas.node import NodeLease, NodeStatus
from store import codec, keys
from store.errors import StoreError
from store.port import Transport

DEFAULT_PORT: Final = 4001
"""The default of the agent's --api-port."""
# Engines that do not end within the grace period are killed; then the agent looks twice for new ones.
_END_S: Final = 20.0
_UNDO_S: Final = 10.0
_AT_ONCE: Final = 64

Verb: TypeAlias = Literal["PUT", "DELETE"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopResult:
    """The answer of one Mac."""

    node: str
    ended: int = 0
    """Engines that were ended."""
    was_stopped: bool = False
    """True if an order was taken back."""
    problem: str = ""
    """The reason why the order had no effect; "" if it had."""
    is_refused: bool = False
    """True if the agent answered, and refused."""


async def read_addresses(transport: Transport, dialer: Dialer) -> dict[str, str]:
    """Return the URLs of all agents by node; https for those with an identity if there is one here.

    Raises:
        StoreError: the store does not answer.

    """
    leases = {
        item.key.removeprefix(keys.NODE_LEASE_PREFIX): item
        for item in (await transport.list(keys.NODE_LEASE_PREFIX)).items
    }
    addresses: dict[str, str] = {}
    for item in (await transport.list(keys.status_prefix("Node"))).items:
        name = keys.kind_and_name(item.key)[1]
        url = codec.decode(NodeStatus, item).agent_url
        lease = leases.get(name)
        # While the fleet gets its certificates, agents still publish http; they take both.
        if dialer.has_identity and lease is not None and codec.decode(NodeLease, lease).tls:
            url = url.replace("http:", "https:", 1)
        if url:
            addresses[name] = url
    return addresses


def without_store(urls: Mapping[str, str], dialer: Dialer) -> dict[str, str]:
    """Return the URLs to use while the store is away: only a certificate opens an agent then, and over TLS alone."""
    if not dialer.has_identity:
        return dict(urls)
    return {name: url.replace("http:", "https:", 1) for name, url in urls.items()}


def parse_nodes(text: str, known: Mapping[str, str], *, is_https: bool) -> dict[str, str]:
    """Return the URLs by node of `--nodes HOST:PORT,NAME=HOST:PORT,...`. Pure.

    Without NAME it is the name of the node whose address is known, else the first part of the host name.

    Raises:
        FleetctlError: a word has another form, or the name of the node is unknown.

    """
    names = {url.partition("://")[2]: name for name, url in known.items()}
    scheme = "https" if is_https else "http"
    nodes: dict[str, str] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word in known:
            nodes[word] = known[word]
            continue
        given, equals, rest = word.rpartition("=")
        address = _address(word, rest)
        host = address.rpartition(":")[0]
        name = given or names.get(address) or ("" if _is_number(host) else host.partition(".")[0])
        if not name or (equals and not given):
            raise FleetctlError(
                f"--nodes: {word}: the name of the node at {address} is unknown, and its certificate must prove it; write "
                f"NAME={address}"
            )
        nodes[name] = f"{scheme}://{address}"
    if not nodes:
        raise FleetctlError("--nodes: expected HOST:PORT or NAME=HOST:PORT, separated by commas")
    return nodes


def _address(word: str, text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536
    if not (host and is_port) or any(one in host for one in "/@?# "):
        raise FleetctlError(
            f"--nodes: {word[:200]}: expected HOST:PORT or NAME=HOST:PORT, such as mac-1.local:4001"
        )
    return f"{host}:{port}"


def _is_number(host: str) -> bool:
    return host.startswith("[") or host.replace(".", "").isdigit()


async def send_all(
    addresses: Sequence[ProcessAddress],
    bearers: Mapping[str, str],
    *,
    verb: Verb,
    grace_s: float,
) -> list[StopResult]:
    """Send the order, or its end, to all agents at once; return one result each."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def send(address: ProcessAddress) -> StopResult:
        async with slots:
            return await _send(address, bearers.get(address.key, ""), verb=verb, grace_s=grace_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(process_address)) for process_address in addresses]
    return [task.result() for task in tasks]


async def _send(address: ProcessAddress, bearer: str, *, verb: Verb, grace_s: float) -> StopResult:
    node = address.label.removeprefix("node/")
    is_stop = verb == "PUT"
    try:
        answer = await process_client.fetch_json(
            address,
            "/v1/stop-order",
            bearer=bearer,
            params={"graceSeconds": f"{grace_s:g}"} if is_stop else None,
            limit_s=grace_s + _END_S if is_stop else _UNDO_S,
            method=verb,
        )
    except ProcessRefusedError as error:
        return StopResult(node=node, problem=str(error), is_refused=True)
    except ProcessError as error:
        return StopResult(node=node, problem=str(error))
    ended = answer.get("ended", 0)
    return StopResult(
        node=node,
        ended=ended if isinstance(ended, int) else 0,
        was_stopped=bool(answer.get("wasStopped", False)),
    )


@asynccontextmanager
async def tickets_if_any(
    transport: Transport | None, addresses: Sequence[ProcessAddress]
) -> AsyncIterator[Mapping[str, str]]:
    """Yield tickets for the agents without TLS, which know no administrators; none while the store is away."""
    plain = [address.key for address in addresses if address.url.startswith("http:")]
    if transport is None or not plain:
        yield {}
        return
    async with contextlib.AsyncExitStack() as stack:
        try:
            bearers: Mapping[str, str] = await stack.enter_async_context(
                issue_tickets(transport, plain)
            )
        except StoreError:
            bearers = {}
        yield bearers


def options_without_gateway(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with what a dialer reads of gateways, which are not dialled here."""
    return {**options, "gateway_ca": None}
