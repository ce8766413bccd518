"""The fleet's trust in the store reaches the folders of processes, and so their connections."""

import asyncio
from datetime import datetime, timedelta
from pathlib import Path

from identity.authority import Authority
from identity.credentials import Credentials
from identity.names import Role
from identity.signer import revoke
from identity.trust_sync import SEEN_S, TrustSync
from machinery import virtual_time
from schemas.trust import FleetTrust
from store import keys
from store.port import Delete, Put
from tests.support.signing import OutageTransport, SigningFleet, on_fleet, running
from tests.support.values import present
from tests.support.waiting import until


@on_fleet
async def test_no_process_waits_a_second_before_it_knows_a_revocation(fleet: SigningFleet) -> None:
    own = await fleet.join()
    credentials = Credentials(own, fleet.clock)
    gateway = fleet.identity(Role.GATEWAY, "edge")
    await fleet.join(Role.GATEWAY, "edge")
    sync = TrustSync(fleet.store, fleet.clock, own)
    async with running(sync.run(), credentials.watch()):
        await asyncio.sleep(5)
        serial = await revoke(fleet.store, fleet.clock, gateway, "stolen")
        began = fleet.clock.monotonic()
        await until(lambda: serial in credentials.trust().revoked)
        assert fleet.clock.monotonic() - began < 1.0


def test_the_time_of_the_store_is_written_once_a_minute_while_it_answers(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = SigningFleet(tmp_path)
        fleet.store = store = OutageTransport(fleet.clock, expires_by_itself=False)
        await fleet.publish()
        own = await fleet.join()

        def age() -> timedelta:
            snapshot = present(own.read_trust())
            seen.add(snapshot.seen)
            return fleet.clock.now() - snapshot.seen

        seen: set[datetime] = set()
        async with running(TrustSync(store, fleet.clock, own).run()):
            for _ in range(600):
                await asyncio.sleep(1)
                assert age() <= timedelta(seconds=SEEN_S + 1)
            assert len(seen) <= 11
            store.is_away = True
            await asyncio.sleep(3600)
            assert age() >= timedelta(seconds=3600 - SEEN_S)

    virtual_time.run(test())


@on_fleet
async def test_a_revocation_that_cannot_be_read_counts(fleet: SigningFleet) -> None:
    own = await fleet.join()
    key = keys.named(keys.REVOKED_PREFIX, "0ABC")
    await fleet.store.commit([], [Put(key=key, value=b"no JSON")])
    async with running(TrustSync(fleet.store, fleet.clock, own).run()):
        await until(own.trust.exists)
    snapshot = present(own.read_trust())
    assert snapshot.revoked == ("0ABC",)


@on_fleet
async def test_restored_store_makes_no_revoked_certificate_valid_again(fleet: SigningFleet) -> None:
    own = await fleet.join()
    await fleet.join(Role.GATEWAY, "edge")
    serial = await revoke(fleet.store, fleet.clock, fleet.identity(Role.GATEWAY, "edge"), "stolen")
    credentials = Credentials(own, fleet.clock)
    sync = TrustSync(fleet.store, fleet.clock, own)
    async with running(sync.run(), credentials.watch()):
        await until(lambda: serial in credentials.trust().revoked)
        key = keys.named(keys.REVOKED_PREFIX, serial)
        await fleet.store.commit([], [Delete(key=key)])
        await asyncio.sleep(2 * SEEN_S)
        assert serial in credentials.trust().revoked


@on_fleet
async def test_store_of_another_fleet_does_not_change_the_authorities(fleet: SigningFleet) -> None:
    own = await fleet.join()
    other = Authority.create(fleet.clock.now(), fleet.authority.fleet)
    trust = FleetTrust(fleet=fleet.authority.fleet, authorities=other.pem)
    await fleet.put(keys.FLEET_TRUST, trust)
    sync = TrustSync(fleet.store, fleet.clock, own)
    async with running(sync.run()):
        await until(lambda: "belongs to another fleet" in sync.failure)
        assert own.read_authorities() == fleet.authority.pem
        assert own.read_trust() is None
        # During an exchange one of them is known.
        both = fleet.authority.pem + other.pem
        await fleet.put(keys.FLEET_TRUST, trust.model_copy(update={"authorities": both}))
        await until(lambda: own.read_authorities() == both)
        assert sync.failure == ""
