"""A response that is kept in memory: its request has no client that is connected."""

import asyncio
from typing import Any

from typing_extensions import override
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.http.request_context import ResponseOwner, ResponseWriter


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
    """Keeps a whole response, which is not streamed."""

    body: bytes = b""

    @override
    def whole(self, status: int, head: bytes, body: bytes) -> None:
        self.status, self.body = status, body
        self._complete()


def buffered_response() -> "tuple[BufferedResponse, asyncio.Future[None]]":
    """Return a response without a client, and the future that is done once it is complete."""
    done = asyncio.get_running_loop().create_future()
    transport = _NoTransport()
    return BufferedResponse(transport, FlowControl(transport), _FutureOwner(done)), done
