"""Heads of engines' responses, read line by line: nearly every line was seen before.

The parser takes a strict part of HTTP/1.1. A head that says two things about the length of its body is refused:
what follows could be taken for the response to another request.
"""

import re
from collections.abc import Callable
from typing import TypeVar

import msgspec

from schemas.wire import headers as wire_headers

_V = TypeVar("_V")
# Lines and sizes that are remembered. A longer line is unlikely to come again.
_MOST_SEEN = 4096
_LONGEST_SEEN = 256
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [\t\x20-\x7e\x80-\xff]*)?")
_HEADER_LINE = re.compile(
    rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*"
    rb"((?:[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?)[ \t]*"
)
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
_LENGTH = re.compile(rb"\d{1,15}")
_PASSED_NAMES = frozenset(name.encode() for name in wire_headers.ENGINE_RESPONSE_HEADERS)
_BODILESS = frozenset({204, 304})
_CONTENT_LENGTH, _TRANSFER_ENCODING = b"content-length", b"transfer-encoding"
_CONNECTION = b"connection"
# Names that must not come twice.
_SINGLE = frozenset({_CONTENT_LENGTH, _TRANSFER_ENCODING})
UNTIL_CLOSE = -1
"""The length of a body that ends with its connection."""


class InvalidResponseError(Exception):
    """The input is not a valid HTTP/1.1 response."""


class ResponseHead(msgspec.Struct):
    """The head of one response."""

    status: int
    fields: dict[bytes, bytes]
    """The last value of each header, by its name in lower case."""
    passed: bytes
    """The header lines that clients get."""
    length: int
    """The length of the body; UNTIL_CLOSE also stands for chunks."""
    is_chunked: bool
    keeps_alive: bool
    """True if the engine keeps the connection open."""


class SeenLines(dict[bytes, _V]):
    """Values of lines that were read before; a new line is read by `read`. Bounded."""

    def __init__(self, read: Callable[[bytes], _V]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, line: bytes) -> _V:
        """Return the value of a new line.

        Raises:
            InvalidResponseError: the line is not valid.

        """
        found = self._read(line)
        if len(line) <= _LONGEST_SEEN:
            if len(self) >= _MOST_SEEN:
                self.clear()
            self[line] = found
        return found


def _read_status_line(line: bytes) -> tuple[int, bool]:
    """Return the status, and whether the version keeps connections open by default."""
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise InvalidResponseError("no status line")
    return int(match[2]), match[1] == b"1"


def _read_header_line(line: bytes) -> tuple[bytes, bytes]:
    """Return the name in lower case, and the value."""
    match = _HEADER_LINE.fullmatch(line)
    if match is None:
        raise InvalidResponseError("an invalid header")
    name, value = match[1].lower(), match[2]
    if name == _CONTENT_LENGTH and not _LENGTH.fullmatch(value):
        raise InvalidResponseError("an invalid content-length")
    if name == _TRANSFER_ENCODING and value.lower() != b"chunked":
        raise InvalidResponseError("an unknown transfer-encoding")
    if name == _CONNECTION:
        value = value.lower()
    return name, value


def _passed_line(line: bytes) -> bytes:
    """Return the line for clients; empty if they do not get it."""
    name, value = _HEADERS[line]
    return b"%b: %b\r\n" % (name, value) if name in _PASSED_NAMES else b""


def _read_chunk_size(line: bytes) -> int:
    match = _CHUNK_SIZE.fullmatch(line)
    if match is None:
        raise InvalidResponseError("an invalid chunk size")
    return int(match[1], 16)


_STATUS_LINES = SeenLines(_read_status_line)
_HEADERS = SeenLines(_read_header_line)
_PASSED_LINES = SeenLines(_passed_line)
_read_header, _read_passed = _HEADERS.__getitem__, _PASSED_LINES.__getitem__
CHUNK_SIZES = SeenLines(_read_chunk_size)
"""The size of a chunk by the line before it."""


def _read_chunk_beginning(data: bytes) -> tuple[int, int]:
    """Return where a chunk's content begins and where the chunk ends, if its first bytes tell; (0, 0) if not."""
    at = data.find(b"\r\n")
    match = _CHUNK_SIZE.fullmatch(data[:at]) if at > 0 else None
    size = 0 if match is None else int(match[1], 16)
    return (at + 2, at + size + 4) if size else (0, 0)


CHUNK_BEGINNING = 5
CHUNK_BEGINNINGS = SeenLines(_read_chunk_beginning)
"""Begin of a chunk's content and end of the chunk, by its first CHUNK_BEGINNING bytes: most have up to 3 digits."""


def parse_head(data: bytes) -> ResponseHead:
    """Return the head in these bytes, given without the empty line at its end.

    Raises:
        InvalidResponseError: it is not a valid head.

    """
    first, *lines = data.split(b"\r\n")
    status, keeps_alive = _STATUS_LINES[first]
    fields = dict(map(_read_header, lines))
    passed = b"".join(map(_read_passed, lines))
    if len(fields) < len(lines):
        names = [_read_header(line)[0] for line in lines]
        for name in _SINGLE & fields.keys():
            if names.count(name) > 1:
                raise InvalidResponseError(f"more than one {name.decode('ascii')}")
    if b"close" in fields.get(_CONNECTION, b""):
        keeps_alive = False
    is_chunked, text = _TRANSFER_ENCODING in fields, fields.get(_CONTENT_LENGTH)
    length = UNTIL_CLOSE if text is None else int(text)
    if status in _BODILESS:
        length, is_chunked = 0, False
    elif is_chunked and text is not None:
        raise InvalidResponseError("a content-length together with chunks")
    return ResponseHead(status, fields, passed, length, is_chunked, keeps_alive)


def list_lines(passed: bytes) -> list[tuple[bytes, bytes]]:
    """Return header lines as pairs of name and value."""
    pairs = (line.partition(b": ") for line in passed.split(b"\r\n")[:-1])
    return [(name, value) for name, _, value in pairs]
