"""JSON bodies of requests, bounded and parsed into types."""

from typing import TypeVar

import msgspec
from fastapi import Request

from machinery.request_body import BodyReader, RequestRefusedError
from schemas.wire.errors import Refusal, RefusedError

Body = TypeVar("Body")


async def read_json(bodies: BodyReader, request: Request, model: type[Body]) -> Body:
    """Return the body of a request.

    Raises:
        RefusedError: it is too large, too slow, or not of this form.

    """
    try:
        raw = await bodies.read(request)
    except RequestRefusedError as error:
        raise RefusedError(Refusal(status=error.status, message=str(error))) from error
    try:
        return msgspec.json.decode(raw or b"{}", type=model)
    except (msgspec.MsgspecError, RecursionError) as error:
        message = f"The body cannot be read: {str(error)[:300]}."
        raise RefusedError(Refusal(status=400, message=message)) from error
