"""The first message of a TLS connection, read before TLS begins: the name of the server that the client wants (SNI).

A listener chooses the whole context by it. OpenSSL's own callback comes too late for that: it changes the certificate, but not
whether the client is asked for one.
"""

import asyncio
import socket
from typing import Final

_RECORD_HEAD = 5
# RFC 8446, 5.1: a record has at most 2^14 bytes.
_MAX_RECORD = _RECORD_HEAD + (1 << 14)
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_SERVER_NAME, _HOST_NAME = 0, 0
# Bytes of the message before the session id: type, length, version, random.
_FIXED = 1 + 3 + 2 + 32
_NO_NAME: Final = ""


async def read_server_name(connection: socket.socket) -> str:
    """Return the server name in the message, which stays in the socket; empty without one. The caller sets the time limit."""
    head = await _peek(connection, _RECORD_HEAD)
    if len(head) < _RECORD_HEAD:
        return _NO_NAME
    size = _RECORD_HEAD + int.from_bytes(head[3:5])
    if size > _MAX_RECORD:
        return _NO_NAME
    return server_name(await _peek(connection, size))


async def _peek(connection: socket.socket, size: int) -> bytes:
    """Return the first bytes and leave them in the socket; fewer if the client has ended."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    # The socket counts as readable only when it has all of them: nothing is polled.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
        return connection.recv(size, socket.MSG_PEEK)
    finally:
        loop.remove_reader(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def server_name(record: bytes) -> str:
    """Return the server name in the first record of a client (RFC 6066, 3); empty if there is none."""
    reader = _Reader(record)
    try:
        if reader.take(1)[0] != _HANDSHAKE:
            return _NO_NAME
        reader.take(_RECORD_HEAD - 1)
        if reader.take(_FIXED)[0] != _CLIENT_HELLO:
            return _NO_NAME
        for length_bytes in (1, 2, 1):  # session id, cipher suites, compression methods
            reader.take_vector(length_bytes)
        extensions = _Reader(reader.take_vector(2))
        while extensions.rest:
            kind, body = int.from_bytes(extensions.take(2)), extensions.take_vector(2)
            if kind == _SERVER_NAME:
                names = _Reader(_Reader(body).take_vector(2))
                is_host = names.take(1)[0] == _HOST_NAME
                return names.take_vector(2).decode("ascii") if is_host else _NO_NAME
    except (_ShortError, UnicodeDecodeError):
        pass  # TLS itself refuses the message
    return _NO_NAME


class _ShortError(Exception):
    """The message ends too early."""


class _Reader:
    """The rest of a message."""

    def __init__(self, data: bytes) -> None:
        self.rest = data

    def take(self, size: int) -> bytes:
        if len(self.rest) < size:
            raise _ShortError
        found, self.rest = self.rest[:size], self.rest[size:]
        return found

    def take_vector(self, length_bytes: int) -> bytes:
        """Return bytes whose number precedes them."""
        return self.take(int.from_bytes(self.take(length_bytes)))
