"""Exchange of the fleet's authority, while everything runs.

1. `begin`: a new authority is trusted beside the old one, which still signs.
2. `activate`, when all processes trust it: the new one signs, and every process gets a certificate by it.
3. `finish`, when all have one: the old one is trusted no more. A signer does it after 60 days by itself.

The state is in `trust/fleet`, and the new key in the folder of the authorities, so each step can be repeated after a crash.
"""

from datetime import timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from identity.authority import (
    Authority,
    AuthorityError,
    is_signed_by,
    load_authorities,
    spki_hash,
)
from identity.authority_folder import AuthorityFolder
from machinery.clock import Clock
from schemas.trust import AuthorityExchange, FleetTrust, IssuedCertificate
from store import codec, keys
from store.port import KeyValue, ModRevisionGuard, Put, Transport

SETTLE: Final = timedelta(minutes=5)
"""The time that every process has to learn the new authority before it signs."""
OLD_AUTHORITY_LIFETIME: Final = timedelta(days=60)
_SHOWN = 5


class ExchangeError(Exception):
    """A step of an exchange is refused; the message says why, and what comes next."""


async def begin(transport: Transport, clock: Clock, folder: AuthorityFolder) -> FleetTrust:
    """Let the fleet trust a new authority, whose key is in the folder as the next one; return the new trust.

    Raises:
        ExchangeError: an exchange is in progress, or the fleet has no authority.
        AuthorityError: the folder has not the authority that signs now.
        ConflictError: another writer was first.
        StoreError: the store did not answer.

    """
    item, fleet = await _read(transport)
    if fleet.exchange is not None:
        raise ExchangeError(
            f"the exchange of {fleet.exchange.begun:%Y-%m-%d %H:%M} UTC has not ended; go on with --activate or --finish"
        )
    current = folder.signing(fleet.authorities)
    following = folder.following()
    if following is not None and following.spki_hash == current.spki_hash:
        folder.promote()  # the end of the last exchange
        following = None
    if following is None:
        following = Authority.create(clock.now(), fleet.fleet)
        folder.write_next(following)
    exchange = AuthorityExchange(incoming=following.spki_hash.hex(), begun=clock.now())
    update = {"authorities": fleet.authorities + following.pem, "exchange": exchange}
    return await _write(transport, item, fleet.model_copy(update=update))


async def activate(
    transport: Transport, clock: Clock, folder: AuthorityFolder, settle: timedelta = SETTLE
) -> FleetTrust:
    """Let the new authority sign; return the new trust. Raises as `begin`."""
    item, fleet = await _read(transport)
    exchange = _exchange(fleet)
    duration = exchange.begun + settle - clock.now()
    if duration > timedelta(0):
        raise ExchangeError(
            f"processes have {settle.total_seconds() / 60:g} minutes to learn the new authority: try again in "
            f"{duration.total_seconds():.0f} s, and restart the members of etcd one after the other until then"
        )
    authorities = load_authorities(fleet.authorities)
    first = [authority for authority in authorities if _hash(authority) == exchange.incoming]
    rest = [authority for authority in authorities if _hash(authority) != exchange.incoming]
    bundle = _bundle([*first, *rest])
    folder.signing(bundle)  # or nobody could sign
    return await _write(transport, item, fleet.model_copy(update={"authorities": bundle}))


async def finish(transport: Transport, clock: Clock) -> FleetTrust:
    """Trust the old authority no more; return the new trust. Raises as `begin`."""
    item, fleet = await _read(transport)
    exchange = _exchange(fleet)
    first, *_ = load_authorities(fleet.authorities)
    if _hash(first) != exchange.incoming:
        raise ExchangeError(
            "the new authority does not sign yet: run `fleetctl cert rotate-authority --activate`"
        )
    waiting = await signed_by_others(transport, clock, first)
    if waiting:
        shown = ", ".join(waiting[:_SHOWN]) + (" ..." if len(waiting) > _SHOWN else "")
        raise ExchangeError(
            f"{len(waiting)} certificates are by the old authority: {shown}. Their processes renew them by themselves "
            "within minutes while they run; revoke those of processes that are gone (`fleetctl cert revoke`)"
        )
    update = {"authorities": _bundle([first]), "exchange": None}
    return await _write(transport, item, fleet.model_copy(update=update))


async def drop_old_authority(transport: Transport, clock: Clock) -> bool:
    """Finish an exchange that began 60 days ago if nothing needs the old authority; return whether it was finished.

    Raises:
        StoreError: the store did not answer, or another signer was first.

    """
    item = await transport.get(keys.FLEET_TRUST)
    if item is None:
        return False
    exchange = codec.decode(FleetTrust, item).exchange
    if exchange is None or clock.now() < exchange.begun + OLD_AUTHORITY_LIFETIME:
        return False
    try:
        await finish(transport, clock)
    except (ExchangeError, AuthorityError):
        return False
    return True


async def signed_by_others(
    transport: Transport, clock: Clock, authority: x509.Certificate
) -> tuple[str, ...]:
    """Return `ROLE/NAME` of the current certificates that have not ended and that this authority has not signed.

    Raises:
        StoreError: the store did not answer.

    """
    signed = []
    for item in (await transport.list(keys.ISSUED_PREFIX)).items:
        issued = codec.decode(IssuedCertificate, item)
        chain = load_authorities(issued.certificate)
        is_signed = any(is_signed_by(certificate, authority) for certificate in chain)
        if issued.not_after > clock.now() and not is_signed:
            signed.append(item.key.removeprefix(keys.ISSUED_PREFIX))
    return tuple(signed)


def _exchange(fleet: FleetTrust) -> AuthorityExchange:
    if fleet.exchange is None:
        raise ExchangeError(
            "no exchange is in progress: begin one with `fleetctl cert rotate-authority`"
        )
    return fleet.exchange


async def _read(transport: Transport) -> tuple[KeyValue, FleetTrust]:
    item = await transport.get(keys.FLEET_TRUST)
    if item is None:
        raise ExchangeError("this fleet has no authority: `fleetctl secure` makes one")
    return item, codec.decode(FleetTrust, item)


async def _write(transport: Transport, item: KeyValue, fleet: FleetTrust) -> FleetTrust:
    guard = ModRevisionGuard(key=item.key, mod_revision=item.mod_revision)
    await transport.commit([guard], [Put(key=item.key, value=codec.encode(fleet))])
    return fleet


def _hash(authority: x509.Certificate) -> str:
    return spki_hash(authority.public_key()).hex()


def _bundle(authorities: list[x509.Certificate]) -> str:
    return "".join(authority.public_bytes(Encoding.PEM).decode() for authority in authorities)
