"""`/ws/dashboard`: six events of the fleet as JSON text messages, `{"type": ..., "data": {...}, "timestamp": ms}`."""

import asyncio
from typing import Final

import orjson
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from dashboard.seed_views import SeedViews
from dashboard.traffic import milliseconds

EVENTS: Final = (
    "worker_online",
    "worker_offline",
    "worker_update",
    "request_started",
    "request_completed",
    "metrics_update",
)
_MAX_SOCKETS: Final = 256
_TRY_LATER: Final = 1013


class EventSocket:
    """Handler of the WebSocket. Each connection keeps its own place in the events; a slow one misses the oldest."""

    def __init__(self, views: SeedViews) -> None:
        self._views = views
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
        traffic, clock = self._views.traffic, self._views.clock
        place = traffic.place
        while True:
            await traffic.wait_beyond(place)
            events, place = traffic.events_since(place)
            for event in events:
                body = {
                    "type": event.name,
                    "data": event.data,
                    "timestamp": milliseconds(clock.now()),
                }
                await socket.send_text(orjson.dumps(body).decode())


async def _until_gone(socket: WebSocket) -> None:
    """Wait for the end of the connection; messages of the client mean nothing."""
    try:
        while True:
            await socket.receive_text()
    except WebSocketDisconnect:
        return
