"""Heads of usual requests to models, read line by line: nearly every line was seen before.

The reader takes a strict part of what llhttp takes. Anything else is not refused here: it is left to llhttp, which
judges. Lines with keys are never kept.
"""

import re
from collections.abc import Iterable
from typing import TypeAlias

from gateway.request import HttpRequest

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
# Names whose values do not come again: remembering them would only push out others.
_FRESH = frozenset({b"x-request-id", b"traceparent", b"tracestate", b"idempotency-key"})
# The name of a line for which the head is left to llhttp. No header is called so.
_ODD = b""
_LEFT: Header = (_ODD, b"")
# How clients write their key, which is read anew in each request. The rest of such a line is one token (RFC 6750, 2.1).
_AUTHORIZATION = b"authorization"
_BEARERS = (b"Authorization: Bearer ", b"authorization: Bearer ")
_BEARER_SIZE, _SCHEME_AT = len(_BEARERS[0]), len(b"Authorization: ")
_TOKEN = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~+/="


class HeadReader:
    """Reads the heads of all connections."""

    def __init__(self, paths: Iterable[bytes]) -> None:
        """`paths`: those of requests to models."""
        self._first_lines = {b"POST %b HTTP/1.1" % path: path.decode("ascii") for path in paths}
        self._seen = _SeenLines()
        self._read_line = self._seen.__getitem__

    def read(self, data: bytes) -> HttpRequest | None:
        """Return the request whose head begins the data, without its id and body; None if it is left to llhttp."""
        end = data.find(b"\r\n\r\n", 0, _LONGEST_HEAD)
        if end < 0:
            return None
        first, *lines = data[:end].split(b"\r\n", _MOST_LINES)
        path = self._first_lines.get(first)
        if path is None:
            return None
        headers = list(map(self._read_line, lines))
        fields = dict(headers)
        length = fields.get(_CONTENT_LENGTH)
        if length is None or _ODD in fields or _HOST not in fields:
            return None
        if len(fields) < len(headers) and not _are_single(headers):
            return None
        return HttpRequest(
            path=path, headers=headers, fields=fields, size=end + 4, length=int(length)
        )


class _SeenLines(dict[bytes, Header]):
    """Headers of lines that were read before; a new line is read. Bounded, and never with a key."""

    def __missing__(self, line: bytes) -> Header:
        """Return what a new line says; its name is `_ODD` if the head is left to llhttp."""
        if line[:_BEARER_SIZE] in _BEARERS:
            token = line[_BEARER_SIZE:]
            if token and not token.translate(None, _TOKEN):
                return _AUTHORIZATION, line[_SCHEME_AT:]
        match = _LINE.fullmatch(line)
        if match is None:
            return _LEFT
        name, value = match[1].lower(), match[2]
        if name in _KEYS:
            return name, value
        found = _LEFT if _is_odd(name, value) else (name, value)
        if len(line) <= _LONGEST_SEEN and name not in _FRESH:
            if len(self) >= _MOST_SEEN:
                self.clear()
            self[line] = found
        return found


def _are_single(headers: list[Header]) -> bool:
    """Return whether neither the host nor the length comes twice."""
    names = [name for name, _ in headers]
    return names.count(_HOST) == names.count(_CONTENT_LENGTH) == 1


def _is_odd(name: bytes, value: bytes) -> bool:
    if name == _CONTENT_LENGTH:
        return not _LENGTH.fullmatch(value)
    if name == _CONNECTION:
        return value.lower() != b"keep-alive"
    return name in _LEFT_TO_LLHTTP
