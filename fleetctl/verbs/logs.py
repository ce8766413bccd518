"""Whose logs are meant: from words and flags to processes, and where each of them runs. Reads the store, asks nobody.

Fetching logs from who has them, and printing their lines as they come.

`fleetctl logs`: flags and what they mean.
"""

import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import IO, Any

import click

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.kubectl_hints import unsupported_flag
from fleetctl.fleets import process_client
from fleetctl.fleets.process_client import ProcessAddress, issue_ticket
from fleetctl.objects import selectors
from fleetctl.objects.kind_args import kind_of
from machinery.process_log import time_text
from manifests.suggestions import not_found_message
from schemas import duration
from schemas.replica import Replica
from store import keys, objects
from store.port import Transport

# What kubectl's users type for what declares replicas.
_DEPLOYMENT = ("deploy", "deployment", "deployments")
_OF_REPLICAS = "only replicas have ranks, previous runs and labels"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSelection:
    """What was asked for; `kind` is that of a replica where only a selector was given."""

    kind: str = "Replica"
    name: str = ""
    selector: str = ""
    rank: int | None = None
    all_ranks: bool = False
    all_replicas: bool = False
    is_previous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """One log."""

    label: str
    """Where its lines are from, for people: `replica/qwen-0/rank-1`, `node/mac-1`."""
    kind: str
    """Who has it: Node or Gateway."""
    holder: str
    """The name of the node, or the id of the gateway."""
    path: str
    params: dict[str, str]


def parse_target(word: str, wanted: LogSelection) -> LogSelection:
    """Return what is wanted with the kind and name in `qwen-0`, `deploy/qwen`, `node/mac-1`, `gateway/ID`.

    Raises:
        click.UsageError: such objects have no log, or not one of the wanted kind.

    """
    before, slash, name = word.partition("/")
    if before.lower() in ("gateway", "gateways"):
        found = replace(wanted, kind="Gateway", name=name)
    elif not slash:
        found = replace(wanted, name=word)
    else:
        kind = "ModelDeployment" if before.lower() in _DEPLOYMENT else kind_of(before).name
        found = replace(wanted, kind=kind, name=name)
    if found.kind not in ("Replica", "ModelDeployment", "Node", "Gateway"):
        raise click.UsageError(
            f"{word}: a {found.kind} has no log; replicas, deployments, nodes and gateways have"
        )
    if slash and not name and found.kind != "Gateway":
        raise click.UsageError(f"{word}: which one? Write {before}/NAME")
    _refuse_flags(word, found)
    return found


def _refuse_flags(word: str, found: LogSelection) -> None:
    if found.all_replicas and found.kind != "ModelDeployment":
        raise click.UsageError("--all-replicas is for deploy/NAME")
    of_replicas = {
        "--rank": found.rank is not None,
        "--all-ranks": found.all_ranks,
        "--previous": found.is_previous,
    }
    given = [flag for flag, is_given in of_replicas.items() if is_given]
    if given and found.kind in ("Node", "Gateway"):
        raise click.UsageError(f"{given[0]} says nothing about {word}: {_OF_REPLICAS}")


async def find_sources(transport: Transport, wanted: LogSelection) -> list[LogSource]:
    """Return the logs that are meant.

    Raises:
        FleetctlError: there is no such object, or it has no such rank.

    """
    if wanted.kind == "Node":
        return [_agent_source(wanted.name)]
    if wanted.kind == "Gateway":
        return [_gateway_source(wanted.name or await _only_gateway(transport))]
    replicas = await _replicas(transport, wanted)
    return [source for one in replicas for source in _replica_sources(one, wanted)]


def _agent_source(name: str) -> LogSource:
    return LogSource(
        label=f"node/{name}", kind="Node", holder=name, path="/v1/logs/agent", params={}
    )


def _gateway_source(id_: str) -> LogSource:
    return LogSource(
        label=f"gateway/{id_}", kind="Gateway", holder=id_, path="/v1/logs/gateway", params={}
    )


def _replica_sources(replica: Replica, wanted: LogSelection) -> list[LogSource]:
    ranks = replica.spec.ranks
    numbers = range(len(ranks)) if wanted.all_ranks else (wanted.rank or 0,)
    if numbers[-1] >= len(ranks):
        there = "rank 0 only" if len(ranks) == 1 else f"ranks 0 to {len(ranks) - 1}"
        raise FleetctlError(f"replica/{replica.name} has no rank {wanted.rank}: it has {there}")
    return [
        LogSource(
            label=f"replica/{replica.name}/rank-{number}",
            kind="Node",
            holder=ranks[number].node,
            path=f"/v1/logs/replicas/{replica.name}",
            params={
                "rank": str(number),
                **({"previous": "true"} if wanted.is_previous else {}),
            },
        )
        for number in numbers
    ]


async def _only_gateway(transport: Transport) -> str:
    found = await process_client.list_gateways(transport)
    if len(found) == 1:
        return found[0].key.removeprefix("Gateway/")
    if not found:
        raise FleetctlError("no gateway is registered. Is one running? `fleetctl up` runs one")
    known = ", ".join(one.label for one in found)
    raise FleetctlError(f"which gateway? There are {known}")


async def _replicas(transport: Transport, wanted: LogSelection) -> list[Replica]:
    """Return the replicas that are meant, by name; says so where one of several was taken, or none found."""
    there = await objects.list_all(transport, Replica)
    if wanted.selector:
        found = selectors.select(there, selectors.parse_labels(wanted.selector))
        if not found:
            click.echo("no replicas found", err=True)
        return found
    if wanted.kind == "Replica":
        found = [one for one in there if one.name == wanted.name]
        if not found:
            names = [one.name for one in there]
            raise FleetctlError(await _no_replica(transport, wanted.name, names))
        return found
    found = [one for one in there if one.spec.deployment == wanted.name]
    if not found:
        raise FleetctlError(await _no_replicas_of(transport, wanted.name))
    if len(found) > 1 and not wanted.all_replicas:
        click.echo(f"Found {len(found)} replicas, using replica/{found[0].name}", err=True)
        return found[:1]
    return found


async def _no_replica(transport: Transport, name: str, there: list[str]) -> str:
    """Return the refusal; a deployment's name, a node's or a gateway's is easily meant."""
    others = {
        "deploy": keys.spec_key("ModelDeployment", name),
        "node": keys.status_key("Node", name),
    }
    for typed, key in others.items():
        if await transport.get(key) is not None:
            return f'replicas "{name}" not found; did you mean {typed}/{name}?'
    return not_found_message(kind_of("replica"), name, there)


async def _no_replicas_of(transport: Transport, name: str) -> str:
    items = (await transport.list(keys.spec_prefix("ModelDeployment"))).items
    names = [keys.kind_and_name(item.key)[1] for item in items]
    if name not in names:
        return not_found_message(kind_of("md"), name, names)
    return f"modeldeployment/{name} has no replicas; `fleetctl describe md {name}` says why"


# A line that goes on for longer is shown in pieces.
_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LogDisplay:
    """How logs are shown."""

    params: dict[str, str]
    """What of each is asked for."""
    has_prefix: bool
    has_times: bool
    most: int | None
    """How many may be followed at once; None: they are not followed."""


class LinePrefixer:
    """From pieces of one log to whole lines with what is to stand before them. Pure."""

    def __init__(self, look: LogDisplay, label: str) -> None:
        self._prefix = f"[{label}] ".encode() if look.has_prefix else b""
        self._has_times = look.has_times
        self._rest = b""
        self._time = b""

    def add(self, piece: bytes) -> bytes:
        """Return what can be printed."""
        if not self._prefix and not self._has_times:
            return piece
        *whole, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            whole, self._rest = [*whole, self._rest], b""
        return b"".join(self._told(line) for line in whole)

    def end(self) -> bytes:
        """Return the last line, if nothing ended it."""
        return self._told(self._rest) if self._rest else b""

    def _told(self, line: bytes) -> bytes:
        if not self._has_times:
            return self._prefix + line + b"\n"
        stamp = time_text(line)
        # What has no time of its own, such as a traceback, came with the line before it.
        self._time = stamp + b" " if stamp is not None else self._time
        return self._prefix + self._time + line + b"\n"


async def print_logs(transport: Transport, sources: list[LogSource], look: LogDisplay) -> None:
    """Print logs; of several all at once, each to its end.

    Raises:
        FleetctlError: the only log cannot be shown; too many would be followed.
        click.exceptions.Exit: of several, one or more could not be shown; each was told of.

    """
    if look.most is not None and len(sources) > look.most:
        raise FleetctlError(
            f"you are attempting to follow {len(sources)} logs, but at most {look.most} are followed at once; "
            "--max-log-requests says how many"
        )
    async with AsyncExitStack() as stack:
        desk = _ProcessAccess(transport, stack)
        if len(sources) == 1:
            await _print_log(desk, sources[0], look)
            return
        failed = await _print_all(desk, sources, look)
    if failed:
        raise click.exceptions.Exit(1)


async def _print_all(desk: "_ProcessAccess", sources: list[LogSource], look: LogDisplay) -> bool:
    """Print several logs; return whether one failed."""
    failures: list[str] = []
    holders = {(one.kind, one.holder) for one in sources}
    # Tickets are got one by one: what gives them back at the end does so in turn.
    for kind, name in sorted(holders):
        await desk.holder(kind, name)

    async def one(source: LogSource) -> None:
        try:
            await _print_log(desk, source, look)
        except FleetctlError as error:
            failures.append(source.label)
            click.echo(f"error: {source.label}: {error.message}", err=True)

    try:
        async with asyncio.TaskGroup() as group:
            for source in sources:
                group.create_task(one(source))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return bool(failures)


class _ProcessAccess:
    """Who is asked, and with which ticket: one for each holder."""

    def __init__(self, transport: Transport, stack: AsyncExitStack) -> None:
        self._transport = transport
        self._stack = stack
        self._known: dict[tuple[str, str], tuple[ProcessAddress, str] | FleetctlError] = {}

    async def holder(self, kind: str, name: str) -> tuple[ProcessAddress, str] | FleetctlError:
        """Return who it is with a ticket for it, or why nobody can be asked. Raises StoreError."""
        known = self._known.get((kind, name))
        if known is None:
            known = self._known[kind, name] = await self._asked(kind, name)
        return known

    async def _asked(self, kind: str, name: str) -> tuple[ProcessAddress, str] | FleetctlError:
        try:
            if kind == "Node":
                found = await process_client.find_agent(self._transport, name)
            else:
                found = await process_client.find_gateway(self._transport, name)
        except FleetctlError as error:
            return error
        return found, await self._stack.enter_async_context(
            issue_ticket(self._transport, found.key)
        )


async def _print_log(desk: _ProcessAccess, source: LogSource, look: LogDisplay) -> None:
    """Print one log to its end. Raises FleetctlError."""
    found = await desk.holder(source.kind, source.holder)
    if isinstance(found, FleetctlError):
        raise found
    holder, bearer = found
    params = {**source.params, **look.params}
    lines = LinePrefixer(look, source.label)
    out = sys.stdout.buffer
    async with process_client.open_stream(
        holder, source.path, bearer=bearer, params=params
    ) as pieces:
        async for piece in pieces:
            await _write_async(out, lines.add(piece))
    await _write_async(out, lines.end())


async def _write_async(out: IO[bytes], text: bytes) -> None:
    """Write; in a thread, because a reader such as `less` may take its time, and tickets are renewed meanwhile."""
    if text:
        await asyncio.to_thread(_write, out, text)


def _write(out: IO[bytes], text: bytes) -> None:
    out.write(text)
    out.flush()


_HELP = """Show the log of a replica's engine, an agent or a gateway.

\b
  fleetctl logs qwen-0                      the engine of replica qwen-0 (its rank 0)
  fleetctl logs qwen-0 -f --tail 20         its last 20 lines, and what comes
  fleetctl logs qwen-0 --previous           of the run before, such as one that crashed
  fleetctl logs sharded-0 --all-ranks       every Mac of a group
  fleetctl logs deploy/qwen                 one of its replicas; --all-replicas: all
  fleetctl logs -l app=chat --since 5m      replicas with a label
  fleetctl logs node/mac-1                  the agent of a Mac
  fleetctl logs gateway/9f3a                a gateway (without an id: the only one)

The agent of the Mac sends it over HTTP: the Mac's address must be reachable from here. An agent and a gateway keep the
last MiB of their own log in memory, since their start; what engines log is on the Mac's disk.
"""


def _since(_: click.Context, __: click.Parameter, value: str) -> str:
    """Check a duration."""
    try:
        if value:
            duration.parse_fine(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return value


@click.command(help=_HELP)
@click.argument("what", required=False, metavar="REPLICA | deploy/NAME | node/NAME | gateway[/ID]")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is logged from now on.")
@click.option(
    "--rank", type=click.IntRange(min=0), help="Which rank of a sharded replica (else 0)."
)
@click.option("--all-ranks", is_flag=True, help="All ranks; implies --prefix.")
@click.option("--all-replicas", is_flag=True, help="All replicas of deploy/NAME; implies --prefix.")
@click.option(
    "--tail",
    type=click.IntRange(min=-1),
    help="How many lines from the end; -1 is all, which is the default, but 10 with -l.",
)
@click.option("--since", callback=_since, default="", help="Only the last so long: 90s, 5m, 1h30m.")
@click.option("-p", "--previous", is_flag=True, help="The engine's run before the last.")
@click.option("--timestamps", is_flag=True, help="Begin each line with its time.")
@click.option("--prefix", is_flag=True, help="Begin each line with where it is from.")
@click.option("-l", "--selector", default="", help="Replicas with these labels: k=v,k!=v,k,!k.")
@click.option(
    "--max-log-requests",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="How many logs may be followed at once.",
)
@unsupported_flag(
    "a replica has one program on each Mac; --rank N says which Mac",
    "-c",
    "--container",
    takes_value=True,
)
@store_options
def logs(what: str | None, **options: Any) -> None:
    """Show the log of a replica's engine, an agent or a gateway."""
    wanted = _log_selection(what, options)
    is_many = wanted.all_ranks or wanted.all_replicas
    tail = options["tail"]
    if tail is None and options["selector"]:
        tail = 10
    look = LogDisplay(
        params={
            **({} if tail in (None, -1) else {"tail": str(tail)}),
            **({"since": options["since"]} if options["since"] else {}),
            **({"follow": "true"} if options["follow"] else {}),
        },
        has_prefix=options["prefix"] or is_many,
        has_times=options["timestamps"],
        most=options["max_log_requests"] if options["follow"] else None,
    )
    run(_logs(wanted, look, options))


def _log_selection(what: str | None, options: dict[str, Any]) -> LogSelection:
    """Return whose logs are meant.

    Raises:
        click.UsageError: flags that say nothing, or two things.

    """
    if bool(what) == bool(options["selector"]):
        raise click.UsageError(
            "whose log? Name a replica, deploy/NAME, node/NAME or gateway/ID, or choose replicas with -l: one of these"
        )
    if options["rank"] is not None and options["all_ranks"]:
        raise click.UsageError("give --rank or --all-ranks: one of them")
    if options["previous"] and options["follow"]:
        raise click.UsageError("the previous run is over: give --previous or --follow")
    return parse_target(
        what or "",
        LogSelection(
            selector=options["selector"],
            rank=options["rank"],
            all_ranks=options["all_ranks"],
            all_replicas=options["all_replicas"],
            is_previous=options["previous"],
        ),
    )


async def _logs(wanted: LogSelection, look: LogDisplay, options: dict[str, Any]) -> None:
    async with open_store(options) as transport:
        found = await find_sources(transport, wanted)
        await print_logs(transport, found, look)
