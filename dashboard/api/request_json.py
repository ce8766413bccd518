"""JSON bodies of requests, bounded and parsed into types."""

from typing import TypeVar

import msgspec
from fastapi import Request

from machinery.request_body import BodyReader
from schemas.wire.errors import invalid

Body = TypeVar("Body")


async def read_json(bodies: BodyReader, request: Request, model: type[Body]) -> Body:
    """Return the body of a request.

    Raises:
        RequestRefusedError: it is too large or too slow.
        RefusedError: it is not of this form.

    """
    raw = await bodies.read(request)
    try:
        return msgspec.json.decode(raw or b"{}", type=model)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(f"The body cannot be read: {str(error)[:300]}.") from error
