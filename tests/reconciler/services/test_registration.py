"""Each reconciler holds a lease that says whether it has a password for the store."""

import asyncio

from machinery import virtual_time
from machinery.virtual_time import VirtualClock
from reconciler.services.registration import ReconcilerRegistration
from schemas.records import ReconcilerLease
from schemas.trust import TlsMode, TlsReport
from store import codec, keys
from store.memory import MemoryTransport
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
