"""Listening for HTTP, as our processes do it: one socket, and signals that mean what we say."""

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from typing_extensions import override

# What is echoed into headers and logs; anything else is replaced.
REQUEST_ID = re.compile(rb"[!-~]{1,128}")
# https://www.w3.org/TR/trace-context/#traceparent-header; longer ones are of versions to come.
TRACE_PARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?"
)
_BACKLOG = 2048


class SignalServer(uvicorn.Server):
    """A uvicorn server that tells us of signals instead of ending by itself."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # From a signal handler: nothing of asyncio may be touched before the loop's next turn.
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._on_signal)

    @override
    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: somebody else listens there, or the address is not ours.

    """
    family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)
