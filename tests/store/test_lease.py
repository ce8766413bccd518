"""A lease lives while it is renewed in time, and its owner knows before anybody else when not."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from store.errors import PermissionDeniedError, StoreError, UnavailableError
from store.etcd.connect import connect
from store.etcd.member.embedded import EmbeddedEtcd
from store.leases import LeaseSession
from store.memory import MemoryTransport
from store.port import Put
from tests.store.faults import FaultyTransport
from tests.store.scripts import Script
from tests.support.clock import FakeClock
from tests.support.waiting import until, until_async


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> FaultyTransport:
    return FaultyTransport(MemoryTransport(clock))


@asynccontextmanager
async def kept(session: LeaseSession) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(session.keep())
        yield task
        task.cancel()


async def opened(store: FaultyTransport, clock: FakeClock, ttl_s: int = 6) -> LeaseSession:
    session = LeaseSession(store, clock, ttl_s=ttl_s)
    await session.open()
    return session


async def test_a_lease_is_valid_only_when_open(store: FaultyTransport, clock: FakeClock) -> None:
    session = LeaseSession(store, clock, ttl_s=6)
    assert not session.valid()
    await session.close()  # nothing to end
    assert store.revoked == 0
    await session.open()
    assert session.valid()
    await session.close()
    assert (session.valid(), store.revoked) == (False, 1)


async def test_it_is_renewed_three_times_within_its_time(
    store: FaultyTransport, clock: FakeClock
) -> None:
    session = await opened(store, clock)
    async with kept(session) as keeping:
        await clock.advance(60)
        assert not keeping.done()
        assert session.valid()
    assert store.renewals == 30


async def test_it_is_lost_when_the_store_forgot_it(
    store: FaultyTransport, clock: FakeClock
) -> None:
    session = await opened(store, clock)
    async with kept(session) as keeping:
        await clock.advance(3)
        await store.inner.revoke(session.id)
        await clock.advance(2)
        assert keeping.done()
    assert not session.valid()


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(UnavailableError("away"), id="away"),
        pytest.param(StoreError("etcd: server stopped (code 2)"), id="odd"),
        pytest.param(PermissionDeniedError("no"), id="denied"),
    ],
)
async def test_without_an_answer_it_lives_to_its_deadline_and_no_longer(
    store: FaultyTransport, clock: FakeClock, error: StoreError
) -> None:
    session = await opened(store, clock)
    async with kept(session) as keeping:
        await clock.advance(2)  # renewed at 2: lives to 8
        store.renewal_fails = error
        await clock.advance(5.9)
        assert (session.valid(), keeping.done()) == (True, False)
        await clock.advance(0.3)
        assert (session.valid(), keeping.done()) == (False, True)


async def test_it_survives_an_absence_shorter_than_its_time(
    store: FaultyTransport, clock: FakeClock
) -> None:
    session = await opened(store, clock)
    async with kept(session) as keeping:
        store.leave()
        await clock.advance(5.5)
        store.come_back()
        await clock.advance(5.5)
        assert (session.valid(), keeping.done()) == (True, False)


async def test_who_was_frozen_knows_it_before_acting(
    store: FaultyTransport, clock: FakeClock
) -> None:
    session = await opened(store, clock)
    await clock.advance(6)  # nobody ran keep(): the process was stopped
    assert not session.valid()
    async with asyncio.timeout(30):
        await session.keep()
    assert store.renewals == 0


async def test_closing_while_the_store_is_away_is_no_failure(
    store: FaultyTransport, clock: FakeClock
) -> None:
    session = await opened(store, clock)
    store.leave()
    await session.close()
    assert not session.valid()


@pytest.mark.etcd
async def test_it_survives_a_kill_of_etcd(etcd: EmbeddedEtcd) -> None:
    clock = SystemClock()
    transport = connect(etcd.address)
    session = LeaseSession(transport, clock, ttl_s=4)
    await session.open()
    await transport.commit([], [Put(key="/alive", value=b"", lease=session.id)])
    async with asyncio.TaskGroup() as group:
        keeping_etcd = group.create_task(etcd.supervisor.run())
        keeping = group.create_task(session.keep())
        assert etcd.supervisor.pid
        os.kill(etcd.supervisor.pid, signal.SIGKILL)
        killed_at = clock.monotonic()
        # Beyond what was granted before the kill, so renewed after it.
        await until(lambda: clock.monotonic() > killed_at + 4.5, limit_s=20)
        assert session.valid()
        assert not keeping.done()
        assert await transport.get("/alive") is not None
        keeping.cancel()
        keeping_etcd.cancel()
    assert etcd.supervisor.restarts == 1
    await session.close()
    assert await transport.get("/alive") is None
    await transport.close()


@pytest.mark.etcd
async def test_a_process_that_was_stopped_past_its_time_does_not_act_any_more(
    shared_etcd: EmbeddedEtcd, corner: str, tmp_path: Path
) -> None:
    transport = connect(shared_etcd.address)
    key = f"{corner}holder"
    holder = Script(
        "lease_holder", sys.executable, tmp_path, str(shared_etcd.address.socket), key, "2"
    )

    async def is_gone() -> bool:
        return await transport.get(key) is None

    try:
        await until(lambda: holder.said("held"), what="the holder's lease")
        # Between two acts: what is on its way already is not the holder's to take back.
        acts = holder.said("acted")
        await until(lambda: holder.said("acted") != acts, what="an act of the holder")
        holder.child.send(signal.SIGSTOP)
        await until_async(is_gone, what="the end of the lease")
        before = await transport.get(f"{key}/work")
        assert before is not None
        holder.child.send(signal.SIGCONT)
        assert await until(lambda: holder.said("lost"), limit_s=15) == "lost valid=False"
        assert await until(lambda: holder.said("stopped")) == f"stopped {before.value.decode()}"
        assert await transport.get(f"{key}/work") == before
    finally:
        await holder.kill()
        await transport.close()


async def test_a_machine_that_slept_past_its_time_knows_it_at_once(
    store: FaultyTransport, clock: FakeClock
) -> None:
    session = await opened(store, clock)
    async with kept(session) as keeping:
        await clock.advance(1)
        clock.doze(3600)
        assert not session.valid()
        await clock.advance(2)
        assert keeping.done()
    assert store.renewals == 0


async def test_a_machine_that_slept_for_a_moment_goes_on(
    store: FaultyTransport, clock: FakeClock
) -> None:
    session = await opened(store, clock)
    async with kept(session) as keeping:
        clock.doze(3)
        assert session.valid()
        await clock.advance(2)
        assert (session.valid(), keeping.done(), store.renewals) == (True, False, 1)


def test_the_systems_clock_goes_on() -> None:
    clock = SystemClock()
    first = clock.elapsed()
    assert 0 <= clock.elapsed() - first < 1
