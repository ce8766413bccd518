"""Rank 0 waits for the others to come, each with two channels, and turns away who does not belong here.

How the ranks of one group find each other, before MLX connects them.
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
    RejectMessage,
    StartMessage,
)
from machinery.clock import Clock
from machinery.http_server import listen

# A stranger on the port must not keep the ranks waiting.
_JOIN_S = 5.0
_ACCEPT_POLL_S = 0.5

log = logging.getLogger(__name__)


@dataclass(slots=True)
class JoinedRanks:
    """The channels to the ranks that have come, by rank."""

    channels: dict[int, socket.socket] = field(default_factory=dict)
    lines: dict[int, socket.socket] = field(default_factory=dict)
    """Lifelines."""

    def close(self) -> None:
        """Let all of them know by it that nothing comes of it."""
        for channel in (*self.channels.values(), *self.lines.values()):
            channel.close()


def accept_ranks(
    listener: socket.socket,
    own: JoinMessage,
    clock: Clock,
    is_stopping: Callable[[], bool],
    timeout_s: float,
) -> JoinedRanks:
    """Wait until all other ranks have come.

    Raises:
        GroupError: they have not in time.
        StoppedError: `is_stopping` became true.

    """
    found = JoinedRanks()
    wanted = set(range(1, own.world_size))
    deadline = clock.monotonic() + timeout_s
    while missing := wanted - (found.channels.keys() & found.lines.keys()):
        left = deadline - clock.monotonic()
        if is_stopping() or left <= 0:
            found.close()
            if is_stopping():
                raise StoppedError
            raise GroupError(f"ranks {sorted(missing)} did not come within {timeout_s:g} s")
        listener.settimeout(min(left, _ACCEPT_POLL_S))
        try:
            channel, address = listener.accept()
        except TimeoutError:
            continue
        _admit(channel, address[0], own, found)
    return found


def _admit(channel: socket.socket, address: str, own: JoinMessage, found: JoinedRanks) -> None:
    """Keep a channel whose other end belongs here."""
    join = _receive_join(channel)
    if join is None:
        log.warning("a stranger was turned away", extra={"address": address})
        channel.close()
        return
    places = found.lines if join.is_lifeline else found.channels
    complaint = _join_error(join, own) or (
        f"rank {join.rank} is here already" if join.rank in places else ""
    )
    if complaint:
        log.warning("a rank was turned away", extra={"address": address, "reason": complaint})
        with suppress(GroupError):  # it went by itself
            messages.send(channel, messages.encode(RejectMessage(reason=complaint)))
        channel.close()
        return
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    places[join.rank] = channel


def _receive_join(channel: socket.socket) -> JoinMessage | None:
    """Return what a rank says first; None if it is none."""
    try:
        raw = messages.receive(channel, _JOIN_S)
        word = messages.decode(raw) if raw is not None else None
    except GroupError:
        return None
    return word if isinstance(word, JoinMessage) else None


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


_RETRY_S = 0.2
_POLL_S = 0.5
_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitContext:
    """How ranks wait: for what they break off, and how."""

    clock: Clock
    pause: Callable[[float], object]
    """Waits for so many seconds, or until the stop."""
    is_stopping: Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLink:
    """The channels to the other ranks; on rank 0 to all of them, elsewhere to rank 0."""

    coordinator: Coordinator | None = None
    channel: socket.socket | None = None
    lines: dict[int, socket.socket] = field(default_factory=dict)
    """Lifelines, by rank."""

    def go(self, patience: WaitContext) -> None:
        """Give the word to connect, or wait for it.

        Raises:
            GroupError: a rank is gone.
            StoppedError: this process is to end.

        """
        if self.coordinator is not None:
            self.coordinator.go()
            return
        word = self._wait(patience)
        if not isinstance(word, ConnectMessage):
            raise GroupError(f"rank 0 said {word.kind} before the start")

    def hello(self, own: LoadedMessage, patience: WaitContext) -> StartMessage:
        """Say what was loaded, and wait until rank 0 begins. Not on rank 0.

        Raises:
            GroupError: rank 0 is gone.
            StoppedError: this process is to end.

        """
        assert self.channel is not None
        messages.send(self.channel, messages.encode(own))
        word = self._wait(patience)
        if not isinstance(word, StartMessage):
            raise GroupError(f"rank 0 said {word.kind} before the beginning")
        return word

    def _wait(self, patience: WaitContext) -> messages.RankMessage:
        assert self.channel is not None
        while (raw := messages.receive(self.channel, _POLL_S)) is None:
            if patience.is_stopping():
                raise StoppedError
        word = messages.decode(raw)
        if isinstance(word, RejectMessage):
            raise GroupError(f"rank 0 turned this rank away: {word.reason}")
        return word


def join_group(group: GroupConfig, patience: WaitContext) -> RankLink:
    """Wait for all other ranks, or find rank 0.

    Raises:
        GroupError: the port is taken, they do not come, or rank 0 wants nothing of this one.
        StoppedError: this process is to end.

    """
    own = JoinMessage(
        rank=group.rank, world_size=group.world_size, epoch=group.epoch, secret=group.secret
    )
    return (
        _lead_group(group, own, patience)
        if group.rank == 0
        else _follow_group(group, own, patience)
    )


def _lead_group(group: GroupConfig, own: JoinMessage, patience: WaitContext) -> RankLink:
    try:
        listener = listen(group.host, group.port)
    except OSError as error:
        raise GroupError(
            f"cannot listen to the other ranks on {group.host}:{group.port}: {error.strerror}"
        ) from error
    with listener:
        found = accept_ranks(listener, own, patience.clock, patience.is_stopping, group.timeout_s)
    channels = [found.channels[rank] for rank in sorted(found.channels)]
    return RankLink(coordinator=Coordinator(channels=channels), lines=found.lines)


def _follow_group(group: GroupConfig, own: JoinMessage, patience: WaitContext) -> RankLink:
    deadline = patience.clock.monotonic() + group.timeout_s
    line = _connect_to_leader(group, replace(own, is_lifeline=True), patience, deadline)
    try:
        channel = _connect_to_leader(group, own, patience, deadline)
    except (GroupError, StoppedError):
        line.close()
        raise
    return RankLink(channel=channel, lines={0: line})


def _connect_to_leader(
    group: GroupConfig, join: JoinMessage, patience: WaitContext, deadline: float
) -> socket.socket:
    """Return a channel on which rank 0 has heard who this is. What it thinks of it comes later."""
    while (left := deadline - patience.clock.monotonic()) > 0:
        if patience.is_stopping():
            raise StoppedError
        try:
            channel = socket.create_connection(
                (group.host, group.port), timeout=min(left, _CONNECT_S)
            )
        except OSError:
            patience.pause(min(_RETRY_S, left))  # it has not begun to listen
            continue
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        messages.send(channel, messages.encode(join))
        return channel
    raise GroupError(f"rank 0 was not at {group.host}:{group.port} within {group.timeout_s:g} s")
