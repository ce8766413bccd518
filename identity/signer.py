"""Issue of certificates: signs requests, and binds every name to one key in the store.

A caller decides whether a process may have an identity. A name that has a certificate gets one for another key only if the caller
names the certificate that may be replaced: what a machine claims about itself, such as a hardware UUID, is no proof. The binding
is written before a certificate leaves, so that two machines cannot have one name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from identity.authority import LEAF_LIFETIME, Authority, AuthorityError, Leaf
from identity.names import Identity, Role
from identity.proof import verify_proof
from machinery.clock import Clock
from schemas.trust import (
    CertificateRequest,
    EarlierCertificate,
    IssuedCertificate,
    RevokedCertificate,
)
from store import codec, keys
from store.errors import ConflictError
from store.port import (
    Delete,
    Guard,
    KeyValue,
    ModRevisionGuard,
    Operation,
    Put,
    Transport,
)

_ATTEMPTS = 5
# A revocation is about all of them, in one transaction.
_MAX_EARLIER = 100


class IssueError(Exception):
    """A certificate is refused; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """Signs for one fleet. Several may run: the store decides between them."""

    transport: Transport
    clock: Clock
    authority: Authority
    lifetime: timedelta = LEAF_LIFETIME

    async def issue(
        self,
        identity: Identity,
        request: bytes,
        *,
        hardware_uuid: str = "",
        addresses: Sequence[str] = (),
        guards: Sequence[Guard] = (),
        operations: Sequence[Operation] = (),
    ) -> IssuedCertificate:
        """Return a new certificate for the identity; the one before it stays valid until it ends.

        `guards` must hold when the binding is written, such as a token's that counts its uses; `operations` happen
        with it. A guard with the version of the current certificate says that the caller may replace it; without one
        the name must have none.

        Raises:
            IssueError: the request is invalid, or the name has a certificate that may not be replaced.
            ConflictError: a guard does not hold, or others kept issuing for this name.
            StoreError: the store did not answer.

        """
        try:
            leaf = self.authority.sign(
                request, identity, self.clock.now(), addresses=addresses, lifetime=self.lifetime
            )
        except AuthorityError as error:
            raise IssueError(str(error)) from error
        return await bind(
            self.transport,
            self.clock,
            identity,
            (leaf, hardware_uuid),
            guards=guards,
            operations=operations,
        )

    async def renew(
        self,
        identity: Identity,
        asked: CertificateRequest,
        *,
        guards: Sequence[Guard] = (),
        operations: Sequence[Operation] = (),
    ) -> IssuedCertificate:
        """Return the next certificate of an identity that proves to have the current key.

        Raises:
            IssueError: it has no certificate, another key, or its certificate is revoked.
            StoreError: as `issue`.

        """
        current = await check_current_key(self.transport, identity, asked)
        return await self.issue(
            identity,
            asked.request.encode(),
            hardware_uuid=asked.hardware_uuid,
            addresses=asked.addresses,
            guards=[current, *guards],
            operations=operations,
        )


async def check_current_key(
    transport: Transport, identity: Identity, asked: CertificateRequest
) -> ModRevisionGuard:
    """Check that a request is signed with the identity's current key; return that certificate's version.

    Raises:
        IssueError: the identity has no certificate, another key, or its certificate is revoked.
        StoreError: the store did not answer.

    """
    item = await transport.get(keys.issued_key(identity.role, identity.name))
    if item is None:
        raise IssueError(f"{identity.uri} has no certificate to renew; join with a token")
    current = codec.decode(IssuedCertificate, item)
    if await transport.get(keys.named(keys.REVOKED_PREFIX, current.serial)) is not None:
        raise IssueError(
            f"the certificate of {identity.uri} is revoked; join with a token for its name"
        )
    if not verify_proof(current.certificate, asked.request, asked.proof):
        raise IssueError(
            f"the request of {identity.uri} is not signed with its current key; a Mac that has lost its key joins "
            "with a token for its name"
        )
    return ModRevisionGuard(key=item.key, mod_revision=item.mod_revision)


async def bind(
    transport: Transport,
    clock: Clock,
    identity: Identity,
    signed: tuple[Leaf, str],
    *,
    guards: Sequence[Guard] = (),
    operations: Sequence[Operation] = (),
) -> IssuedCertificate:
    """Record a certificate, with the hardware UUID of its Mac, as the current one of the identity; return the record.

    Raises:
        IssueError: the name has a certificate that may not be replaced.
        ConflictError: a guard does not hold, or another certificate was issued meanwhile.
        StoreError: the store did not answer.

    """
    leaf, hardware_uuid = signed
    key = keys.issued_key(identity.role, identity.name)
    bound = await find_binding(transport, identity)
    versions = [guard for guard in guards if guard.key == key]
    if bound is not None and not versions:
        raise IssueError(name_taken(identity))
    before = None if bound is None else bound.record
    issued_certificate = IssuedCertificate(
        certificate=leaf.pem,
        serial=leaf.serial,
        key_hash=leaf.key_hash,
        issued=clock.now(),
        not_after=leaf.not_after,
        hardware_uuid=hardware_uuid or ("" if before is None else before.hardware_uuid),
        earlier=_earlier(identity, before, clock.now()),
    )
    is_new = [] if versions else [ModRevisionGuard(key=key, mod_revision=0)]
    put = Put(key=key, value=codec.encode(issued_certificate))
    await transport.commit([*is_new, *guards], [put, *operations])
    return issued_certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The current certificate of a name."""

    record: IssuedCertificate
    version: ModRevisionGuard
    """A guard for `Signer.issue`, of a caller that may replace it."""


async def find_binding(transport: Transport, identity: Identity) -> Binding | None:
    """Return the current certificate of the identity; None if there is none. Raises StoreError."""
    item = await transport.get(keys.issued_key(identity.role, identity.name))
    if item is None:
        return None
    version = ModRevisionGuard(key=item.key, mod_revision=item.mod_revision)
    return Binding(record=codec.decode(IssuedCertificate, item), version=version)


def name_taken(identity: Identity) -> str:
    """Return why a machine does not get a name that the fleet has, and the ways to get it. It tells nothing of its holder."""
    role, name = identity.role, identity.name
    token, remove = f"token create --role {role} --node {name}", f"cert revoke {role}/{name}"
    if role is Role.NODE:
        token, remove = f"token create --node {name}", f"delete node {name}"
    return (
        f"the fleet has a {role} {name} already, and a machine cannot prove by what it says of itself that it is this one. "
        f"If it is, and has lost its key, create a token for the name with `fleetctl {token}` and join with it, or run "
        f"`fleetctl {remove}` first. Otherwise choose another name with --name"
    )


def _earlier(
    identity: Identity, before: IssuedCertificate | None, now: datetime
) -> tuple[EarlierCertificate, ...]:
    """Return the certificates that the new one joins and that have not ended yet. Raises IssueError."""
    if before is None:
        return ()
    last = EarlierCertificate(serial=before.serial, not_after=before.not_after)
    earlier_certificates = tuple(
        certificate for certificate in (*before.earlier, last) if certificate.not_after > now
    )
    if len(earlier_certificates) > _MAX_EARLIER:
        raise IssueError(
            f"{identity.uri} has {len(earlier_certificates)} certificates that have not ended; it is replaced too often"
        )
    return earlier_certificates


async def revoke(transport: Transport, clock: Clock, identity: Identity, why: str) -> str:
    """Revoke all certificates of an identity, and free its name; return the serial number of the current one, "" without one.

    Raises:
        ConflictError: a new certificate was issued meanwhile, several times.
        StoreError: the store did not answer.

    """
    key = keys.issued_key(identity.role, identity.name)
    for _ in range(_ATTEMPTS):
        item = await transport.get(key)
        if item is None:
            return ""
        try:
            return await _revoke(transport, clock, identity, item, why)
        except ConflictError:
            continue
    raise ConflictError(f"{identity.uri} gets new certificates all the time; try again")


async def _revoke(
    transport: Transport, clock: Clock, identity: Identity, item: KeyValue, why: str
) -> str:
    current = codec.decode(IssuedCertificate, item)
    last = EarlierCertificate(serial=current.serial, not_after=current.not_after)
    puts = []
    for certificate in (*current.earlier, last):
        entry = RevokedCertificate(
            identity=identity.uri, revoked=clock.now(), not_after=certificate.not_after, why=why
        )
        puts.append(
            Put(key=keys.named(keys.REVOKED_PREFIX, certificate.serial), value=codec.encode(entry))
        )
    guard = ModRevisionGuard(key=item.key, mod_revision=item.mod_revision)
    await transport.commit([guard], [*puts, Delete(key=item.key)])
    return current.serial
