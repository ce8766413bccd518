"""Tests of `store.leases`: leases that are kept alive, lost and survived, and elections with fencing."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from store.errors import ConflictError, PermissionDeniedError, StoreError, UnavailableError
from store.etcd.connect import connect
from store.etcd.member.embedded import EmbeddedEtcd
from store.leases import Election, Leadership, LeaseSession
from store.memory import MemoryTransport
from store.port import CreateRevisionGuard, Put, Transport
from tests.support.clock import FakeClock
from tests.support.store_faults import FaultyTransport
from tests.support.store_scripts import Script
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


async def test_a_lease_is_renewed_three_times_within_its_ttl(
    store: FaultyTransport, clock: FakeClock
) -> None:
    session = await opened(store, clock)
    async with kept(session) as keeping:
        await clock.advance(60)
        assert not keeping.done()
        assert session.valid()
    assert store.renewals == 30


async def test_a_lease_unknown_to_the_store_is_lost(
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
async def test_without_an_answer_a_lease_ends_at_its_deadline(
    store: FaultyTransport, clock: FakeClock, error: StoreError
) -> None:
    session = await opened(store, clock)
    async with kept(session) as keeping:
        await clock.advance(2)  # renewed at 2, so valid until 8
        store.renewal_fails = error
        await clock.advance(5.9)
        assert (session.valid(), keeping.done()) == (True, False)
        await clock.advance(0.3)
        assert (session.valid(), keeping.done()) == (False, True)


async def test_closing_without_a_store_is_no_failure(
    store: FaultyTransport, clock: FakeClock
) -> None:
    session = await opened(store, clock)
    store.leave()
    await session.close()
    assert not session.valid()


@pytest.mark.etcd
async def test_a_lease_survives_a_kill_of_etcd(etcd: EmbeddedEtcd) -> None:
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
        # Longer than the lease granted before the kill, so it was renewed afterwards.
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
async def test_a_process_stopped_past_its_ttl_stops_acting(
    shared_etcd: EmbeddedEtcd, corner: str, tmp_path: Path
) -> None:
    transport = connect(shared_etcd.address)
    key = f"{corner}holder"
    holder = Script(
        "store_lease_holder", sys.executable, tmp_path, str(shared_etcd.address.socket), key, "2"
    )

    async def is_gone() -> bool:
        return await transport.get(key) is None

    try:
        await until(lambda: holder.said("held"), what="the holder's lease")
        # Checked between two actions: requests in flight cannot be taken back.
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


async def test_a_machine_that_slept_past_the_ttl_notices_at_once(
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


async def test_a_machine_that_slept_briefly_continues(
    store: FaultyTransport, clock: FakeClock
) -> None:
    session = await opened(store, clock)
    async with kept(session) as keeping:
        clock.doze(3)
        assert session.valid()
        await clock.advance(2)
        assert (session.valid(), keeping.done(), store.renewals) == (True, False, 1)


def election(transport: Transport, key: str, ttl_s: int = 10) -> Election:
    return Election(transport, SystemClock(), key=key, ttl_s=ttl_s)


def has_led(leaders: list[Leadership], turn: int) -> bool:
    return len(leaders) >= turn


async def write_as(leader: Leadership, transport: Transport, key: str) -> None:
    await transport.commit([leader.guard], [Put(key=key, value=b"led")])


async def test_one_of_three_leads_and_resigning_hands_over(
    transport: Transport, corner: str
) -> None:
    clock, key = SystemClock(), f"{corner}leader"
    leaders: list[Leadership] = []

    async def stand(name: str) -> None:
        leaders.append(await election(transport, key, ttl_s=60).campaign(name))

    async with asyncio.TaskGroup() as group:
        for name in ("a", "b", "c"):
            group.create_task(stand(name))
        for turn in (1, 2, 3):
            resigned_at = clock.monotonic()
            await until(partial(has_led, leaders, turn))
            assert clock.monotonic() - resigned_at < 30
            assert len(leaders) == turn
            assert leaders[-1].valid()
            await write_as(leaders[-1], transport, f"{corner}work")
            await leaders[-1].resign()
            assert not leaders[-1].valid()
    epochs = [leader.epoch for leader in leaders]
    assert epochs == sorted(set(epochs))


async def test_a_former_leader_cannot_write_after_the_takeover(
    transport: Transport, corner: str
) -> None:
    key = f"{corner}leader"
    old = await election(transport, key, ttl_s=2).campaign("old")
    await write_as(old, transport, f"{corner}work")
    async with asyncio.timeout(30):  # the old lease is not kept alive
        new = await election(transport, key).campaign("new")
    assert not old.valid()
    with pytest.raises(ConflictError):
        await write_as(old, transport, f"{corner}work")
    await write_as(new, transport, f"{corner}work")
    await new.resign()


async def test_keep_returns_when_leadership_is_lost(transport: Transport, corner: str) -> None:
    leader = await election(transport, f"{corner}leader", ttl_s=2).campaign("a")
    item = await transport.get(f"{corner}leader")
    assert item is not None
    await transport.revoke(item.lease)
    async with asyncio.timeout(30):
        await leader.keep()
    assert not leader.valid()


@pytest.mark.parametrize("lost", ["answer", "call"])
async def test_a_claim_with_a_lost_answer_is_resolved(lost: str) -> None:
    memory = MemoryTransport(SystemClock())
    faulty = FaultyTransport(memory)
    if lost == "answer":
        faulty.answers_to_lose = 1
    else:
        faulty.commits_to_lose = 1
    async with asyncio.timeout(30):
        leader = await election(faulty, "/leader").campaign("a")
    item = await memory.get("/leader")
    assert item is not None
    assert (item.create_revision, item.value) == (leader.epoch, b"a")
    await write_as(leader, memory, "/work")


async def test_a_campaign_survives_an_outage() -> None:
    faulty = FaultyTransport(MemoryTransport(SystemClock()))
    first = await election(faulty, "/leader").campaign("first")
    async with asyncio.TaskGroup() as group:
        second = group.create_task(election(faulty, "/leader").campaign("second"))
        await until(lambda: faulty.watches, what="the second's watch")
        faulty.leave()
        await faulty.inner.revoke(first._session.id)
        assert not second.done()
        faulty.come_back()
        async with asyncio.timeout(30):
            assert (await second).valid()


@pytest.mark.etcd
async def test_another_process_leads_after_a_kill(
    shared_etcd: EmbeddedEtcd, corner: str, tmp_path: Path
) -> None:
    clock, key, socket = SystemClock(), f"{corner}leader", str(shared_etcd.address.socket)
    transport = connect(shared_etcd.address)
    standing = [
        Script("store_candidate", sys.executable, tmp_path, socket, key, name) for name in "abc"
    ]

    def leading() -> list[Script]:
        return [s for s in standing if s.child.running() and s.said("leads")]

    try:
        (first,) = await until(leading, what="the first leader")
        await until(lambda: all(s.said("stands") for s in standing))
        epoch = int(first.said("leads").split()[1])
        guard = CreateRevisionGuard(key=key, create_revision=epoch)
        await transport.commit([guard], [Put(key=f"{corner}work", value=b"")])
        killed_at = clock.monotonic()
        await first.kill()
        (second,) = await until(leading, what="the second leader")
        assert clock.monotonic() - killed_at < 20  # 3 s for the lease to end, and a busy machine
        assert int(second.said("leads").split()[1]) > epoch
        with pytest.raises(ConflictError):
            await transport.commit([guard], [Put(key=f"{corner}work", value=b"late")])
    finally:
        for script in standing:
            await script.kill()
        await transport.close()
