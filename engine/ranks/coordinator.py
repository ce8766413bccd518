"""Rank 0's end of the channels: starts the group, and sends every step plan before rank 0 executes it."""

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

_POLL_S = 0.5

log = logging.getLogger(__name__)


def agree(ranks: Sequence[LoadedMessage]) -> StartMessage:
    """Return the values that hold for all ranks; the first message is rank 0's.

    Prefix caches must hold the same blocks on all ranks, because rank 0 only looks into its own. Pipeline stages with
    more layers need more bytes a token, so all ranks count the largest size. This is exact only for layers that keep
    every token; otherwise the prefix cache is off. It is off, too, where ranks would cut prompts at other checkpoints.

    Raises:
        GroupError: the ranks have loaded different models.

    """
    leader = ranks[0]
    for rank in ranks:
        if rank.model != leader.model:
            raise GroupError(
                f"rank {rank.rank} has another model, or other versions of mlx or mlx-lm, than rank 0"
            )
    shared, token_bytes = min(rank.prefix_bytes for rank in ranks), None
    sizes = {rank.token_bytes for rank in ranks}
    distances = {rank.checkpoint_tokens for rank in ranks}
    if len(sizes) > 1 and distances == {0}:
        token_bytes = max(sizes)
    elif len(sizes) > 1 or len(distances) > 1:
        shared = 0
    by_rows = all(rank.by_rows for rank in ranks)
    return StartMessage(prefix_bytes=shared, token_bytes=token_bytes, by_rows=by_rows)


def smallest_kv_share(ranks: Sequence[LoadedMessage]) -> float:
    """Return the share of all requests' caches for which every rank has room."""
    return min(rank.room for rank in ranks)


@dataclass(slots=True, kw_only=True)
class Coordinator:
    """The channels to all other ranks."""

    channels: list[socket.socket]
    """In rank order, from rank 1 on."""
    _number: int = 0
    _checksum: TokenChecksum = field(default_factory=TokenChecksum)

    def send_connect(self) -> None:
        """Make all ranks connect; the last one first, because it waits a moment by itself (model/mlx_group.py).

        Raises:
            GroupError: one of them is gone.

        """
        for channel in reversed(self.channels):
            messages.send(channel, messages.encode(ConnectMessage()))

    def receive_loaded(self, is_stopping: Callable[[], bool]) -> list[LoadedMessage]:
        """Wait without a limit until all ranks have loaded; return their messages in rank order.

        Raises:
            GroupError: one of them is gone.
            StoppedError: `is_stopping` became true.

        """
        return [self._receive_loaded(channel, is_stopping) for channel in self.channels]

    def send_start(self, start: StartMessage) -> None:
        """Send the agreed values to all ranks.

        Raises:
            GroupError: one of them is gone.

        """
        self._broadcast(start)

    def send_plan(self, plan: StepPlan) -> None:
        """Send a plan to all ranks.

        Raises:
            GroupError: one of them is gone.

        """
        self._number += 1
        self._broadcast(StepMessage(number=self._number, plan=plan, made=self._checksum.sum))

    def add_outputs(self, outputs: Sequence[TokenOutput]) -> None:
        """Add rank 0's tokens of a step to the checksum that the other ranks compare with their own."""
        self._checksum.add(outputs)

    def close(self) -> None:
        """Let the other ranks end."""
        for channel in self.channels:
            try:
                messages.send(channel, messages.encode(StopMessage()))
            except GroupError as error:
                log.warning("a rank was gone before it was stopped", extra={"why": str(error)})
            channel.close()

    def _broadcast(self, message: RankMessage) -> None:
        raw = messages.encode(message)
        for rank, channel in enumerate(self.channels, 1):
            try:
                messages.send(channel, raw)
            except GroupError as error:
                raise GroupError(f"rank {rank} was lost: {error}") from error

    def _receive_loaded(
        self, channel: socket.socket, is_stopping: Callable[[], bool]
    ) -> LoadedMessage:
        while (raw := messages.receive(channel, _POLL_S)) is None:
            if is_stopping():
                raise StoppedError
        message = messages.decode(raw)
        if not isinstance(message, LoadedMessage):
            raise GroupError(f"a rank sent '{message.kind}' before it had loaded its model")
        return message
