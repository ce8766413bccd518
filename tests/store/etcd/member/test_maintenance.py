"""Tests of `store.etcd.member.maintenance`: its decisions, and a full store that accepts writes again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from store.errors import NoSpaceError
from store.etcd.connect import connect
from store.etcd.grpc.admin import Alarm, MaintenanceClient, MemberStatus
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd
from store.etcd.member.maintenance import (
    DisarmAlarms,
    MemberMaintenance,
    MemberObservation,
    ReclaimSpace,
    Trouble,
    WarnUser,
    decide,
)
from store.informer import Informer
from store.port import Delete, Put, Transport
from tests.support.store_binaries import BINARIES
from tests.support.waiting import until, until_async

MIB = 2**20
QUOTA = 16 * MIB
NOSPACE = Alarm(member=7, kind="NOSPACE")


def seen(
    *,
    size: float,
    in_use: float,
    quota: float = 512,
    alarms: tuple[Alarm, ...] = (),
    reclaimed_ago_s: float | None = None,
    warned: tuple[Trouble, ...] = (),
) -> MemberObservation:
    status = MemberStatus(
        version="3.5.16",
        revision=5000,
        store="1",
        member=7,
        leader=7,
        db_size_bytes=int(size * MIB),
        db_size_in_use_bytes=int(in_use * MIB),
        is_learner=False,
        has_alarms=bool(alarms),
    )
    return MemberObservation(
        status=status,
        alarms=alarms,
        quota_bytes=int(quota * MIB),
        now_s=10_000.0,
        reclaimed_at_s=None if reclaimed_ago_s is None else 10_000.0 - reclaimed_ago_s,
        warned_at_s=dict.fromkeys(warned, 9_000.0),
    )


def full(
    *, reclaimed_ago_s: float | None = None, warned: tuple[Trouble, ...] = ()
) -> MemberObservation:
    return seen(
        size=512, in_use=510, alarms=(NOSPACE,), reclaimed_ago_s=reclaimed_ago_s, warned=warned
    )


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        pytest.param(seen(size=10, in_use=9), None, id="small"),
        pytest.param(seen(size=60, in_use=1), None, id="not-worth-it"),
        pytest.param(seen(size=300, in_use=200), None, id="in-use"),
        pytest.param(seen(size=300, in_use=100), ReclaimSpace, id="mostly-free"),
        pytest.param(seen(size=300, in_use=100, reclaimed_ago_s=60), None, id="tidied-just-now"),
        pytest.param(seen(size=14, in_use=2, quota=16), ReclaimSpace, id="small-quota-mostly-free"),
        pytest.param(seen(size=450, in_use=420), ReclaimSpace, id="nearly-full"),
        pytest.param(
            seen(size=450, in_use=420, reclaimed_ago_s=9), WarnUser, id="nearly-full-of-life"
        ),
        pytest.param(
            seen(size=450, in_use=420, reclaimed_ago_s=9, warned=("nearly full",)), None, id="said"
        ),
        pytest.param(full(), ReclaimSpace, id="full"),
        pytest.param(full(reclaimed_ago_s=9), WarnUser, id="full-of-life"),
        pytest.param(
            full(reclaimed_ago_s=9, warned=("nearly full",)), WarnUser, id="worse-than-said"
        ),
        pytest.param(full(reclaimed_ago_s=9, warned=("full",)), None, id="full-and-said"),
        pytest.param(full(reclaimed_ago_s=40), ReclaimSpace, id="full-again"),
        pytest.param(seen(size=100, in_use=90, alarms=(NOSPACE,)), DisarmAlarms, id="freed"),
        pytest.param(
            seen(size=13, in_use=5, quota=16, alarms=(NOSPACE,)), ReclaimSpace, id="no-room"
        ),
        pytest.param(
            seen(size=9, in_use=9, alarms=(Alarm(member=7, kind="CORRUPT"), NOSPACE)),
            WarnUser,
            id="corrupt",
        ),
    ],
)
def test_the_next_action_follows_from_the_state(
    situation: MemberObservation, expected: type | None
) -> None:
    action = decide(situation)
    assert (None if action is None else type(action)) is expected


def test_actions_carry_revisions_and_messages() -> None:
    assert decide(full()) == ReclaimSpace(compact_to=4990, because="its quota is used up")
    mostly_free = decide(seen(size=300, in_use=100))
    assert mostly_free == ReclaimSpace(compact_to=None, because="200 MiB of 300 MiB are free")
    warning = decide(full(reclaimed_ago_s=9))
    assert isinstance(warning, WarnUser)
    assert "fills 510 MiB of etcd's quota of 512 MiB" in warning.message
    assert "`fleetctl up --etcd-quota 1024Mi`" in warning.message
    assert decide(seen(size=100, in_use=90, alarms=(NOSPACE,))) == DisarmAlarms(alarms=(NOSPACE,))


class Small:
    """An etcd with the smallest quota, and its maintenance."""

    def __init__(self, folder: Path, *, quota: int = QUOTA, binary: Path | None = None) -> None:
        clock = SystemClock()
        self.etcd = EmbeddedEtcd(locate(binary), folder, clock, quota_bytes=quota)
        self.said: list[str] = []
        self.care = MemberMaintenance(self.etcd.address, clock, self.said.append, quota_bytes=quota)
        self.transport: Transport = connect(self.etcd.address)
        self.member = MaintenanceClient(self.etcd.address)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Small"]:
        try:
            await self.etcd.start()
            yield self
        finally:
            await self.transport.close()
            await self.member.close()
            await self.etcd.supervisor.stop()

    async def put(self, key: str, size: int = 300_000) -> None:
        await self.transport.commit([], [Put(key=key, value=b"x" * size)])

    async def fill(self, key_of: Callable[[int], str]) -> None:
        """Write until etcd refuses."""
        for number in range(200):
            try:
                await self.put(key_of(number))
            except NoSpaceError:
                return
            if number > 60:  # 3.5.1 checks its size every 5 s with these flags
                await asyncio.sleep(0.1)
        raise AssertionError("etcd never refused")


async def settled(look: Callable[[], Awaitable[bool]]) -> None:
    """Run until there is nothing left to do."""
    async with asyncio.timeout(20):
        while await look():
            pass


@pytest.mark.etcd
@pytest.mark.parametrize("binary", BINARIES)
async def test_a_full_store_accepts_writes_again(tmp_path: Path, binary: Path) -> None:
    """It runs beside the fleet, without any manual action."""
    async with Small(tmp_path, binary=binary).running() as small:
        informer = Informer(small.transport, "/a/", lambda item: item.value, SystemClock())
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(informer.run())
            await informer.wait_synced()
            await small.fill(lambda number: f"/a/{number % 5}")
            with pytest.raises(NoSpaceError):
                await small.put("/a/last")
            assert [alarm.kind for alarm in await small.member.alarms()] == ["NOSPACE"]
            caring = group.create_task(small.care.run())
            await until(lambda: len(small.said) == 2, limit_s=20, what="the rescue")
            await small.put("/a/last", size=1)
            await until(lambda: informer.items.get("/a/last") == b"x", what="the informer")
            assert set(informer.items) == {*(f"/a/{n}" for n in range(5)), "/a/last"}
            caring.cancel()
            watching.cancel()
        after = await small.member.status()
        assert await small.member.alarms() == ()
        assert after.db_size_bytes < QUOTA / 2
        assert not after.has_alarms
    assert "its quota is used up: its file had" in small.said[0]
    assert small.said[1] == "etcd accepts writes again: its quota is no longer used up"


@pytest.mark.etcd
async def test_a_store_full_of_live_data_asks_for_a_larger_quota(tmp_path: Path) -> None:
    async with Small(tmp_path).running() as small:
        await small.fill(lambda number: f"/a/{number}")
        await settled(small.care.check_once)
        assert len(small.said) == 2
        assert "It refuses all writes. Raise the quota" in small.said[1]
        assert "--etcd-quota 32Mi" in small.said[1]
        before = (await small.transport.list("/a/")).items
    async with Small(tmp_path, quota=4 * QUOTA).running() as larger:
        await settled(larger.care.check_once)
        assert larger.said == ["etcd accepts writes again: its quota is no longer used up"]
        assert (await larger.transport.list("/a/")).items == before
        await larger.put("/b")


@pytest.mark.etcd
async def test_free_space_is_returned_to_the_disk_early(tmp_path: Path) -> None:
    async with Small(tmp_path).running() as small:
        keys = [f"/a/{number}" for number in range(46)]
        for key in keys:
            await small.put(key)
        await small.transport.commit([], [Delete(key=key) for key in keys])
        status = await small.member.status()
        await small.member.compact(status.revision)
        await small.member.compact(status.revision)  # compacting again is no error

        async def is_counted() -> bool:
            await small.put("/b", size=1)  # etcd updates its numbers when it commits
            return (await small.member.status()).db_size_in_use_bytes < QUOTA / 4

        await until_async(is_counted, what="free space")
        await settled(small.care.check_once)
        assert len(small.said) == 1
        assert "are free: its file had" in small.said[0]
        assert (await small.member.status()).db_size_bytes < QUOTA / 4


@pytest.mark.etcd
async def test_an_unreachable_etcd_does_not_end_the_maintenance(tmp_path: Path) -> None:
    small = Small(tmp_path)  # not started yet
    async with asyncio.TaskGroup() as group:
        caring = group.create_task(small.care.run())
        await asyncio.sleep(0.1)
        async with small.running():
            assert not caring.done()
            caring.cancel()
