"""Exchange of the authority: its end after 60 days, and crashes between its steps."""

import asyncio
from datetime import timedelta

import pytest

from identity import authority_exchange
from identity.authority import Authority, AuthorityError, load_authorities
from identity.authority_exchange import OLD_AUTHORITY_LIFETIME, SETTLE, ExchangeError
from identity.authority_folder import AuthorityFolder
from identity.names import Role
from identity.renewal import Applicant, Renewal
from identity.trust_sync import TrustSync
from schemas.trust import FleetTrust
from store import codec, keys
from tests.support.signing import UUID, SigningFleet, on_fleet, running
from tests.support.values import present

NODE = Applicant(role=Role.NODE, name="mac-1", hardware_uuid=UUID)


async def trusted(fleet: SigningFleet) -> int:
    """Return the number of authorities that the fleet trusts."""
    item = present(await fleet.store.get(keys.FLEET_TRUST))
    return len(load_authorities(codec.decode(FleetTrust, item).authorities))


async def exchange(fleet: SigningFleet) -> None:
    """Let a new authority sign."""
    await authority_exchange.begin(fleet.store, fleet.clock, fleet.folder)
    await asyncio.sleep(SETTLE.total_seconds())
    await authority_exchange.activate(fleet.store, fleet.clock, fleet.folder)


@on_fleet
async def test_a_signer_ends_an_exchange_after_sixty_days_when_all_have_renewed(
    fleet: SigningFleet,
) -> None:
    own = await fleet.join()
    await fleet.join(Role.GATEWAY, "gone")  # its process never comes back
    renewal = Renewal(fleet.store, fleet.clock, own, NODE)
    sync = TrustSync(fleet.store, fleet.clock, own)
    async with fleet.signers(), running(renewal.run(), sync.run()):
        await exchange(fleet)
        await asyncio.sleep(3600)
        waiting = "gateway/gone"
        with pytest.raises(
            ExchangeError, match=f"1 certificates are by the old authority: {waiting}"
        ):
            await authority_exchange.finish(fleet.store, fleet.clock)
        renewals = renewal.renewals
        assert renewals == 1
        # Nothing else happens in the meantime.
        await asyncio.sleep(12 * 3600)
        assert renewal.renewals == renewals
    await asyncio.sleep((OLD_AUTHORITY_LIFETIME - timedelta(days=1)).total_seconds())
    assert not await authority_exchange.drop_old_authority(fleet.store, fleet.clock)
    assert await trusted(fleet) == 2
    await asyncio.sleep(timedelta(days=1).total_seconds())
    assert await authority_exchange.drop_old_authority(fleet.store, fleet.clock)
    assert await trusted(fleet) == 1


@on_fleet
async def test_old_authority_stays_while_a_certificate_of_it_is_valid(fleet: SigningFleet) -> None:
    await exchange(fleet)
    fleet.lifetime = timedelta(days=90)
    await fleet.join()  # by the old one, whose key another Mac still has
    await asyncio.sleep(OLD_AUTHORITY_LIFETIME.total_seconds())
    assert not await authority_exchange.drop_old_authority(fleet.store, fleet.clock)
    assert await trusted(fleet) == 2


@on_fleet
async def test_new_authority_that_was_not_published_yet_is_used_again(fleet: SigningFleet) -> None:
    made = Authority.create(fleet.clock.now(), fleet.authority.fleet)
    fleet.folder.write_next(made)  # and the command was killed
    trust = await authority_exchange.begin(fleet.store, fleet.clock, fleet.folder)
    assert load_authorities(trust.authorities)[1] == made.certificate


@pytest.mark.parametrize("copied", [(), ("ca.key",), ("ca.key", "ca.pem")])
@on_fleet
async def test_a_crash_while_the_new_authority_takes_the_old_place_loses_no_key(
    fleet: SigningFleet, copied: tuple[str, ...]
) -> None:
    old, new = (AuthorityFolder(fleet.root / name) for name in ("old", "new"))
    following = Authority.create(fleet.clock.now(), fleet.authority.fleet)
    old.write(fleet.authority)
    old.write_next(following)
    new.write(following)
    for name in copied:  # the steps of `promote`
        (old.path / name).write_bytes((new.path / name).read_bytes())
    assert old.signing(following.pem + fleet.authority.pem).spki_hash == following.spki_hash
    assert old.load().fleet == fleet.authority.fleet  # a reconciler starts with it
    old.promote()
    assert old.load().spki_hash == following.spki_hash
    assert sorted(path.name for path in old.path.iterdir()) == ["ca.key", "ca.pem"]


@on_fleet
async def test_a_key_that_other_users_may_read_is_refused(fleet: SigningFleet) -> None:
    fleet.folder.key.chmod(0o644)
    with pytest.raises(AuthorityError, match="chmod 600"):
        fleet.folder.signing(fleet.authority.pem)
