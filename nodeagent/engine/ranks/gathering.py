"""Rank 0 waits for the others to come, each with two channels, and turns away who does not belong here."""

import logging
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from machinery.clock import Clock
from nodeagent.engine.errors import StoppedError
from nodeagent.engine.ranks import frames, words
from nodeagent.engine.ranks.errors import GroupError
from nodeagent.engine.ranks.words import Away, Join

# A stranger on the port must not keep the ranks waiting.
_JOIN_S = 5.0
_LOOK_S = 0.5

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Gathered:
    """The channels to the ranks that have come, by rank."""

    channels: dict[int, socket.socket] = field(default_factory=dict)
    lines: dict[int, socket.socket] = field(default_factory=dict)
    """Lifelines."""

    def close(self) -> None:
        """Let all of them know by it that nothing comes of it."""
        for channel in (*self.channels.values(), *self.lines.values()):
            channel.close()


def gather(
    listener: socket.socket,
    own: Join,
    clock: Clock,
    is_stopping: Callable[[], bool],
    timeout_s: float,
) -> Gathered:
    """Wait until all other ranks have come.

    Raises:
        GroupError: they have not in time.
        StoppedError: `is_stopping` became true.

    """
    found = Gathered()
    wanted = set(range(1, own.world_size))
    deadline = clock.monotonic() + timeout_s
    while missing := wanted - (found.channels.keys() & found.lines.keys()):
        left = deadline - clock.monotonic()
        if is_stopping() or left <= 0:
            found.close()
            if is_stopping():
                raise StoppedError
            raise GroupError(f"ranks {sorted(missing)} did not come within {timeout_s:g} s")
        listener.settimeout(min(left, _LOOK_S))
        try:
            channel, address = listener.accept()
        except TimeoutError:
            continue
        _take(channel, address[0], own, found)
    return found


def _take(channel: socket.socket, address: str, own: Join, found: Gathered) -> None:
    """Keep a channel whose other end belongs here."""
    join = _read(channel)
    if join is None:
        log.warning("a stranger was turned away", extra={"address": address})
        channel.close()
        return
    places = found.lines if join.is_lifeline else found.channels
    complaint = _complaint(join, own) or (
        f"rank {join.rank} is here already" if join.rank in places else ""
    )
    if complaint:
        log.warning("a rank was turned away", extra={"address": address, "reason": complaint})
        with suppress(GroupError):  # it went by itself
            frames.send(channel, words.encode(Away(reason=complaint)))
        channel.close()
        return
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    places[join.rank] = channel


def _read(channel: socket.socket) -> Join | None:
    """Return what a rank says first; None if it is none."""
    try:
        raw = frames.receive(channel, _JOIN_S)
        word = words.decode(raw) if raw is not None else None
    except GroupError:
        return None
    return word if isinstance(word, Join) else None


def _complaint(join: Join, own: Join) -> str:
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
