"""`/v1/ws/chat/completions`: chat completions over one WebSocket, several at a time.

    client:  {"id": "1", "request": {"model": "qwen", "messages": [...], "stream": true}}
    gateway: {"id": "1", "status": 200, "headers": {...}}
             {"id": "1", "data": {...}}      each chunk, or the whole answer
             {"id": "1", "done": true}
    client:  {"id": "1", "cancel": true}

Each request is served as one over HTTP: the same authentication, limits, queues, journal and resumption. A client that
reads too slowly stops the engines of all its requests.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson
from typing_extensions import override
from wsproto.frame_protocol import CloseReason, Opcode

from gateway import errors
from gateway.http.request_context import (
    RequestContext,
    ResponseOwner,
    ResponseWriter,
)
from gateway.request import HttpRequest, RawHeaders
from gateway.upstream.response_head import list_lines
from machinery.websocket_frames import FrameError, ServerFrames
from schemas.wire.errors import Refusal, invalid

if TYPE_CHECKING:  # it answers the requests
    from gateway.handler import InferenceHandler

PATH: Final = b"/v1/ws/chat/completions"
CHAT: Final = b"/v1/chat/completions"
MAX_RUNNING: Final = 32
_IDLE_S: Final = 600.0
"""Seconds after which a connection without requests and messages is closed."""
_AT_ONCE: Final = 128
"""Frames that are read before other connections are served: one read may hold 30,000."""
_TURN_S: Final = 0.001
"""Seconds between two such turns. A loop that never waits takes the interpreter's lock from threads for half a second."""
_WRAPPING: Final = 1024
"""Bytes of a message around its request."""
_DONE: Final = b"[DONE]"
_HANDSHAKE_ONLY: Final = frozenset({b"upgrade", b"connection", b"content-length", b"x-request-id"})


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a client."""

    id: str
    request: msgspec.Raw = msgspec.Raw()
    cancel: bool = False


_MESSAGES: Final = msgspec.json.Decoder(_Message)
_EXPECTED: Final = 'Expected {"id": "1", "request": {...}} with the body of a chat completion, or {"id": "1", "cancel": true}.'


class SocketResponseOwner(ResponseOwner):
    """Tells the socket of the end of one of its responses."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    @override
    def on_response_complete(self) -> None:
        self._on_end()

    @override
    def close_after_response(self) -> None:
        """Leave the socket open: it has other responses."""


class FrameResponse(ResponseWriter):
    """Writes one response as messages; its stream's events become one message each."""

    message_id: str = ""
    send: Callable[[dict[str, Any]], None] = lambda _: None

    @override
    def whole(self, status: int, head: bytes, body: bytes) -> None:
        self.status = status
        self._tell(status=status, headers=_shown(head))
        self._tell(data=_json(body))
        self._tell(done=True)
        self._complete()

    @override
    def begin(self, status: int, head: bytes) -> None:
        self.status, self.is_streamed = status, True
        self._tell(status=status, headers=_shown(head))

    @override
    def piece(self, data: bytes) -> bool:
        if not data or self.is_gone:
            return False
        for event in data.split(b"\n\n"):
            lines = [line[6:] for line in event.split(b"\n") if line.startswith(b"data: ")]
            if lines and (text := b"\n".join(lines)) != _DONE:
                self._tell(data=_json(text))
        return self.flow.write_paused

    @override
    def chunk_writer(self) -> None:
        return None  # events are sent as messages

    @override
    def end(self, data: bytes = b"", trailers: bytes = b"") -> None:
        self.piece(data)
        more = {"trailers": _shown(trailers)} if trailers else {}
        self._tell(done=True, **more)
        self._complete()

    def _tell(self, **fields: Any) -> None:
        if not self.is_gone:
            self.send({"id": self.message_id, **fields})


def _shown(head: bytes) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in list_lines(head)}


def _json(body: bytes) -> Any:
    """Return the JSON as it was written; a text if it is none."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")
    return orjson.Fragment(body)


class ChatSocket(asyncio.Protocol):
    """One connection after its handshake. `client`: the protocol of the connection before, which owns its limits."""

    def __init__(
        self, client: Any, handler: "InferenceHandler", headers: RawHeaders, owner: str
    ) -> None:
        """`owner`: the identity of its API key; empty without one."""
        self._client = client
        self._handler = handler
        self._headers = [
            header
            for header in headers
            if header[0] not in _HANDSHAKE_ONLY and not header[0].startswith(b"sec-websocket-")
        ]
        self._frames = ServerFrames(handler.max_body + _WRAPPING)
        self._running: dict[str, RequestContext] = {}
        self._owner, self._held_bytes = owner, 0
        self._is_over = self._is_stopping = False
        self._is_behind = False
        """True while messages wait that have arrived."""
        self._idle_timer = client.loop.call_later(_IDLE_S, self._close_idle)

    @property
    def is_serving(self) -> bool:
        """True while a request is answered."""
        return bool(self._running)

    @override
    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._restart_timer()
        self._take_messages(data)

    def _take_messages(self, data: bytes = b"") -> bool:
        """Take a few messages; return whether none is left. The others wait until other connections were served."""
        self._is_behind = False
        try:
            for number, (opcode, payload) in enumerate(self._frames.feed(data), 1):
                if not self._take(opcode, payload):
                    return False
                if number == _AT_ONCE:
                    self._is_behind = True
                    self._client.flow.pause_reading()
                    self._client.loop.call_later(_TURN_S, self._catch_up)
                    break
        except FrameError as error:
            self.close(error.code, str(error))
            return False
        memory, held = self._handler.body_memory, self._frames.held_bytes
        if held > self._held_bytes:
            if not memory.take(self._owner, held - self._held_bytes):
                self.close(CloseReason.TRY_AGAIN_LATER, "too many unfinished messages")
                return False
        else:
            memory.free(self._owner, self._held_bytes - held)
        self._held_bytes = held
        return not self._is_behind

    def _catch_up(self) -> None:
        """Take the next messages, unless the client reads no answers."""
        if self._is_over or not self._is_behind or self._client.flow.write_paused:
            return
        if self._take_messages():
            self._client.flow.resume_reading()

    @override
    def pause_writing(self) -> None:
        self._client.flow.pause_writing()
        self._client.flow.pause_reading()  # each message of the client may have an answer
        for context in tuple(self._running.values()):
            context.pause()

    @override
    def resume_writing(self) -> None:
        self._client.flow.resume_writing()
        if self._is_behind:
            self._client.loop.call_soon(self._catch_up)
        else:
            self._client.flow.resume_reading()
        for context in tuple(self._running.values()):
            context.resume()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        self._idle_timer.cancel()
        self._handler.body_memory.free(self._owner, self._held_bytes)
        self._held_bytes = 0
        running, self._running = tuple(self._running.values()), {}
        for context in running:
            self._handler.disconnect(context)
        self._client.connection_lost(exc)

    def shut_down(self) -> None:
        """Take no more requests, and close after those in progress."""
        self._is_stopping = True
        if not self._running:
            self.close(CloseReason.GOING_AWAY, "the gateway stops")

    def close(self, code: int, reason: str = "") -> None:
        """Send a close frame and close the connection."""
        if self._is_over:
            return
        self._is_over = True
        transport = self._client.transport
        if not transport.is_closing():
            transport.write(self._frames.close(code, reason))
            transport.close()

    def _close_idle(self) -> None:
        if self._running:
            self._restart_timer()
        else:
            self.close(CloseReason.GOING_AWAY, f"nothing was asked for {_IDLE_S:.0f} s")

    def _restart_timer(self) -> None:
        self._idle_timer.cancel()
        self._idle_timer = self._client.loop.call_later(_IDLE_S, self._close_idle)

    def _take(self, opcode: Opcode, payload: bytes) -> bool:
        """Take one message; return whether the connection goes on."""
        if opcode is Opcode.CLOSE:
            self.close(CloseReason.NORMAL_CLOSURE)
        elif opcode is Opcode.PING:
            if not self._client.flow.write_paused:  # pongs to one that reads nothing would pile up
                self._client.transport.write(self._frames.pong(payload))
        elif opcode is Opcode.BINARY:
            self.close(CloseReason.UNSUPPORTED_DATA, "messages are text")
        elif opcode is Opcode.TEXT:
            self._take_message(payload)
        return not self._is_over

    def _take_message(self, payload: bytes) -> None:
        try:
            message = _MESSAGES.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._refuse("", invalid(f"{str(error)[:200]}. {_EXPECTED}").refusal)
            return
        if not message.id or len(message.id) > 100:
            self._refuse(
                "", invalid(f'"id" has 1 to 100 characters. {_EXPECTED}', param="id").refusal
            )
        elif message.cancel:
            context = self._running.pop(message.id, None)
            if context is not None:  # else it has just ended
                self._handler.disconnect(context)
                self._send({"id": message.id, "done": True, "cancelled": True})
                self._close_if_stopping()
        elif not message.request:
            self._refuse(message.id, invalid(_EXPECTED, param="request").refusal)
        elif message.id in self._running:
            self._refuse(message.id, invalid("This id is running already.", param="id").refusal)
        elif self._is_stopping or len(self._running) >= MAX_RUNNING:
            self._refuse(message.id, errors.too_many_on_socket(MAX_RUNNING))
        else:
            self._start(message.id, bytes(message.request))

    def _start(self, message_id: str, body: bytes) -> None:
        handler, client = self._handler, self._client
        http_request = HttpRequest(
            path=CHAT.decode(), headers=self._headers, fields=dict(self._headers)
        )
        response = FrameResponse(
            client.transport,
            client.flow,
            SocketResponseOwner(partial(self._finish, message_id)),
            message_id=message_id,
            send=self._send,
        )
        context = RequestContext(handler, http_request, response, handler.adapters[CHAT])
        context.is_current, context.more_body = True, False
        # Again for each request: the key may be gone since the handshake.
        refusal = handler.check_head(context) or context.hold(len(body), is_complete=True)
        self._running[message_id] = context
        if refusal is not None:
            handler.refuse(context, refusal)
            return
        http_request.body, context.began_s = body, handler.clock.monotonic()
        handler.start(context)
        if client.flow.write_paused and message_id in self._running:
            context.pause()

    def _finish(self, message_id: str) -> None:
        self._running.pop(message_id, None)
        self._client.loop.call_soon(self._close_if_stopping)

    def _close_if_stopping(self) -> None:
        if self._is_stopping and not self._running:
            self.close(CloseReason.GOING_AWAY, "the gateway stops")

    def _refuse(self, message_id: str, refusal: Refusal) -> None:
        data = orjson.Fragment(refusal.body())
        self._send({"id": message_id, "status": refusal.status, "data": data, "done": True})

    def _send(self, message: dict[str, Any]) -> None:
        if not self._is_over:
            self._client.transport.write(self._frames.text(orjson.dumps(message)))
