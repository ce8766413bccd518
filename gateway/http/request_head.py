"""Heads of usual requests to models, read line by line: nearly every line was seen before.

The reader takes a strict part of what llhttp takes. Anything else is not refused here: it is left to llhttp, which
judges. Lines with keys are never kept.
"""

import re
from collections.abc import Iterable
from typing import TypeAlias

Header: TypeAlias = tuple[bytes, bytes]

# Lines that are remembered, of all connections together. A longer line is unlikely to come again.
_MOST_SEEN = 8192
_LONGEST_SEEN = 512
# Far more than clients send; larger heads are counted and refused with llhttp.
_LONGEST_HEAD = 8192
_MOST_LINES = 64
_LINE = re.compile(
    rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*((?:[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?)?)[ \t]*"
)
_LENGTH = re.compile(rb"\d{1,9}")
_KEYS = frozenset({b"authorization", b"x-api-key", b"api-key", b"proxy-authorization", b"cookie"})
# Names that change where a body ends, what its connection becomes, or what must be sent first.
_LEFT_TO_LLHTTP = frozenset(
    {b"transfer-encoding", b"upgrade", b"expect", b"proxy-connection", b"http2-settings"}
)
_HOST, _CONTENT_LENGTH, _CONNECTION = b"host", b"content-length", b"connection"


# What a line says. The last: the head is left to llhttp.
_OTHER, _BODY_LENGTH, _HOST_NAME, _ODD = range(4)


class RequestHead:
    """The head of a usual request. A plain object: one is created for each request."""

    __slots__ = ("fields", "headers", "length", "path", "size")

    def __init__(self, path: bytes, headers: list[Header], length: int, size: int) -> None:
        self.path = path
        self.headers = headers
        """Names in lower case and values, in the order of arrival."""
        self.fields = dict(headers)
        """The last value of each header."""
        self.length = length
        """The length of the body."""
        self.size = size
        """The length of the head with its empty line."""


class HeadReader:
    """Reads the heads of all connections."""

    def __init__(self, paths: Iterable[bytes]) -> None:
        """`paths`: those of requests to models."""
        self._first_lines = {b"POST %b HTTP/1.1" % path: path for path in paths}
        self._seen: dict[bytes, tuple[int, Header]] = {}

    def read(self, data: bytes) -> RequestHead | None:
        """Return the head with which the data begins; None if it is left to llhttp."""
        end = data.find(b"\r\n\r\n", 0, _LONGEST_HEAD)
        if end < 0:
            return None
        first, *lines = data[:end].split(b"\r\n", _MOST_LINES)
        path = self._first_lines.get(first)
        if path is None:
            return None
        headers: list[Header] = []
        length, hosts, seen = -1, 0, self._seen
        for line in lines:
            kind, header = seen.get(line) or self._learn(line)
            headers.append(header)
            if kind == _OTHER:
                continue
            if kind == _BODY_LENGTH and length < 0:
                length = int(header[1])
            elif kind == _HOST_NAME and not hosts:
                hosts = 1
            else:
                return None
        if length < 0 or not hosts:
            return None
        return RequestHead(path, headers, length, end + 4)

    def _learn(self, line: bytes) -> tuple[int, Header]:
        """Return what a new line says."""
        match = _LINE.fullmatch(line)
        if match is None:
            return _ODD, (b"", b"")
        name, value = match[1].lower(), match[2]
        if name in _KEYS:
            return _OTHER, (name, value)
        found = _kind(name, value), (name, value)
        if len(line) <= _LONGEST_SEEN:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[line] = found
        return found


def _kind(name: bytes, value: bytes) -> int:
    if name == _CONTENT_LENGTH:
        return _BODY_LENGTH if _LENGTH.fullmatch(value) else _ODD
    if name == _HOST:
        return _HOST_NAME
    if name == _CONNECTION and value.lower() != b"keep-alive":
        return _ODD
    return _ODD if name in _LEFT_TO_LLHTTP else _OTHER
