"""Bodies of requests that manage models: short, and never compressed."""

from typing import Final

from fastapi import Request

from gateway import errors
from schemas.wire.errors import RefusedError, body_too_large

# A model name and a few options.
_BODY_LIMIT: Final = 64 << 10


async def read_body(request: Request) -> bytes:
    """Return the body of a request. Raises RefusedError if it is too long or compressed."""
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise RefusedError(errors.compressed(coding))
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _BODY_LIMIT:
            raise body_too_large(_BODY_LIMIT)
    return bytes(body)
