"""How a rank notices that another one has ended, whatever its own worker hangs in. On the event loop.

MLX does not tell: after the death of one of several ranks the others may wait in a collective for ever (measured on the
ring, mlx 0.32.4; reported of JACCL). But the kernel closes a dead process' connections, and a thread that waits in MLX does
not hold Python's lock. Each rank above 0 has a line to rank 0, which passes on what it learns.
"""

import asyncio
import socket
from collections.abc import Mapping
from contextlib import suppress

from engine.errors import GroupError
from engine.ranks import messages
from engine.ranks.messages import FailureMessage, RankMessage, RejectMessage, StopMessage

# Who failed first is heard within milliseconds, once MLX has failed here because of it.
_BLAME_WAIT_S = 1.0
_FAREWELL_S = 0.5
# A reason of a rank's end, and some.
_MAX_MESSAGE_BYTES = 1 << 16


class PeerMonitor:
    """The lines of one rank."""

    def __init__(self, rank: int) -> None:
        self.is_parting = False
        """Whether the others are being let go: that they end is no loss then."""
        self._rank = rank
        self._lines: dict[int, socket.socket] = {}
        self._known = asyncio.Event()
        self._failed = asyncio.Event()

    def met(self, lines: Mapping[int, socket.socket]) -> None:
        """Take over the lines, by the other end's rank."""
        for line in lines.values():
            line.settimeout(0)
        self._lines = dict(lines)
        self._known.set()

    def failed(self) -> None:
        """Learn that this rank's worker has failed; it may be another rank's doing."""
        self._failed.set()
        self._known.set()

    async def watch(self) -> str | None:
        """Return which rank ended the group, once one has; None if it was this one."""
        await self._known.wait()
        async with asyncio.TaskGroup() as group:
            failing = group.create_task(self._until_failed())
            hearing = {
                group.create_task(self._hear(rank, line)) for rank, line in self._lines.items()
            }
            loss = await self._first_loss(failing, hearing)
            for task in (failing, *hearing):
                task.cancel()
        return loss

    async def _until_failed(self) -> None:
        await self._failed.wait()

    async def close(self, reason: str | None) -> None:
        """Say why this rank ends, None because it was asked to, and hang up."""
        word: RankMessage = StopMessage()
        if reason is not None:
            # What another rank is to blame for is passed on as it came.
            word = FailureMessage(
                reason=reason if self._rank == 0 else f"rank {self._rank}: {reason}"
            )
        loop = asyncio.get_running_loop()
        for line in self._lines.values():
            with suppress(OSError, TimeoutError):  # the other end is gone
                async with asyncio.timeout(_FAREWELL_S):
                    await loop.sock_sendall(line, messages.frame(messages.encode(word)))
            line.close()
        self._lines = {}

    async def _first_loss(
        self, failing: asyncio.Task[None], hearing: set[asyncio.Task[str | None]]
    ) -> str | None:
        waits = set(hearing)
        while waits or not failing.done():
            has_failed = failing.done()
            done, _ = await asyncio.wait(
                waits if has_failed else {*waits, failing},
                timeout=_BLAME_WAIT_S if has_failed else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            losses = [task.result() for task in waits & done]
            waits -= done
            loss = next((one for one in losses if one is not None), None)
            if loss is not None or has_failed:
                return loss
        return None

    async def _hear(self, rank: int, line: socket.socket) -> str | None:
        """Wait for the last word of a rank; return why it means the end here, None if it does not."""
        try:
            return self._meaning(rank, await _receive_message(line))
        except (OSError, EOFError):
            return f"rank {rank} was lost: its connection closed without a word"
        except GroupError as error:
            return f"rank {rank} was lost: {error}"

    def _meaning(self, rank: int, word: RankMessage) -> str | None:
        match word:
            case StopMessage() if rank == 0 or self.is_parting:
                return None  # the worker is let go on its own channel
            case StopMessage():
                return f"rank {rank} was asked to end"
            case RejectMessage(reason=reason):
                return f"rank {rank} turned this rank away: {reason}"
            case FailureMessage(reason=reason):
                return reason
            case _:
                return f"rank {rank} said {word.kind} on its lifeline"


async def _receive_message(line: socket.socket) -> RankMessage:
    length = int.from_bytes(await _receive_exactly(line, messages.LENGTH_BYTES), "big")
    if length > _MAX_MESSAGE_BYTES:
        raise GroupError(f"a last word of {length} bytes is announced")
    return messages.decode(await _receive_exactly(line, length))


async def _receive_exactly(line: socket.socket, count: int) -> bytes:
    loop, found = asyncio.get_running_loop(), b""
    while len(found) < count:
        part = await loop.sock_recv(line, count - len(found))
        if not part:
            raise EOFError
        found += part
    return found
