"""Certificates and authorities in backups: no key without a passphrase, and no revoked certificate that is valid again."""

from pathlib import Path

import pytest

from fleetctl.fleets.data_dir import DataDir
from identity.authority_folder import AuthorityFolder
from identity.signer import revoke
from machinery.clock import SystemClock
from store import keys
from store.etcd.connect import connect
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Put
from tests.support.fleet import fleetctl
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.identities import TestAuthority
from tests.support.signing import SigningFleet

HTTP = ("--etcd-transport", "http")


@pytest.fixture
async def signing(fleet: MemoryFleet, tmp_path: Path) -> SigningFleet:
    """Return a fleet with an authority whose store fleetctl reaches."""
    signing_fleet = SigningFleet(tmp_path / "signing", clock=SystemClock())
    signing_fleet.store = fleet.store
    await signing_fleet.publish()
    return signing_fleet


def key_lines(folder: AuthorityFolder) -> list[str]:
    """Return the lines of the authority's key."""
    return [line for line in folder.key.read_text().splitlines() if not line.startswith("-----")]


async def test_a_backup_has_no_key_of_the_authority(
    fleet: MemoryFleet, signing: SigningFleet, tmp_path: Path
) -> None:
    await signing.join()
    plain, sealed = tmp_path / "plain.backup", tmp_path / "sealed.backup"
    folder = ("--authority-dir", str(signing.folder.path))
    assert (await fleet.ctl("backup", str(plain), *folder)).code == 0
    done = await fleet.ctl("backup", str(sealed), "--with-ca", *folder)
    assert done.code == 0, done.err
    for file in (plain, sealed):
        text = file.read_text()
        assert "PRIVATE KEY" not in text
        assert not any(line in text for line in key_lines(signing.folder))
    assert '"authority"' not in plain.read_text()


@pytest.mark.ci
async def test_an_authority_comes_back_with_its_passphrase_only(
    fleet: MemoryFleet, signing: SigningFleet, tmp_path: Path
) -> None:
    file, back = tmp_path / "fleet.backup", tmp_path / "back"
    source = ("--authority-dir", str(signing.folder.path))
    done = await fleet.ctl("backup", str(file), "--with-ca", *source)
    (line,) = (one for one in done.err.splitlines() if "shown only now" in one)
    passphrase = tmp_path / "passphrase"
    target = ("--authority-dir", str(back), "--passphrase-file", str(passphrase))
    other = MemoryFleet()
    for text, why in ((line.split()[-1][:-1] + "_", "is not that of the backup"), ("", "")):
        passphrase.write_text(text or line.split()[-1])
        passphrase.chmod(0o600)
        restored = await other.ctl("restore", str(file), *target, *HTTP)
        assert (restored.code == 0) == (why == ""), restored.err
        assert why in restored.err
    authority_folder = AuthorityFolder(back)
    assert authority_folder.load().spki_hash == signing.authority.spki_hash
    assert back.stat().st_mode & 0o077 == authority_folder.key.stat().st_mode & 0o077 == 0
    again = await MemoryFleet().ctl("restore", str(file), *target, *HTTP)
    assert "has an authority already" in again.err


async def test_a_short_passphrase_is_refused(
    fleet: MemoryFleet, signing: SigningFleet, tmp_path: Path
) -> None:
    (tmp_path / "short").write_text("fleet\n")
    (tmp_path / "short").chmod(0o600)
    words = ("--with-ca", "--authority-dir", str(signing.folder.path))
    file = ("--passphrase-file", str(tmp_path / "short"))
    done = await fleet.ctl("backup", str(tmp_path / "x"), *words, *file)
    assert done.code == 1
    assert "expected 12 or more" in done.err
    assert not (tmp_path / "x").exists()


async def test_a_restore_keeps_revocations_and_bindings_of_the_store(
    fleet: MemoryFleet, signing: SigningFleet, tmp_path: Path
) -> None:
    await signing.join()
    await fleet.store.commit([], [Put(key=keys.spec_key("NodePool", "old"), value=b"{}")])
    await signing.ask(signing.identity(), None)
    file = tmp_path / "fleet.backup"
    assert (await fleet.ctl("backup", str(file))).code == 0
    assert keys.REQUEST_PREFIX not in file.read_text()
    serial = await revoke(fleet.store, SystemClock(), signing.identity(), "stolen")
    await signing.join(name="mac-2")
    done = await fleet.ctl("restore", str(file), "--force", *HTTP)
    assert done.code == 0, done.err
    assert await fleet.store.get(keys.named(keys.REVOKED_PREFIX, serial)) is not None
    assert await signing.issued(signing.identity()) is None
    assert await signing.issued(signing.identity(name="mac-2")) is not None
    assert await fleet.store.get(keys.spec_key("NodePool", "old")) is not None
    # An empty store gets all of it, and a warning.
    empty = MemoryFleet()
    done = await empty.ctl("restore", str(file), *HTTP)
    assert done.code == 0, done.err
    assert "revoke them again" in done.err
    signing.store = empty.store
    assert await signing.issued(signing.identity()) is not None


@pytest.mark.ci
@pytest.mark.etcd
async def test_a_restored_data_folder_keeps_the_revocations_of_the_one_before(
    tmp_path: Path,
) -> None:
    fleet, data, file = TestAuthority(tmp_path), tmp_path / "data", tmp_path / "fleet.backup"
    revoked = keys.named(keys.REVOKED_PREFIX, "0A")

    async def with_store(*puts: Put) -> bool:
        """Write to the folder's store; return whether it has the revocation."""
        etcd = EmbeddedEtcd(locate(None), DataDir(data).etcd, SystemClock())
        await etcd.start()
        transport = connect(etcd.address)
        try:
            await fleet.publish(transport)
            if puts:
                await transport.commit([], puts)
            elif not file.exists():
                done = await fleetctl("backup", str(file), "--data-dir", str(data))
                assert done.code == 0, done.err
            return await transport.get(revoked) is not None
        finally:
            await transport.close()
            await etcd.supervisor.stop()

    assert not await with_store()
    assert await with_store(Put(key=revoked, value=b"{}"))
    done = await fleetctl("restore", str(file), "--data-dir", str(data), "--force")
    assert done.code == 0, done.err
    assert await with_store()
