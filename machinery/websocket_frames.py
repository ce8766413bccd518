"""Frames of the WebSocket protocol (RFC 6455): the handshake's answer, whole frames out, messages of clients in. Pure."""

import base64
import hashlib
import struct
from collections.abc import Iterator
from typing import Final

# RFC 6455, section 1.3.
_MAGIC: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
NORMAL, GOING_AWAY, PROTOCOL_ERROR, UNSUPPORTED, BAD_DATA = 1000, 1001, 1002, 1003, 1007
TOO_BIG, TRY_LATER = 1009, 1013
_MAX_CONTROL: Final = 125
KEY_LENGTH: Final = 24


class FrameError(Exception):
    """The client broke the protocol or a limit; `code` closes the connection."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def switching_protocols(key: bytes) -> bytes:
    """Return the response that accepts a handshake with this key."""
    digest = hashlib.sha1(key + _MAGIC, usedforsecurity=False).digest()
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
        b"sec-websocket-accept: %b\r\n\r\n" % base64.b64encode(digest)
    )


def frame(opcode: int, payload: bytes) -> bytes:
    """Return a whole message as one frame of a server."""
    size = len(payload)
    if size < 126:
        head = struct.pack("!BB", 0x80 | opcode, size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", 0x80 | opcode, 126, size)
    else:
        head = struct.pack("!BBQ", 0x80 | opcode, 127, size)
    return head + payload


def close_frame(code: int, reason: str = "") -> bytes:
    """Return the frame that ends a connection."""
    return frame(CLOSE, struct.pack("!H", code) + reason.encode()[: _MAX_CONTROL - 2])


class FrameReader:
    """Reads the messages of a client. No extension is negotiated, so nothing is compressed."""

    def __init__(self, max_message: int) -> None:
        self._max_message = max_message
        self._buffer = bytearray()
        self._message = bytearray()
        self._opcode = 0
        """The kind of the message whose parts arrive; 0 between messages."""

    @property
    def held_bytes(self) -> int:
        """The bytes of the message that is incomplete."""
        return len(self._buffer) + len(self._message)

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the whole messages and control frames that the data completes, as opcode and payload.

        A part of a message that is not its last yields CONTINUATION, so that a caller can count the frames.

        Raises:
            FrameError: the client broke the protocol, or a message is too long.

        """
        self._buffer += data
        while (found := self._read_frame()) is not None:
            opcode, is_last, payload = found
            if opcode >= CLOSE:
                yield opcode, payload
                continue
            if (opcode == CONTINUATION) != bool(self._opcode):
                raise FrameError(PROTOCOL_ERROR, "a message begins within another, or without one")
            self._opcode = self._opcode or opcode
            self._message += payload
            if is_last:
                kind, whole = self._opcode, bytes(self._message)
                self._opcode = 0
                self._message.clear()
                yield kind, whole
            else:
                yield CONTINUATION, b""

    def _read_frame(self) -> tuple[int, bool, bytes] | None:
        """Take one frame from the buffer; None if it is incomplete."""
        found = self._buffer
        if len(found) < 2:
            return None
        opcode, is_last, length = found[0] & 0x0F, bool(found[0] & 0x80), found[1] & 0x7F
        extra = {126: 2, 127: 8}.get(length, 0)
        if found[0] & 0x70 or not found[1] & 0x80 or opcode not in _OPCODES:
            raise FrameError(PROTOCOL_ERROR, "a frame without a mask, or with an unknown extension")
        if opcode >= CLOSE and (extra or not is_last):
            raise FrameError(PROTOCOL_ERROR, "a control frame that is long or in parts")
        if len(found) < 2 + extra:
            return None
        if extra:
            length = int.from_bytes(found[2 : 2 + extra], "big")
        if len(self._message) + length > self._max_message:
            raise FrameError(TOO_BIG, f"a message has more than {self._max_message} bytes")
        begin = 2 + extra + 4
        if len(found) < begin + length:
            return None
        payload = _unmask(bytes(found[begin - 4 : begin]), bytes(found[begin : begin + length]))
        del found[: begin + length]
        return opcode, is_last, payload


_OPCODES: Final = frozenset({CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG})


def _unmask(mask: bytes, payload: bytes) -> bytes:
    # One operation on long integers: a loop over megabytes would block all other clients.
    size = len(payload)
    whole = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(whole, "big")).to_bytes(size, "big")
