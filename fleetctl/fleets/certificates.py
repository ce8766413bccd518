"""The certificates of a fleet for `fleetctl cert`: issued and revoked ones, requests, and authorities."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.join_material import MAKE_AUTHORITY
from fleetctl.output.columns import age
from identity.authority import addresses_of, is_signed_by, load_authorities, spki_hash
from identity.external_authority import read_signed
from identity.names import Identity, IdentityError, Role
from identity.signer import bind, check_current_key, find_binding
from machinery.clock import Clock
from manifests.suggestions import did_you_mean
from schemas.trust import (
    CertificateRequest,
    FleetTrust,
    IssuedCertificate,
    RefusedRequest,
    RevokedCertificate,
)
from store import codec, keys
from store.errors import UndecodableError
from store.port import Guard, KeyValue, ModRevisionGuard, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateRow:
    """One line of `fleetctl cert list`."""

    name: str
    """ROLE/NAME."""
    serial: str
    state: str
    expires: str
    authority: str

    def cells(self) -> tuple[str, ...]:
        return (self.name, self.state, self.expires, self.serial, self.authority)


TITLES = ("NAME", "STATE", "EXPIRES", "SERIAL", "AUTHORITY")


async def read_fleet(transport: Transport) -> FleetTrust:
    """Return the fleet's trust. Raises FleetctlError: it has none."""
    item = await transport.get(keys.FLEET_TRUST)
    if item is None:
        raise FleetctlError(f"this fleet has no certificate authority. {MAKE_AUTHORITY}")
    return codec.decode(FleetTrust, item)


def parse_name(text: str, fleet: str) -> Identity:
    """Return the identity in ROLE/NAME. Raises FleetctlError."""
    role, _, name = text.partition("/")
    if role not in set(Role) or not name:
        raise FleetctlError(
            f"{text}: expected ROLE/NAME, such as node/mac-1; roles are {', '.join(Role)}"
        )
    try:
        return Identity(fleet, Role(role), name)
    except IdentityError as error:
        raise FleetctlError(str(error)) from error


async def read_issued(transport: Transport, identity: Identity) -> IssuedCertificate:
    """Return the current certificate of an identity. Raises FleetctlError: it has none."""
    item = await transport.get(keys.issued_key(identity.role, identity.name))
    if item is not None:
        return codec.decode(IssuedCertificate, item)
    listed = (await transport.list(keys.ISSUED_PREFIX)).items
    known = sorted(one.key.removeprefix(keys.ISSUED_PREFIX) for one in listed)
    hint = did_you_mean(f"{identity.role}/{identity.name}", known, "There are")
    raise FleetctlError(f"{identity.role}/{identity.name} has no certificate. {hint}".rstrip(" ."))


async def list_certificates(transport: Transport, now: datetime) -> list[CertificateRow]:
    """Return all current certificates, the requests without one, and the revoked ones."""
    fleet = await read_fleet(transport)
    authorities = load_authorities(fleet.authorities)
    issued = {
        _name(keys.ISSUED_PREFIX, item): codec.decode(IssuedCertificate, item)
        for item in (await transport.list(keys.ISSUED_PREFIX)).items
    }
    asking = {
        _name(keys.REQUEST_PREFIX, item)
        for item in (await transport.list(keys.REQUEST_PREFIX)).items
    }
    refused = {
        _name(keys.REFUSED_PREFIX, item)
        for item in (await transport.list(keys.REFUSED_PREFIX)).items
    }
    rows = [
        CertificateRow(
            name=name,
            serial=one.serial,
            state=_state(one, now, is_asking=name in asking, is_refused=name in refused),
            expires=_expires(one.not_after, now),
            authority=authority_name(one, authorities),
        )
        for name, one in sorted(issued.items())
    ]
    waiting = sorted((asking | refused) - issued.keys())
    rows += [
        CertificateRow(
            name=name,
            serial="",
            state="Pending" if name in asking else "Refused",
            expires="",
            authority="",
        )
        for name in waiting
    ]
    return [*rows, *[row async for row in _revoked(transport, now)]]


async def _revoked(transport: Transport, now: datetime) -> AsyncIterator[CertificateRow]:
    for item in (await transport.list(keys.REVOKED_PREFIX)).items:
        try:
            entry = codec.decode(RevokedCertificate, item)
        except UndecodableError:
            continue
        yield CertificateRow(
            name="/".join(entry.identity.split("/")[-2:]),
            serial=item.key.removeprefix(keys.REVOKED_PREFIX),
            state="Revoked",
            expires=_expires(entry.not_after, now),
            authority="",
        )


def _name(prefix: str, item: KeyValue) -> str:
    return item.key.removeprefix(prefix)


def _state(one: IssuedCertificate, now: datetime, *, is_asking: bool, is_refused: bool) -> str:
    words = ["Expired" if one.not_after <= now else "Valid"]
    words += ["renewal pending"] * is_asking + ["renewal refused"] * is_refused
    return ", ".join(words)


def _expires(end: datetime, now: datetime) -> str:
    return f"in {age(now, end)}" if end > now else f"{age(end, now)} ago"


def authority_name(one: IssuedCertificate, authorities: tuple[x509.Certificate, ...]) -> str:
    """Return the beginning of the hash of the authority that signed, `via` an intermediate, or `unknown`."""
    chain = load_authorities(one.certificate)
    for authority in authorities:
        if any(is_signed_by(link, authority) for link in chain):
            return authority_hash(authority)[:16]
    return "unknown"


def authority_hash(authority: x509.Certificate) -> str:
    """Return SHA-256 of an authority's public key, hexadecimal."""
    return spki_hash(authority.public_key()).hex()


async def describe(
    transport: Transport, identity: Identity, now: datetime
) -> list[tuple[str, str]]:
    """Return titles and values about an identity's certificate. Raises FleetctlError: it has none."""
    fleet = await read_fleet(transport)
    issued = await read_issued(transport, identity)
    leaf, *_ = load_authorities(issued.certificate)
    item = await transport.get(keys.refused_key(identity.role, identity.name))
    refusal = None if item is None else codec.decode(RefusedRequest, item)
    asking = await transport.get(keys.request_key(identity.role, identity.name))
    return [
        ("Identity:", identity.uri),
        ("Serial:", issued.serial),
        ("Issued:", f"{_time(issued.issued)} ({age(issued.issued, now)} ago)"),
        ("Expires:", f"{_time(issued.not_after)} ({_expires(issued.not_after, now)})"),
        ("Addresses:", ", ".join(sorted(addresses_of(leaf)))),
        ("Key:", f"SHA-256 {issued.key_hash}"),
        ("Authority:", authority_name(issued, load_authorities(fleet.authorities))),
        ("Hardware UUID:", issued.hardware_uuid or "<none>"),
        ("Earlier:", ", ".join(certificate.serial for certificate in issued.earlier) or "<none>"),
        ("Renewal:", _renewal(asking, refusal)),
    ]


def _renewal(asking: KeyValue | None, refusal: RefusedRequest | None) -> str:
    if refusal is not None:
        return f"refused at {_time(refusal.refused)}: {refusal.why}"
    return "not due" if asking is None else "waits for a signer"


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


async def read_request(
    transport: Transport, identity: Identity
) -> tuple[CertificateRequest, ModRevisionGuard]:
    """Return the request that waits, with the guard that it stays the same. Raises FleetctlError: none does."""
    item = await transport.get(keys.request_key(identity.role, identity.name))
    if item is None:
        raise FleetctlError(
            f"{identity.role}/{identity.name} does not ask for a certificate. A process asks when it starts with an "
            "empty --identity-dir, and at two thirds of its certificate's life"
        )
    guard = ModRevisionGuard(key=item.key, mod_revision=item.mod_revision)
    return codec.decode(CertificateRequest, item), guard


async def install(transport: Transport, clock: Clock, identity: Identity, chain: str) -> str:
    """Answer the request of an identity with a certificate by an external authority; return its serial number.

    Raises:
        FleetctlError: no request waits.
        AuthorityError: the certificate cannot be used.
        IssueError: the request is not signed with the current key.
        StoreError: the store did not answer, or the request has changed.

    """
    fleet = await read_fleet(transport)
    asked, unchanged = await read_request(transport, identity)
    leaf = read_signed(chain, identity, asked.request, fleet.authorities, clock.now())
    guards: list[Guard] = [unchanged]
    if await find_binding(transport, identity) is not None:
        guards.append(await check_current_key(transport, identity, asked))
    issued = await bind(transport, clock, identity, (leaf, asked.hardware_uuid), guards=guards)
    return issued.serial
