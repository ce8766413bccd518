"""`fleetctl routes`: shows which node served each request, or works on it, from all gateways."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

import click
import msgspec

from fleetctl.cli.arguments import output_option, parse_urls
from fleetctl.cli.connect import api_key_options, gateway_option, process_options
from fleetctl.cli.documents import list_tree, print_tree
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import gateway_api, gateways
from fleetctl.fleets.gateway_api import GatewayAnswer, GatewayQuestion
from fleetctl.output import printers
from schemas.wire.metrics import REQUEST_OUTCOMES
from schemas.wire.requests import EndedRequest, RunningRequest

_JOURNAL = "/api/requests/ended"
_IN_FLIGHT = "/api/requests/in-flight"
_HELP = """Show which node served each request, the latest last.

With --in-flight: which node works on each.

\b
  fleetctl routes --last 20
  fleetctl routes --model qwen --outcome failed --outcome interrupted -o wide
  fleetctl routes --in-flight                  oldest first; `fleetctl cancel ID` ends one

The requests are read from the journals of all gateways in the store, or of those given with --gateway. A journal holds
the last 10,000 requests, without prompts and answers.
"""

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalQuery:
    """The query for journals, and the API key."""

    query: dict[str, str]
    key: str


@click.command(help=_HELP)
@click.option("--last", type=click.IntRange(1, 1000), default=100, show_default=True)
@click.option("--in-flight", is_flag=True, help="Requests that have not ended.")
@click.option("--model", default="", help="Only requests for this model name.")
@click.option("--node", default="", help="Only requests that were forwarded to this node.")
@click.option(
    "--outcome",
    type=click.Choice(REQUEST_OUTCOMES),
    multiple=True,
    help="Only requests with this outcome.",
)
@output_option("table", "wide", "json")
@click.option("--no-headers", is_flag=True, help="Do not print column titles.")
@gateway_option("Gateway to read (default: all gateways of the fleet). Can be repeated.")
@api_key_options
@process_options
async def routes(last: int, output: str, gateway: tuple[str, ...], **options: Any) -> None:
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
    named, is_running = parse_urls(gateway), options["in_flight"]
    if is_running and options["outcome"]:
        raise click.UsageError(
            "--outcome: a request in flight has none; leave it or --in-flight out"
        )
    if is_running:
        requests = (await _fetch_in_flight(named, query, options))[:last]
    else:
        requests = (await _fetch_requests(named, query, options))[-last:]
    if output == "json":
        print_tree(list_tree(requests), "json")
    elif requests:
        table = in_flight_table if is_running else request_table
        click.echo(table(requests, is_wide=output == "wide", headers=not options["no_headers"]))
    else:
        click.echo("no requests found", err=True)


def request_table(found: Sequence[Json], *, is_wide: bool, headers: bool) -> str:
    """Return the requests as a table. Pure."""
    rows = [_request_cells(msgspec.convert(one, EndedRequest), is_wide=is_wide) for one in found]
    titles = ["TIME", "MODEL", "NODE", "REPLICA", "OUTCOME", "ATTEMPTS", "FIRST TOKEN", "LATENCY"]
    titles += ["PROMPT", "OUTPUT"]
    if is_wide:
        titles += ["STATUS", "QUEUED", "CACHED", "RESUMED", "STRATEGY", "KEY", "SESSION", "PATH"]
        titles += ["GATEWAY", "REQUEST", "FAILED AT"]
    return printers.align_columns(rows, titles if headers else [])


async def describe_requests(ids: Sequence[str], options: Json) -> str:
    """Return the details of ended requests by their ids. Raises FleetctlError: a request is in no journal."""
    named, key = parse_urls(options["gateway"]), gateways.read_api_key(options)
    texts: list[str] = []
    for id_ in ids:
        query = JournalQuery(query={"id": id_}, key=key)
        rows = await _fetch_requests(named, query, options)
        if not rows:
            raise FleetctlError(
                f"no request {id_!r} in the journals of the gateways; they hold the last 10,000 that have ended, and "
                "`fleetctl routes -o wide` lists their ids"
            )
        texts += [_description(msgspec.convert(row, EndedRequest)) for row in rows]
    return "\n\n".join(texts)


def _description(row: EndedRequest) -> str:
    tokens = row.tokens
    lines = [
        ("Request:", row.id),
        ("Time:", row.time.astimezone().isoformat(sep=" ", timespec="milliseconds")),
        ("Model:", row.model),
        ("Path:", row.path),
        ("Key:", row.api_key or "-"),
        ("Session:", row.session or "-"),
        ("Gateway:", row.gateway),
        ("Outcome:", f"{row.outcome}, status {row.http_status or '-'}"),
        ("Served by:", f"{row.replica or '-'} on {row.worker or '-'}"),
        (
            "Time taken:",
            f"{_duration_text(row.latency_ms)}, of which {_duration_text(row.queue_ms)} queued",
        ),
        ("Tokens:", f"{tokens.prompt} prompt ({tokens.cached} cached), {tokens.output} output"),
        ("Cache:", row.cache_miss or "-"),
    ]
    for attempt in row.attempts:
        why = f": {attempt.why}" if attempt.why else ""
        taken = _duration_text(attempt.ms)
        lines.append(("Attempt:", f"{attempt.replica} {attempt.outcome} after {taken}{why}"))
    return printers.align_columns(lines, [])


def in_flight_table(found: Sequence[Json], *, is_wide: bool, headers: bool) -> str:
    """Return the requests under way as a table. Pure."""
    rows = [
        _in_flight_cells(msgspec.convert(tree, RunningRequest), tree["gateway"], is_wide=is_wide)
        for tree in found
    ]
    titles = ["REQUEST", "MODEL", "NODE", "REPLICA", "PHASE", "PROMPT", "OUTPUT", "AGE"]
    titles += ["ATTEMPTS", "RESUMED", "KEY", "PATH", "GATEWAY"] if is_wide else []
    return printers.align_columns(rows, titles if headers else [])


def _in_flight_cells(row: RunningRequest, gateway: str, *, is_wide: bool) -> list[str]:
    prompt = "-" if row.prompt_tokens is None else str(row.prompt_tokens)
    if row.phase == "prefill" and row.prompt_tokens and row.prefilled_tokens is not None:
        prompt = f"{row.prefilled_tokens}/{row.prompt_tokens}"
    cells = [
        row.id,
        row.model,
        row.worker or "-",
        row.replica or "-",
        row.phase,
        prompt,
        "-" if row.tokens is None else str(row.tokens),
        _duration_text(row.seconds * 1000),
    ]
    if is_wide:
        more = (str(row.attempts), str(row.resumptions), row.api_key or "-", row.path, gateway)
        cells += more
    return cells


def _request_cells(row: EndedRequest, *, is_wide: bool) -> list[str]:
    moment = row.time.astimezone()  # the local time zone
    cells = [
        moment.isoformat(sep=" ", timespec="milliseconds")[:-6],
        row.model,
        row.worker or "-",
        row.replica or "-",
        row.outcome,
        str(len(row.attempts)),
        "-" if row.first_token_ms is None else _duration_text(row.first_token_ms),
        _duration_text(row.latency_ms),
        str(row.tokens.prompt),
        str(row.tokens.output),
    ]
    if is_wide:
        failed = [
            attempt for attempt in row.attempts if attempt.outcome not in ("answered", "resumed")
        ]
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
            ",".join(
                f"{request_attempt.replica}:{request_attempt.outcome}" for request_attempt in failed
            )
            or "-",
        ]
    return cells


def _duration_text(milliseconds: float) -> str:
    if milliseconds >= 10_000:
        return f"{milliseconds / 1000:.1f}s"
    return f"{milliseconds:.0f}ms" if milliseconds >= 10 else f"{milliseconds:.1f}ms"


async def _fetch_requests(named: Sequence[str], query: JournalQuery, options: Json) -> list[Json]:
    """Return the requests of all journals, the latest last. Raises FleetctlError: no journal can be read."""
    question = GatewayQuestion(path=_JOURNAL, parameters=query.query, key=query.key)
    rows = await _rows(named, question, options, EndedRequest)
    # Two URLs may lead to one gateway. Journals are newest first; reversing keeps the order within a millisecond.
    lines = {(one["gateway"], one["id"]): one for journal in rows for one in reversed(journal)}
    return sorted(lines.values(), key=lambda tree: datetime.fromisoformat(tree["time"]))


async def _fetch_in_flight(named: Sequence[str], query: JournalQuery, options: Json) -> list[Json]:
    """Return the requests that are under way at all gateways, oldest first. Raises FleetctlError: no gateway answers."""
    question = GatewayQuestion(path=_IN_FLIGHT, key=query.key)
    model, node = query.query.get("model"), query.query.get("node")
    lines = {
        (row["gateway"], row["id"]): row
        for rows in await _rows(named, question, options, RunningRequest)
        for row in rows
        if model in (None, row["model"]) and node in (None, row["worker"])
    }
    return sorted(lines.values(), key=lambda line: -float(line["seconds"]))


async def _rows(
    named: Sequence[str], question: GatewayQuestion, options: Json, kind: type[msgspec.Struct]
) -> list[list[Json]]:
    """Return the rows of each gateway, with the gateway's id in each. Raises FleetctlError: no gateway answers."""

    def parse(answer: GatewayAnswer) -> list[Json]:
        rows = [{"gateway": answer.body.get("gateway"), **one} for one in answer.body["requests"]]
        for row in rows:
            msgspec.convert(row, kind)
        return rows

    return await gateway_api.ask_all(named, question, options, parse)
