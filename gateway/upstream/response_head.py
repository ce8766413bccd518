"""Heads of responses, from their lines: nearly every line was seen before."""

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from schemas.wire import headers as wire_headers

_V = TypeVar("_V")
# Lines and sizes that are remembered. A longer line is unlikely to come again.
_MOST_SEEN = 4096
_LONGEST_SEEN = 256
_HEADER_LINE = re.compile(
    rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*"
    rb"((?:[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?)[ \t]*"
)
_LENGTH = re.compile(rb"\d{1,15}")
_PASSED_NAMES = frozenset(name.encode() for name in wire_headers.ENGINE_RESPONSE_HEADERS)


class InvalidResponseError(Exception):
    """The input is not a valid response."""


class ResponseHead(msgspec.Struct):
    """The head of one response."""

    status: int
    fields: dict[bytes, bytes]
    """The last value of each header, by its name in lower case."""
    passed: bytes
    """The header lines that clients get."""


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
        missing = self._read(line)
        if len(line) <= _LONGEST_SEEN:
            if len(self) >= _MOST_SEEN:
                self.clear()
            self[line] = missing
        return missing


def _read_header_line(line: bytes) -> tuple[bytes, bytes]:
    """Return the name in lower case, and the value."""
    match = _HEADER_LINE.fullmatch(line)
    if match is None:
        raise InvalidResponseError("an invalid header")
    name, value = match[1].lower(), match[2]
    if name == b"content-length" and not _LENGTH.fullmatch(value):
        raise InvalidResponseError("an invalid content-length")
    if name == b"transfer-encoding" and value.lower() != b"chunked":
        raise InvalidResponseError("an unknown transfer-encoding")
    return name, value


_HEADERS = SeenLines(_read_header_line)


def read_head(status: int, lines: Iterable[bytes]) -> ResponseHead:
    """Return the head with these header lines, given without their ends.

    Raises:
        InvalidResponseError: a line is not valid.

    """
    headers = [_HEADERS[line] for line in lines]
    passed = [b"%b: %b\r\n" % header for header in headers if header[0] in _PASSED_NAMES]
    return ResponseHead(status, dict(headers), b"".join(passed))


def list_lines(passed: bytes) -> list[tuple[bytes, bytes]]:
    """Return header lines as pairs of name and value."""
    pairs = (line.partition(b": ") for line in passed.split(b"\r\n")[:-1])
    return [(name, value) for name, _, value in pairs]
