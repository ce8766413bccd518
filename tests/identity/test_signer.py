"""Issue, renewal and revocation of certificates: a name belongs to one key."""

from pathlib import Path

import pytest

from identity.authority import new_key
from identity.folder import IdentityFolder
from identity.names import Identity, Role
from identity.proof import make_proof
from identity.signer import IssueError, Signer, find_binding, revoke
from machinery.clock import SystemClock
from schemas.trust import CertificateRequest, IssuedCertificate
from store import keys
from store.errors import ConflictError
from store.memory import MemoryTransport
from tests.support.identities import TestAuthority
from tests.support.values import present

UUID, OTHER_UUID = "11111111-aaaa", "22222222-bbbb"


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    authority = TestAuthority(tmp_path).authority
    return Signer(
        transport=MemoryTransport(SystemClock()), clock=SystemClock(), authority=authority
    )


def node(signer: Signer, name: str = "mac-1") -> Identity:
    return Identity(signer.authority.fleet, Role.NODE, name)


def renewal(folder: IdentityFolder, uuid: str = UUID) -> CertificateRequest:
    request = new_key()[1].decode()
    proof = make_proof(folder.identity.read_bytes(), request)
    return CertificateRequest(request=request, hardware_uuid=uuid, proof=proof)


async def join(signer: Signer, folder: IdentityFolder, uuid: str = UUID) -> IssuedCertificate:
    key, request = new_key()
    issued = await signer.issue(node(signer), request, hardware_uuid=uuid)
    folder.write_identity(key, issued.certificate)
    return issued


async def test_a_name_goes_to_another_key_only_with_the_version_of_its_certificate(
    signer: Signer, tmp_path: Path
) -> None:
    """A hardware UUID is what a machine says of itself: the right one is no proof."""
    first = await join(signer, IdentityFolder(tmp_path / "a"))
    with pytest.raises(IssueError, match="`fleetctl token create --node mac-1`") as refused:
        await join(signer, IdentityFolder(tmp_path / "b"))
    assert UUID not in str(refused.value)
    bound = present(await find_binding(signer.transport, node(signer)))
    assert bound.record == first
    request = new_key()[1]
    await signer.issue(node(signer), request, guards=[bound.version])
    with pytest.raises(ConflictError):
        await signer.issue(node(signer), request, guards=[bound.version])


async def test_holder_of_current_key_gets_next_certificate(signer: Signer, tmp_path: Path) -> None:
    folder = IdentityFolder(tmp_path / "a")
    first = await join(signer, folder)
    second = await signer.renew(node(signer), renewal(folder))
    assert second.serial != first.serial
    assert second.key_hash != first.key_hash


async def test_a_request_signed_with_another_key_is_refused(signer: Signer, tmp_path: Path) -> None:
    await join(signer, IdentityFolder(tmp_path / "a"))
    thief = TestAuthority(tmp_path / "thief").issue(Role.NODE, "mac-1")
    with pytest.raises(IssueError, match="not signed with its current key"):
        await signer.renew(node(signer), renewal(thief))
    unsigned = CertificateRequest(request=new_key()[1].decode(), hardware_uuid=UUID)
    with pytest.raises(IssueError, match="not signed with its current key"):
        await signer.renew(node(signer), unsigned)


async def test_a_renewal_is_used_once(signer: Signer, tmp_path: Path) -> None:
    folder = IdentityFolder(tmp_path / "a")
    await join(signer, folder)
    asked = renewal(folder)
    await signer.renew(node(signer), asked)
    with pytest.raises(IssueError, match="not signed with its current key"):
        await signer.renew(node(signer), asked)


async def test_a_revocation_is_about_every_certificate_that_has_not_ended(
    signer: Signer, tmp_path: Path
) -> None:
    folder = IdentityFolder(tmp_path / "a")
    first = await join(signer, folder)
    second = await signer.renew(node(signer), renewal(folder))
    await revoke(signer.transport, signer.clock, node(signer), "stolen")
    for serial in (first.serial, second.serial):
        assert await signer.transport.get(keys.named(keys.REVOKED_PREFIX, serial)) is not None


async def test_a_revoked_identity_cannot_renew_and_its_name_is_free(
    signer: Signer, tmp_path: Path
) -> None:
    folder = IdentityFolder(tmp_path / "a")
    issued = await join(signer, folder)
    serial = await revoke(signer.transport, signer.clock, node(signer), "stolen")
    assert serial == issued.serial
    assert await signer.transport.get(keys.named(keys.REVOKED_PREFIX, serial)) is not None
    with pytest.raises(IssueError, match="join with a token"):
        await signer.renew(node(signer), renewal(folder))
    assert (await join(signer, folder, OTHER_UUID)).hardware_uuid == OTHER_UUID


@pytest.mark.parametrize(
    "request_", [b"", b"x" * 20_000, b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n"]
)
async def test_invalid_requests_are_refused_with_what_was_expected(
    signer: Signer, request_: bytes
) -> None:
    with pytest.raises(IssueError, match="PKCS#10"):
        await signer.issue(node(signer), request_, hardware_uuid=UUID)
