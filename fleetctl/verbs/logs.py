"""The verb `fleetctl logs`: finds the processes whose logs are requested, fetches the logs and prints them."""

import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import IO, Any, Final

import click

from fleetctl.cli.connect import open_store, process_options, run
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.kubectl_hints import unsupported_flag
from fleetctl.fleets import process_client
from fleetctl.fleets.dialer import open_dialer
from fleetctl.fleets.process_client import ProcessAddress
from fleetctl.objects import selectors
from fleetctl.objects.kind_args import kind_of
from identity.dialer import Dialer
from insight.tickets import issue_ticket
from machinery.process_log import time_text
from manifests.suggestions import not_found_message
from schemas import duration
from schemas.replica import Replica
from store import keys, objects
from store.port import Transport

# Words for deployments that kubectl users know.
_DEPLOYMENT_WORDS = ("deploy", "deployment", "deployments")
_PROCESSES: Final = {"gateway": "Gateway", "reconciler": "Reconciler"}
"""Words for processes with a log of their own, and the kind of their tickets' holder."""
_LISTS: Final = {
    "Gateway": process_client.list_gateways,
    "Reconciler": process_client.list_reconcilers,
}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """A log and the process that serves it."""

    label: str
    """Label of its lines, such as `replica/qwen-0/rank-1` or `node/mac-1`."""
    kind: str
    """Kind of the process's holder: Node, Gateway or Reconciler."""
    address: str
    """Name of the node, or id of the process."""
    path: str
    params: dict[str, str]


def parse_target(word: str, selection: LogSelection) -> LogSelection:
    """Return the selection with kind and name from `qwen-0`, `deploy/qwen`, `node/mac-1`, `gateway/ID` or `reconciler/ID`.

    Raises:
        click.UsageError: the kind has no logs, or the flags do not fit it.

    """
    before, slash, name = word.partition("/")
    if before.lower() == "etcd":
        raise click.UsageError(
            f"{word}: only processes of the fleet give their logs to others; this one is on its own machine: etcd.log "
            "below the data folder of `fleetctl up`, or what `fleetctl service status` names"
        )
    if (process := before.lower().removesuffix("s")) in _PROCESSES:
        target = replace(selection, kind=_PROCESSES[process], name=name)
    elif not slash:
        target = replace(selection, name=word)
    else:
        kind = "ModelDeployment" if before.lower() in _DEPLOYMENT_WORDS else kind_of(before).name
        target = replace(selection, kind=kind, name=name)
    if target.kind not in ("Replica", "ModelDeployment", "Node", *_PROCESSES.values()):
        raise click.UsageError(
            f"{word}: a {target.kind} has no log; only replicas, deployments, nodes, gateways and reconcilers have logs"
        )
    if slash and not name and target.kind not in _PROCESSES.values():
        raise click.UsageError(f"{word}: the name is missing; write {before}/NAME")
    _refuse_flags(word, target)
    return target


def _refuse_flags(word: str, target: LogSelection) -> None:
    if target.all_replicas and target.kind != "ModelDeployment":
        raise click.UsageError("--all-replicas needs deploy/NAME")
    replica_flags = {
        "--rank": target.rank is not None,
        "--all-ranks": target.all_ranks,
        "--previous": target.is_previous,
    }
    given = [flag for flag, is_given in replica_flags.items() if is_given]
    if given and target.kind in ("Node", *_PROCESSES.values()):
        raise click.UsageError(f"{given[0]} cannot be used with {word}: {_REPLICAS_ONLY}")


async def find_sources(transport: Transport, selection: LogSelection) -> list[LogSource]:
    """Return the selected logs.

    Raises:
        FleetctlError: the object or the rank does not exist.

    """
    if selection.kind == "Node":
        return [_agent_source(selection.name)]
    if selection.kind in _PROCESSES.values():
        return [await _process_source(transport, selection)]
    replicas = await _find_replicas(transport, selection)
    return [source for one in replicas for source in _replica_sources(one, selection)]


def _agent_source(name: str) -> LogSource:
    return LogSource(
        label=f"node/{name}", kind="Node", address=name, path="/v1/logs/agent", params={}
    )


async def _process_source(transport: Transport, selection: LogSelection) -> LogSource:
    """Return the log of a gateway or a reconciler: the only one, if none is named. Raises FleetctlError."""
    kind, word = selection.kind, selection.kind.lower()
    id_ = selection.name or await _find_only(transport, kind)
    return LogSource(
        label=f"{word}/{id_}", kind=kind, address=id_, path=f"/v1/logs/{word}", params={}
    )


def _replica_sources(replica: Replica, selection: LogSelection) -> list[LogSource]:
    ranks = replica.spec.ranks
    numbers = range(len(ranks)) if selection.all_ranks else (selection.rank or 0,)
    if numbers[-1] >= len(ranks):
        ranks_text = "rank 0 only" if len(ranks) == 1 else f"ranks 0 to {len(ranks) - 1}"
        raise FleetctlError(
            f"replica/{replica.name} has no rank {selection.rank}: it has {ranks_text}"
        )
    return [
        LogSource(
            label=f"replica/{replica.name}/rank-{number}",
            kind="Node",
            address=ranks[number].node,
            path=f"/v1/logs/replicas/{replica.name}",
            params={
                "rank": str(number),
                **({"previous": "true"} if selection.is_previous else {}),
            },
        )
        for number in numbers
    ]


async def _find_only(transport: Transport, kind: str) -> str:
    word = kind.lower()
    found = await _LISTS[kind](transport)
    if len(found) == 1:
        return found[0].key.removeprefix(f"{kind}/")
    if not found:
        raise FleetctlError(f"no {word} is registered. Is one running? `fleetctl up` starts one")
    known = ", ".join(one.label for one in found)
    raise FleetctlError(f"give the {word}'s id; there are {known}")


async def _find_replicas(transport: Transport, selection: LogSelection) -> list[Replica]:
    """Return the selected replicas by name; print a note if none was found or one of several is used."""
    replicas = await objects.list_all(transport, Replica)
    if selection.selector:
        found = selectors.select(replicas, selectors.parse_labels(selection.selector))
        if not found:
            click.echo("no replicas found", err=True)
        return found
    if selection.kind == "Replica":
        found = [one for one in replicas if one.name == selection.name]
        if not found:
            names = [one.name for one in replicas]
            raise FleetctlError(await _no_replica_text(transport, selection.name, names))
        return found
    found = [one for one in replicas if one.spec.deployment == selection.name]
    if not found:
        raise FleetctlError(await _no_replicas_text(transport, selection.name))
    if len(found) > 1 and not selection.all_replicas:
        click.echo(f"Found {len(found)} replicas, using replica/{found[0].name}", err=True)
        return found[:1]
    return found


async def _no_replica_text(transport: Transport, name: str, known: list[str]) -> str:
    """Return the error message; it suggests a deployment or a node of that name."""
    others = {
        "deploy": keys.spec_key("ModelDeployment", name),
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


# Longer lines are printed in parts.
_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LogDisplay:
    """Request parameters and format of the output."""

    params: dict[str, str]
    """Query parameters of each log request."""
    has_prefix: bool
    has_times: bool
    max_followed: int | None
    """Maximum number of followed logs; None if logs are not followed."""


class LinePrefixer:
    """Splits a log into lines, and puts prefix and time in front of each. Pure."""

    def __init__(self, display: LogDisplay, label: str) -> None:
        self._prefix = f"[{label}] ".encode() if display.has_prefix else b""
        self._has_times = display.has_times
        self._rest = b""
        self._time = b""

    def add(self, piece: bytes) -> bytes:
        """Return the output for the next piece of the log."""
        if not self._prefix and not self._has_times:
            return piece
        *whole, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            whole, self._rest = [*whole, self._rest], b""
        return b"".join(self._format(line) for line in whole)

    def end(self) -> bytes:
        """Return the output for an unterminated last line."""
        return self._format(self._rest) if self._rest else b""

    def _format(self, line: bytes) -> bytes:
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
        FleetctlError: the only log cannot be printed, or too many would be followed.
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
    holders = {(one.kind, one.address) for one in sources}
    # Issue the tickets one after the other, because the exit stack revokes them one after the other.
    for kind, name in sorted(holders):
        await access.address(kind, name)

    async def copy(source: LogSource) -> None:
        try:
            await _print_log(access, source, display)
        except FleetctlError as error:
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
        self._known: dict[tuple[str, str], tuple[ProcessAddress, str] | FleetctlError] = {}

    async def address(self, kind: str, name: str) -> tuple[ProcessAddress, str] | FleetctlError:
        """Return the address and a ticket, or the reason why there is none. Raises StoreError."""
        known = self._known.get((kind, name))
        if known is None:
            known = self._known[kind, name] = await self._open(kind, name)
        return known

    async def _open(self, kind: str, name: str) -> tuple[ProcessAddress, str] | FleetctlError:
        try:
            if kind == "Node":
                found = await process_client.find_agent(self._transport, name, self._dialer)
            elif kind == "Reconciler":
                found = await process_client.find_reconciler(self._transport, name, self._dialer)
            else:
                found = await process_client.find_gateway(self._transport, name, self._dialer)
        except FleetctlError as error:
            return error
        return found, await self._stack.enter_async_context(
            issue_ticket(self._transport, found.key)
        )


async def _print_log(access: _ProcessAccess, source: LogSource, display: LogDisplay) -> None:
    """Print one log to the end. Raises FleetctlError."""
    found = await access.address(source.kind, source.address)
    if isinstance(found, FleetctlError):
        raise found
    address, bearer = found
    params = {**source.params, **display.params}
    lines = LinePrefixer(display, source.label)
    out = sys.stdout.buffer
    async with process_client.open_stream(
        address, source.path, bearer=bearer, params=params
    ) as pieces:
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


_HELP = """Print the log of an engine, an agent, a gateway or a reconciler.

\b
  fleetctl logs qwen-0                      the engine of replica qwen-0 (its rank 0)
  fleetctl logs qwen-0 -f --tail 20         its last 20 lines, and new ones
  fleetctl logs qwen-0 --previous           the previous run, such as one that crashed
  fleetctl logs sharded-0 --all-ranks       all Macs of a group
  fleetctl logs deploy/qwen                 one of its replicas; --all-replicas for all
  fleetctl logs -l app=chat --since 5m      replicas with a label
  fleetctl logs node/mac-1                  the agent of a Mac
  fleetctl logs gateway/9f3a                a gateway (the id is optional if there is only one)
  fleetctl logs reconciler                  a reconciler, in the same way

The agent of the Mac serves the log over HTTP, so this machine must reach the Mac's address. Agents, gateways and
reconcilers keep the last MiB of their own log in memory, since their start. Logs of engines are files on the Mac.
"""


def _since(_: click.Context, __: click.Parameter, value: str) -> str:
    """Validate a duration."""
    try:
        if value:
            duration.parse_fine(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return value


@click.command(help=_HELP)
@click.argument(
    "what",
    required=False,
    metavar="REPLICA | deploy/NAME | node/NAME | gateway[/ID] | reconciler[/ID]",
)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines.")
@click.option("--rank", type=click.IntRange(min=0), help="Rank of a sharded replica (default 0).")
@click.option("--all-ranks", is_flag=True, help="Print all ranks; implies --prefix.")
@click.option(
    "--all-replicas", is_flag=True, help="Print all replicas of deploy/NAME; implies --prefix."
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
@unsupported_flag(
    "a replica has one process on each Mac; select the Mac with --rank N",
    "-c",
    "--container",
    takes_value=True,
)
@process_options
def logs(what: str | None, **options: Any) -> None:
    """Print the log of an engine, an agent, a gateway or a reconciler."""
    selection = _log_selection(what, options)
    is_many = selection.all_ranks or selection.all_replicas
    tail = options["tail"]
    if tail is None and options["selector"]:
        tail = 10
    display = LogDisplay(
        params={
            **({} if tail in (None, -1) else {"tail": str(tail)}),
            **({"since": options["since"]} if options["since"] else {}),
            **({"follow": "true"} if options["follow"] else {}),
        },
        has_prefix=options["prefix"] or is_many,
        has_times=options["timestamps"],
        max_followed=options["max_log_requests"] if options["follow"] else None,
    )
    run(_logs(selection, display, options))


def _log_selection(what: str | None, options: dict[str, Any]) -> LogSelection:
    """Return the selection that the arguments describe.

    Raises:
        click.UsageError: the arguments are missing or contradict each other.

    """
    if bool(what) == bool(options["selector"]):
        raise click.UsageError(
            "give one of: a replica, deploy/NAME, node/NAME, gateway/ID, reconciler/ID, or a selector with -l"
        )
    if options["rank"] is not None and options["all_ranks"]:
        raise click.UsageError("give --rank or --all-ranks, not both")
    if options["previous"] and options["follow"]:
        raise click.UsageError("the previous run has ended: give --previous or --follow, not both")
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


async def _logs(selection: LogSelection, display: LogDisplay, options: dict[str, Any]) -> None:
    async with open_store(options) as transport:
        sources = await find_sources(transport, selection)
        dialer = await open_dialer(options, transport)
        await print_logs(transport, sources, display, dialer)
