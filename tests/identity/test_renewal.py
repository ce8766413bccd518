"""Renewal through the store: in time, with a new key each time, and after a crash at any moment."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from typing_extensions import override

from identity.authority import (
    Authority,
    addresses_of,
    identity_of,
    life_of,
    load_certificate,
    spki_hash,
)
from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.names import Role
from identity.pending_request import write_pending
from identity.renewal import SPREAD_S, Applicant, Renewal
from machinery import virtual_time
from schemas.trust import TlsMode
from store import keys
from store.memory import MemoryTransport
from store.port import Guard, KeyValue, Operation, Put, Transport
from tests.support.signing import UUID, SigningFleet, on_fleet, running
from tests.support.values import present
from tests.support.waiting import until

NODE = Applicant(role=Role.NODE, name="mac-1", hardware_uuid=UUID)
LIFE = timedelta(days=1)


def key_hash(folder: IdentityFolder) -> str:
    return spki_hash(load_certificate(folder.certificate()).public_key()).hex()


def renewal(
    fleet: SigningFleet,
    folder: IdentityFolder,
    *,
    transport: Transport | None = None,
    applicant: Applicant = NODE,
) -> Renewal:
    return Renewal(transport or fleet.store, fleet.clock, folder, applicant)


@on_fleet(lifetime=LIFE)
async def test_a_certificate_is_renewed_at_two_thirds_of_its_life_with_a_new_key(
    fleet: SigningFleet,
) -> None:
    folder = await fleet.join()
    start, _ = life_of(load_certificate(folder.certificate()))
    hashes, times = [key_hash(folder)], [start]
    async with fleet.signers(), running(renewal(fleet, folder).run()):
        for _ in range(4 * 24 * 6):
            await asyncio.sleep(600)
            if key_hash(folder) != hashes[-1]:
                hashes.append(key_hash(folder))
                times.append(life_of(load_certificate(folder.certificate()))[0])
    assert len(set(hashes)) == len(hashes) >= 5
    for before, after in pairwise(times):
        assert 0.6 * LIFE <= after - before <= 2 / 3 * LIFE + timedelta(seconds=20)
    assert not folder.pending.exists()


class DyingTransport(MemoryTransport):
    """A store whose caller is killed at one of its calls, before or after the call takes effect."""

    def __init__(self, inner: MemoryTransport, calls: int, *, is_done: bool) -> None:
        self._inner = inner
        self._left = calls
        self._is_done = is_done

    @override
    async def get(self, key: str) -> KeyValue | None:
        self._die(is_done=False)
        item = await self._inner.get(key)
        self._die(is_done=True)
        return item

    @override
    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        self._die(is_done=False)
        found = await self._inner.commit(guards, operations)
        self._die(is_done=True)
        return found

    def _die(self, *, is_done: bool) -> None:
        if is_done == self._is_done:
            self._left -= 1
            if self._left == 0:
                raise asyncio.CancelledError


@pytest.mark.parametrize("is_done", [False, True])
def test_a_renewal_that_is_killed_at_any_call_converges(tmp_path: Path, *, is_done: bool) -> None:
    async def test() -> None:
        for calls in range(1, 30):
            fleet = SigningFleet(tmp_path / f"{calls}")
            await fleet.publish()
            folder = await fleet.join()
            before = key_hash(folder)
            async with fleet.signers():
                dying = DyingTransport(fleet.store, calls, is_done=is_done)
                try:
                    await renewal(fleet, folder, transport=dying).renew()
                except asyncio.CancelledError:
                    Credentials(folder, fleet.clock)  # usable at each moment
                else:
                    return
                await asyncio.sleep(5)
                if key_hash(folder) == before:
                    assert await renewal(fleet, folder).renew()
            issued = present(await fleet.issued(fleet.identity()))
            assert key_hash(folder) == issued.key_hash != before
            assert not folder.pending.exists()
            # One request was enough: the key that was on disk got its certificate.
            assert len(issued.earlier) == 1
        raise AssertionError("the renewal never ended by itself")

    virtual_time.run(test())


@on_fleet
async def test_a_key_that_was_taken_is_not_asked_for_again(fleet: SigningFleet) -> None:
    """The process ended between the two files."""
    folder = await fleet.join()
    pending = write_pending(folder, fleet.identity(), ())
    async with fleet.signers():
        assert await renewal(fleet, folder).renew()
        folder.pending.write_text(pending.key.decode() + pending.request)
        folder.pending.chmod(0o600)
        taken = key_hash(folder)
        assert taken == pending.key_hash
        assert await renewal(fleet, folder).renew()
    assert key_hash(folder) != taken


@pytest.mark.parametrize("content", ["", "no key", "-----BEGIN PRIVATE KEY-----\nAAAA\n"])
@on_fleet
async def test_a_damaged_pending_file_is_replaced(fleet: SigningFleet, content: str) -> None:
    folder = await fleet.join()
    folder.pending.write_text(content)
    folder.pending.chmod(0o600)
    async with fleet.signers():
        assert await renewal(fleet, folder).renew()
    assert not folder.pending.exists()


@on_fleet(lifetime=LIFE)
async def test_a_renewal_without_a_signer_is_reported_and_done_when_one_comes(
    fleet: SigningFleet,
) -> None:
    folder = await fleet.join()
    one = renewal(fleet, folder)
    before = key_hash(folder)
    async with running(one.run()):
        await asyncio.sleep(0.7 * LIFE.total_seconds())
        assert "no signer has answered" in one.failure
        requests = await fleet.store.list(keys.REQUEST_PREFIX)
        assert len(requests.items) == 1
        async with fleet.signers():
            await asyncio.sleep(400)
        assert key_hash(folder) != before
        assert one.failure == ""


@on_fleet
async def test_a_refusal_is_reported_with_its_reason(fleet: SigningFleet) -> None:
    folder = IdentityFolder(fleet.root / "own")
    folder.write_authorities(fleet.authority.pem)
    one = renewal(fleet, folder)
    async with fleet.signers(), running(one.run()):
        await until(lambda: "the fleet has no node mac-1" in one.failure)
        await fleet.register()
        await until(lambda: folder.is_issued)
        await until(lambda: one.failure == "")
    assert identity_of(load_certificate(folder.certificate())) == fleet.identity()


@on_fleet
async def test_gateway_gets_name_of_its_own_and_addresses_it_asks_for(fleet: SigningFleet) -> None:
    addresses = ["192.0.2.7", "fleet.example.com", "mac-1.node.mlx-fleet.internal"]
    applicant = Applicant(role=Role.GATEWAY, addresses=lambda: addresses)
    folders = [IdentityFolder(fleet.root / name) for name in ("a", "b")]
    async with fleet.signers():
        for folder in folders:
            folder.write_authorities(fleet.authority.pem)
            assert await renewal(fleet, folder, applicant=applicant).renew()
    certificates = [load_certificate(folder.certificate()) for folder in folders]
    first, second = map(identity_of, certificates)
    assert first.role is second.role is Role.GATEWAY
    assert first.name != second.name
    assert addresses_of(certificates[0]) == {*addresses[:2], first.dns_name}


@on_fleet
async def test_a_new_address_leads_to_a_new_certificate(fleet: SigningFleet) -> None:
    addresses = ["192.0.2.7"]
    applicant = Applicant(role=Role.GATEWAY, addresses=lambda: tuple(addresses))
    folder = IdentityFolder(fleet.root / "own")
    folder.write_authorities(fleet.authority.pem)
    one = renewal(fleet, folder, applicant=applicant)
    async with fleet.signers(), running(one.run()):
        await until(lambda: one.renewals == 1)
        await asyncio.sleep(7200)
        assert one.renewals == 1
        addresses.append("192.0.2.8")
        await asyncio.sleep(60)
    assert {"192.0.2.7", "192.0.2.8"} <= addresses_of(load_certificate(folder.certificate()))


@on_fleet
async def test_a_certificate_for_another_key_is_not_taken(fleet: SigningFleet) -> None:
    """A store that lies can keep a process from renewing, and cannot give it another identity."""
    folder = await fleet.join()
    before = folder.read_identity()
    other = SigningFleet(fleet.root / "other")
    await other.join()
    forged = present(await other.issued(other.identity()))
    pending = write_pending(folder, fleet.identity(), ())
    await fleet.put(
        keys.issued_key("node", "mac-1"), forged.model_copy(update={"key_hash": pending.key_hash})
    )
    one = renewal(fleet, folder)
    with pytest.raises(Exception, match="is not for mlxfleet://"):
        await one.renew()
    assert folder.read_identity() == before


@on_fleet
async def test_all_processes_renew_soon_after_another_authority_signs(fleet: SigningFleet) -> None:
    folder = await fleet.join()
    new = Authority.create(fleet.clock.now(), fleet.authority.fleet)
    one = renewal(fleet, folder)
    async with running(one.run()):
        await asyncio.sleep(60)
        fleet.folder.write_next(new)
        old, fleet.authority = fleet.authority, new
        folder.write_authorities(new.pem + old.pem)
        await fleet.publish(TlsMode.STRICT)
        async with fleet.signers():
            await asyncio.sleep(SPREAD_S + 60)
    certificate = load_certificate(folder.certificate())
    certificate.verify_directly_issued_by(new.certificate)
    assert one.renewals == 1


@on_fleet
async def test_expired_process_that_comes_back_renews_with_its_old_key(fleet: SigningFleet) -> None:
    folder = await fleet.join()
    await asyncio.sleep(timedelta(days=40).total_seconds())
    async with fleet.signers():
        assert await renewal(fleet, folder).renew()
    assert life_of(load_certificate(folder.certificate()))[1] > fleet.clock.now()


@on_fleet
async def test_requests_of_the_same_text_are_written_once(fleet: SigningFleet) -> None:
    folder = await fleet.join()
    for _ in range(3):
        with pytest.raises(Exception, match="no signer has answered"):
            await renewal(fleet, folder).renew()
    item = present(await fleet.store.get(keys.request_key("node", "mac-1")))
    assert item.create_revision == item.mod_revision
    await fleet.store.commit([], [Put(key=item.key, value=b"by hand")])
    with pytest.raises(Exception, match="no signer has answered"):
        await renewal(fleet, folder).renew()
    again = present(await fleet.store.get(item.key))
    assert again.value != b"by hand"
