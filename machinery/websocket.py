"""Server side of the WebSocket protocol (RFC 6455) by uvicorn: text to the client; of its messages only the end counts."""

import asyncio
from collections.abc import Callable
from typing import Final

from typing_extensions import override
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

MAX_MESSAGE_BYTES: Final = 4096
"""A client that sends more than control frames and short messages is disconnected."""


class WebSocketProtocol(WSProtocol):
    """One WebSocket connection; uvicorn makes it after an upgrade and passes it the request's head."""

    on_lost: Callable[[], None]
    """Called at the end of the connection."""

    @property
    def is_open(self) -> bool:
        """True from the handshake's acceptance until one side closes."""
        is_over = self.close_sent or self.response_started or self.transport.is_closing()
        return self.handshake_complete and not is_over

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self.app_state = {**self.app_state, "ssl_object": transport.get_extra_info("ssl_object")}

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.on_lost()
