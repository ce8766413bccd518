"""Engine's side of the engine link (machinery/engine_link.py): each stream is a request to the ASGI application.

What the requests of a link send in one turn of the event loop, such as the tokens of one step, is written at once.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override
from uvicorn.server import ServerState

from engine.api import web
from engine.api.connections import HAND_OVER, IS_LINK, EngineConnectionLimits
from engine.api.progress import WRITE_PROGRESS
from machinery import engine_link
from machinery.engine_link import EngineGauges, Failure, FrameReader, LinkError, RequestHead
from machinery.http_server import SSL_OBJECT
from schemas.wire.errors import Refusal, RefusedError

# Streams of one link at the same time; the engine's own limits are far lower.
_MOST_STREAMS: Final = 4096
_TOO_MANY: Final = Refusal(
    status=503,
    message=f"This link has {_MOST_STREAMS} requests in flight.",
    code="too_many_streams",
)
_NO_UPGRADE: Final = Refusal(
    status=426,
    message=f"{engine_link.PATH} is for gateways: it needs 'connection: upgrade' and 'upgrade: {engine_link.UPGRADE}'.",
    param="upgrade",
    code="upgrade_required",
)
_LATE_BODY: Final = Failure("the body of the request did not arrive in time")

RECORD: Final = "record"
"""The key in a message of a response's body with the resume record of its events; without a link nothing reads it."""
SEND_EVENTS: Final = "send_events"
"""The key in an ASGI scope's `state` with `LinkStream.send_events`."""
FAILURE: Final = "failure"
"""The key in the last message of a stream that failed, with the `Failure` that a link sends in place of its body."""

log = logging.getLogger(__name__)


class LinkStream:
    """One request of a link and its response."""

    def __init__(self, link: "EngineLink", number: int, head: RequestHead) -> None:
        self._link = link
        self._number = number
        self._missing = head.body_bytes
        """Bytes of the request's body that have not arrived."""
        self._body_timer: asyncio.TimerHandle | None = None
        self._received: asyncio.Queue[Message] = asyncio.Queue()
        self._window = engine_link.WINDOW_BYTES
        """Bytes that may be sent; below 0 by at most one frame."""
        self._can_send = asyncio.Event()
        self._stalled_since = 0.0
        """The time, by the loop's clock, since which the client has read nothing."""
        self.is_over = False
        """True once nothing more can be sent."""
        self._has_status = False

    def add_body(self, data: bytes) -> None:
        """Take a part of the request's body.

        Raises:
            LinkError: the body is longer than its head says.

        """
        self._missing -= len(data)
        if self._missing < 0:
            raise LinkError("a body that is longer than its head says")
        more = self._missing > 0
        self._received.put_nowait({"type": "http.request", "body": data, "more_body": more})
        if not more:
            self._end_timer()
        elif self._body_timer is None:
            loop, limit_s = asyncio.get_running_loop(), self._link.limits.body_s
            self._body_timer = loop.call_later(limit_s, self.fail, _LATE_BODY)

    def grant(self, granted: int) -> None:
        """Let so many more bytes be sent."""
        self._window += granted
        if granted:
            self._stalled_since = asyncio.get_running_loop().time()
        self.wake()

    def wake(self) -> None:
        """Look again whether something can be sent."""
        self._can_send.set()

    def cancel(self) -> None:
        """End the request: nothing more of its response is wanted.

        A `send` that waits is not woken. The disconnection ends it, before it goes on with what cannot be sent.
        """
        self.is_over = True
        self._end_timer()
        self._received.put_nowait({"type": "http.disconnect"})

    def _end_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()

    def write_progress(self, record: bytes) -> None:
        """Send a sign of progress, unless the response has begun."""
        if not (self._has_status or self.is_over):
            self._link.add(self._number, engine_link.PROGRESS, record)

    def fail(self, failure: Failure) -> None:
        """End the response before it is complete."""
        if not self.is_over:
            self._link.add(self._number, engine_link.FAIL, engine_link.encode_head(failure))
            self._link.forget(self._number)
            self.cancel()

    async def run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        """Run the application for the request."""
        try:
            await app(scope, self._received.get, self._send)
        finally:
            self.fail(Failure("the engine ended the response early"))

    async def _send(self, message: Message) -> None:
        if self.is_over:
            return
        if message["type"] == "http.response.start":
            lines = engine_link.header_lines(list(message["headers"]))
            head = engine_link.StatusHead(message["status"], lines)
            self._has_status = True
            self._link.add(self._number, engine_link.STATUS, engine_link.encode_head(head))
            return
        if FAILURE in message:
            self.fail(message[FAILURE])
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if RECORD in message or more:
            await self.send_events(body, message.get(RECORD))
            body = b""
        if not more:
            await self._send_parts(body, engine_link.EVENTS, engine_link.END)

    async def send_events(self, events: bytes, record: bytes | None) -> None:
        """Send a part of the body after which more follows, past the middleware that every token would run through.

        `record`: its resume record, which may be empty; None if no other engine can continue the response.
        """
        if record is not None:
            events = engine_link.encode_recorded(record, events)
            await self._send_parts(events, engine_link.RECORDED_PART, engine_link.RECORDED)
        elif events:
            await self._send_parts(events, engine_link.EVENTS, engine_link.EVENTS)

    async def _send_parts(self, data: bytes, kind: int, last_kind: int) -> None:
        """Send a part of the response in frames, as the window allows."""
        if self.is_over:
            return
        most = engine_link.MAX_RESPONSE_PAYLOAD
        for at in range(0, max(len(data), 1), most):
            if (self._window <= 0 or self._link.is_full) and not await self._may_send():
                return
            part = data[at : at + most]
            self._window -= len(part)
            self._link.add(self._number, last_kind if at + most >= len(data) else kind, part)
        if last_kind == engine_link.END:
            self.is_over = True
            self._link.forget(self._number)

    async def _may_send(self) -> bool:
        """Wait until the client reads; return False if it does not for too long, or the request is over."""
        link, limits, loop = self._link, self._link.limits, asyncio.get_running_loop()
        self._stalled_since = loop.time()
        while not self.is_over:
            if self._window > 0 and not link.is_full:
                return True
            # By the clock: a link that is full again and again wakes all of its streams each time.
            stalled_s = loop.time() - self._stalled_since
            if stalled_s >= (limits.crowded_stall_s if limits.is_crowded() else limits.stall_s):
                self.fail(Failure("the client reads nothing"))
            self._can_send.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits.check_s):
                    await self._can_send.wait()
        return False


class EngineLink(asyncio.Protocol):
    """One link to a gateway."""

    def __init__(
        self,
        app: ASGIApp,
        limits: EngineConnectionLimits,
        state: ServerState,
        scope: dict[str, Any],
        on_lost: Callable[[], None],
    ) -> None:
        """`scope`: that of the request that began the link; `on_lost` is called at its end."""
        self.limits = limits
        self.is_full = False
        """True while the gateway does not read."""
        self._app = app
        self._state = state
        self._base = {key: scope[key] for key in ("asgi", "client", "server", "scheme")}
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(engine_link.MAX_REQUEST_PAYLOAD)
        self._streams: dict[int, LinkStream] = {}
        self._out: list[bytes] = []
        """Frames of this turn of the loop."""
        self._gauges: EngineGauges | None = None
        """The last ones that were sent."""
        self._is_retiring = False

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        self.transport = transport
        self._state.connections.add(self)  # type: ignore[arg-type]  # it knows its own protocols only
        transport.write(engine_link.SWITCHING)
        self._add_gauges()
        self._flush_soon()

    @override
    def data_received(self, data: bytes) -> None:
        try:
            frames = self._reader.feed(data)
            if len(frames) > engine_link.MANY_FRAMES:
                self.transport.pause_reading()
                self._loop.call_soon(self._read_on)
            for number, kind, payload in frames:
                self._take(number, kind, payload)
        except LinkError as error:
            log.warning("link closed", extra={"why": str(error)})
            self.transport.abort()

    def _read_on(self) -> None:
        if not self.is_full:
            self.transport.resume_reading()

    def _take(self, number: int, kind: int, payload: bytes) -> None:
        stream = self._streams.get(number)
        match kind:
            case engine_link.REQUEST:
                if stream is not None:
                    raise LinkError(f"a second REQUEST of stream {number}")
                self._begin(number, *engine_link.decode_request(payload))
            case engine_link.BODY if stream is not None:
                stream.add_body(payload)
            case engine_link.WINDOW if stream is not None:
                stream.grant(engine_link.decode_window(payload))
            case engine_link.CANCEL if stream is not None:
                self.forget(number)
                stream.cancel()
            case engine_link.PING:
                self._gauges = None
                self._flush_soon()
            case _:
                pass  # of a stream that has ended, or of a later release

    def _begin(self, number: int, head: RequestHead, body: bytes) -> None:
        stream = LinkStream(self, number, head)
        if len(self._streams) >= _MOST_STREAMS:
            lines = engine_link.header_lines(_TOO_MANY.headers())
            status = engine_link.StatusHead(_TOO_MANY.status, lines)
            self.add(number, engine_link.STATUS, engine_link.encode_head(status))
            self.add(number, engine_link.END, _TOO_MANY.body())
            return
        self._streams[number] = stream
        stream.add_body(body)
        headers = engine_link.split_lines(head.lines)
        headers.append((b"content-length", b"%d" % head.body_bytes))
        scope = {
            **self._base,
            "type": "http",
            "http_version": "1.1",
            "method": head.method,
            "root_path": "",
            "path": unquote(head.path),
            "raw_path": head.path.encode(),
            "query_string": b"",
            "headers": headers,
            "state": {
                SSL_OBJECT: self.transport.get_extra_info("ssl_object"),
                WRITE_PROGRESS: stream.write_progress,
                SEND_EVENTS: stream.send_events,
                IS_LINK: True,
            },
        }
        # uvicorn waits for the tasks in this set when it ends, as it does for those of requests.
        task = self._loop.create_task(stream.run(self._app, scope))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    def add(self, number: int, kind: int, payload: bytes) -> None:
        """Send a frame with those of this turn of the loop."""
        if not self._out:
            self._flush_soon()
        self._out.append(engine_link.frame(number, kind, payload))

    def forget(self, number: int) -> None:
        """Drop a stream that has ended."""
        self._streams.pop(number, None)
        if self._is_retiring and not self._streams:
            self._flush_soon()

    def _flush_soon(self) -> None:
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._add_gauges()
        out, self._out = self._out, []
        if not self.transport.is_closing():
            if out:
                self.transport.write(b"".join(out))
            if self._is_retiring and not self._streams:
                self.transport.close()

    def _add_gauges(self) -> None:
        gauges = self.limits.gauges()
        if gauges != self._gauges:
            self._gauges = gauges
            payload = engine_link.encode_head(gauges)
            self._out.append(engine_link.frame(0, engine_link.GAUGES, payload))

    def retire(self) -> None:
        """Take no further request, and close when the last one is answered."""
        if not self._is_retiring:
            self._is_retiring = True
            self.add(0, engine_link.GOAWAY, b"")

    def shutdown(self) -> None:
        """End because the server ends; uvicorn calls it."""
        self.retire()

    @override
    def pause_writing(self) -> None:
        self.is_full = True
        # Every request is answered, if only with a refusal. A gateway always reads, so neither waits for the other.
        self.transport.pause_reading()

    @override
    def resume_writing(self) -> None:
        self.is_full = False
        self.transport.resume_reading()
        for stream in self._streams.values():
            stream.wake()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.cancel()
        self._on_lost()


@dataclass(frozen=True, slots=True)
class LinkMiddleware:
    """Begins links, and passes all other requests on."""

    app: ASGIApp
    limits: EngineConnectionLimits
    names: Iterable[str] | None
    """As in `web.check_sender`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] != engine_link.PATH:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            web.check_sender(headers, self.names)
        except RefusedError as error:
            await web.refusal_response(error.refusal)(scope, receive, send)
            return
        hand_over = scope["state"].get(HAND_OVER)
        if hand_over is None or headers.get("upgrade", "").lower() != engine_link.UPGRADE:
            await web.refusal_response(_NO_UPGRADE)(scope, receive, send)
            return
        hand_over(
            lambda state, on_lost: EngineLink(self.app, self.limits, state, dict(scope), on_lost)
        )
