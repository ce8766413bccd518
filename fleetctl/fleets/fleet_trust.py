"""The trust of a fleet as an administrator makes it: its authority, its document in the store, and identities."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetctl.cli.errors import FleetctlError
from identity.authority import (
    Authority,
    AuthorityError,
    addresses_of,
    allowed_addresses,
    identity_of,
    is_signed_by,
    life_of,
    load_authorities,
    load_certificate,
    new_key,
)
from identity.authority_folder import AuthorityFolder
from identity.folder import FolderError, IdentityFolder
from identity.names import Identity, Role
from identity.signer import Signer, find_binding
from machinery.clock import Clock
from machinery.os_user import current_user
from nodeagent.node.identity import dns_label
from schemas.trust import FleetTrust, TlsMode, TrustSnapshot
from store import codec, keys
from store.errors import ConflictError
from store.port import ModRevisionGuard, Put, Transport

_LOCAL_ADDRESSES: Final = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The names and addresses of this machine in certificates."""

    hostname: str
    hardware_uuid: str
    address: str = ""
    """The address at which other machines reach it; empty if they do not."""

    @property
    def label(self) -> str:
        return dns_label(self.hostname, fallback="mac")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the names and addresses by which clients may know its processes."""
        return tuple(dict.fromkeys(filter(None, (self.address, self.label, *_LOCAL_ADDRESSES))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedIdentity:
    """An identity that an administrator's command keeps in a folder."""

    identity: Identity
    folder: IdentityFolder


def administrator(fleet: str, machine: Machine) -> Identity:
    """Return the identity of this command's user on this machine."""
    user = current_user().partition("@")[0]
    return Identity(fleet, Role.ADMIN, dns_label(f"{user}-{machine.label}", fallback="admin"))


def open_authority(path: Path, clock: Clock) -> Authority:
    """Return the authority in the folder; make one if there is none.

    Raises:
        FleetctlError: a file cannot be used.

    """
    folder = AuthorityFolder(path)
    try:
        if not folder.certificate.exists():
            folder.key.unlink(
                missing_ok=True
            )  # nothing was signed with a key that has no certificate
            folder.write(Authority.create(clock.now()))
        return folder.load()
    except AuthorityError as error:
        raise FleetctlError(str(error)) from error
    except OSError as error:
        raise FleetctlError(f"{path} cannot be used: {error.strerror or error}") from error


async def ensure_trust(
    transport: Transport, authority: Authority, where: Path, mode: TlsMode
) -> tuple[FleetTrust, bool]:
    """Return the fleet's trust, and whether it is new. A new one has the authority and the mode.

    Raises:
        FleetctlError: the store belongs to another fleet than the authority in the folder `where`.
        StoreError: the store did not answer.

    """
    is_new = False
    with suppress(ConflictError):  # another process was faster
        if await transport.get(keys.FLEET_TRUST) is None:
            made = FleetTrust(fleet=authority.fleet, authorities=authority.pem, mode=mode)
            guard = ModRevisionGuard(key=keys.FLEET_TRUST, mod_revision=0)
            put = Put(key=keys.FLEET_TRUST, value=codec.encode(made))
            await transport.commit([guard], [put])
            is_new = True
    item = await transport.get(keys.FLEET_TRUST)
    if item is None:
        raise FleetctlError(f"{keys.FLEET_TRUST} was deleted meanwhile; run the command again")
    fleet_trust = codec.decode(FleetTrust, item)
    if fleet_trust.fleet != authority.fleet:
        raise FleetctlError(
            f"the store belongs to fleet {fleet_trust.fleet}, and {where} holds the authority of fleet {authority.fleet}. "
            "Give the folder that belongs to the store"
        )
    return fleet_trust, is_new


async def ensure_identity(
    signer: Signer, trust: FleetTrust, wanted: ManagedIdentity, machine: Machine
) -> None:
    """Issue the identity unless its folder holds a certificate that can be used for long enough.

    Raises:
        IssueError: the certificate is refused; FolderError: its folder cannot be written; StoreError.

    """
    folder, now = wanted.folder, signer.clock.now()
    if not is_current(wanted, trust.authorities, machine, signer.clock):
        key, request = new_key()
        bound = await find_binding(signer.transport, wanted.identity)
        # The holder of the authority's key may replace every certificate; this is a check for mistakes.
        is_own = bound is None or bound.record.hardware_uuid in ("", machine.hardware_uuid)
        issued = await signer.issue(
            wanted.identity,
            request,
            hardware_uuid=machine.hardware_uuid,
            addresses=machine.addresses,
            guards=[bound.version] if bound is not None and is_own else [],
        )
        folder.write_identity(key, issued.certificate)
    if authorities_of(folder) != trust.authorities:
        folder.write_authorities(trust.authorities)
    if not folder.trust.exists():
        folder.write_trust(TrustSnapshot(fleet=trust.fleet, mode=trust.mode, seen=now))


def is_current(wanted: ManagedIdentity, authorities: str, machine: Machine, clock: Clock) -> bool:
    """Return whether the folder's certificate is of the authority that signs, and has a third of its life left."""
    try:
        certificate = load_certificate(wanted.folder.certificate())
        known = load_authorities(authorities)
        if identity_of(certificate) != wanted.identity:
            return False
    except (FolderError, AuthorityError):
        return False
    start, end = life_of(certificate)
    is_fresh = end - clock.now() > (end - start) / 3
    needed = allowed_addresses(wanted.identity, machine.addresses)
    # The first one signs; during an exchange, others end soon.
    return (
        is_fresh
        and is_signed_by(certificate, known[0])
        and set(needed) <= addresses_of(certificate)
    )


def authorities_of(folder: IdentityFolder) -> str:
    """Return the authorities that a process trusts; empty if it has none yet."""
    try:
        return folder.read_authorities()
    except FolderError:
        return ""
