"""A small site for the dashboard's page: two Macs, a model with a gateway and an engine, and hostile texts everywhere."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.async_api import Browser, Page

from schemas.event import Event, EventSpec, ObjectReference
from schemas.meta import Condition, ConditionStatus, ObjectMeta
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put, Transport
from tests.support.browser import open_page
from tests.support.dashboards import CLOCK, RunningDashboard, running_dashboard
from tests.support.gateway_engine_scripts import DONE, delta
from tests.support.gateway_fake_engine import Call, FakeEngine, running
from tests.support.gateway_world import Running, World, running_gateway
from tests.support.macs import mac

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>javascript:hacked'


def event(name: str, message: str) -> Put:
    found = Event(
        metadata=ObjectMeta(name=name),
        spec=EventSpec(
            about=ObjectReference(kind="Node", name="mac-1"),
            type="Warning",
            reason="NodeNotReady",
            message=message,
            source="reconciler",
            first_seen=CLOCK.now(),
            last_seen=CLOCK.now(),
        ),
    )
    return Put(key=keys.event_key("reconciler", name), value=codec.encode_spec(found))


TOO_WARM = Condition(
    type="ThermalPressure",
    status=ConditionStatus.TRUE,
    reason="TooWarm",
    message=f"it is throttled {HOSTILE}",
)


@dataclass(frozen=True)
class Site:
    """A dashboard over a small fleet: two Macs, one model with a gateway and an engine."""

    store: Transport
    dashboard: RunningDashboard
    gateway: Running
    engine: FakeEngine

    @property
    def url(self) -> str:
        return self.dashboard.url


async def hostile_answer(call: Call) -> None:
    await call.begin_stream()
    for piece in ("Hello ", HOSTILE):
        await call.chunk(delta(piece))
    await call.chunk(DONE)
    await call.send(b"0\r\n\r\n")


@asynccontextmanager
async def running_site() -> AsyncIterator[Site]:
    store = MemoryTransport(CLOCK)
    await store.commit([], [*mac("mac-1"), *mac("mac-2", TOO_WARM), event("e1", HOSTILE)])
    async with (
        running_gateway(store) as gateway,
        running(FakeEngine("qwen-0", hostile_answer)) as engine,
    ):
        await World(store).serve("qwen", engine)
        await gateway.knows("qwen", ready=1)
        with TemporaryDirectory() as state:
            async with running_dashboard(store, state_dir=Path(state)) as dashboard:
                yield Site(store, dashboard, gateway, engine)


@asynccontextmanager
async def opened(
    browser: Browser, store: Transport, **settings: Any
) -> AsyncIterator[tuple[Page, RunningDashboard]]:
    """Run a dashboard over the store with these settings, and open a page of it."""
    async with (
        running_dashboard(store, **settings) as dashboard,
        open_page(browser, dashboard.url) as (page, _),
    ):
        yield page, dashboard
