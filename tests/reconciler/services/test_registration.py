"""Leases of reconcilers, and the retention of the audit log."""

import asyncio

import pytest

from machinery import virtual_time
from machinery.clock import SystemClock
from machinery.virtual_time import VirtualClock
from reconciler.services.change_retention import MOST_RECORDS, ChangeRetention, surplus_records
from reconciler.services.registration import ReconcilerRegistration
from schemas.records import ReconcilerLease
from schemas.trust import TlsMode, TlsReport
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put
from tests.support.store_faults import FaultyTransport


def test_reconcilers_register_while_they_live_and_after_an_outage() -> None:
    async def main() -> None:
        clock = VirtualClock()
        memory = MemoryTransport(clock)
        store = FaultyTransport(memory)
        leases = [
            ReconcilerLease(identity=f"mac-1/{pid} 1.0", has_store_password=pid == 1)
            for pid in (1, 2)
        ]

        async def registered() -> list[ReconcilerLease]:
            items = (await memory.list(keys.RECONCILER_LEASE_PREFIX)).items
            found = [codec.decode(ReconcilerLease, item) for item in items]
            return sorted(found, key=lambda lease: lease.identity)

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(ReconcilerRegistration(store, clock, lease).run())
                for lease in leases
            ]
            await clock.sleep(10)
            assert await registered() == leases
            store.leave()
            await clock.sleep(60)
            assert await registered() == []
            store.come_back()
            await clock.sleep(5)
            assert await registered() == leases
            tasks[0].cancel()
            await clock.sleep(1)
            assert await registered() == leases[1:]
            tasks[1].cancel()

    virtual_time.run(main())


def test_the_lease_follows_the_tls_mode_of_its_process() -> None:
    async def main() -> None:
        clock = VirtualClock()
        memory = MemoryTransport(clock)
        store = FaultyTransport(memory)
        mode = [TlsMode.PERMISSIVE]

        def report() -> TlsReport:
            return TlsReport(identity="mlxfleet://f/reconciler/mac-1", mode=mode[0])

        async def seen() -> TlsMode | None:
            (item,) = (await memory.list(keys.RECONCILER_LEASE_PREFIX)).items
            tls = codec.decode(ReconcilerLease, item).tls
            return None if tls is None else tls.mode

        lease = ReconcilerLease(identity="mac-1/1 1.0")
        async with asyncio.TaskGroup() as group:
            task = group.create_task(ReconcilerRegistration(store, clock, lease, report).run())
            await clock.sleep(10)
            assert await seen() is TlsMode.PERMISSIVE
            before = (await memory.list("/")).revision
            await clock.sleep(10)
            assert (await memory.list("/")).revision == before
            mode[0] = TlsMode.TLS
            await clock.sleep(2)
            assert await seen() is TlsMode.TLS
            store.leave()
            mode[0] = TlsMode.STRICT
            await clock.sleep(2)
            store.come_back()
            await clock.sleep(8)
            assert await seen() is TlsMode.STRICT
            task.cancel()

    virtual_time.run(main())


DAY_MS = 24 * 3600 * 1000
NOW_MS = 1_800_000_000_000


def record_key(age_days: float, suffix: str = "a") -> str:
    return keys.change_key(int(NOW_MS - age_days * DAY_MS), suffix)


@pytest.mark.parametrize(
    ("ages", "now_ms", "removed"),
    [
        pytest.param((), NOW_MS, 0, id="nothing"),
        pytest.param((31, 29, 0), NOW_MS, 1, id="older than 30 days"),
        pytest.param((31, 29, 0), NOW_MS + 365 * DAY_MS, 1, id="a clock that is a year ahead"),
        pytest.param((40, 35), NOW_MS, 0, id="a fleet at rest keeps its last month"),
        pytest.param((31, 29, -60), NOW_MS, 1, id="a record from the future"),
    ],
)
def test_old_records_are_surplus(ages: tuple[float, ...], now_ms: int, removed: int) -> None:
    found = [record_key(age) for age in ages]
    assert surplus_records(found, now_ms) == found[:removed]


def test_the_oldest_of_too_many_are_surplus() -> None:
    found = sorted(record_key(1, f"{n:08}") for n in range(MOST_RECORDS + 3))
    assert surplus_records(found, NOW_MS) == found[:3]


async def test_surplus_records_are_removed_from_the_store() -> None:
    store = MemoryTransport(SystemClock())
    now_ms = int(SystemClock().now().timestamp() * 1000)
    old = [keys.change_key(now_ms - 40 * DAY_MS, f"{n:08}") for n in range(150)]
    kept = keys.change_key(now_ms, "new")
    for key in (*old, kept):
        await store.commit([], [Put(key=key, value=b"{}")])
    await ChangeRetention(store, SystemClock()).remove_surplus()
    assert [item.key for item in (await store.list(keys.CHANGE_PREFIX)).items] == [kept]
