"""The engine link: the frames that a gateway and an engine exchange on one connection. Sans-I/O.

    reader = FrameReader(MAX_REQUEST_PAYLOAD)
    for stream, kind, payload in reader.feed(data): ...
    transport.write(frame(stream, END, b""))

A gateway sends `POST /v1/link` with `Upgrade: fleet-link` on a connection of its own; after the engine's 101 both sides send
frames: u32 stream, u8 kind, u24 length, payload, in network byte order. Each request is a stream, numbered by the gateway;
stream 0 is the link itself. Unknown kinds are skipped, and frames of unknown streams: their request has ended on this side.
"""

import struct
from typing import Final, TypeAlias, TypeVar

import msgspec

PATH: Final = "/v1/link"
UPGRADE: Final = "fleet-link"
SWITCHING: Final = (
    b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: fleet-link\r\n\r\n"
)
WINDOW_BYTES: Final = 256 << 10
"""Bytes of a response that an engine may send before the gateway has granted more with WINDOW."""
MAX_REQUEST_PAYLOAD: Final = 128 << 10
"""Bytes of a gateway's largest frame: BODY_BYTES with a head."""
BODY_BYTES: Final = 64 << 10
"""Bytes of a request's body in one frame, so that other requests pass between the frames of a large one."""
MAX_RESPONSE_PAYLOAD: Final = 128 << 10
"""Bytes of an engine's largest frame."""

# Of gateways.
REQUEST: Final = 1
"""A request: u16 length of the head, `RequestHead`, and the first bytes of the body."""
BODY: Final = 2
"""More of a request's body."""
CANCEL: Final = 3
"""The end of the gateway's interest in a stream."""
WINDOW: Final = 4
"""u32: so many more bytes of the response may be sent."""
PING: Final = 5
"""Asks for GAUGES."""
# Of engines.
STATUS: Final = 16
"""The beginning of a response: `StatusHead`."""
EVENTS: Final = 17
"""A part of a response's body, after which more follows."""
END: Final = 18
"""The last part of a response's body."""
FAIL: Final = 19
"""A response that ends before it is complete: `Failure`."""
PROGRESS: Final = 20
"""The engine advances, and the response has not begun: a `ResumeRecord` of an answer that is not streamed, or nothing."""
GAUGES: Final = 21
"""`EngineGauges`: first on each link, when they have changed, and after PING."""
GOAWAY: Final = 22
"""No further request is taken on this link. Streams that run end as usual."""
RECORDED: Final = 23
"""Events of a stream that another engine can continue: u32 length, a `ResumeRecord` of that length or none, the events.

A client gets the events of one RECORDED, or none of them.
"""
RECORDED_PART: Final = 24
"""The beginning of a RECORDED that is larger than a frame."""
MAX_RECORDED: Final = 16 << 20
"""Bytes of the largest RECORDED. The largest are batches of log probabilities for slow readers."""

_HEADER = struct.Struct("!II")
_LENGTH_BITS, _LENGTH_MASK = 24, (1 << 24) - 1
_WORD = struct.Struct("!I")
_HEAD_LENGTH = struct.Struct("!H")
HEADER_BYTES: Final = _HEADER.size
MANY_FRAMES: Final = 256
"""Frames of one read after which a side lets others run before it reads on: uvloop reads 32 times in a row."""

Frame: TypeAlias = tuple[int, int, bytes]
"""Stream, kind and payload."""


class LinkError(Exception):
    """The peer has sent what no frame can be."""


class RequestHead(msgspec.Struct, array_like=True, frozen=True):
    """Head of one request."""

    method: str
    path: str
    """Without a query."""
    lines: bytes
    """The headers as lines of HTTP/1.1, names in lower case, each with its line end."""
    body_bytes: int
    """The length of the whole body."""


class StatusHead(msgspec.Struct, array_like=True, frozen=True):
    """Head of one response."""

    status: int
    lines: bytes
    """As in `RequestHead`."""


class EngineGauges(msgspec.Struct, array_like=True, frozen=True):
    """State and load of one engine."""

    replica: str
    is_ready: bool
    """False while it loads its model, drains, or has failed."""
    in_flight: int
    """Sequences that hold a slot."""
    queued: int
    """Requests in its queue."""
    memory_free: float | None = None
    """The part of its memory limit that is free or can be freed, 0..1; None if unknown."""
    kv_used: float | None = None
    """The part of the memory for KV caches that is promised to requests, 0..1; None if unknown."""


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """The reason for which a response ends early."""

    message: str
    last_event: bytes = b""
    """The event with which the client's stream ends; empty if another engine may succeed."""


class ResumeStart(msgspec.Struct, array_like=True, frozen=True):
    """The beginning of a resume point: what another engine needs besides the tokens, and what a gateway counts."""

    seed: int
    prompt: str
    """A digest of the prompt's tokens."""
    id: str
    created: int
    """Seconds since 1970."""
    prompt_tokens: int
    cached_tokens: int


class ResumeRecord(msgspec.Struct, array_like=True, frozen=True):
    """The addition of one part of an answer to its resume point."""

    tokens: dict[int, list[int]]
    """The new tokens of each choice that has any."""
    start: ResumeStart | None = None
    """In the first record of an engine."""
    finished: list[int] = []
    """The choices that end with this part."""
    output_tokens: int | None = None
    """The tokens of the whole answer, once a choice has ended."""
    events: int = 0
    """The number of events so far, in streams whose events are numbered."""


# The second: msgspec raises Python's own for text that is not UTF-8.
_T = TypeVar("_T")
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError)
_encode = msgspec.msgpack.Encoder().encode
_request_decoder = msgspec.msgpack.Decoder(RequestHead)
_status_decoder = msgspec.msgpack.Decoder(StatusHead)
_gauges_decoder = msgspec.msgpack.Decoder(EngineGauges)
_failure_decoder = msgspec.msgpack.Decoder(Failure)
_records_decoder = msgspec.msgpack.Decoder(list[ResumeRecord])
_ARRAY32 = b"\xdd"


def frame(stream: int, kind: int, payload: bytes) -> bytes:
    """Return one frame; the payload has less than 16 MiB."""
    return _HEADER.pack(stream, kind << _LENGTH_BITS | len(payload)) + payload


def encode_request(head: RequestHead, body: bytes | memoryview) -> bytes:
    """Return the payload of REQUEST, with the first bytes of the body.

    Raises:
        LinkError: the head has more than 64 KiB.

    """
    encoded = _encode(head)
    if len(encoded) > MAX_REQUEST_PAYLOAD - BODY_BYTES - _HEAD_LENGTH.size:
        raise LinkError("the headers of the request are too large")
    return b"".join((_HEAD_LENGTH.pack(len(encoded)), encoded, body))


def decode_request(payload: bytes) -> tuple[RequestHead, bytes]:
    """Return the head in the payload of REQUEST, and the first bytes of the body.

    Raises:
        LinkError: it is not valid.

    """
    try:
        end = _HEAD_LENGTH.size + _HEAD_LENGTH.unpack_from(payload)[0]
        return _request_decoder.decode(memoryview(payload)[_HEAD_LENGTH.size : end]), payload[end:]
    except (struct.error, *_DECODE_ERRORS) as error:
        raise LinkError(f"an invalid REQUEST: {error}") from error


def encode_head(head: StatusHead | EngineGauges | Failure | ResumeRecord) -> bytes:
    """Return the payload of STATUS, GAUGES or FAIL, or a record."""
    return _encode(head)


def _decode(decoder: msgspec.msgpack.Decoder[_T], payload: bytes, fault: str) -> _T:
    try:
        return decoder.decode(payload)
    except _DECODE_ERRORS as error:
        raise LinkError(f"{fault}: {error}") from error


def decode_status(payload: bytes) -> StatusHead:
    """Return the head in the payload of STATUS.

    Raises:
        LinkError: it is not valid.

    """
    return _decode(_status_decoder, payload, "an invalid STATUS")


def decode_gauges(payload: bytes) -> EngineGauges:
    """Return the payload of GAUGES.

    Raises:
        LinkError: it is not valid.

    """
    return _decode(_gauges_decoder, payload, "invalid GAUGES")


def decode_failure(payload: bytes) -> Failure:
    """Return the payload of FAIL.

    Raises:
        LinkError: it is not valid.

    """
    return _decode(_failure_decoder, payload, "an invalid FAIL")


def encode_recorded(record: bytes, events: bytes) -> bytes:
    """Return the payload of RECORDED."""
    return b"".join((_WORD.pack(len(record)), record, events))


def split_recorded(payload: bytes) -> tuple[bytes, bytes]:
    """Return the record and the events in the payload of RECORDED.

    Raises:
        LinkError: it is not valid.

    """
    size = _WORD.size
    end = size + _WORD.unpack_from(payload)[0] if len(payload) >= size else len(payload) + 1
    if end > len(payload):
        raise LinkError("a RECORDED that is shorter than its record")
    return payload[size:end], payload[end:]


def decode_records(records: bytes | bytearray, count: int) -> list[ResumeRecord]:
    """Return so many records, one behind the other.

    Raises:
        LinkError: they are not valid.

    """
    try:
        return _records_decoder.decode(b"".join((_ARRAY32, _WORD.pack(count), records)))
    except _DECODE_ERRORS as error:
        raise LinkError(f"invalid resume records: {error}") from error


def encode_window(granted: int) -> bytes:
    """Return the payload of WINDOW."""
    return _WORD.pack(granted)


def decode_window(payload: bytes) -> int:
    """Return the bytes in the payload of WINDOW.

    Raises:
        LinkError: it is not valid.

    """
    if len(payload) != _WORD.size:
        raise LinkError(f"a WINDOW of {len(payload)} bytes")
    return int(_WORD.unpack(payload)[0])


def header_lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return headers as lines."""
    return b"".join([b"%b: %b\r\n" % pair for pair in headers])


def split_lines(lines: bytes) -> list[tuple[bytes, bytes]]:
    """Return lines as headers."""
    parts = [line.partition(b": ") for line in lines.split(b"\r\n")[:-1]]
    return [(name, value) for name, _, value in parts]


class FrameReader:
    """Cuts the bytes of one connection into frames. Holds the beginning of at most one."""

    __slots__ = ("_limit", "_missing", "_rest")

    def __init__(self, max_payload: int) -> None:
        self._limit = max_payload
        self._rest = bytearray()
        self._missing = 0
        """The length of `_rest` from which something can be read."""

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are complete with these bytes.

        Raises:
            LinkError: a frame is larger than the limit; nothing may be fed after that.

        """
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < self._missing:
                return []
            data = bytes(rest)
            rest.clear()
        frames: list[Frame] = []
        at, end = 0, len(data)
        while end - at >= HEADER_BYTES:
            stream, word = _HEADER.unpack_from(data, at)
            begin, length = at + HEADER_BYTES, word & _LENGTH_MASK
            if length > self._limit:
                raise LinkError(f"a frame of {length} bytes; at most {self._limit} are accepted")
            if begin + length > end:
                self._missing = HEADER_BYTES + length
                rest += data[at:]
                return frames
            at = begin + length
            frames.append((stream, word >> _LENGTH_BITS, data[begin:at]))
        if at < end:
            self._missing = HEADER_BYTES
            rest += data[at:]
        return frames
