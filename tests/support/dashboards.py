"""A dashboard on a real socket, in the test's own process or in one that can be killed, with a client."""

import asyncio
import resource
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from fastapi import FastAPI

from dashboard.server import Dashboard, DashboardSettings
from machinery.clock import SystemClock
from machinery.http_server import ServerSecurity
from schemas.wire.requests import EndedRequest, RequestTokens
from store.port import Transport
from tests.support.ports import free_port
from tests.support.waiting import until, until_async

CLOCK = SystemClock()
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def until_answer(
    http: aiohttp.ClientSession,
    url: str,
    holds: Callable[[Any], object] | None = None,
    *,
    status: int = 200,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Wait until an answer has this status and its JSON holds; return what that returns."""

    async def look() -> Any:
        async with http.get(url, headers=headers) as response:
            raw = await response.read()
            if response.status != status:
                return None
            return True if holds is None else holds(orjson.loads(raw))

    return await until_async(look, limit_s=60, what=f"{url} to be so")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningDashboard:
    """A dashboard that listens."""

    dashboard: Dashboard
    store: Transport
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.dashboard.server.url

    @property
    def app(self) -> FastAPI:
        """The application, to look at its routes."""
        return self.dashboard.app

    async def until(
        self, path: str, holds: Callable[[Any], object] | None = None, **options: Any
    ) -> Any:
        """Wait until the answer at a path is as it should be; see `until_answer`."""
        return await until_answer(self.http, self.url + path, holds, **options)

    async def get(self, path: str, status: int = 200, **options: Any) -> Any:
        """Return the JSON body of an answer with this status."""
        async with self.http.get(self.url + path, **options) as response:
            text = await response.text()
            assert response.status == status, text
            return orjson.loads(text)

    async def post(self, path: str, body: object, status: int = 200, **options: Any) -> Any:
        """Send a change as the page does; return the JSON body of an answer with this status."""
        headers = {"x-fleet-csrf": "1", **options.pop("headers", {})}
        async with self.http.post(
            self.url + path, json=body, headers=headers, **options
        ) as response:
            text = await response.text()
            assert response.status == status, text
            return orjson.loads(text)

    async def log_in(self, key: str) -> dict[str, str]:
        """Log in with an API key; return the header of the session."""
        headers = {"x-fleet-csrf": "1"}
        async with self.http.post(
            f"{self.url}/login", json={"key": key}, headers=headers
        ) as response:
            assert response.status == 200, await response.text()
            return {"cookie": response.headers["set-cookie"].partition(";")[0]}


@asynccontextmanager
async def serving(path: str, *answers: Handler) -> AsyncIterator[list[str]]:
    """Serve each answer at this path, on a port of its own; yield the addresses."""
    runners: list[web.AppRunner] = []
    try:
        for answer in answers:
            app = web.Application()
            app.router.add_get(path, answer)
            runners.append(web.AppRunner(app, shutdown_timeout=0.1))
            await runners[-1].setup()
            await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        yield [f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners]
    finally:
        for runner in runners:
            await runner.cleanup()


@asynccontextmanager
async def running_dashboard(
    transport: Transport,
    *,
    asks_for_keys: bool = False,
    id_: str = "run1",
    has_store: bool = True,
    **more: Any,
) -> AsyncIterator[RunningDashboard]:
    """Run a dashboard on a free port until the block ends. `has_store`: the store answers, and is waited for."""
    settings = DashboardSettings(
        address=("127.0.0.1", 0),
        asks_for_keys=asks_for_keys,
        session_secret=b"s" * 32,
        security=ServerSecurity(),
        **more,
    )
    dashboard = Dashboard(transport, CLOCK, settings, id_=id_)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(dashboard.run())
        await until(lambda: dashboard.server.url, what="the dashboard listens")
        if has_store:
            await dashboard.model.wait_ready()
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http:
            yield RunningDashboard(dashboard=dashboard, store=transport, http=http)
        task.cancel()


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One server-sent event."""

    id: str
    name: str
    data: Any


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[SseEvent]:
    """Yield the events of a stream; comments are left out."""
    fields: dict[str, str] = {}
    async for line in response.content:
        text = line.decode().rstrip("\n")
        if text.startswith(":"):
            continue
        if text:
            name, _, value = text.partition(": ")
            fields[name] = value
        elif fields:
            yield SseEvent(
                fields.get("id", ""), fields.get("event", "message"), orjson.loads(fields["data"])
            )
            fields = {}


@dataclass(slots=True)
class DashboardProcess:
    """The process `fleet-dashboard`, which a test may kill and start again."""

    words: tuple[str, ...]
    http: aiohttp.ClientSession
    url: str
    process: asyncio.subprocess.Process | None = None
    program: tuple[str, ...] = ("-m", "dashboard")

    async def start(self) -> None:
        """Start it, and wait for the state of the fleet."""
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, *self.program, *self.words), stderr=asyncio.subprocess.DEVNULL
        )
        await until_async(self._is_ready, limit_s=60, what="the dashboard")

    def limit_files(self, most_bytes: int = resource.RLIM_INFINITY) -> None:
        """Let it write no file longer than so many bytes, as a full disk would."""
        assert self.process is not None
        if sys.platform == "linux":
            limit = (most_bytes, resource.RLIM_INFINITY)
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, limit)

    def send(self, number: int) -> None:
        """Send a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    async def metric(self, name: str) -> float:
        """Return the value of one of its own metrics."""
        async with self.http.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return float(next(line.split()[1] for line in lines if line.split()[0] == name))

    async def _is_ready(self) -> bool:
        try:
            async with self.http.get(f"{self.url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; return the exit code."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.process.wait()

    async def until(self, path: str, holds: Callable[[Any], object]) -> Any:
        """Wait until the answer at a path is as it should be; see `until_answer`."""
        return await until_answer(self.http, self.url + path, holds)

    async def get(self, path: str, status: int = 200) -> Any:
        """Return the JSON body of an answer with this status."""
        async with self.http.get(self.url + path) as response:
            text = await response.text()
            assert response.status == status, text
            return orjson.loads(text)


@asynccontextmanager
async def dashboard_process(etcd: str, folder: Path) -> AsyncIterator[DashboardProcess]:
    """Yield a process with a history in the folder; it is not started yet, and ended after the block."""
    port = free_port()
    words = ("--etcd", etcd, "--auth", "off", "--port", str(port), "--state-dir", str(folder))
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        process = DashboardProcess(words, http, f"http://127.0.0.1:{port}")
        try:
            yield process
        finally:
            if process.process is not None:
                await process.end(signal.SIGKILL)


def ended(
    number: int, *, first_ms: float = 100.0, outcome: str = "ok", tokens: int = 101
) -> EndedRequest:
    """Return a stream of the deployment qwen that took a second after its first token."""
    return EndedRequest(
        time=CLOCK.now(),
        id=f"r-{number}",
        gateway="g",
        model="qwen",
        deployment="qwen",
        outcome=outcome,
        latency_ms=first_ms + 1000,
        first_token_ms=first_ms,
        tokens=RequestTokens(prompt=10, output=tokens),
        worker="mac-1",
    )
