"""HTTP beside a process' main work: figures and logs for people. Whoever asks slowly, or not at all, is given up.

The main work goes on whatever happens here: connections are few, each step of one has a time limit, and a port that
is taken is said so and tried again.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from machinery.bounded_http import BoundedHttp
from machinery.clock import Clock
from machinery.lifelines import notice_death
from machinery.web import listen

_RETRY_S = 30.0
_GOODBYE_S = 1.0
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """What strangers are granted, in seconds."""

    head_s: float = 10.0
    """From the first byte of a connection, or of a request, to the end of its headers."""
    flush_s: float = 10.0
    """For taking what is left of an answer that is complete."""
    stall_s: float = 30.0
    """For a reader who follows and takes nothing."""
    connections: int = 64
    """How many there may be at once."""


class SideHttp(BoundedHttp):
    """One connection: one request, one answer."""

    def __init__(self, patience: Patience, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._patience = patience
        self._late: asyncio.TimerHandle | None = None

    def _within(self, seconds: float) -> None:
        """Give the connection up unless something happens by then."""
        self._at_ease()
        self._late = self.loop.call_later(seconds, self.transport.abort)

    def _at_ease(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._within(self._patience.head_s)
        line = transport.get_extra_info("socket")
        if line is not None:
            notice_death(line)
        if len(self.connections) > self._patience.connections:
            transport.write(_FULL)
            transport.close()

    @override
    def on_message_begin(self) -> None:
        self._within(self._patience.head_s)
        super().on_message_begin()

    @override
    def on_headers_complete(self) -> None:
        self._at_ease()
        super().on_headers_complete()
        self.cycle.keep_alive = False

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._within(self._patience.flush_s)

    @override
    def pause_writing(self) -> None:
        self._within(self._patience.stall_s)
        super().pause_writing()

    @override
    def resume_writing(self) -> None:
        # What is left after the end of an answer keeps its own limit.
        if not self.transport.is_closing():
            self._at_ease()
        super().resume_writing()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._at_ease()
        super().connection_lost(exc)


def _because(error: OSError) -> str:
    # asyncio and socket put the address into strerror as well; names that cannot be resolved have errors below 0.
    number = error.errno or 0
    return os.strerror(number).lower() if number > 0 else str(error.strerror or error)


class _Server(uvicorn.Server):
    """uvicorn without its handlers of signals: they are the process' own."""

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class SideDoor:
    """An app on a port of its own, for as long as `run()` runs."""

    def __init__(
        self,
        app: ASGIApp,
        clock: Clock,
        address: tuple[str, int],
        on_change: Callable[[], None],
        *,
        patience: Patience | None = None,
    ) -> None:
        """`address`: host and port, 0 for any; `on_change` is called when `url` or `why` is another one."""
        self._app = app
        self._clock = clock
        self._host, self._port = address
        self._patience = patience or Patience()
        self._on_change = on_change
        self.url = ""
        """Where it answers; empty while it does not."""
        self.why = ""
        """Why it does not."""

    async def run(self) -> None:
        """Listen, and answer; while somebody else has the port, try again now and then."""
        while True:
            try:
                listener = listen(self._host, self._port)
            except OSError as error:
                why = f"port {self._port} on {self._host}: {_because(error)}"
                if why != self.why:
                    log.warning(
                        "logs and figures cannot be asked for over HTTP", extra={"why": why}
                    )
                    self.why = why
                    self._on_change()
                await self._clock.sleep(_RETRY_S)
                continue
            named = f"[{self._host}]" if ":" in self._host else self._host
            self.url, self.why = f"http://{named}:{listener.getsockname()[1]}", ""
            log.info("answers over HTTP", extra={"url": self.url})
            self._on_change()
            await self._serve(listener)

    async def _serve(self, listener: socket.socket) -> None:
        server = _Server(
            uvicorn.Config(
                self._app,
                http=cast("type[SideHttp]", partial(SideHttp, self._patience)),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # strangers' wrong requests are no news
                access_log=False,
                server_header=False,
                proxy_headers=False,
            )
        )
        try:
            await server.serve(sockets=[listener])
        finally:
            for one in server.servers:
                one.close()
            for connection in tuple(server.server_state.connections):
                if isinstance(connection, SideHttp):
                    connection.transport.abort()
            if server.server_state.tasks:
                await asyncio.wait(server.server_state.tasks, timeout=_GOODBYE_S)
