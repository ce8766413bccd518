"""The signer's control loop: which requests in the store become certificates, and what becomes of the others."""

import asyncio
from datetime import timedelta

import pytest

from identity.authority import AuthorityError
from identity.credentials import GRACE
from identity.names import Role
from identity.proof import request_hash
from identity.signer import revoke
from identity.signing_controller import MAX_REQUEST_BYTES, MAX_REQUESTS, REFUSAL_LIFETIME, sweep
from schemas.trust import TlsMode
from store import keys
from store.port import Put
from tests.support.signing import UUID, SigningFleet, on_fleet
from tests.support.values import present


@on_fleet
async def test_a_renewal_is_answered_and_its_request_is_deleted(fleet: SigningFleet) -> None:
    node = fleet.identity()
    folder = await fleet.join()
    before = await fleet.issued(node)
    async with fleet.signers():
        await fleet.ask(node, folder)
        await fleet.answered(node)
    after = await fleet.issued(node)
    assert before is not None
    assert after is not None
    assert after.key_hash != before.key_hash
    assert await fleet.refusal(node) is None


@on_fleet
async def test_two_signers_issue_one_certificate(fleet: SigningFleet) -> None:
    names = [f"mac-{number}" for number in range(20)]
    for name in names:
        await fleet.register(name)
    async with fleet.signers(fleet.store, fleet.store):
        for name in names:
            await fleet.ask(fleet.identity(name=name), None)
        for name in names:
            await fleet.answered(fleet.identity(name=name))
    for name in names:
        issued = present(await fleet.issued(fleet.identity(name=name)))
        assert issued.earlier == ()
        assert await fleet.refusal(fleet.identity(name=name)) is None


@on_fleet
async def test_a_refusal_names_the_request_and_the_reason(fleet: SigningFleet) -> None:
    node = fleet.identity()
    async with fleet.signers():
        asked = await fleet.ask(node, None)
        await fleet.answered(node)
        refusal = present(await fleet.refusal(node))
        assert refusal.request_hash == request_hash(asked.request)
        assert "has no node mac-1" in refusal.why
        await fleet.register()
        await fleet.ask(node, None)
        await fleet.answered(node)
    assert await fleet.issued(node) is not None
    assert await fleet.refusal(node) is None


TOKEN = "fleetctl token create"


@pytest.mark.parametrize(("mode", "role", "name", "uuid", "why"), [
    (TlsMode.TLS, Role.NODE, "mac-1", UUID, TOKEN),
    (TlsMode.STRICT, Role.NODE, "mac-1", UUID, TOKEN),
    (TlsMode.PERMISSIVE, Role.NODE, "mac-1", "22222222-bbbb", "node mac-1 is another Mac"),
    (TlsMode.PERMISSIVE, Role.ADMIN, "anna", "", "without an administrator"),
    (TlsMode.PERMISSIVE, Role.ETCD, "etcd-1", "", "without an administrator"),
])  # fmt: skip
@on_fleet
async def test_others_and_nodes_of_a_secured_fleet_get_no_first_certificate(
    fleet: SigningFleet, mode: TlsMode, role: Role, name: str, uuid: str, why: str
) -> None:
    identity = fleet.identity(role, name)
    await fleet.register()
    await fleet.publish(mode)
    async with fleet.signers():
        await fleet.ask(identity, None, uuid)
        await fleet.answered(identity)
    assert why in present(await fleet.refusal(identity)).why
    assert await fleet.issued(identity) is None


@on_fleet
async def test_a_name_with_a_certificate_is_not_given_to_a_request_without_its_key(
    fleet: SigningFleet,
) -> None:
    node = fleet.identity()
    await fleet.register()
    await fleet.join()
    before = await fleet.issued(node)
    async with fleet.signers():
        await fleet.ask(node, None)
        await asyncio.sleep(60)  # of virtual time
    assert await fleet.issued(node) == before
    refusal = present(await fleet.refusal(node))
    assert "has a certificate" in refusal.why


@on_fleet
async def test_a_revoked_process_does_not_come_back_by_a_first_request(fleet: SigningFleet) -> None:
    node = fleet.identity()
    await fleet.register()
    folder = await fleet.join()
    await revoke(fleet.store, fleet.clock, node, "stolen")
    async with fleet.signers():
        for used in (folder, None):
            await fleet.ask(node, used)
            await fleet.answered(node)
            refusal = present(await fleet.refusal(node))
            assert "token" in refusal.why
    assert await fleet.issued(node) is None


@pytest.mark.parametrize(("value", "why"), [
    (b'{"request": "' + b"x" * MAX_REQUEST_BYTES + b'"}', "larger than 32 KiB"),
    (b"\xff\x00 no JSON", "was written by another version"),
    (b'{"request":"-----BEGIN","hardwareUuid":"11111111-aaaa"}', "PKCS#10"),
])  # fmt: skip
@on_fleet
async def test_requests_that_cannot_be_read_are_refused_and_deleted(
    fleet: SigningFleet, value: bytes, why: str
) -> None:
    node = fleet.identity()
    await fleet.register()
    async with fleet.signers():
        await fleet.store.commit([], [Put(key=keys.request_key("node", "mac-1"), value=value)])
        await fleet.answered(node)
    refusal = present(await fleet.refusal(node))
    assert why in refusal.why


@on_fleet
async def test_a_flood_of_requests_is_deleted_and_delays_its_own_role_only(
    fleet: SigningFleet,
) -> None:
    node = fleet.identity()
    folder = await fleet.join()
    for number in range(MAX_REQUESTS + 500):
        key = keys.request_key("gateway", f"thief-{number}")
        await fleet.store.commit([], [Put(key=key, value=b"{}")])
    async with fleet.signers():
        before = fleet.clock.now()
        await fleet.ask(node, folder)
        await fleet.answered(node)
        assert fleet.clock.now() - before < timedelta(seconds=1)
        left = await fleet.store.list(keys.request_prefix("gateway"))
        assert len(left.items) <= MAX_REQUESTS


@on_fleet
async def test_signer_without_key_that_signs_leaves_requests_to_others(fleet: SigningFleet) -> None:
    other = SigningFleet(fleet.root / "other")
    with pytest.raises(AuthorityError, match="has not the key"):
        other.folder.signing(fleet.authority.pem)
    node = fleet.identity()
    folder = await fleet.join()
    other.store = fleet.store
    async with other.signers():
        await fleet.ask(node, folder)
        await asyncio.sleep(60)
        assert await fleet.store.get(keys.request_key("node", "mac-1")) is not None
        async with fleet.signers():
            await fleet.answered(node)
    assert await fleet.refusal(node) is None


@on_fleet
async def test_entries_of_ended_certificates_are_removed_when_nobody_accepts_them(
    fleet: SigningFleet,
) -> None:
    node = fleet.identity()
    await fleet.join()
    issued = present(await fleet.issued(node))
    await revoke(fleet.store, fleet.clock, node, "stolen")
    key = keys.named(keys.REVOKED_PREFIX, issued.serial)
    await asyncio.sleep((fleet.lifetime + GRACE - timedelta(hours=1)).total_seconds())
    await sweep(fleet.store, fleet.clock)
    assert await fleet.store.get(key) is not None
    await asyncio.sleep(2 * 3600)
    await sweep(fleet.store, fleet.clock)
    assert await fleet.store.get(key) is None


@on_fleet
async def test_refusals_are_removed_after_ten_minutes(fleet: SigningFleet) -> None:
    node = fleet.identity()
    async with fleet.signers():
        await fleet.ask(node, None)
        await fleet.answered(node)
        assert await fleet.refusal(node) is not None
        await asyncio.sleep(REFUSAL_LIFETIME.total_seconds() + 120)
        assert await fleet.refusal(node) is None
