"""Bodies of HTTP responses, read whole up to a limit. The other process may be faulty, or not ours at all."""

from collections.abc import AsyncIterable

import aiohttp


class BodyTooLargeError(aiohttp.ClientPayloadError):
    """The body is larger than the limit; callers that catch `aiohttp.ClientError` catch it, too."""


async def read_limited(pieces: AsyncIterable[bytes], limit_bytes: int) -> bytes:
    """Return a whole body; `pieces` is `response.content.iter_any()`, or its like.

    `response.content.read(n)` is no substitute: it returns what has arrived, which may be the first piece only.

    Raises:
        BodyTooLargeError: the body is larger than `limit_bytes`; the rest is not read.
        aiohttp.ClientError: the connection broke.

    """
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > limit_bytes:
            limit = f"{limit_bytes >> 20} MiB" if limit_bytes >> 20 else f"{limit_bytes} bytes"
            raise BodyTooLargeError(f"the response is larger than {limit}")
    return bytes(body)
