"""The rendezvous of a group: connects the ranks over TCP before MLX connects them.

Rank 0 accepts two channels of every other rank and rejects processes that do not belong to the group.
"""

import logging
import secrets
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self, cast

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
from schemas.wire.engine_config import GroupConfig

# The time and the size of a whole first message, and the connections that may be sending one: a foreign process on the
# port must not keep the ranks waiting.
_JOIN_S, _MAX_JOIN_BYTES, _MAX_VISITORS = 5.0, 4096, 64
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
    with _Lobby(listener, clock) as lobby:
        while missing := expected - (joined.channels.keys() & joined.lifelines.keys()):
            left_s = deadline - clock.monotonic()
            if is_stopping() or left_s <= 0:
                joined.close()
                if is_stopping():
                    raise StoppedError
                raise GroupError(f"ranks {sorted(missing)} did not come within {timeout_s:g} s")
            for visitor in lobby.wait(min(left_s, _ACCEPT_POLL_S)):
                _admit(visitor, own, joined)
    return joined


@dataclass(slots=True)
class _Visitor:
    """A connection whose first message is not complete."""

    channel: socket.socket
    address: str
    until_s: float
    """The end of its time, on the monotonic clock."""
    received: bytearray = field(default_factory=bytearray)

    @property
    def missing_bytes(self) -> int:
        """The rest of the message, or of its length; 0 if the message is complete."""
        length = messages.LENGTH_BYTES
        if len(self.received) >= length:
            length += int.from_bytes(self.received[: messages.LENGTH_BYTES], "big")
        return length - len(self.received)

    @property
    def is_too_long(self) -> bool:
        """True if it announced more than a JoinMessage can have."""
        return len(self.received) + self.missing_bytes > _MAX_JOIN_BYTES

    def read(self) -> bool:
        """Read what has arrived; return False if there is no more to come."""
        try:
            piece = self.channel.recv(self.missing_bytes)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.received += piece
        return bool(piece) and not self.is_too_long

    def join(self) -> JoinMessage | None:
        """Return the complete message; None if it is no JoinMessage."""
        try:
            message = messages.decode(bytes(self.received[messages.LENGTH_BYTES :]))
        except GroupError:
            return None
        return message if isinstance(message, JoinMessage) else None


class _Lobby:
    """Accepts connections, and reads the first messages of all of them at once.

    Until a visitor has sent the group's secret, it may be any process that reaches the port.
    """

    def __init__(self, listener: socket.socket, clock: Clock) -> None:
        self._listener = listener
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._visitors: dict[socket.socket, _Visitor] = {}  # in the order of arrival

    def __enter__(self) -> Self:
        self._listener.settimeout(0)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        for visitor in tuple(self._visitors.values()):
            self._dismiss(visitor)
        self._selector.close()

    def wait(self, timeout_s: float) -> list[_Visitor]:
        """Wait for input; return the visitors whose first message is complete, and forget them."""
        complete: list[_Visitor] = []
        for key, _ in self._selector.select(timeout_s):
            visitor = self._visitors.get(cast("socket.socket", key.fileobj))
            if visitor is None:
                self._accept()
            elif not visitor.read():
                self._dismiss(visitor)
            elif not visitor.missing_bytes:
                self._forget(visitor)
                complete.append(visitor)
        now_s = self._clock.monotonic()
        for visitor in [one for one in self._visitors.values() if one.until_s <= now_s]:
            self._dismiss(visitor)
        return complete

    def _accept(self) -> None:
        try:
            channel, address = self._listener.accept()
        except OSError:  # it has left already
            return
        if len(self._visitors) >= _MAX_VISITORS:
            self._dismiss(next(iter(self._visitors.values())))
        channel.settimeout(0)
        visitor = _Visitor(channel, address[0], self._clock.monotonic() + _JOIN_S)
        self._visitors[channel] = visitor
        self._selector.register(channel, selectors.EVENT_READ)

    def _forget(self, visitor: _Visitor) -> None:
        del self._visitors[visitor.channel]
        self._selector.unregister(visitor.channel)
        visitor.channel.settimeout(None)

    def _dismiss(self, visitor: _Visitor) -> None:
        self._forget(visitor)
        _close_stranger(visitor)


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


def _close_stranger(visitor: _Visitor) -> None:
    log.warning("closed a connection that is from no rank", extra={"address": visitor.address})
    visitor.channel.close()


def _admit(visitor: _Visitor, own: JoinMessage, joined: JoinedRanks) -> None:
    """Keep a channel if its rank belongs to the group; reject and close it otherwise."""
    channel, join = visitor.channel, visitor.join()
    if join is None:
        _close_stranger(visitor)
        return
    channels = joined.lifelines if join.is_lifeline else joined.channels
    error = _join_error(join, own) or (
        f"rank {join.rank} has joined already" if join.rank in channels else ""
    )
    if error:
        log.warning("rejected a rank", extra={"address": visitor.address, "why": error})
        with suppress(GroupError):  # the rank closed the channel itself
            messages.send(channel, messages.encode(RejectMessage(reason=error)))
        channel.close()
        return
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channels[join.rank] = channel


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
