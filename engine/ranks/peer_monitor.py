"""Monitors the other ranks of a group, even while this rank's worker hangs. Event loop only.

MLX does not report the death of a rank: the others may wait in a collective forever (measured on the ring, mlx 0.32.4;
reported for JACCL). But the kernel closes the connections of a dead process, and a thread that waits in MLX does not
hold Python's lock. Each rank above 0 has a lifeline to rank 0, which passes on the reasons that it receives.
"""

import asyncio
import socket
from collections.abc import Mapping
from contextlib import suppress

from engine.errors import GroupError
from engine.ranks import messages
from engine.ranks.messages import FailureMessage, RankMessage, RejectMessage, StopMessage

# Once MLX has failed here because of another rank, that rank's reason arrives within milliseconds.
_BLAME_WAIT_S = 1.0
_FAREWELL_S = 0.5
# The reason of a rank's end, with room to spare.
_MAX_MESSAGE_BYTES = 1 << 16


class PeerMonitor:
    """The lifelines of one rank."""

    def __init__(self, rank: int) -> None:
        self.is_parting = False
        """True if this rank releases the others, so that their end is not a failure."""
        self._rank = rank
        self._lifelines: dict[int, socket.socket] = {}
        self._ready = asyncio.Event()
        self._failed = asyncio.Event()

    def set_lifelines(self, lifelines: Mapping[int, socket.socket]) -> None:
        """Take over the lifelines, by the rank at the other end."""
        for line in lifelines.values():
            line.settimeout(0)
        self._lifelines = dict(lifelines)
        self._ready.set()

    def note_failure(self) -> None:
        """Note that this rank's worker has failed, perhaps because of another rank."""
        self._failed.set()
        self._ready.set()

    async def watch(self) -> str | None:
        """Wait until the group ends; return a reason that names the rank at fault, None if it was this rank."""
        await self._ready.wait()
        async with asyncio.TaskGroup() as group:
            failure = group.create_task(self._wait_for_failure())
            receivers = {
                group.create_task(self._receive_loss(rank, line))
                for rank, line in self._lifelines.items()
            }
            loss = await self._first_loss(failure, receivers)
            for task in (failure, *receivers):
                task.cancel()
        return loss

    async def _wait_for_failure(self) -> None:
        await self._failed.wait()

    async def close(self, reason: str | None) -> None:
        """Send the reason why this rank ends (None: it was asked to), and close the lifelines."""
        message: RankMessage = StopMessage()
        if reason is not None:
            # Rank 0 passes the reason of another rank on unchanged.
            message = FailureMessage(
                reason=reason if self._rank == 0 else f"rank {self._rank}: {reason}"
            )
        loop = asyncio.get_running_loop()
        for line in self._lifelines.values():
            with suppress(OSError, TimeoutError):  # the other end is gone
                async with asyncio.timeout(_FAREWELL_S):
                    await loop.sock_sendall(line, messages.frame(messages.encode(message)))
            line.close()
        self._lifelines = {}

    async def _first_loss(
        self, failure: asyncio.Task[None], receivers: set[asyncio.Task[str | None]]
    ) -> str | None:
        waits = set(receivers)
        while waits or not failure.done():
            has_failed = failure.done()
            done, _ = await asyncio.wait(
                waits if has_failed else {*waits, failure},
                timeout=_BLAME_WAIT_S if has_failed else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            losses = [task.result() for task in waits & done]
            waits -= done
            loss = next((one for one in losses if one is not None), None)
            if loss is not None or has_failed:
                return loss
        return None

    async def _receive_loss(self, rank: int, line: socket.socket) -> str | None:
        """Wait for the last message of a rank; return why it ends the group, None if it does not."""
        try:
            return self._explain(rank, await _receive_message(line))
        except (OSError, EOFError):
            return f"rank {rank} was lost: its connection closed without a reason"
        except GroupError as error:
            return f"rank {rank} was lost: {error}"

    def _explain(self, rank: int, message: RankMessage) -> str | None:
        match message:
            case StopMessage() if rank == 0 or self.is_parting:
                return None  # the worker is released on its own channel
            case StopMessage():
                return f"rank {rank} was asked to end"
            case RejectMessage(reason=reason):
                return f"rank {rank} rejected this rank: {reason}"
            case FailureMessage(reason=reason):
                return reason
            case _:
                return f"rank {rank} sent '{message.kind}' on its lifeline"


async def _receive_message(line: socket.socket) -> RankMessage:
    length = int.from_bytes(await _receive_exactly(line, messages.LENGTH_BYTES), "big")
    if length > _MAX_MESSAGE_BYTES:
        raise GroupError(f"it announced a message of {length} bytes on its lifeline")
    return messages.decode(await _receive_exactly(line, length))


async def _receive_exactly(line: socket.socket, count: int) -> bytes:
    loop, receive_exactly = asyncio.get_running_loop(), b""
    while len(receive_exactly) < count:
        part = await loop.sock_recv(line, count - len(receive_exactly))
        if not part:
            raise EOFError
        receive_exactly += part
    return receive_exactly
