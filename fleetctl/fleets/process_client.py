"""The right to read what an agent or a gateway tells nobody else: written to the store, where only fleetctl may.

Asking agents and gateways over HTTP: where they are, one answer, a stream; and why there is none.
"""

import asyncio
import hashlib
import os
import pwd
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects.kind_args import kind_of
from machinery.clock import SystemClock
from machinery.tcp_keepalive import enable_keepalive
from manifests.suggestions import not_found_message
from schemas.node import NodeStatus
from schemas.records import TICKET_TTL_S, GatewayLease, Ticket
from store import codec, keys
from store.leases import LeaseSession
from store.port import MAX_OPERATIONS, Put, Transport

_ID_BYTES, _SECRET_BYTES = 8, 32


@asynccontextmanager
async def issue_ticket(transport: Transport, holder: str) -> AsyncIterator[str]:
    """Yield `ID.SECRET` for the header `authorization: Bearer ID.SECRET` of requests to one holder.

    `holder` is `Node/<name>` or `Gateway/<id>`. The ticket lives under a lease that is renewed for as long as the
    block runs, and revoked at its end; after a kill -9 of ours it lives for a minute. An error of the block is raised
    as it is, in no group.

    Raises:
        StoreError: it could not be written (PermissionDeniedError: only fleet-admin may).

    """
    async with issue_tickets(transport, (holder,)) as bearers:
        yield bearers[holder]


@asynccontextmanager
async def issue_tickets(
    transport: Transport, holders: Sequence[str]
) -> AsyncIterator[Mapping[str, str]]:
    """Yield a ticket for each holder, with a secret of its own, all under one lease; `ticket` says more."""
    made = {holder: secrets.token_hex(_ID_BYTES) for holder in holders}
    secret = {holder: secrets.token_urlsafe(_SECRET_BYTES) for holder in holders}
    session = LeaseSession(transport, SystemClock(), ttl_s=TICKET_TTL_S)
    await session.open()
    try:
        puts = [_put_ticket(holder, made[holder], secret[holder], session.id) for holder in holders]
        for at in range(0, len(puts), MAX_OPERATIONS):
            await transport.commit([], puts[at : at + MAX_OPERATIONS])
        async with asyncio.TaskGroup() as tasks:
            kept = tasks.create_task(session.keep())
            yield {holder: f"{made[holder]}.{secret[holder]}" for holder in holders}
            kept.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        await session.close()


def _put_ticket(holder: str, made: str, secret: str, lease: int) -> Put:
    written = Ticket(hash=hashlib.sha256(secret.encode()).hexdigest(), user=current_user())
    return Put(key=keys.ticket_key(holder, made), value=codec.encode(written), lease=lease)


def current_user() -> str:
    """Return who runs this command, such as `anna@studio`."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container, say
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


_CONNECT_S = 5.0
_ANSWER_S = 10.0
_LIMIT_BYTES = 16 << 20
_REFUSAL_BYTES = 4096


class ProcessUnreachableError(FleetctlError):
    """An agent or gateway that does not answer, or has no address: what else is asked for may be shown without it."""


class ProcessRefusedError(FleetctlError):
    """It answers, and refuses: `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAddress:
    """Who is asked, and for whom tickets are."""

    label: str
    """For people: `node/mac-1`, `gateway/1f2e3d`."""
    key: str
    """For `tickets.ticket`: `Node/mac-1`, `Gateway/1f2e3d`."""
    url: str
    """Its base address."""


async def find_agent(transport: Transport, name: str) -> ProcessAddress:
    """Return the agent of a node.

    Raises:
        FleetctlError: there is no such node; AwayError: its agent has no address.

    """
    item = await transport.get(keys.status_key("Node", name))
    if item is None:
        items = (await transport.list(keys.status_prefix("Node"))).items
        known = [keys.kind_and_name(i.key)[1] for i in items]
        raise FleetctlError(not_found_message(kind_of("node"), name, known))
    url = codec.decode(NodeStatus, item).agent_url
    if not url:
        raise ProcessUnreachableError(
            f"node/{name}: its agent does not answer over HTTP: it is of an older release, or could not listen on its "
            f"port. `fleetctl describe node {name}` says so in the condition ApiServing; choose another port with "
            "--api-port there"
        )
    return ProcessAddress(label=f"node/{name}", key=f"Node/{name}", url=url)


async def find_gateway(transport: Transport, id_: str) -> ProcessAddress:
    """Return a gateway that is registered.

    Raises:
        FleetctlError: none of that id is; with those that are.

    """
    found = await list_gateways(transport)
    for one in found:
        if one.key == f"Gateway/{id_}":
            return one
    known = ", ".join(one.label for one in found) or "no gateway at all"
    raise FleetctlError(f"gateway/{id_} is not registered; there is {known}")


async def list_gateways(transport: Transport) -> list[ProcessAddress]:
    """Return the gateways that are registered, by their ids."""
    items = (await transport.list(keys.GATEWAY_LEASE_PREFIX)).items
    found = [
        (i.key.removeprefix(keys.GATEWAY_LEASE_PREFIX), codec.decode(GatewayLease, i))
        for i in items
    ]
    return [
        ProcessAddress(label=f"gateway/{id_}", key=f"Gateway/{id_}", url=lease.url)
        for id_, lease in found
    ]


async def fetch(
    holder: ProcessAddress,
    path: str,
    *,
    bearer: str = "",
    params: Mapping[str, str] | None = None,
    limit_s: float = _ANSWER_S,
) -> bytes:
    """Return one answer, whole; 16 MiB at most, all of it within `limit_s`.

    `bearer` is what `tickets.ticket` yields; `/health` and `/metrics` need none.

    Raises:
        AwayError: nobody answers there; NoAnswerError: it refuses.

    """
    body = bytearray()
    try:
        async with (
            asyncio.timeout(limit_s),
            open_stream(holder, path, bearer=bearer, params=params) as pieces,
        ):
            async for piece in pieces:
                body += piece
                if len(body) > _LIMIT_BYTES:
                    raise FleetctlError(
                        f"{holder.label}: its answer is larger than {_LIMIT_BYTES >> 20} MiB"
                    )
    except TimeoutError:
        raise ProcessUnreachableError(
            _unreachable_text(holder, f"no answer within {limit_s:g} s")
        ) from None
    return bytes(body)


async def fetch_json(
    holder: ProcessAddress,
    path: str,
    *,
    bearer: str = "",
    params: Mapping[str, str] | None = None,
    limit_s: float = _ANSWER_S,
) -> dict[str, Any]:
    """Return one answer that is a JSON object, as `ask` does (`/health`, `/v1/vitals`)."""
    raw = await fetch(holder, path, bearer=bearer, params=params, limit_s=limit_s)
    try:
        tree = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ProcessUnreachableError(
            _unreachable_text(holder, f"what it says is no JSON ({error})")
        ) from error
    if not isinstance(tree, dict):
        raise ProcessUnreachableError(_unreachable_text(holder, "what it says is no JSON object"))
    return tree


@asynccontextmanager
async def open_stream(
    holder: ProcessAddress,
    path: str,
    *,
    bearer: str = "",
    params: Mapping[str, str] | None = None,
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Yield the pieces of an answer as they come, for as long as it takes.

    Raises:
        AwayError: nobody answers there, or it breaks off in the middle (raised from the iterator then).
        NoAnswerError: it refuses.

    """
    headers = {"authorization": f"Bearer {bearer}"} if bearer else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
        try:
            async with asyncio.timeout(_ANSWER_S):
                response = await session.get(
                    f"{holder.url.rstrip('/')}{path}",
                    params=dict(params or {}),
                    headers=headers,
                    allow_redirects=False,
                )
                if response.status != 200:
                    said = await response.content.read(_REFUSAL_BYTES)
                    raise ProcessRefusedError(
                        _refusal_text(holder, response.status, said), response.status
                    )
        except TimeoutError:
            raise ProcessUnreachableError(
                _unreachable_text(holder, "no answer within 10 s")
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ProcessUnreachableError(_unreachable_text(holder, _cause(error))) from error
        _watch_for_death(response)
        async with response:
            yield _pieces(holder, response)


async def _pieces(holder: ProcessAddress, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for piece in response.content.iter_any():
            yield piece
    except (aiohttp.ClientError, OSError) as error:
        raise ProcessUnreachableError(
            f"{holder.label}: the connection to {holder.url} broke off ({_cause(error)}); what was shown is not all"
        ) from error


def _watch_for_death(response: aiohttp.ClientResponse) -> None:
    """Have the kernel ask a silent connection whether its other end still lives; a short answer has none any more."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        line = connection.transport.get_extra_info("socket")
        if line is not None:
            enable_keepalive(line)


def _cause(error: Exception) -> str:
    # aiohttp's own words name host, port and TLS again; the operating system's are what matters.
    inner = getattr(error, "os_error", error)
    if isinstance(inner, OSError) and (inner.errno or 0) > 0:
        return os.strerror(inner.errno or 0).lower()
    return str(error) or type(error).__name__


def _unreachable_text(holder: ProcessAddress, why: str) -> str:
    return f"{holder.label} does not answer at {holder.url}: {why}. Is it running, and can this machine reach that address?"


def _refusal_text(holder: ProcessAddress, status: int, said: bytes) -> str:
    """Return what an agent or a gateway says when it refuses; both speak of errors as OpenAI's API does."""
    try:
        message = str(orjson.loads(said)["error"]["message"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        message = said[:200].decode("utf-8", "replace").strip() or f"HTTP status {status}"
    if status == 404 and b"error" not in said:
        message = "it does not know what was asked for; is it of an older release?"
    return f"{holder.label}: {message}"
