"""Fetching logs from who has them, and printing their lines as they come."""

import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import IO

import click

from fleetctl import agents
from fleetctl.agents import Holder
from fleetctl.errors import FleetctlError
from fleetctl.logs.sources import Source
from fleetctl.tickets import ticket
from machinery.loglines import stamp_of
from store.port import Transport

# A line that goes on for longer is shown in pieces.
_LONGEST = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How logs are shown."""

    params: dict[str, str]
    """What of each is asked for."""
    has_prefix: bool
    has_times: bool
    most: int | None
    """How many may be followed at once; None: they are not followed."""


class Lines:
    """From pieces of one log to whole lines with what is to stand before them. Pure."""

    def __init__(self, look: Look, label: str) -> None:
        self._prefix = f"[{label}] ".encode() if look.has_prefix else b""
        self._has_times = look.has_times
        self._rest = b""
        self._time = b""

    def add(self, piece: bytes) -> bytes:
        """Return what can be printed."""
        if not self._prefix and not self._has_times:
            return piece
        *whole, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _LONGEST:
            whole, self._rest = [*whole, self._rest], b""
        return b"".join(self._told(line) for line in whole)

    def end(self) -> bytes:
        """Return the last line, if nothing ended it."""
        return self._told(self._rest) if self._rest else b""

    def _told(self, line: bytes) -> bytes:
        if not self._has_times:
            return self._prefix + line + b"\n"
        stamp = stamp_of(line)
        # What has no time of its own, such as a traceback, came with the line before it.
        self._time = stamp + b" " if stamp is not None else self._time
        return self._prefix + self._time + line + b"\n"


async def show(transport: Transport, sources: list[Source], look: Look) -> None:
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
        desk = _Desk(transport, stack)
        if len(sources) == 1:
            await _copy(desk, sources[0], look)
            return
        failed = await _all(desk, sources, look)
    if failed:
        raise click.exceptions.Exit(1)


async def _all(desk: "_Desk", sources: list[Source], look: Look) -> bool:
    """Print several logs; return whether one failed."""
    failures: list[str] = []
    holders = {(one.kind, one.holder) for one in sources}
    # Tickets are got one by one: what gives them back at the end does so in turn.
    for kind, name in sorted(holders):
        await desk.holder(kind, name)

    async def one(source: Source) -> None:
        try:
            await _copy(desk, source, look)
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


class _Desk:
    """Who is asked, and with which ticket: one for each holder."""

    def __init__(self, transport: Transport, stack: AsyncExitStack) -> None:
        self._transport = transport
        self._stack = stack
        self._known: dict[tuple[str, str], tuple[Holder, str] | FleetctlError] = {}

    async def holder(self, kind: str, name: str) -> tuple[Holder, str] | FleetctlError:
        """Return who it is with a ticket for it, or why nobody can be asked. Raises StoreError."""
        known = self._known.get((kind, name))
        if known is None:
            known = self._known[kind, name] = await self._asked(kind, name)
        return known

    async def _asked(self, kind: str, name: str) -> tuple[Holder, str] | FleetctlError:
        try:
            if kind == "Node":
                found = await agents.of_node(self._transport, name)
            else:
                found = await agents.of_gateway(self._transport, name)
        except FleetctlError as error:
            return error
        return found, await self._stack.enter_async_context(ticket(self._transport, found.key))


async def _copy(desk: _Desk, source: Source, look: Look) -> None:
    """Print one log to its end. Raises FleetctlError."""
    found = await desk.holder(source.kind, source.holder)
    if isinstance(found, FleetctlError):
        raise found
    holder, bearer = found
    params = {**source.params, **look.params}
    lines = Lines(look, source.label)
    out = sys.stdout.buffer
    async with agents.stream(holder, source.path, bearer=bearer, params=params) as pieces:
        async for piece in pieces:
            await _print(out, lines.add(piece))
    await _print(out, lines.end())


async def _print(out: IO[bytes], text: bytes) -> None:
    """Write; in a thread, because a reader such as `less` may take its time, and tickets are renewed meanwhile."""
    if text:
        await asyncio.to_thread(_written, out, text)


def _written(out: IO[bytes], text: bytes) -> None:
    out.write(text)
    out.flush()
