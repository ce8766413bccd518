"""One request of a batch, served by this gateway as a client's would be: limits, queues, retries, journal."""

import asyncio
from dataclasses import dataclass
from typing import Any

from typing_extensions import override
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.auth.keyring import Principal
from gateway.http.request_context import (
    RequestContext,
    RequestHandler,
    ResponseOwner,
    ResponseWriter,
)
from gateway.request import HttpRequest
from schemas.wire.errors import RefusedError


class _NoTransport(asyncio.Transport):
    """The transport of a client that is always there and reads at once."""

    @override
    def get_write_buffer_size(self) -> int:
        return 0

    @override
    def abort(self) -> None:
        pass

    @override
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class _FutureOwner(ResponseOwner):
    """The owner of a response that a task awaits."""

    def __init__(self, done: "asyncio.Future[None]") -> None:
        self._done = done

    @override
    def on_response_complete(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    @override
    def close_after_response(self) -> None:
        """There is no connection to close."""


class BufferedResponse(ResponseWriter):
    """Keeps a whole response. Requests of batches are not streamed."""

    body: bytes = b""

    @override
    def whole(self, status: int, head: bytes, body: bytes) -> None:
        self.status, self.body = status, body
        self._complete()


@dataclass(slots=True)
class InternalRequest:
    """A request under way."""

    context: RequestContext
    response: BufferedResponse
    done: "asyncio.Future[None]"
    handler: RequestHandler

    async def answer(self) -> tuple[int, bytes]:
        """Return status and body; a cancelled call gives up the engine, as a client does that leaves."""
        try:
            await asyncio.shield(self.done)
        except asyncio.CancelledError:
            self.handler.disconnect(self.context)
            raise
        return self.response.status, self.response.body


def start(
    handler: RequestHandler, principal: Principal | None, path: str, body: bytes, request_id: str
) -> InternalRequest:
    """Begin a request in the name of an API key; None where keys are not required.

    Raises:
        RefusedError: there is no memory for its body.

    """
    done = asyncio.get_running_loop().create_future()
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    http_request = HttpRequest(
        path=path,
        headers=headers,
        fields=dict(headers),
        request_id=request_id.encode(),
        body=body,
        length=len(body),
    )
    transport = _NoTransport()
    response = BufferedResponse(transport, FlowControl(transport), _FutureOwner(done))
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
