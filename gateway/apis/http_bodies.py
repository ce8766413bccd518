"""Bodies of routes that no engine serves: those of requests bounded and never compressed, those of responses JSON."""

from collections.abc import AsyncGenerator
from typing import Any, Final

import orjson
from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from gateway import errors
from schemas.wire.errors import RefusedError, body_too_large, invalid

# A name and a few options.
_BODY_LIMIT: Final = 64 << 10


async def read_parts(request: Request, limit_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the parts of a body.

    Raises:
        RefusedError: it is too large, or its client left.

    """
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit_bytes:
                raise body_too_large(limit_bytes)
            yield part
    except ClientDisconnect as error:
        raise invalid("The body is not complete.") from error


async def read_body(request: Request) -> bytes:
    """Return the short body of a request. Raises RefusedError if it is too long, cut off or compressed."""
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise RefusedError(errors.compressed(coding))
    return b"".join([part async for part in read_parts(request, _BODY_LIMIT)])


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    """Return a response with this body."""
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")
