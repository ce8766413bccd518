"""Frames of the WebSocket protocol (RFC 6455) by wsproto, for servers: messages of clients in, whole frames out. Pure."""

from collections.abc import Iterator
from typing import Final

from wsproto.frame_protocol import CloseReason, Frame, FrameProtocol, Opcode, ParseFailed
from wsproto.utilities import generate_accept_token

KEY_LENGTH: Final = 24
# wsproto copies what it has not parsed for each frame, so it gets little at a time.
_PIECE_BYTES: Final = 4096


class FrameError(Exception):
    """The client broke the protocol or a limit; `code` closes the connection."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def switching_protocols(key: bytes) -> bytes:
    """Return the response that accepts a handshake with this key."""
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
        b"sec-websocket-accept: %b\r\n\r\n" % generate_accept_token(key)
    )


class ServerFrames:
    """The frames of one connection. No extension is negotiated, so nothing is compressed."""

    def __init__(self, max_message: int) -> None:
        """`max_message`: the longest message of the client, in bytes."""
        self._max_message = max_message
        self._protocol = FrameProtocol(client=False, extensions=[])
        self._unparsed = b""
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def held_bytes(self) -> int:
        """The bytes of the message that is incomplete, and of what is not parsed."""
        return len(self._unparsed) + self._size

    def text(self, message: bytes) -> bytes:
        """Return a message in UTF-8 as one frame."""
        return bytes(self._protocol.send_data(message.decode(), fin=True))

    def pong(self, payload: bytes) -> bytes:
        """Return the answer to a ping."""
        return bytes(self._protocol.pong(payload))

    def close(self, code: int, reason: str = "") -> bytes:
        """Return the frame that ends the connection."""
        return bytes(self._protocol.close(code, reason))

    def feed(self, data: bytes) -> Iterator[tuple[Opcode, bytes]]:
        """Yield the whole messages and control frames that the data completes, as opcode and payload.

        A part of a message that is not its last yields CONTINUATION, so that a caller can count the frames. The rest is
        kept if the caller reads no further; the next call goes on with it.

        Raises:
            FrameError: the client broke the protocol, or a message is too long.

        """
        self._unparsed += data
        try:
            while True:
                for frame in self._protocol.received_frames():
                    yield from self._take(frame)
                if not self._unparsed:
                    return
                self._protocol.receive_bytes(self._unparsed[:_PIECE_BYTES])
                self._unparsed = self._unparsed[_PIECE_BYTES:]
        except ParseFailed as error:
            raise FrameError(error.code, str(error)) from error

    def _take(self, frame: Frame) -> Iterator[tuple[Opcode, bytes]]:
        if frame.opcode is Opcode.CLOSE:
            yield Opcode.CLOSE, b""
            return
        payload = frame.payload
        assert not isinstance(payload, tuple)  # that of CLOSE
        part = payload.encode() if isinstance(payload, str) else bytes(payload)
        if frame.opcode.iscontrol():
            yield frame.opcode, part
            return
        self._parts.append(part)
        self._size += len(part)
        if self._size > self._max_message:
            raise FrameError(
                CloseReason.MESSAGE_TOO_BIG, f"a message has more than {self._max_message} bytes"
            )
        if not frame.frame_finished:
            return
        if frame.message_finished:
            message, self._parts, self._size = b"".join(self._parts), [], 0
            yield Opcode.TEXT if isinstance(payload, str) else Opcode.BINARY, message
        else:
            yield Opcode.CONTINUATION, b""
