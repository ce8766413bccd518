"""Words on a socket, each after its length. Blocking, with deadlines; used in the worker's thread alone."""

import socket

from nodeagent.engine.ranks.errors import GroupError

# A plan of 1,024 jobs with a million tokens each is larger; nobody has memory for it either.
MAX_BYTES = 256 << 20
LENGTH = 4
# A rank whose kernel takes nothing for so long is gone or frozen.
_SEND_S = 20.0


def framed(raw: bytes) -> bytes:
    """Return a word with its length before it."""
    return len(raw).to_bytes(LENGTH, "big") + raw


def send(channel: socket.socket, raw: bytes) -> None:
    """Send one word.

    Raises:
        GroupError: the other side is gone, or takes nothing.

    """
    channel.settimeout(_SEND_S)
    try:
        channel.sendall(framed(raw))
    except TimeoutError as error:
        raise GroupError(f"the other rank took nothing for {_SEND_S:g} s") from error
    except OSError as error:
        raise GroupError(f"the other rank is gone: {error.strerror}") from error


def receive(channel: socket.socket, timeout_s: float | None) -> bytes | None:
    """Return the next word; None if none began within the time. `timeout_s` None waits for as long as it takes.

    Raises:
        GroupError: the other side is gone, or sent what is no word.

    """
    channel.settimeout(timeout_s)
    try:
        first = channel.recv(1)
    except TimeoutError:
        return None
    except OSError as error:
        raise GroupError(f"the other rank is gone: {error.strerror}") from error
    channel.settimeout(_SEND_S)
    length = int.from_bytes(first + _exactly(channel, LENGTH - len(first), first), "big")
    if length > MAX_BYTES:
        raise GroupError(f"a word of {length} bytes is announced; at most {MAX_BYTES} are allowed")
    return _exactly(channel, length, first)


def _exactly(channel: socket.socket, count: int, before: bytes) -> bytes:
    if not before:
        raise GroupError("the other rank closed the channel")
    found = bytearray()
    while len(found) < count:
        try:
            part = channel.recv(min(count - len(found), 1 << 20))
        except TimeoutError as error:
            raise GroupError("the other rank stopped in the middle of a word") from error
        except OSError as error:
            raise GroupError(f"the other rank is gone: {error.strerror}") from error
        if not part:
            raise GroupError("the other rank closed the channel in the middle of a word")
        found += part
    return bytes(found)
