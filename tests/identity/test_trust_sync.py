"""The fleet's trust in the store reaches the folders of processes, and so their connections."""

import asyncio
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from identity.authority import Authority, new_key
from identity.credentials import Credentials
from identity.names import Role
from identity.signer import Signer, revoke
from identity.trust_sync import SEEN_S, TrustSync
from machinery import virtual_time
from machinery.clock import SystemClock
from schemas.trust import FleetTrust, TlsMode
from store import keys
from store.etcd.connect import connect
from store.port import Delete, Put
from tests.support.etcd import running_etcd
from tests.support.identities import TestAuthority
from tests.support.signing import OutageTransport, SigningFleet, in_fleet, running
from tests.support.waiting import until


@pytest.mark.etcd
async def test_a_revocation_reaches_a_process_over_a_real_watch(tmp_path: Path) -> None:
    fleet, clock = TestAuthority(tmp_path), SystemClock()
    own = fleet.issue(Role.NODE, "mac-1")
    async with running_etcd(tmp_path / "etcd") as etcd:
        admin, transport = connect(etcd.address), connect(etcd.address)
        await fleet.publish(admin, TlsMode.STRICT)
        credentials = Credentials(own, clock)
        thief = fleet.identity(Role.GATEWAY, "edge")
        async with running(TrustSync(transport, clock, own).run(), credentials.watch()):
            await until(lambda: credentials.mode is TlsMode.STRICT)
            signer = Signer(transport=admin, clock=clock, authority=fleet.authority)
            issued = await signer.issue(thief, new_key()[1])
            await revoke(admin, clock, thief, "stolen")
            await until(lambda: issued.serial in credentials.trust().revoked, limit_s=6)
        for one in (admin, transport):
            await one.close()


def test_no_process_waits_a_second_before_it_knows_a_revocation(tmp_path: Path) -> None:
    async def test(fleet: SigningFleet) -> None:
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

    in_fleet(tmp_path, test)


def test_the_time_of_the_store_is_written_once_a_minute_while_it_answers(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = SigningFleet(tmp_path)
        fleet.store = store = OutageTransport(fleet.clock, expires_by_itself=False)
        await fleet.publish()
        own = await fleet.join()

        def age() -> timedelta:
            snapshot = own.read_trust()
            assert snapshot is not None
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


def test_a_revocation_that_cannot_be_read_counts(tmp_path: Path) -> None:
    async def test(fleet: SigningFleet) -> None:
        own = await fleet.join()
        key = keys.named(keys.REVOKED_PREFIX, "0ABC")
        await fleet.store.commit([], [Put(key=key, value=b"no JSON")])
        async with running(TrustSync(fleet.store, fleet.clock, own).run()):
            await until(own.trust.exists)
        snapshot = own.read_trust()
        assert snapshot is not None
        assert snapshot.revoked == ("0ABC",)

    in_fleet(tmp_path, test)


def test_a_restored_store_makes_no_revoked_certificate_valid_again(tmp_path: Path) -> None:
    async def test(fleet: SigningFleet) -> None:
        own = await fleet.join()
        await fleet.join(Role.GATEWAY, "edge")
        serial = await revoke(
            fleet.store, fleet.clock, fleet.identity(Role.GATEWAY, "edge"), "stolen"
        )
        credentials = Credentials(own, fleet.clock)
        sync = TrustSync(fleet.store, fleet.clock, own)
        async with running(sync.run(), credentials.watch()):
            await until(lambda: serial in credentials.trust().revoked)
            key = keys.named(keys.REVOKED_PREFIX, serial)
            await fleet.store.commit([], [Delete(key=key)])
            await asyncio.sleep(2 * SEEN_S)
            assert serial in credentials.trust().revoked

    in_fleet(tmp_path, test)


def test_a_store_of_another_fleet_does_not_change_the_authorities(tmp_path: Path) -> None:
    async def test(fleet: SigningFleet) -> None:
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

    in_fleet(tmp_path, test)
