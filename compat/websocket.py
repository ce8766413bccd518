"""`/ws/dashboard`: six events of the fleet as JSON text messages, `{"type": ..., "data": {...}, "timestamp": ms}`."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol

import orjson
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from compat.shapes import request_status
from machinery.clock import Clock

_MAX_SOCKETS: Final = 256
_TRY_LATER: Final = 1013


class Event(Protocol):
    """One event: `worker_online`, `worker_offline`, `worker_update`, `request_started` and so on."""

    @property
    def name(self) -> str: ...

    @property
    def data(self) -> Mapping[str, object]: ...


class EventSource(Protocol):
    """The events of a process, which are numbered."""

    @property
    def place(self) -> int: ...

    def events_since(self, place: int) -> tuple[Sequence[Event], int]: ...

    async def wait_beyond(self, place: int) -> None: ...


class EventSocket:
    """Handler of the WebSocket. Each connection keeps its own place in the events; a slow one misses the oldest."""

    def __init__(self, source: EventSource, clock: Clock) -> None:
        self._source, self._clock = source, clock
        self._open = 0

    def add_to(self, router: APIRouter) -> None:
        """Register the route."""
        router.add_api_websocket_route("/ws/dashboard", self.follow)

    async def follow(self, socket: WebSocket) -> None:
        """Send events until the client leaves."""
        await socket.accept()
        if self._open >= _MAX_SOCKETS:
            await socket.close(_TRY_LATER)
            return
        self._open += 1
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send_all(socket))
                await _until_gone(socket)
                sending.cancel()
        finally:
            self._open -= 1

    async def _send_all(self, socket: WebSocket) -> None:
        place = self._source.place
        with suppress(WebSocketDisconnect):
            while True:
                await self._source.wait_beyond(place)
                events, place = self._source.events_since(place)
                for event in events:
                    data = dict(event.data)
                    if event.name == "request_completed":
                        data["status"] = request_status(str(data["status"]))
                    body = {
                        "type": event.name,
                        "data": data,
                        "timestamp": int(self._clock.now().timestamp() * 1000),
                    }
                    await socket.send_text(orjson.dumps(body).decode())


async def _until_gone(socket: WebSocket) -> None:
    """Wait for the end of the connection; messages of the client mean nothing."""
    try:
        while True:
            await socket.receive_text()
    except WebSocketDisconnect:
        return
