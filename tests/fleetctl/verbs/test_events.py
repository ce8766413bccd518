"""`fleetctl events`, once and with -w."""

from datetime import timedelta

import pytest

from machinery.clock import SystemClock
from schemas.event import Event, EventSpec, ObjectReference
from schemas.meta import ObjectMeta
from store import codec, keys
from store.port import Put, Transport
from tests.support.fleet import Fleet
from tests.support.fleetctl_stream import streaming
from tests.support.terminal import CTRL_C, terminal

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180)]


async def happened(
    shared_transport: Transport,
    name: str,
    about: str,
    *,
    warns: bool = False,
    ago_s: int = 0,
    count: int = 1,
) -> None:
    kind, _, object_ = about.partition("/")
    moment = SystemClock().now() - timedelta(seconds=ago_s)
    spec = EventSpec(
        about=ObjectReference(kind=kind, name=object_),
        type="Warning" if warns else "Normal",
        reason="Unschedulable" if warns else "Placed",
        message=f"what {name} says",
        source="reconciler",
        count=count,
        first_seen=moment,
        last_seen=moment,
    )
    event = Event(metadata=ObjectMeta(name=name), spec=spec)
    put = Put(key=keys.event_key("reconciler", name), value=codec.encode(event))
    await shared_transport.commit([], [put])


async def test_watched_events(shared: Fleet, transport: Transport) -> None:
    await happened(transport, "w1", "Node/watched")
    async with streaming(shared, "events", "-w", "--for", "node/watched") as running:
        assert (await running.line()).split()[:2] == ["LAST", "SEEN"]
        assert "what w1 says" in await running.line()
        await happened(transport, "w2", "Node/watched", warns=True)
        await happened(transport, "other", "Node/elsewhere")
        await happened(transport, "w1", "Node/watched", count=2)
        assert "what w2 says" in await running.line()
        assert "what w1 says" in await running.line()
        running.interrupt()
        assert await running.ended() == 130


async def test_at_a_terminal(shared: Fleet, transport: Transport) -> None:
    await happened(transport, "t1", "Node/terminal")
    where = ("--etcd", str(shared.etcd.address))
    async with terminal("events", "-w", "--for=node/terminal", "-o", "yaml", *where) as shown:
        await shown.until("name: t1")
        await happened(transport, "t2", "Node/terminal")
        assert "\r\n---\r\n" in await shown.until("name: t2")
        shown.type(CTRL_C)
        assert await shown.ended() == 130
