"""A dashboard in the test's own process, on a real socket, with a client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from dashboard.server import Dashboard, DashboardSettings
from machinery.clock import SystemClock
from machinery.http_server import ServerSecurity
from store.port import Transport
from tests.support.waiting import until

CLOCK = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningDashboard:
    """A dashboard that listens."""

    dashboard: Dashboard
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.dashboard.server.url

    async def get(self, path: str, status: int = 200, **options: Any) -> Any:
        """Return the JSON body of an answer with this status."""
        async with self.http.get(self.url + path, **options) as response:
            text = await response.text()
            assert response.status == status, text
            return orjson.loads(text)


@asynccontextmanager
async def running_dashboard(
    transport: Transport, *, asks_for_keys: bool = False, id_: str = "run1", **more: Any
) -> AsyncIterator[RunningDashboard]:
    """Run a dashboard on a free port until the block ends."""
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
        await dashboard.model.wait_ready()
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http:
            yield RunningDashboard(dashboard=dashboard, http=http)
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
