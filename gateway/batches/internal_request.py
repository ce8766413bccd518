"""One request of a batch, served by this gateway as a client's would be: limits, queues, retries, journal."""

import asyncio
from dataclasses import dataclass

from gateway.auth.keyring import Principal
from gateway.handler import InferenceHandler
from gateway.http.buffered_response import BufferedResponse, buffered_response
from gateway.http.request_context import RequestContext
from gateway.request import HttpRequest
from schemas.wire.errors import RefusedError


@dataclass(slots=True)
class InternalRequest:
    """A request under way."""

    context: RequestContext
    response: BufferedResponse
    done: "asyncio.Future[None]"
    handler: InferenceHandler

    async def answer(self) -> tuple[int, bytes]:
        """Return status and body; a cancelled call gives up the engine, as a client does that leaves."""
        try:
            await asyncio.shield(self.done)
        except asyncio.CancelledError:
            self.handler.disconnect(self.context)
            raise
        return self.response.status, self.response.body


def start(
    handler: InferenceHandler, principal: Principal | None, path: str, body: bytes, request_id: str
) -> InternalRequest:
    """Begin a request in the name of an API key; None where keys are not required.

    Raises:
        RefusedError: there is no memory for its body.

    """
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    http_request = HttpRequest(
        path=path,
        headers=headers,
        fields=dict(headers),
        request_id=request_id.encode(),
        body=body,
    )
    response, done = buffered_response()
    context = RequestContext(handler, http_request, response, handler.adapters[path.encode()])
    context.is_current, context.more_body, context.is_identified = True, False, True
    context.principal = principal
    context.limiter = None if principal is None else principal.limiter
    refusal = context.hold(len(body), is_complete=True)
    if refusal is not None:
        raise RefusedError(refusal)
    context.began_s = handler.clock.monotonic()
    handler.start(context)
    return InternalRequest(context, response, done, handler)
