"""A TCP proxy that delays, stalls, cuts and truncates as a seeded plan says, or as it is told."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from machinery.clock import Clock, SystemClock

_CHUNK = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """The fault of one direction of one connection; without one, bytes pass undisturbed."""

    delay_s: float = 0.0
    """Every chunk waits this long."""
    cut_after: int | None = None
    """After so many bytes, in the middle of a chunk, the connection ends."""
    abrupt: bool = False
    """It ends with a reset, not with an orderly end; then bytes under way may get lost too."""
    stall_after: int | None = None
    """After so many bytes nothing passes any more, but the connection stays."""


QUIET = Fate()
Plan = Callable[[int], tuple[Fate, Fate]]
"""From the number of a connection to its fates: client to server, and back."""


def undisturbed(_: int) -> tuple[Fate, Fate]:
    return QUIET, QUIET


def random_plan(seed: int, *, trouble: float = 0.6, longest_delay_s: float = 0.03) -> Plan:
    """Return a plan that depends on the seed and the connection's number only."""

    def fates(number: int) -> tuple[Fate, Fate]:
        dice = random.Random(f"{seed}/{number}")
        return one(dice), one(dice)

    def one(dice: random.Random) -> Fate:
        delay_s = dice.random() ** 3 * longest_delay_s if dice.random() < trouble else 0.0
        if dice.random() > trouble / 2:
            return Fate(delay_s=delay_s)
        # Short lives are likely: heads and first answers are cut as well as long streams.
        after = int(10 ** dice.uniform(0, 4.2)) - 1
        if dice.random() < 0.1:
            return Fate(delay_s=delay_s, stall_after=after)
        return Fate(delay_s=delay_s, cut_after=after, abrupt=dice.random() < 0.5)

    return fates


class TcpProxy:
    """Forwards connections to a server, while `serving()` runs."""

    def __init__(self, host: str, port: int, clock: Clock) -> None:
        self._upstream = (host, port)
        self._clock = clock
        self.plan: Plan = undisturbed
        self.accepted = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._refuses = False
        self.url = ""

    @property
    def open_connections(self) -> int:
        return len(self._open)

    def cut_all(self) -> None:
        """End every connection abruptly."""
        for writer in list(self._open):
            writer.transport.abort()

    def refuse(self, refuses: bool) -> None:
        """True if new connections are closed at once."""
        self._refuses = refuses

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["TcpProxy"]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            self._refuses = True  # what was accepted and is not served yet
            server.close()
            self.cut_all()
            await server.wait_closed()
            while self._open:
                await self._clock.sleep(0.005)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            await self._serve(reader, writer)
        except OSError:
            return
        finally:
            writer.transport.abort()
            self._open.discard(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.accepted = self.accepted, self.accepted + 1
        if self._refuses:
            return
        there, back = self.plan(number)
        far_reader, far_writer = await asyncio.open_connection(*self._upstream)
        try:
            async with asyncio.TaskGroup() as group:
                lanes = {
                    group.create_task(self._pump(reader, far_writer, there)),
                    group.create_task(self._pump(far_reader, writer, back)),
                }
                # Whichever direction ends, ends the connection.
                await asyncio.wait(lanes, return_when=asyncio.FIRST_COMPLETED)
                for lane in lanes:
                    lane.cancel()
            if not (there.abrupt or back.abrupt):
                # Let what was passed arrive before the end does.
                for end in (far_writer, writer):
                    end.close()
                    await end.wait_closed()
        finally:
            far_writer.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fate: Fate
    ) -> None:
        """Forward until one side ends, or the fate says so."""
        passed = 0
        try:
            while chunk := await reader.read(_CHUNK):
                if fate.delay_s:
                    await self._clock.sleep(fate.delay_s)
                ends_at = fate.cut_after if fate.stall_after is None else fate.stall_after
                piece = chunk if ends_at is None else chunk[: max(0, ends_at - passed)]
                writer.write(piece)
                await writer.drain()
                passed += len(piece)
                if len(piece) == len(chunk):
                    continue
                if fate.stall_after is None:
                    return
                await _stand_still(reader)
                return
        except OSError:
            return


async def _stand_still(reader: asyncio.StreamReader) -> None:
    """Swallow what comes until the sender gives up."""
    while await reader.read(_CHUNK):
        continue


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[TcpProxy]:
    """Run a proxy in front of `http://HOST:PORT`."""
    host, _, port = url.removeprefix("http://").partition(":")
    async with TcpProxy(host, int(port), SystemClock()).serving() as proxy:
        yield proxy
