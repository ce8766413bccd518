"""One leads, the next takes over, and who led before cannot write any more."""

import asyncio
import sys
from functools import partial
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from store.errors import ConflictError
from store.etcd.connect import connect
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd
from store.leases import Election, Leadership
from store.memory import MemoryTransport
from store.port import CreateRevisionGuard, Put, Transport
from tests.store.faults import FaultyTransport
from tests.store.scripts import Script
from tests.support.waiting import until


def election(transport: Transport, key: str, ttl_s: int = 10) -> Election:
    return Election(transport, SystemClock(), key=key, ttl_s=ttl_s)


def has_led(leaders: list[Leadership], turn: int) -> bool:
    return len(leaders) >= turn


async def write_as(leader: Leadership, transport: Transport, key: str) -> None:
    await transport.commit([leader.guard], [Put(key=key, value=b"led")])


async def test_one_of_three_leads_and_resigning_hands_over_at_once(
    transport: Transport, corner: str
) -> None:
    clock, key = SystemClock(), f"{corner}leader"
    leaders: list[Leadership] = []

    async def stand(name: str) -> None:
        leaders.append(await election(transport, key).campaign(name))

    async with asyncio.TaskGroup() as group:
        for name in ("a", "b", "c"):
            group.create_task(stand(name))
        for turn in (1, 2, 3):
            resigned_at = clock.monotonic()
            await until(partial(has_led, leaders, turn))
            assert clock.monotonic() - resigned_at < 4
            assert len(leaders) == turn
            assert leaders[-1].valid()
            await write_as(leaders[-1], transport, f"{corner}work")
            await leaders[-1].resign()
            assert not leaders[-1].valid()
    epochs = [leader.epoch for leader in leaders]
    assert epochs == sorted(set(epochs))


async def test_who_lost_the_lead_cannot_write_after_the_takeover(
    transport: Transport, corner: str
) -> None:
    key = f"{corner}leader"
    old = await election(transport, key, ttl_s=2).campaign("old")
    await write_as(old, transport, f"{corner}work")
    async with asyncio.timeout(30):  # nobody keeps the old one
        new = await election(transport, key).campaign("new")
    assert not old.valid()
    with pytest.raises(ConflictError):
        await write_as(old, transport, f"{corner}work")
    await write_as(new, transport, f"{corner}work")
    await new.resign()


async def test_keep_ends_when_the_lead_is_taken_away(transport: Transport, corner: str) -> None:
    leader = await election(transport, f"{corner}leader", ttl_s=2).campaign("a")
    item = await transport.get(f"{corner}leader")
    assert item is not None
    await transport.revoke(item.lease)
    async with asyncio.timeout(30):
        await leader.keep()
    assert not leader.valid()


@pytest.mark.parametrize("lost", ["answer", "call"])
async def test_a_claim_without_an_answer_is_looked_into(lost: str) -> None:
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


async def test_a_campaign_outlives_the_absence_of_the_store() -> None:
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
async def test_a_campaign_before_etcd_is_up_wins_when_it_is(tmp_path: Path) -> None:
    etcd = EmbeddedEtcd(locate(None), tmp_path, SystemClock())
    transport = connect(etcd.address)
    async with asyncio.TaskGroup() as group:
        standing = group.create_task(election(transport, "/leader").campaign("a"))
        await etcd.start()
        async with asyncio.timeout(30):
            assert (await standing).valid()
    await transport.close()
    await etcd.supervisor.stop()


@pytest.mark.etcd
async def test_the_next_leads_within_five_seconds_after_a_kill_of_the_leaders_process(
    shared_etcd: EmbeddedEtcd, corner: str, tmp_path: Path
) -> None:
    clock, key, socket = SystemClock(), f"{corner}leader", str(shared_etcd.address.socket)
    transport = connect(shared_etcd.address)
    standing = [Script("candidate", sys.executable, tmp_path, socket, key, name) for name in "abc"]

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
        assert clock.monotonic() - killed_at < 5.0
        assert int(second.said("leads").split()[1]) > epoch
        with pytest.raises(ConflictError):
            await transport.commit([guard], [Put(key=f"{corner}work", value=b"late")])
    finally:
        for script in standing:
            await script.kill()
        await transport.close()
