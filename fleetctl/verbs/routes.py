"""`fleetctl routes`: shows which node served each request, from the journals of all gateways."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

import aiohttp
import click
import msgspec
import orjson

from fleetctl.cli.connect import api_key_options, gateway_option, process_options, run
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import gateways
from fleetctl.fleets.dialer import offline_dialer
from fleetctl.output import printers
from identity.dialer import Dial
from machinery.http_body import read_limited
from schemas.wire.metrics import REQUEST_OUTCOMES

_ANSWER_S = 5.0
_BODY_LIMIT = 16 << 20
_HELP = """Show which node served each request, the latest last.

\b
  fleetctl routes --last 20
  fleetctl routes --model qwen --outcome failed --outcome interrupted -o wide

The requests are read from the journals of all gateways in the store, or of those given with --gateway. A journal holds
the last 10,000 requests, without prompts and answers.
"""

Json: TypeAlias = dict[str, Any]


class AttemptRow(msgspec.Struct, rename="camel"):
    """One attempt to forward the request to an engine."""

    replica: str
    outcome: str


class TokenCounts(msgspec.Struct):
    """The token counts of a request."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


class RequestRow(msgspec.Struct, rename="camel"):
    """The shown fields of one request."""

    time: str
    id: str
    gateway: str
    path: str
    model: str
    status: str
    latency_ms: float
    tokens: TokenCounts
    attempts: list[AttemptRow] = []
    replica: str | None = None
    worker: str | None = None
    strategy: str | None = None
    http_status: int | None = None
    queue_ms: float = 0.0
    first_token_ms: float | None = None
    resumptions: int = 0
    api_key: str | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalQuery:
    """The query for journals, and the API key."""

    query: dict[str, str]
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessDenied:
    """A gateway that requires another API key."""

    message: str


@click.command(help=_HELP)
@click.option("--last", type=click.IntRange(1, 1000), default=100, show_default=True)
@click.option("--model", default="", help="Only requests for this model name.")
@click.option("--node", default="", help="Only requests that were forwarded to this node.")
@click.option(
    "--outcome",
    type=click.Choice(REQUEST_OUTCOMES),
    multiple=True,
    help="Only requests with this outcome.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "wide", "json"]),
    default="table",
    show_default=True,
)
@click.option("--no-headers", is_flag=True, help="Do not print column titles.")
@gateway_option("Gateway to read (default: all gateways of the fleet). Can be repeated.")
@api_key_options
@process_options
def routes(last: int, output: str, gateway: tuple[str, ...], **options: Any) -> None:
    """Show which node served each request, the latest last."""
    filters = {
        "limit": str(last),
        "model": options["model"],
        "node": options["node"],
        "status": ",".join(options["outcome"]),
    }
    query = JournalQuery(
        query={k: v for k, v in filters.items() if v}, key=gateways.read_api_key(options)
    )
    found = run(_fetch_requests(gateways.parse_urls(gateway), query, options))[-last:]
    if output == "json":
        tree = {"apiVersion": "v1", "kind": "List", "items": found}
        click.echo(orjson.dumps(tree, option=orjson.OPT_INDENT_2).decode())
    elif found:
        headers = not options["no_headers"]
        click.echo(request_table(found, is_wide=output == "wide", headers=headers))
    else:
        click.echo("no requests found", err=True)


def request_table(found: Sequence[Json], *, is_wide: bool, headers: bool) -> str:
    """Return the requests as a table. Pure."""
    rows = [_request_cells(msgspec.convert(one, RequestRow), is_wide=is_wide) for one in found]
    titles = ["TIME", "MODEL", "NODE", "REPLICA", "OUTCOME", "ATTEMPTS", "FIRST TOKEN", "LATENCY"]
    titles += ["PROMPT", "OUTPUT"]
    if is_wide:
        titles += ["STATUS", "QUEUED", "CACHED", "RESUMED", "STRATEGY", "KEY", "SESSION", "PATH"]
        titles += ["GATEWAY", "REQUEST", "FAILED AT"]
    return printers.align_columns(rows, titles if headers else [])


def _request_cells(row: RequestRow, *, is_wide: bool) -> list[str]:
    # Times are shown in the local time zone.
    moment = datetime.fromisoformat(row.time).astimezone()
    cells = [
        moment.isoformat(sep=" ", timespec="milliseconds")[:-6],
        row.model,
        row.worker or "-",
        row.replica or "-",
        row.status,
        str(len(row.attempts)),
        "-" if row.first_token_ms is None else _duration_text(row.first_token_ms),
        _duration_text(row.latency_ms),
        str(row.tokens.prompt),
        str(row.tokens.output),
    ]
    if is_wide:
        failed = [one for one in row.attempts if one.outcome not in ("answered", "resumed")]
        cells += [
            "-" if row.http_status is None else str(row.http_status),
            _duration_text(row.queue_ms),
            str(row.tokens.cached),
            str(row.resumptions),
            row.strategy or "-",
            row.api_key or "-",
            row.session or "-",
            row.path,
            row.gateway,
            row.id,
            ",".join(f"{one.replica}:{one.outcome}" for one in failed) or "-",
        ]
    return cells


def _duration_text(milliseconds: float) -> str:
    if milliseconds >= 10_000:
        return f"{milliseconds / 1000:.1f}s"
    return f"{milliseconds:.0f}ms" if milliseconds >= 10 else f"{milliseconds:.1f}ms"


async def _fetch_requests(named: Sequence[str], query: JournalQuery, options: Json) -> list[Json]:
    """Return the requests of all journals, the latest last; print a warning for each journal that cannot be read.

    Raises:
        FleetctlError: no journal can be read.

    """
    found = await _gateways(named, options)
    urls = [url for url, _ in found]
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        answers = await asyncio.gather(*(_fetch_journal(session, *one, query) for one in found))
    silent = [
        f"{url}: {journal}"
        for url, journal in zip(urls, answers, strict=True)
        if isinstance(journal, str)
    ]
    refused = [journal.message for journal in answers if isinstance(journal, AccessDenied)]
    if len(silent) + len(refused) == len(urls):
        if not silent:
            raise FleetctlError("; ".join(refused))
        failures = "; ".join((*silent, *refused))
        raise FleetctlError(
            f"no gateway answers ({failures}). Start one, or pass its URL with --gateway"
        )
    for line in silent:
        click.echo(f"warning: a gateway does not answer: {line}", err=True)
    for line in refused:
        click.echo(f"warning: a gateway denies access: {line}", err=True)
    # Two URLs may lead to one gateway. Journals are newest first; reversing keeps the order within a millisecond.
    lines = {
        (one["gateway"], one["id"]): one
        for journal in answers
        if isinstance(journal, list)
        for one in reversed(journal)
    }
    return sorted(lines.values(), key=lambda one: str(one["time"]))


async def _gateways(named: Sequence[str], options: Json) -> list[tuple[str, Dial]]:
    """Return the URLs that a person gives, or those of all registered gateways, and how to dial each."""
    if named:
        dial = offline_dialer(options).address()
        return [(url, dial) for url in named]
    found = await gateways.list_dials(options)
    if not found:
        raise FleetctlError(
            "no gateway is registered. `fleetctl up` runs one; for another gateway, pass its URL with --gateway"
        )
    return found


async def _fetch_journal(
    session: aiohttp.ClientSession, url: str, dial: Dial, query: JournalQuery
) -> list[Json] | AccessDenied | str:
    """Return the requests of one journal, or why it cannot be read."""
    headers = {"authorization": f"Bearer {query.key}"} if query.key else {}
    try:
        async with session.get(
            f"{url.rstrip('/')}/api/dashboard/requests",
            params=query.query,
            headers=headers,
            allow_redirects=False,
            ssl=dial.ssl,
            server_hostname=dial.server_hostname,
        ) as response:
            body = await read_limited(response.content.iter_any(), _BODY_LIMIT)
            if response.status in (401, 403):
                return AccessDenied(message=_access_denied_text(url, response.status))
            if response.status != 200:
                return f"status {response.status}"
            found: list[Json] = orjson.loads(body)["requests"]
            msgspec.convert(found, list[RequestRow])
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return gateways.untrusted_text(error) or str(error) or f"no answer within {_ANSWER_S:g} s"
    except (orjson.JSONDecodeError, KeyError, TypeError, msgspec.ValidationError) as error:
        return (
            f"the response is not a journal ({error}); check that it is a gateway of this release"
        )
    return found


def _access_denied_text(url: str, status: int) -> str:
    if status == 401:
        return (
            f"{url} requires an API key with the role viewer: pass --api-key-file, or set FLEET_API_KEY "
            "(`fleetctl create apikey NAME --role viewer` creates one)"
        )
    return f"{url}: this API key lacks the role viewer; create one with `fleetctl create apikey NAME --role viewer`"
