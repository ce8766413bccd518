"""HTTP client of the fleet's processes: their addresses, answers and streams, for both doors."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import orjson

from identity.dialer import Dial, Dialer, UntrustedAddressError
from identity.names import Role
from identity.peers import PeerError
from insight.errors import ProcessError, ProcessRefusedError, ProcessUnreachableError
from machinery.clock import SystemClock
from machinery.http_body import BodyTooLargeError, read_limited
from machinery.tcp_keepalive import enable_keepalive
from machinery.tls_client import untrusted_reason
from manifests.suggestions import not_found_message
from schemas import kinds, local_network
from schemas.meta import find_condition
from schemas.node import NodeStatus
from schemas.records import DashboardLease, GatewayLease, ReconcilerLease
from schemas.wire.errors import ErrorBody
from store import codec, keys
from store.port import Transport

_CONNECT_S = 5.0
_ANSWER_S = 10.0
_LIMIT_BYTES = 16 << 20
_REFUSAL_BYTES = 4096
# https://docs.aiohttp.org/en/stable/client_advanced.html#graceful-shutdown
_CLOSE_S = 0.05

LeaseT = TypeVar("LeaseT", GatewayLease, ReconcilerLease, DashboardLease)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAddress:
    """Address of a process, and the key under which its tickets are stored."""

    label: str
    """Name in messages: `node/mac-1`, `gateway/1f2e3d`, `reconciler/9c0d`."""
    key: str
    """Holder for `issue_ticket`: `Node/mac-1`, `Gateway/1f2e3d`, `Reconciler/9c0d`."""
    url: str
    """Base URL."""
    dial: Callable[[], Dial] = Dial
    """Returns how to dial it. Raises UntrustedAddressError."""


def agent_address(dialer: Dialer, name: str, url: str) -> ProcessAddress:
    """Return the address of a node's agent at a URL."""
    dial = partial(dialer.node, name, url)
    return ProcessAddress(label=f"node/{name}", key=f"Node/{name}", url=url, dial=dial)


def gateway_address(dialer: Dialer, id_: str, lease: GatewayLease) -> ProcessAddress:
    """Return the address of a registered gateway."""
    dial = partial(dialer.gateway, id_, lease)
    return ProcessAddress(label=f"gateway/{id_}", key=f"Gateway/{id_}", url=lease.url, dial=dial)


def reconciler_address(dialer: Dialer, id_: str, lease: ReconcilerLease) -> ProcessAddress:
    """Return the address of a registered reconciler; its URL is empty while it does not listen."""
    label = f"reconciler/{id_}"
    dial = partial(dialer.peer, Role.RECONCILER, id_, lease.url, lease.tls)
    return ProcessAddress(label=label, key=f"Reconciler/{id_}", url=lease.url, dial=dial)


def dashboard_address(dialer: Dialer, id_: str, lease: DashboardLease) -> ProcessAddress:
    """Return the address of a registered dashboard; its URL is empty while it does not listen."""
    label = f"dashboard/{id_}"
    dial = partial(dialer.peer, Role.DASHBOARD, id_, lease.url, lease.tls)
    return ProcessAddress(label=label, key=f"Dashboard/{id_}", url=lease.url, dial=dial)


async def find_agent(
    transport: Transport, name: str, dialer: Dialer | None = None
) -> ProcessAddress:
    """Return the address of a node's agent.

    Raises:
        ProcessError: the node does not exist; ProcessUnreachableError: its agent reports no address.

    """
    item = await transport.get(keys.status_key("Node", name))
    if item is None:
        items = (await transport.list(keys.status_prefix("Node"))).items
        known = [keys.kind_and_name(i.key)[1] for i in items]
        kind = kinds.by_name("Node")
        assert kind is not None
        raise ProcessError(not_found_message(kind, name, known))
    url = agent_url(name, codec.decode(NodeStatus, item))
    return agent_address(dialer or Dialer(), name, url)


def agent_url(name: str, status: NodeStatus) -> str:
    """Return the URL of a node's agent. Raises ProcessUnreachableError: it reports none; the message says why."""
    if status.agent_url:
        return status.agent_url
    serving = find_condition(status.conditions, "ApiServing")
    why = "it is an older release" if serving is None else f"{serving.reason}: {serving.message}"
    raise ProcessUnreachableError(f"node/{name}: its agent serves no HTTP API: {why}")


async def find_process(
    transport: Transport, kind: str, id_: str = "", dialer: Dialer | None = None
) -> ProcessAddress:
    """Return the address of a registered gateway, reconciler or dashboard; without an id, of the only one.

    Raises:
        ProcessError: there is none, there are several, or none has this id; the message lists them.
        ProcessUnreachableError: it does not listen.

    """
    processes = await list_processes(transport, kind, dialer)
    known = ", ".join(process.label for process in processes)
    if not id_ and not processes:
        raise ProcessError(
            f"no {kind.lower()} is registered. Is one running? `fleetctl up` starts one"
        )
    if not id_ and len(processes) > 1:
        raise ProcessError(f"give the {kind.lower()}'s id; there are {known}")
    for process in processes:
        if process.key == f"{kind}/{id_}" or not id_:
            if not process.url:
                raise ProcessUnreachableError(
                    f"{process.label}: it does not listen on its port yet; its log says why if this lasts"
                )
            return process
    registered = f"Registered {kind.lower()}s: {known or 'none'}"
    raise ProcessError(f"{kind.lower()}/{id_} is not registered. {registered}")


async def list_processes(
    transport: Transport, kind: str, dialer: Dialer | None = None
) -> list[ProcessAddress]:
    """Return the addresses of all registered processes of a kind that has leases, sorted by id."""
    dialer = dialer or Dialer()
    match kind:
        case "Gateway":
            gateways = await list_gateway_leases(transport)
            return [gateway_address(dialer, *entry) for entry in gateways.items()]
        case "Reconciler":
            prefix = keys.RECONCILER_LEASE_PREFIX
            reconcilers = await _list_leases(transport, prefix, ReconcilerLease)
            return [reconciler_address(dialer, *entry) for entry in reconcilers.items()]
        case "Dashboard":
            dashboards = await list_dashboard_leases(transport)
            return [dashboard_address(dialer, *entry) for entry in dashboards.items()]
        case _:
            raise ValueError(f"{kind} has no leases")


async def list_gateway_leases(transport: Transport) -> dict[str, GatewayLease]:
    """Return the leases of registered gateways, by gateway id."""
    return await _list_leases(transport, keys.GATEWAY_LEASE_PREFIX, GatewayLease)


async def list_dashboard_leases(transport: Transport) -> dict[str, DashboardLease]:
    """Return the leases of registered dashboards, by id."""
    return await _list_leases(transport, keys.DASHBOARD_LEASE_PREFIX, DashboardLease)


async def _list_leases(transport: Transport, prefix: str, model: type[LeaseT]) -> dict[str, LeaseT]:
    items = (await transport.list(prefix)).items
    return {item.key.removeprefix(prefix): codec.decode(model, item) for item in items}


async def fetch(
    address: ProcessAddress,
    path: str,
    *,
    bearer: str = "",
    params: Mapping[str, str] | None = None,
    limit_s: float = _ANSWER_S,
    method: str = "GET",
) -> bytes:
    """Return a whole response body: at most 16 MiB, within `limit_s` seconds.

    `bearer` comes from `issue_ticket`; `/health` and `/metrics` need none on this machine, or with an identity.

    Raises:
        ProcessUnreachableError: no answer; ProcessRefusedError: the process refused the request.

    """
    try:
        async with (
            asyncio.timeout(limit_s),
            open_stream(
                address, path, bearer=bearer, params=params, method=method, answer_s=limit_s
            ) as pieces,
        ):
            return await read_limited(pieces, _LIMIT_BYTES)
    except BodyTooLargeError as error:
        raise ProcessError(f"{address.label}: {error}") from error
    except TimeoutError:
        raise ProcessUnreachableError(
            _unreachable_text(address, f"no answer within {limit_s:g} s")
        ) from None


async def fetch_json(
    address: ProcessAddress,
    path: str,
    *,
    bearer: str = "",
    params: Mapping[str, str] | None = None,
    limit_s: float = _ANSWER_S,
    method: str = "GET",
) -> dict[str, Any]:
    """Return a response that is a JSON object (`/health`, `/v1/vitals`); see `fetch`."""
    raw = await fetch(address, path, bearer=bearer, params=params, limit_s=limit_s, method=method)
    try:
        tree = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ProcessUnreachableError(
            _unreachable_text(address, f"the response is not JSON ({error})")
        ) from error
    if not isinstance(tree, dict):
        raise ProcessUnreachableError(
            _unreachable_text(address, "the response is not a JSON object")
        )
    return tree


@asynccontextmanager
async def open_stream(
    address: ProcessAddress,
    path: str,
    *,
    bearer: str = "",
    params: Mapping[str, str] | None = None,
    method: str = "GET",
    answer_s: float = _ANSWER_S,
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Yield the chunks of a response body as they arrive, without a time limit once it began within `answer_s`.

    Raises:
        ProcessUnreachableError: no answer, or the connection broke (raised from the iterator in that case).
        ProcessRefusedError: the process refused the request.

    """
    headers = {"authorization": f"Bearer {bearer}"} if bearer else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    try:
        dial = address.dial()
    except UntrustedAddressError as error:
        raise ProcessUnreachableError(str(error)) from error
    async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
        try:
            async with asyncio.timeout(answer_s):
                response = await session.request(
                    method,
                    f"{address.url.rstrip('/')}{path}",
                    params=dict(params or {}),
                    headers=headers,
                    allow_redirects=False,
                    ssl=dial.ssl,
                    server_hostname=dial.server_hostname,
                )
                if response.status != 200:
                    body = await response.content.read(_REFUSAL_BYTES)
                    raise ProcessRefusedError(
                        _refusal_text(address, response.status, body), response.status
                    )
        except TimeoutError:
            raise ProcessUnreachableError(
                _unreachable_text(address, f"no answer within {answer_s:g} s")
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ProcessUnreachableError(
                _unreachable_text(address, _cause(error, address.url))
            ) from error
        watch_peer(response)
        async with response:
            yield _pieces(address, response)
    # Let a TLS connection close: aiohttp does it in the background, and a command ends its event
    # loop next.
    if dial.server_hostname is not None:
        await SystemClock().sleep(_CLOSE_S)


async def _pieces(
    address: ProcessAddress, response: aiohttp.ClientResponse
) -> AsyncIterator[bytes]:
    try:
        async for piece in response.content.iter_any():
            yield piece
    except (aiohttp.ClientError, OSError) as error:
        raise ProcessUnreachableError(
            f"{address.label}: the connection to {address.url} broke ({_cause(error, address.url)}); the output is incomplete"
        ) from error


def watch_peer(response: aiohttp.ClientResponse) -> None:
    """Enable TCP keepalive, so that a dead peer ends a silent stream."""
    # None if the response is complete: its connection is back in the pool.
    connection = response.connection
    if connection is not None and connection.transport is not None:
        sock = connection.transport.get_extra_info("socket")
        if sock is not None:
            enable_keepalive(sock)


_REMEDIES = {
    "Revoked": "Let it join again with a new token, or delete it",
    "Expired": "See its log for why it was not renewed, or let it join again with a new token",
}


def untrusted_text(error: Exception) -> str:
    """Return the message for a certificate that is not trusted, with the remedy; empty for another error."""
    refused = getattr(error, "certificate_error", error)
    if isinstance(refused, PeerError):
        # The authority is known: the process itself has to be mended.
        return f"{refused.verify_message}. {_REMEDIES.get(refused.refusal, 'See `fleetctl cert list`')}"
    reason = untrusted_reason(error)
    return reason and (
        f"its certificate is not trusted ({reason}). Give the certificate of its authority with --gateway-ca FILE, "
        "FLEET_GATEWAY_CA or `fleetctl config set-context NAME --gateway-ca FILE`"
    )


def _cause(error: Exception, url: str) -> str:
    if untrusted := untrusted_text(error):
        return untrusted
    text = local_network.failure_text(error, urlsplit(url).hostname or "")
    return text if text == str(error) else text[:1].lower() + text[1:]


def _unreachable_text(address: ProcessAddress, why: str) -> str:
    return f"{address.label} does not answer at {address.url}: {why}. Is it running, and can this machine reach that address?"


def _refusal_text(address: ProcessAddress, status: int, body: bytes) -> str:
    """Return the message of a refusal; processes answer with OpenAI's error envelope."""
    refused = ErrorBody.parse(body)
    if refused is not None:
        message = refused.message
    elif status == 404:
        message = "it does not know this path; is it an older release?"
    else:
        message = body[:200].decode("utf-8", "replace").strip() or f"HTTP status {status}"
    return f"{address.label}: {message}"
