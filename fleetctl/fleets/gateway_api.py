"""Questions to the admin APIs of all gateways of a fleet, or of those that a person names."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import aiohttp
import click
import msgspec
import orjson

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import gateways
from fleetctl.fleets.dialer import offline_dialer
from identity.dialer import Dial
from insight import process_client
from machinery.http_body import read_limited
from schemas.records import Role

Json: TypeAlias = dict[str, Any]
T = TypeVar("T")

_ANSWER_S = 5.0
_BODY_LIMIT = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayQuestion:
    """One question to each gateway."""

    path: str
    key: str
    """The API key; empty without one."""
    role: Role = "viewer"
    """The role that the key needs."""
    method: Literal["GET", "POST"] = "GET"
    parameters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    accepted: frozenset[int] = frozenset({200})
    """The statuses that are answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayAnswer:
    """The answer of one gateway."""

    status: int
    body: Any
    """JSON, of any form."""


@dataclass(frozen=True, slots=True)
class _Parsed(Generic[T]):
    """The parsed answer of one gateway."""

    value: T


@dataclass(frozen=True, slots=True, kw_only=True)
class _AccessDenied:
    """The refusal of a gateway that requires another API key."""

    message: str


async def ask_all(
    named: Sequence[str],
    question: GatewayQuestion,
    options: Json,
    parse: Callable[[GatewayAnswer], T],
) -> list[T]:
    """Return the answers of the gateways at these URLs, or of all that are registered; warn of those that give none.

    `parse` raises KeyError, TypeError, ValueError or msgspec.ValidationError for an answer with another form.

    Raises:
        FleetctlError: no gateway answers.

    """
    found = await _gateways(named, options)
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        answers = await asyncio.gather(
            *(_ask(session, url, dial, question, parse) for url, dial in found)
        )
    silent = [
        f"{url}: {answer}"
        for (url, _), answer in zip(found, answers, strict=True)
        if isinstance(answer, str)
    ]
    refused = [answer.message for answer in answers if isinstance(answer, _AccessDenied)]
    if len(silent) + len(refused) == len(found):
        if not silent:
            raise FleetctlError("; ".join(refused))
        failures = "; ".join((*silent, *refused))
        raise FleetctlError(
            f"no gateway answers ({failures}). Start one, or pass its URL with --gateway"
        )
    for line in silent:
        click.echo(f"warning: a gateway does not answer: {line}", err=True)
    if refused:
        others = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        note = f"note: a gateway was not read{others}: {refused[0]}"
        # Below the table: a fleet may have gateways that a person has no key for, and knows it.
        click.get_current_context().call_on_close(lambda: click.echo(note, err=True))
    return [answer.value for answer in answers if isinstance(answer, _Parsed)]


async def _gateways(named: Sequence[str], options: Json) -> list[tuple[str, Dial]]:
    """Return the URLs that a person gives, or those of all registered gateways, and how to dial each."""
    if named:
        dial = offline_dialer(options).address()
        return [(url, dial) for url in named]
    dials = await gateways.list_dials(options)
    if not dials:
        raise FleetctlError(
            "no gateway is registered. `fleetctl up` runs one; for another gateway, pass its URL with --gateway"
        )
    return dials


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    dial: Dial,
    question: GatewayQuestion,
    parse: Callable[[GatewayAnswer], T],
) -> _Parsed[T] | _AccessDenied | str:
    """Return the answer of one gateway, or why there is none."""
    headers = {"authorization": f"Bearer {question.key}"} if question.key else {}
    try:
        async with session.request(
            question.method,
            f"{url.rstrip('/')}{question.path}",
            params=question.parameters,
            headers=headers,
            allow_redirects=False,
            ssl=dial.ssl,
            server_hostname=dial.server_hostname,
        ) as response:
            body = await read_limited(response.content.iter_any(), _BODY_LIMIT)
            if response.status in (401, 403):
                return _AccessDenied(
                    message=_access_denied_text(url, response.status, question.role)
                )
            if response.status not in question.accepted:
                return f"status {response.status}"
            answer = GatewayAnswer(status=response.status, body=orjson.loads(body))
        return _Parsed(parse(answer))
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return (
            process_client.untrusted_text(error)
            or str(error)
            or f"no answer within {_ANSWER_S:g} s"
        )
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        return (
            f"the response has another form ({error}); check that it is a gateway of this release"
        )


def _access_denied_text(url: str, status: int, role: Role) -> str:
    command = f"`fleetctl create apikey NAME --role {role}`"
    if status == 401:
        return (
            f"{url} requires an API key with the role {role}: pass --api-key-file, or set FLEET_API_KEY "
            f"({command} creates one)"
        )
    return f"{url}: this API key lacks the role {role}; create one with {command}"
