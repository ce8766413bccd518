"""Server side of the WebSocket protocol (RFC 6455) for uvicorn: text to the client; of its messages only the end counts.

No extension is negotiated, so nothing is compressed. Frames of clients are bounded, and a client that sends more than
control frames of 125 bytes and short messages is disconnected. An ASGI application sees scopes of type `websocket`.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote

import httptools
from typing_extensions import override
from uvicorn import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState
from wsproto.frame_protocol import CloseReason, Opcode

from machinery.websocket_frames import KEY_LENGTH, FrameError, ServerFrames, switching_protocols

_MAX_MESSAGE: Final = 4096


class WebSocketProtocol(asyncio.Protocol):
    """One WebSocket connection; uvicorn makes it after an upgrade and passes it the request's head."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any]
    ) -> None:
        self._config = config
        self._state = server_state
        self._app_state = app_state
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._frames = ServerFrames(_MAX_MESSAGE)
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._is_accepted = self._is_over = False
        self._task: asyncio.Task[None] | None = None
        self.on_lost: Callable[[], None] = lambda: None
        """Called at the end of the connection."""

    @property
    def is_open(self) -> bool:
        """True from the handshake's acceptance until one side closes."""
        return self._is_accepted and not self._is_over

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        self.transport = transport
        self._flow = FlowControl(transport)
        self._state.connections.add(self)  # type: ignore[arg-type]  # it knows its own protocols only

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        self._flow.resume_writing()
        self._end(CloseReason.ABNORMAL_CLOSURE)
        self.on_lost()

    @override
    def pause_writing(self) -> None:
        self._flow.pause_writing()

    @override
    def resume_writing(self) -> None:
        self._flow.resume_writing()

    def shutdown(self) -> None:
        """Close the connection because the server ends; uvicorn calls it."""
        self._close(CloseReason.GOING_AWAY)

    def on_url(self, url: bytes) -> None:
        """Take the request's target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header."""
        self._headers.append((name.lower(), value))

    @override
    def data_received(self, data: bytes) -> None:
        if self._task is None:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade:
                url = httptools.parse_url(self._url)
                scope = {
                    "type": "websocket",
                    "asgi": {"version": "3.0", "spec_version": "2.4"},
                    "http_version": "1.1",
                    "scheme": "ws",
                    "server": get_local_addr(self.transport),
                    "client": get_remote_addr(self.transport),
                    "root_path": "",
                    "path": unquote(url.path.decode("ascii", "replace")),
                    "raw_path": url.path,
                    "query_string": url.query or b"",
                    "headers": self._headers,
                    "subprotocols": [],
                    "state": {
                        **self._app_state,
                        "ssl_object": self.transport.get_extra_info("ssl_object"),
                    },
                }
                self._incoming.put_nowait({"type": "websocket.connect"})
                # uvicorn waits for the tasks in this set when it ends, as it does for those of requests.
                self._task = asyncio.get_running_loop().create_task(self._run(scope))
                self._state.tasks.add(self._task)
                self._task.add_done_callback(self._state.tasks.discard)
            return
        try:
            for opcode, payload in self._frames.feed(data):
                if opcode is Opcode.CLOSE:
                    self._close(CloseReason.NORMAL_CLOSURE)
                    return
                if opcode is Opcode.PING:
                    self.transport.write(self._frames.pong(payload))
                # Messages of clients mean nothing here; pongs end nothing.
        except FrameError as error:
            self._close(error.code)

    async def _run(self, scope: dict[str, Any]) -> None:
        app: Any = self._config.loaded_app
        try:
            await app(scope, self._incoming.get, self._send)
        finally:
            self._close(CloseReason.NORMAL_CLOSURE)

    async def _send(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "websocket.accept":
            self._accept()
        elif kind == "websocket.send" and not self._is_over:
            self.transport.write(self._frames.text((message.get("text") or "").encode()))
            await self._flow.drain()
        elif kind == "websocket.close":
            self._close(message.get("code", CloseReason.NORMAL_CLOSURE))
        elif kind == "websocket.http.response.start":
            self._refuse(message["status"], message.get("headers", ()))
        elif kind == "websocket.http.response.body":
            self.transport.write(message.get("body", b""))
            if not message.get("more_body"):
                self._is_over = True
                self.transport.close()

    def _accept(self) -> None:
        key = dict(self._headers).get(b"sec-websocket-key", b"")
        version = dict(self._headers).get(b"sec-websocket-version", b"")
        if len(key) != KEY_LENGTH or version != b"13":
            self._refuse(400, ((b"sec-websocket-version", b"13"),))
            self._is_over = True
            self.transport.close()
            return
        self._is_accepted = True
        self.transport.write(switching_protocols(key))

    def _refuse(self, status: int, headers: Any) -> None:
        lines = b"".join(b"%b: %b\r\n" % (name, value) for name, value in headers)
        self.transport.write(
            b"HTTP/1.1 %d Refused\r\n%bconnection: close\r\n\r\n" % (status, lines)
        )

    def _close(self, code: int) -> None:
        """Send a close frame, once, and close the connection."""
        if not self._is_over and not self.transport.is_closing():
            if self._is_accepted:
                self.transport.write(self._frames.close(code))
            else:
                self._refuse(403, ())
            self.transport.close()
        self._end(code)

    def _end(self, code: int) -> None:
        if not self._is_over:
            self._is_over = True
            self._incoming.put_nowait({"type": "websocket.disconnect", "code": code})
