"""The verb `fleetctl logs`: finds the processes whose logs are requested, fetches the logs and prints them."""

import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import IO, Any

import click

from fleetctl.cli import terminal
from fleetctl.cli.connect import open_store, process_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.dialer import open_dialer
from fleetctl.objects import selectors
from fleetctl.objects.kind_args import kind_of
from identity.dialer import Dialer
from insight import logs as logs_of_fleet
from insight import process_client
from insight.errors import ProcessError
from insight.logs import LineFilter, LineReader, LogHolder, LogRange, LogSource
from insight.process_client import ProcessAddress
from insight.tickets import issue_ticket
from machinery.process_log import parse_line, time_text
from manifests.suggestions import not_found_message
from schemas import duration
from schemas.replica import Replica
from store import keys, objects
from store.port import Transport

# Words for deployments that kubectl users know.
_DEPLOYMENT_WORDS = ("deploy", "deployment", "deployments")
_LEASED = frozenset(logs_of_fleet.LEASED_HOLDERS.values())
_REPLICAS_ONLY = "only replicas have ranks, previous runs and labels"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSelection:
    """Selection of logs by kind, name and flags; with a selector only, the kind is Replica."""

    kind: str = "Replica"
    name: str = ""
    selector: str = ""
    rank: int | None = None
    all_ranks: bool = False
    all_replicas: bool = False
    is_previous: bool = False


def parse_target(word: str, selection: LogSelection) -> LogSelection:
    """Return the selection with kind and name from `qwen-0`, `md/qwen`, `node/mac-1` or `gateway/ID`.

    Raises:
        click.UsageError: the kind has no logs, or the flags do not fit it.

    """
    before, slash, name = word.partition("/")
    process = before.lower().removesuffix("s")
    if process == "etcd":
        raise click.UsageError(
            f"{word}: etcd gives its log to nobody; it is on its own machine: etcd.log below the data folder of "
            "`fleetctl up`, or what `fleetctl service status` names"
        )
    if process in logs_of_fleet.LEASED_HOLDERS:
        target = replace(selection, kind=logs_of_fleet.LEASED_HOLDERS[process], name=name)
    elif not slash:
        target = replace(selection, name=word)
    else:
        kind = "ModelDeployment" if before.lower() in _DEPLOYMENT_WORDS else kind_of(before).name
        target = replace(selection, kind=kind, name=name)
    if target.kind not in ("Replica", "ModelDeployment", "Node", *_LEASED):
        raise click.UsageError(
            f"{word}: a {target.kind} has no log; only replicas, deployments, nodes, gateways, reconcilers and "
            "dashboards have logs"
        )
    if slash and not name and target.kind not in _LEASED:
        raise click.UsageError(f"{word}: the name is missing; write {before}/NAME")
    if target.all_replicas and target.kind != "ModelDeployment":
        raise click.UsageError("--all-replicas needs md/NAME")
    replica_flags = {
        "--rank": target.rank is not None,
        "--all-ranks": target.all_ranks,
        "--previous": target.is_previous,
    }
    given = [flag for flag, is_given in replica_flags.items() if is_given]
    if given and target.kind in ("Node", *_LEASED):
        raise click.UsageError(f"{given[0]} cannot be used with {word}: {_REPLICAS_ONLY}")
    return target


async def find_sources(transport: Transport, selection: LogSelection) -> list[LogSource]:
    """Return the selected logs.

    Raises:
        FleetctlError: the object does not exist.
        ProcessError: the rank, or the process, does not exist.

    """
    if selection.kind == "Node":
        return [logs_of_fleet.agent_log(selection.name)]
    if selection.kind in _LEASED:
        id_ = selection.name
        if not id_:
            only = await process_client.find_process(transport, selection.kind)
            id_ = only.key.partition("/")[2]
        return [logs_of_fleet.process_log(selection.kind.lower(), id_)]
    replicas = await _find_replicas(transport, selection)
    return [
        logs_of_fleet.engine_log(replica, rank, is_previous=selection.is_previous)
        for replica in replicas
        for rank in (
            range(len(replica.spec.ranks)) if selection.all_ranks else (selection.rank or 0,)
        )
    ]


async def _find_replicas(transport: Transport, selection: LogSelection) -> list[Replica]:
    """Return the selected replicas by name; print a note if none was found or one of several is used."""
    replicas = await objects.list_all(transport, Replica)
    if selection.selector:
        found = selectors.select(replicas, selectors.parse_labels(selection.selector))
        if not found:
            click.echo("no replicas found", err=True)
        return found
    if selection.kind == "Replica":
        found = [replica for replica in replicas if replica.name == selection.name]
        if not found:
            names = [replica.name for replica in replicas]
            raise FleetctlError(await _no_replica_text(transport, selection.name, names))
        return found
    found = [replica for replica in replicas if replica.spec.deployment == selection.name]
    if not found:
        raise FleetctlError(await _no_replicas_text(transport, selection.name))
    if len(found) > 1 and not selection.all_replicas:
        click.echo(f"Found {len(found)} replicas, using replica/{found[0].name}", err=True)
        return found[:1]
    return found


async def _no_replica_text(transport: Transport, name: str, known: list[str]) -> str:
    """Return the error message; it suggests a deployment or a node of that name."""
    others = {
        "md": keys.spec_key("ModelDeployment", name),
        "node": keys.status_key("Node", name),
    }
    for prefix, key in others.items():
        if await transport.get(key) is not None:
            return f'replicas "{name}" not found; did you mean {prefix}/{name}?'
    return not_found_message(kind_of("replica"), name, known)


async def _no_replicas_text(transport: Transport, name: str) -> str:
    items = (await transport.list(keys.spec_prefix("ModelDeployment"))).items
    names = [keys.kind_and_name(item.key)[1] for item in items]
    if name not in names:
        return not_found_message(kind_of("md"), name, names)
    return f"modeldeployment/{name} has no replicas; `fleetctl describe md {name}` shows the reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogDisplay:
    """Request parameters and format of the output."""

    part: LogRange
    """The part of each log that is printed."""
    has_prefix: bool
    has_times: bool
    is_text: bool
    """True to show lines of JSON as text."""
    wanted: LineFilter
    max_followed: int | None
    """Maximum number of followed logs; None if logs are not followed."""


_LEVEL_ROLES: dict[str, terminal.Role] = {
    "DEBUG": "dim",
    "WARNING": "warn",
    "ERROR": "bad",
    "CRITICAL": "bad",
}


class LineFormatter:
    """Formats the wanted lines of a log: prefix, time, and text for people. Pure but for its state."""

    def __init__(self, display: LogDisplay, label: str) -> None:
        self._prefix = f"[{label}] ".encode() if display.has_prefix else b""
        self._has_times = display.has_times
        self._lines = LineReader(display.wanted)
        self._is_text = display.is_text
        is_changed = self._prefix or self._has_times or self._is_text
        self._is_raw = display.wanted.keeps_all and not is_changed
        self._time = b""

    def add(self, piece: bytes) -> bytes:
        """Return the output for the next piece of the log."""
        if self._is_raw:
            return piece
        return b"".join(self._format(line) for line in self._lines.add(piece))

    def end(self) -> bytes:
        """Return the output for an unterminated last line."""
        return b"".join(self._format(line) for line in self._lines.end())

    def _format(self, line: bytes) -> bytes:
        if self._is_text and (parsed := parse_line(line)) is not None:
            role = _LEVEL_ROLES.get(parsed.level)
            level = f"{parsed.level:<7}"
            level = level if role is None else terminal.style(level, role)
            text = f"{parsed.time} {level} {parsed.text}\n"
            return b"".join(self._prefix + one for one in text.encode().splitlines(keepends=True))
        if not self._has_times:
            return self._prefix + line + b"\n"
        stamp = time_text(line)
        # A line without a time, such as a traceback, gets the time of the line before it.
        self._time = stamp + b" " if stamp is not None else self._time
        return self._prefix + self._time + line + b"\n"


async def print_logs(
    transport: Transport,
    sources: list[LogSource],
    display: LogDisplay,
    dialer: Dialer | None = None,
) -> None:
    """Print one log, or several in parallel, to the end.

    Raises:
        FleetctlError: too many would be followed.
        ProcessError: the only log cannot be printed.
        click.exceptions.Exit: one of several logs could not be printed; an error was shown.

    """
    if display.max_followed is not None and len(sources) > display.max_followed:
        raise FleetctlError(
            f"you are attempting to follow {len(sources)} logs, but at most {display.max_followed} are followed at once; "
            "raise the limit with --max-log-requests"
        )
    async with AsyncExitStack() as stack:
        access = _ProcessAccess(transport, stack, dialer)
        if len(sources) == 1:
            await _print_log(access, sources[0], display)
            return
        failed = await _print_all(access, sources, display)
    if failed:
        raise click.exceptions.Exit(1)


async def _print_all(
    access: "_ProcessAccess", sources: list[LogSource], display: LogDisplay
) -> bool:
    """Print several logs in parallel; return whether one failed."""
    failures: list[str] = []
    holders = {(log_source.holder, log_source.name) for log_source in sources}
    # Issue the tickets one after the other, because the exit stack revokes them one after the other.
    for holder, name in sorted(holders):
        await access.address(holder, name)

    async def copy(source: LogSource) -> None:
        try:
            await _print_log(access, source, display)
        except ProcessError as error:
            failures.append(source.label)
            click.echo(f"error: {source.label}: {error.message}", err=True)

    try:
        async with asyncio.TaskGroup() as group:
            for source in sources:
                group.create_task(copy(source))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return bool(failures)


class _ProcessAccess:
    """Addresses and tickets of processes; one ticket for each."""

    def __init__(self, transport: Transport, stack: AsyncExitStack, dialer: Dialer | None) -> None:
        self._transport = transport
        self._dialer = dialer
        self._stack = stack
        self._known: dict[tuple[LogHolder, str], tuple[ProcessAddress, str] | ProcessError] = {}

    async def address(
        self, holder: LogHolder, name: str
    ) -> tuple[ProcessAddress, str] | ProcessError:
        """Return the address and a ticket, or the reason why there is none. Raises StoreError."""
        known = self._known.get((holder, name))
        if known is None:
            known = self._known[holder, name] = await self._open(holder, name)
        return known

    async def _open(
        self, holder: LogHolder, name: str
    ) -> tuple[ProcessAddress, str] | ProcessError:
        try:
            address = await logs_of_fleet.read_address(self._transport, holder, name, self._dialer)
        except ProcessError as error:
            return error
        return address, await self._stack.enter_async_context(
            issue_ticket(self._transport, address.key)
        )


async def _print_log(access: _ProcessAccess, source: LogSource, display: LogDisplay) -> None:
    """Print one log to the end. Raises ProcessError."""
    found = await access.address(source.holder, source.name)
    if isinstance(found, ProcessError):
        raise found
    address, bearer = found
    lines = LineFormatter(display, source.label)
    out = sys.stdout.buffer
    async with logs_of_fleet.open_log(address, source, display.part, bearer=bearer) as pieces:
        async for piece in pieces:
            await _write_async(out, lines.add(piece))
    await _write_async(out, lines.end())


async def _write_async(out: IO[bytes], text: bytes) -> None:
    """Write in a thread: a slow reader such as `less` must not stop the renewal of tickets."""
    if text:
        await asyncio.to_thread(_write, out, text)


def _write(out: IO[bytes], text: bytes) -> None:
    out.write(text)
    out.flush()


_HELP = """Print the log of an engine or another process.

\b
  fleetctl logs qwen-0                      the engine of replica qwen-0 (its rank 0)
  fleetctl logs qwen-0 -f --tail 20         its last 20 lines, and new ones
  fleetctl logs qwen-0 --previous           the previous run, such as one that crashed
  fleetctl logs sharded-0 --all-ranks       all Macs of a group
  fleetctl logs md/qwen                     one of its replicas; --all-replicas for all
  fleetctl logs -l app=chat --since 5m      replicas with a label
  fleetctl logs node/mac-1                  the agent of a Mac
  fleetctl logs gateway/9f3a                a gateway (the id is optional if there is only one)
  fleetctl logs reconciler                  a reconciler; `fleetctl logs dashboard` for a dashboard
  fleetctl logs reconciler --about qwen     its lines about one object, node, request or trace
  fleetctl logs node/mac-1 --grep warning   its lines with a text

The agent of the Mac serves the log over HTTP, so this machine must reach the Mac's address. Agents, gateways,
reconcilers and dashboards keep the last MiB of their own log in memory, since their start. Logs of engines are files on
the Mac.
"""


def _since(_: click.Context, __: click.Parameter, value: str) -> str:
    """Validate a duration."""
    try:
        if value:
            duration.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return value


@click.command(help=_HELP)
@click.argument(
    "what",
    required=False,
    metavar="REPLICA | md/NAME | node/NAME | gateway[/ID] | reconciler[/ID] | dashboard[/ID]",
)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines.")
@click.option("--rank", type=click.IntRange(min=0), help="Rank of a sharded replica (default 0).")
@click.option("--all-ranks", is_flag=True, help="Print all ranks; implies --prefix.")
@click.option(
    "--all-replicas", is_flag=True, help="Print all replicas of md/NAME; implies --prefix."
)
@click.option(
    "--tail",
    type=click.IntRange(min=-1),
    help="Number of lines from the end; -1 for all (the default, or 10 with -l).",
)
@click.option(
    "--since", callback=_since, default="", help="Only lines of this period: 90s, 5m, 1h30m."
)
@click.option("-p", "--previous", is_flag=True, help="Print the engine's previous run.")
@click.option(
    "--about",
    metavar="NAME",
    default="",
    help="Only lines about an object, a node, a request id or a trace id; --tail counts lines before this.",
)
@click.option(
    "--grep",
    metavar="TEXT",
    default="",
    help="Only lines with this text, in any case of letters; --tail counts lines before this.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    help="text: time, level, message and fields; json: lines as they were written (default: text at a terminal, else json).",
)
@click.option("--timestamps", is_flag=True, help="Start each line with its time.")
@click.option("--prefix", is_flag=True, help="Start each line with its source.")
@click.option("-l", "--selector", default="", help="Replicas with these labels: k=v,k!=v,k,!k.")
@click.option(
    "--max-log-requests",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Maximum number of logs to follow at once.",
)
@process_options
async def logs(what: str | None, **options: Any) -> None:
    """Print the log of an engine or another process."""
    # The selection that the arguments describe.
    if bool(what) == bool(options["selector"]):
        raise click.UsageError(
            "give one of: a replica, md/NAME, node/NAME, gateway/ID, reconciler/ID, dashboard/ID, or a selector with -l"
        )
    if options["rank"] is not None and options["all_ranks"]:
        raise click.UsageError("give --rank or --all-ranks, not both")
    if options["previous"] and options["follow"]:
        raise click.UsageError("the previous run has ended: give --previous or --follow, not both")
    selection = parse_target(
        what or "",
        LogSelection(
            selector=options["selector"],
            rank=options["rank"],
            all_ranks=options["all_ranks"],
            all_replicas=options["all_replicas"],
            is_previous=options["previous"],
        ),
    )
    is_many = selection.all_ranks or selection.all_replicas
    tail = options["tail"]
    if tail is None and options["selector"]:
        tail = 10
    display = LogDisplay(
        part=LogRange(
            tail=None if tail == -1 else tail,
            since=options["since"],
            is_followed=options["follow"],
        ),
        has_prefix=options["prefix"] or is_many,
        has_times=options["timestamps"],
        is_text=options["output"] == "text"
        or (options["output"] is None and terminal.is_tty(sys.stdout)),
        wanted=LineFilter(text=options["grep"], about=options["about"]),
        max_followed=options["max_log_requests"] if options["follow"] else None,
    )
    async with open_store(options) as transport:
        sources = await find_sources(transport, selection)
        dialer = await open_dialer(options, transport)
        await print_logs(transport, sources, display, dialer)
