"""How the ranks of one group find each other, before MLX connects them."""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from machinery.clock import Clock
from machinery.web import listen
from nodeagent.engine.config import GroupConfig
from nodeagent.engine.errors import StoppedError
from nodeagent.engine.ranks import frames, words
from nodeagent.engine.ranks.coordinator import Coordinator
from nodeagent.engine.ranks.errors import GroupError
from nodeagent.engine.ranks.gathering import gather
from nodeagent.engine.ranks.words import Away, Begin, Go, Hello, Join

_RETRY_S = 0.2
_LOOK_S = 0.5
_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How ranks wait: for what they break off, and how."""

    clock: Clock
    pause: Callable[[float], object]
    """Waits for so many seconds, or until the stop."""
    is_stopping: Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The channels to the other ranks; on rank 0 to all of them, elsewhere to rank 0."""

    coordinator: Coordinator | None = None
    channel: socket.socket | None = None
    lines: dict[int, socket.socket] = field(default_factory=dict)
    """Lifelines, by rank."""

    def go(self, patience: Patience) -> None:
        """Give the word to connect, or wait for it.

        Raises:
            GroupError: a rank is gone.
            StoppedError: this process is to end.

        """
        if self.coordinator is not None:
            self.coordinator.go()
            return
        word = self._wait(patience)
        if not isinstance(word, Go):
            raise GroupError(f"rank 0 said {word.kind} before the start")

    def hello(self, own: Hello, patience: Patience) -> Begin:
        """Say what was loaded, and wait until rank 0 begins. Not on rank 0.

        Raises:
            GroupError: rank 0 is gone.
            StoppedError: this process is to end.

        """
        assert self.channel is not None
        frames.send(self.channel, words.encode(own))
        word = self._wait(patience)
        if not isinstance(word, Begin):
            raise GroupError(f"rank 0 said {word.kind} before the beginning")
        return word

    def _wait(self, patience: Patience) -> words.Word:
        assert self.channel is not None
        while (raw := frames.receive(self.channel, _LOOK_S)) is None:
            if patience.is_stopping():
                raise StoppedError
        word = words.decode(raw)
        if isinstance(word, Away):
            raise GroupError(f"rank 0 turned this rank away: {word.reason}")
        return word


def meet(group: GroupConfig, patience: Patience) -> Link:
    """Wait for all other ranks, or find rank 0.

    Raises:
        GroupError: the port is taken, they do not come, or rank 0 wants nothing of this one.
        StoppedError: this process is to end.

    """
    own = Join(rank=group.rank, world_size=group.world_size, epoch=group.epoch, secret=group.secret)
    return _lead(group, own, patience) if group.rank == 0 else _follow(group, own, patience)


def _lead(group: GroupConfig, own: Join, patience: Patience) -> Link:
    try:
        listener = listen(group.host, group.port)
    except OSError as error:
        raise GroupError(
            f"cannot listen to the other ranks on {group.host}:{group.port}: {error.strerror}"
        ) from error
    with listener:
        found = gather(listener, own, patience.clock, patience.is_stopping, group.timeout_s)
    channels = [found.channels[rank] for rank in sorted(found.channels)]
    return Link(coordinator=Coordinator(channels=channels), lines=found.lines)


def _follow(group: GroupConfig, own: Join, patience: Patience) -> Link:
    deadline = patience.clock.monotonic() + group.timeout_s
    line = _joined(group, replace(own, is_lifeline=True), patience, deadline)
    try:
        channel = _joined(group, own, patience, deadline)
    except (GroupError, StoppedError):
        line.close()
        raise
    return Link(channel=channel, lines={0: line})


def _joined(group: GroupConfig, join: Join, patience: Patience, deadline: float) -> socket.socket:
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
        frames.send(channel, words.encode(join))
        return channel
    raise GroupError(f"rank 0 was not at {group.host}:{group.port} within {group.timeout_s:g} s")
