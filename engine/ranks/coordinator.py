"""What the ranks of a group agree on once each knows what it has. Pure.

Rank 0's end of the channels: says when, and tells the others every step before doing it.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.batch.step_plan import StepPlan
from engine.errors import GroupError, StoppedError
from engine.jobs import TokenOutput
from engine.ranks import messages
from engine.ranks.messages import (
    ConnectMessage,
    LoadedMessage,
    RankMessage,
    StartMessage,
    StepMessage,
    StopMessage,
    TokenChecksum,
)


def agree(hellos: Sequence[LoadedMessage]) -> StartMessage:
    """Return what holds for all; the first hello is rank 0's.

    Prefix caches must hold the same on all ranks, for rank 0 alone looks what is in its own. Stages of a pipeline with
    more layers need more for a token: all count what it takes where it takes most. That is exact for layers which keep
    every token, and for nothing else.

    Raises:
        GroupError: they have loaded different things.

    """
    own = hellos[0]
    for hello in hellos:
        if hello.model != own.model:
            raise GroupError(
                f"rank {hello.rank} has another model, or other versions of mlx or mlx-lm, than rank 0"
            )
    shared = min(hello.prefix_bytes for hello in hellos)
    if len({hello.token_bytes for hello in hellos}) == 1:
        return StartMessage(prefix_bytes=shared, token_bytes=None)
    if all(hello.is_even for hello in hellos):
        most = max(hello.token_bytes for hello in hellos)
        return StartMessage(prefix_bytes=shared, token_bytes=most)
    return StartMessage(prefix_bytes=0, token_bytes=None)


def smallest_kv_share(hellos: Sequence[LoadedMessage]) -> float:
    """Return which part of all requests' caches has room on every rank."""
    return min(hello.room for hello in hellos)


_POLL_S = 0.5

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Coordinator:
    """The channels to all other ranks."""

    channels: list[socket.socket]
    """In rank order, from rank 1 on."""
    _number: int = 0
    _tally: TokenChecksum = field(default_factory=TokenChecksum)

    def go(self) -> None:
        """Have all ranks connect. The last one first, for it waits a moment by itself (model/connecting.py).

        Raises:
            GroupError: one of them is gone.

        """
        for channel in reversed(self.channels):
            messages.send(channel, messages.encode(ConnectMessage()))

    def hellos(self, is_stopping: Callable[[], bool]) -> list[LoadedMessage]:
        """Wait until all ranks have loaded, for as long as that takes; return what they say, in rank order.

        Raises:
            GroupError: one of them is gone.
            StoppedError: `is_stopping` became true.

        """
        return [self._hello(channel, is_stopping) for channel in self.channels]

    def begin(self, begin: StartMessage) -> None:
        """Tell all ranks what was agreed on.

        Raises:
            GroupError: one of them is gone.

        """
        self._say(begin)

    def tell(self, plan: StepPlan) -> None:
        """Send a plan to all ranks.

        Raises:
            GroupError: one of them is gone.

        """
        self._number += 1
        self._say(StepMessage(number=self._number, plan=plan, made=self._tally.sum))

    def made(self, made: Sequence[TokenOutput]) -> None:
        """Count what a step brought here; the others compare it with theirs."""
        self._tally.add(made)

    def close(self) -> None:
        """Let the others end."""
        for channel in self.channels:
            try:
                messages.send(channel, messages.encode(StopMessage()))
            except GroupError as error:
                log.warning("a rank was gone before it was let go", extra={"reason": str(error)})
            channel.close()

    def _say(self, word: RankMessage) -> None:
        raw = messages.encode(word)
        for rank, channel in enumerate(self.channels, 1):
            try:
                messages.send(channel, raw)
            except GroupError as error:
                raise GroupError(f"rank {rank} was lost: {error}") from error

    def _hello(self, channel: socket.socket, is_stopping: Callable[[], bool]) -> LoadedMessage:
        while (raw := messages.receive(channel, _POLL_S)) is None:
            if is_stopping():
                raise StoppedError
        word = messages.decode(raw)
        if not isinstance(word, LoadedMessage):
            raise GroupError(f"a rank said {word.kind} where it should say what it loaded")
        return word
