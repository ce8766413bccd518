"""The rendezvous of a group: connects the ranks over TCP before MLX connects them.

Rank 0 accepts two channels of every other rank and rejects processes that do not belong to the group.
"""

import logging
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from engine.config import GroupConfig
from engine.errors import GroupError, StoppedError
from engine.ranks import messages
from engine.ranks.coordinator import Coordinator
from engine.ranks.messages import (
    ConnectMessage,
    JoinMessage,
    LoadedMessage,
    RankMessage,
    RejectMessage,
    StartMessage,
)
from machinery.clock import Clock
from machinery.http_server import listen

# The time for the first message: a foreign process on the port must not keep the ranks waiting.
_JOIN_S = 5.0
_ACCEPT_POLL_S = 0.5
_POLL_S = 0.5
_RETRY_S = 0.2
_CONNECT_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitContext:
    """The clock and the stop signal with which ranks wait for each other."""

    clock: Clock
    pause: Callable[[float], object]
    """Waits for this many seconds, or until the stop."""
    is_stopping: Callable[[], bool]


@dataclass(slots=True)
class JoinedRanks:
    """The channels to the ranks that have joined, by rank."""

    channels: dict[int, socket.socket] = field(default_factory=dict)
    lifelines: dict[int, socket.socket] = field(default_factory=dict)

    def close(self) -> None:
        """Close all channels, which tells the ranks that the group will not start."""
        for channel in (*self.channels.values(), *self.lifelines.values()):
            channel.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLink:
    """The channels to the other ranks: to all of them on rank 0, to rank 0 elsewhere."""

    coordinator: Coordinator | None = None
    channel: socket.socket | None = None
    lifelines: dict[int, socket.socket] = field(default_factory=dict)
    """By rank."""

    def start_connecting(self, wait: WaitContext) -> None:
        """Tell the other ranks to connect MLX; on other ranks, wait until rank 0 says so.

        Raises:
            GroupError: a rank is gone.
            StoppedError: this process must end.

        """
        if self.coordinator is not None:
            self.coordinator.send_connect()
            return
        message = self._receive(wait)
        if not isinstance(message, ConnectMessage):
            raise GroupError(f"rank 0 sent '{message.kind}' before the ranks connected")

    def report_loaded(self, loaded: LoadedMessage, wait: WaitContext) -> StartMessage:
        """Report what this rank has loaded, and wait until rank 0 starts. Not for rank 0.

        Raises:
            GroupError: rank 0 is gone.
            StoppedError: this process must end.

        """
        assert self.channel is not None
        messages.send(self.channel, messages.encode(loaded))
        message = self._receive(wait)
        if not isinstance(message, StartMessage):
            raise GroupError(f"rank 0 sent '{message.kind}' before it started the group")
        return message

    def _receive(self, wait: WaitContext) -> RankMessage:
        assert self.channel is not None
        while (raw := messages.receive(self.channel, _POLL_S)) is None:
            if wait.is_stopping():
                raise StoppedError
        message = messages.decode(raw)
        if isinstance(message, RejectMessage):
            raise GroupError(f"rank 0 rejected this rank: {message.reason}")
        return message


def join_group(group: GroupConfig, wait: WaitContext) -> RankLink:
    """Wait for all other ranks on rank 0; connect to rank 0 elsewhere.

    Raises:
        GroupError: the port is taken, the ranks do not come, or rank 0 rejects this one.
        StoppedError: this process must end.

    """
    join = JoinMessage(
        rank=group.rank, world_size=group.world_size, epoch=group.epoch, secret=group.secret
    )
    return _lead_group(group, join, wait) if group.rank == 0 else _follow_group(group, join, wait)


def accept_ranks(
    listener: socket.socket,
    own: JoinMessage,
    clock: Clock,
    is_stopping: Callable[[], bool],
    timeout_s: float,
) -> JoinedRanks:
    """Wait until all other ranks have joined.

    Raises:
        GroupError: they did not join in time.
        StoppedError: `is_stopping` became true.

    """
    joined = JoinedRanks()
    expected = set(range(1, own.world_size))
    deadline = clock.monotonic() + timeout_s
    while missing := expected - (joined.channels.keys() & joined.lifelines.keys()):
        left_s = deadline - clock.monotonic()
        if is_stopping() or left_s <= 0:
            joined.close()
            if is_stopping():
                raise StoppedError
            raise GroupError(f"ranks {sorted(missing)} did not come within {timeout_s:g} s")
        listener.settimeout(min(left_s, _ACCEPT_POLL_S))
        try:
            channel, address = listener.accept()
        except TimeoutError:
            continue
        _admit(channel, address[0], own, joined)
    return joined


def _lead_group(group: GroupConfig, own: JoinMessage, wait: WaitContext) -> RankLink:
    try:
        listener = listen(group.host, group.port)
    except OSError as error:
        raise GroupError(
            f"cannot listen to the other ranks on {group.host}:{group.port}: {error.strerror}"
        ) from error
    with listener:
        joined = accept_ranks(listener, own, wait.clock, wait.is_stopping, group.timeout_s)
    channels = [joined.channels[rank] for rank in sorted(joined.channels)]
    return RankLink(coordinator=Coordinator(channels=channels), lifelines=joined.lifelines)


def _follow_group(group: GroupConfig, own: JoinMessage, wait: WaitContext) -> RankLink:
    deadline = wait.clock.monotonic() + group.timeout_s
    lifeline = _connect_to_leader(group, replace(own, is_lifeline=True), wait, deadline)
    try:
        channel = _connect_to_leader(group, own, wait, deadline)
    except (GroupError, StoppedError):
        lifeline.close()
        raise
    return RankLink(channel=channel, lifelines={0: lifeline})


def _connect_to_leader(
    group: GroupConfig, join: JoinMessage, wait: WaitContext, deadline: float
) -> socket.socket:
    """Return a channel on which the JoinMessage was sent; rank 0 answers later."""
    while (left_s := deadline - wait.clock.monotonic()) > 0:
        if wait.is_stopping():
            raise StoppedError
        try:
            channel = socket.create_connection(
                (group.host, group.port), timeout=min(left_s, _CONNECT_S)
            )
        except OSError:
            wait.pause(min(_RETRY_S, left_s))  # rank 0 does not listen yet
            continue
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        messages.send(channel, messages.encode(join))
        return channel
    raise GroupError(f"rank 0 was not at {group.host}:{group.port} within {group.timeout_s:g} s")


def _admit(channel: socket.socket, address: str, own: JoinMessage, joined: JoinedRanks) -> None:
    """Keep a channel if its rank belongs to the group; reject and close it otherwise."""
    join = _receive_join(channel)
    if join is None:
        log.warning("closed a connection that is from no rank", extra={"address": address})
        channel.close()
        return
    channels = joined.lifelines if join.is_lifeline else joined.channels
    error = _join_error(join, own) or (
        f"rank {join.rank} has joined already" if join.rank in channels else ""
    )
    if error:
        log.warning("rejected a rank", extra={"address": address, "reason": error})
        with suppress(GroupError):  # the rank closed the channel itself
            messages.send(channel, messages.encode(RejectMessage(reason=error)))
        channel.close()
        return
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channels[join.rank] = channel


def _receive_join(channel: socket.socket) -> JoinMessage | None:
    """Return the first message of a rank; None if it is no JoinMessage."""
    try:
        raw = messages.receive(channel, _JOIN_S)
        message = messages.decode(raw) if raw is not None else None
    except GroupError:
        return None
    return message if isinstance(message, JoinMessage) else None


def _join_error(join: JoinMessage, own: JoinMessage) -> str:
    """Return why a rank cannot join; "" if it can."""
    if join.epoch != own.epoch:
        return f"it is of epoch {join.epoch}, and the group is in epoch {own.epoch}"
    if not secrets.compare_digest(join.secret.encode(), own.secret.encode()):
        return "its secret is not the group's"
    if join.world_size != own.world_size or not 0 < join.rank < own.world_size:
        return (
            f"it is rank {join.rank} of {join.world_size}, and the group has ranks 1 to {own.world_size - 1} "
            "besides this one"
        )
    return ""
