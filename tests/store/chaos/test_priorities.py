"""One process has more to write than a slow etcd takes: its lease lives, its statuses are written, its events wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from schemas.event import ObjectReference
from store import keys
from store.errors import StoreError
from store.etcd.connect import connect
from store.events import EventRecorder
from store.leases import LeaseSession
from store.port import Put, Transport
from tests.support import slow_cpu
from tests.support.etcd import running_etcd

pytestmark = [pytest.mark.ci, pytest.mark.etcd, pytest.mark.timeout(180)]

TTL_S = 4
WRITERS, STATUSES_EACH = 8, 25
# More than the recorder keeps.
EVENTS = 12_000
KEPT = 10_000
LEASED = "/priorities/alive"


@asynccontextmanager
async def alive(transport: Transport, clock: SystemClock) -> AsyncIterator[LeaseSession]:
    """Keep a lease with a key."""
    session = LeaseSession(transport, clock, ttl_s=TTL_S)
    await session.open()
    await transport.commit([], [Put(key=LEASED, value=b"", lease=session.id)])
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(session.keep())
        yield session
        keeping.cancel()


async def write_statuses(transport: Transport, writer: int) -> None:
    """Write statuses one after the other, each until it is acknowledged."""
    for number in range(STATUSES_EACH):
        put = Put(key=keys.status_key("Replica", f"qwen-{writer}-{number}"), value=b"{}" * 300)
        while True:
            try:
                await transport.commit([], [put])
                break
            except StoreError:
                await asyncio.sleep(0.2)  # etcd is too slow on purpose: a pause between attempts


async def written(transport: Transport, prefix: str) -> int:
    return len((await transport.list(prefix)).items)


async def test_leases_go_before_statuses_and_statuses_before_events(tmp_path: Path) -> None:
    clock = SystemClock()
    async with running_etcd(tmp_path / "etcd") as etcd:
        pid = etcd.supervisor.pid
        assert pid is not None
        transport = connect(etcd.address)
        recorder = EventRecorder(transport, clock, source="test")
        about = ObjectReference(kind="ModelDeployment", name="qwen", uid="1")
        try:
            async with alive(transport, clock) as session:
                born = await transport.get(LEASED)
                async with asyncio.TaskGroup() as group, slow_cpu.duty_cycle(pid):
                    recording = group.create_task(recorder.run())
                    await asyncio.sleep(
                        0
                    )  # the recorder's task begins: from then on `record` waits for nothing
                    for number in range(EVENTS):
                        await recorder.record(about, "Flood", f"event {number}")
                    began = clock.monotonic()
                    async with asyncio.TaskGroup() as writers:
                        for writer in range(WRITERS):
                            writers.create_task(write_statuses(transport, writer))
                    took_s = clock.monotonic() - began
                    events = await written(transport, keys.EVENT_PREFIX)
                    # Longer than the lease lives without renewals.
                    await asyncio.sleep(max(0.0, 1.5 * TTL_S - took_s))
                    assert session.valid()
                    recording.cancel()
                assert await transport.get(LEASED) == born, "the lease was lost"
                statuses = await written(transport, keys.status_prefix("Replica"))
                print(f"{statuses} statuses in {took_s:.1f} s, {events} of {EVENTS} events by then")
                assert statuses == WRITERS * STATUSES_EACH
                # The recorder has one transaction on its way, and the 167 that it would need take their time.
                assert 0 < events < KEPT / 2, "events did not wait for statuses"
        finally:
            await transport.close()
