"""A stand-in engine for `bench.gateway`: answers at once, so that a gateway's cost is all there is.

    python -m bench.gateway_engine PORT

POST with `"stream":true` in the body: 64 events, each a write of its own. Otherwise 600 bytes.
"""

import asyncio
import sys
from typing import cast

import uvloop
from typing_extensions import override

EVENTS = 64
BODY = b'{"object":"chat.completion","choices":[{"text":"' + b"x" * 548 + b'"}]}'
_EVENT = b'data: {"object":"chat.completion.chunk","choices":[{"delta":{"content":"word"}}]}\n\n'
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)


class Engine(asyncio.Protocol):
    """One connection; understands just enough HTTP."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    @override
    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, gap, body = self._buffer.partition(b"\r\n\r\n")
        low = head.lower()
        at = low.find(b"content-length: ")
        if not gap or at < 0 or len(body) < int(low[at + 16 :].split(b"\r\n", 1)[0]):
            return
        self._buffer = b""
        if b'"stream":true' in body:
            self._event(0)
        elif self._transport is not None:
            self._transport.write(_WHOLE)

    def _event(self, number: int) -> None:
        """Write one event and come back in the loop's next turn, as a batch of sequences does."""
        if self._transport is None:
            return
        if number == EVENTS:
            self._transport.write(_END)
            return
        self._transport.write(_CHUNK if number else _STREAM_HEAD + _CHUNK)
        self._loop.call_soon(self._event, number + 1)


async def serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(loop), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1])))
