"""Each reconciler holds a lease that says whether it has a password for the store."""

import asyncio

from machinery import virtual_time
from machinery.virtual_time import VirtualClock
from reconciler.registration import ReconcilerRegistration
from schemas.records import ReconcilerLease
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
