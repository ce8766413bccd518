"""Shadow traffic: copies of requests to another deployment, whose answers are dropped.

A copy never delays its request: it starts after it, waits for nothing, is never repeated, and is left out where there
are too many.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec
from typing_extensions import override

from gateway.forwarding.engine_stream import EngineStream, StreamReceiver
from gateway.forwarding.forwarder import Forwarder
from gateway.forwarding.retry_state import ForwardClient, ForwardResult, RetryState
from gateway.request import InferenceRequest
from gateway.routing.table import ServedModel
from gateway.upstream.call import BrokenResponseError
from schemas.wire.errors import RefusedError

MAX_RUNNING: Final = 32
"""Copies under way in one gateway."""
MAX_BYTES: Final = 16 << 20
"""Bytes of the bodies of all copies under way: they outlive their requests."""
LONGEST_S: Final = 300.0


class Mirror:
    """Sends copies of requests."""

    def __init__(
        self,
        forwarder: Forwarder,
        rename: Callable[[bytes, str], bytes],
        draw: Callable[[], float],
        count: Callable[[str], None],
    ) -> None:
        """`rename` returns a body with another model, `draw` a random number, 0..1; `count` counts copies by outcome."""
        self.forwarder = forwarder
        self._rename = rename
        self._draw = draw
        self._count = count
        self.copies: set[_Copy] = set()
        """The copies under way."""
        self._bytes = 0

    def offer(self, request: InferenceRequest, model: ServedModel) -> None:
        """Copy the request, if the model has a mirror and chance wants it."""
        mirror = model.mirror
        if mirror is None or self._draw() * 100 >= mirror.percent:
            return
        size = len(request.body)
        if len(self.copies) >= MAX_RUNNING or self._bytes + size > MAX_BYTES:
            self._count("dropped")
            return
        name = mirror.deployment
        body = self._rename(request.body, name)
        copied = msgspec.structs.replace(
            request, model=name, body=body, is_resumable=False, session=""
        )
        self._bytes += len(body)
        # The client's own request is sent first.
        asyncio.get_running_loop().call_soon(_Copy(self, copied).start)

    def close(self) -> None:
        """End all copies."""
        for copy in tuple(self.copies):
            copy.end("dropped")

    def remove(self, copy: "_Copy", size: int, outcome: str) -> None:
        """Count the end of a copy."""
        self.copies.discard(copy)
        self._bytes -= size
        self._count(outcome)


class _Copy(ForwardClient, StreamReceiver):
    """One copy, as the client of its answer."""

    def __init__(self, mirror: Mirror, request: InferenceRequest) -> None:
        self._mirror = mirror
        self._request = request
        self._state = RetryState()
        self._stream: EngineStream | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def start(self) -> None:
        """Send the copy."""
        self._mirror.copies.add(self)
        if not self._mirror.forwarder.has_free_slot(self._request.model):
            # A refused copy would eject the endpoint for the clients' own requests.
            self.end("dropped")
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LONGEST_S, self.end, "failed")
        try:
            now_s = self._mirror.forwarder.clock.monotonic()
            self._mirror.forwarder.start(self._request, self._state, self, now_s)
        except RefusedError:
            self.end("failed")

    def end(self, outcome: str) -> None:
        """Give up the engine, and count the copy."""
        if self._is_over:
            return
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._mirror.forwarder.abandon(self._state)
        if self._stream is not None:
            self._stream.close()
        self._mirror.forwarder.leave(self._state)
        self._state.client = None
        self._mirror.remove(self, len(self._request.body), outcome)

    @override
    def on_result(self, result: ForwardResult) -> None:
        if isinstance(result, EngineStream):
            self._stream = result
            result.attach(self)
        else:
            self.end("answered" if result.status < 400 else "failed")

    @override
    def wait_for(self, result: Coroutine[Any, Any, ForwardResult]) -> None:
        # There is no slot or no replica, or the engine failed: a copy waits for nothing.
        result.close()
        self.end("dropped" if not self._state.started else "failed")

    @override
    async def send_keep_alive(self, note: str) -> None:
        pass

    @override
    def on_events(self, events: bytes) -> None:
        pass

    @override
    def on_stream_end(self) -> None:
        self.end("answered")

    @override
    def on_stream_broken(self, error: BrokenResponseError) -> None:
        self.end("failed")

    @override
    def on_engine_died(self) -> None:
        self.end("failed")

    @override
    def on_suspended(self) -> None:
        self.end("dropped")
