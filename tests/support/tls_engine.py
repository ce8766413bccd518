"""The listener of an engine in this process: an engine's connections, TLS and health, and a stand-in for its model."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.api.connections import EngineConnectionLimits, EngineHttpProtocol
from engine.api.link import LinkMiddleware
from engine.api.tls import EngineTls
from engine.metrics import TlsMetrics
from identity.credentials import Credentials
from identity.folder import IdentityFolder
from machinery.clock import SystemClock
from machinery.engine_link import EngineGauges
from machinery.http_server import HttpServer, listen
from schemas.wire import headers
from tests.support.waiting import until

HOST = "127.0.0.1"
_LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def on_loop(test: Callable[..., Coroutine[Any, Any, None]], name: str = "uvloop") -> Any:
    """Run the test on an event loop of this name; engines and gateways have uvloop's."""

    @wraps(test)
    def run(*args: Any, **options: Any) -> None:
        with asyncio.Runner(loop_factory=_LOOPS[name]) as runner:
            runner.run(test(*args, **options))

    return run


@dataclass
class TlsEngine:
    """An engine's listener; `reached` counts the requests that came through."""

    credentials: Credentials
    replica: str
    metrics: TlsMetrics = field(default_factory=TlsMetrics)
    reached: int = 0
    port: int = 0
    health_body: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self.port}"

    @property
    def refused(self) -> dict[str, int]:
        """The failed handshakes by reason."""
        lines = "\n".join(self.metrics.failures.lines()).splitlines()
        found = (line.split('reason="')[1].split('"} ') for line in lines if "reason=" in line)
        return {reason: int(count) for reason, count in found}

    async def health(self, _: Request) -> Response:
        return JSONResponse(self.health_body, headers=self._headers())

    async def chat(self, request: Request) -> Response:
        self.reached += 1
        await request.body()
        return JSONResponse({"object": "chat.completion", "choices": []}, headers=self._headers())

    async def stream(self, _: Request) -> Response:
        self.reached += 1

        async def events() -> AsyncIterator[bytes]:
            while True:
                yield b"data: x\n\n"
                await asyncio.sleep(0.05)

        return StreamingResponse(events(), media_type="text/event-stream", headers=self._headers())

    def _headers(self) -> dict[str, str]:
        return {headers.REPLICA: self.replica}


@asynccontextmanager
async def serving_tls(
    folder: IdentityFolder, replica: str = "m-0", *, port: int = 0
) -> AsyncIterator[TlsEngine]:
    """Yield an engine's listener that serves with the identity in the folder."""
    clock = SystemClock()
    engine = TlsEngine(Credentials(folder, clock), replica)
    tls = EngineTls(engine.credentials, engine.metrics)
    routes = [
        Route("/health", engine.health),
        Route("/v1/chat/completions", engine.chat, methods=["POST"]),
        Route("/stream", engine.stream),
    ]
    gauges = EngineGauges(replica=replica, is_ready=True, in_flight=0, queued=0)
    limits = EngineConnectionLimits(gauges=lambda: gauges)
    http: Any = partial(EngineHttpProtocol, limits, limits.limiter())
    config = uvicorn.Config(
        LinkMiddleware(Starlette(routes=routes), limits, None),
        http=http,
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    server = HttpServer(config, lambda: None, tls.options().acceptor)
    with listen(HOST, port) as listener:
        engine.port = listener.getsockname()[1]
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            follow = group.create_task(tls.run(clock, lambda: server.server_state.connections))
            await until(lambda: server.started, what="the server")
            try:
                yield engine
            finally:
                follow.cancel()
                server.should_exit = True
