"""Framing of HTTP/1.1 chunks (RFC 9112, 7.1): `b"".join((SIZE_LINES[len(data)], data, CHUNK_END))`."""

from typing import Final

_MOST_KEPT: Final = 1024


class _SizeLines(dict[int, bytes]):
    """The line before a chunk, by the chunk's size. Those of small chunks, such as tokens, are made once."""

    def __missing__(self, size: int) -> bytes:
        return b"%x\r\n" % size


SIZE_LINES: Final = _SizeLines({size: b"%x\r\n" % size for size in range(1, _MOST_KEPT)})
CHUNK_END: Final = b"\r\n"
