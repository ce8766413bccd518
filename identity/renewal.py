"""Renewal of this process's certificate through the store, before it ends. Run by agents, gateways and reconcilers.

The process writes a request for a new key, signed with its current one, at `csr/<role>/<name>`, and takes its
certificate from `trust/issued/<role>/<name>`. It asks at two thirds of the certificate's life, or a little before, so
that a third is left for an outage; and soon after another authority has begun to sign.

The new key is on disk before its request leaves, and replaces the old one together with its certificate. So a process
that is killed at any moment goes on where it was.
"""

import asyncio
import contextlib
import ipaddress
import logging
import random
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from identity.authority import (
    AuthorityError,
    addresses_of,
    allowed_addresses,
    identity_of,
    is_signed_by,
    life_of,
    load_authorities,
    load_certificate,
    spki_hash,
)
from identity.folder import FolderError, IdentityFolder
from identity.names import Identity, IdentityError, Role
from identity.pending_request import PendingRequest, read_pending, write_pending
from identity.proof import make_proof, request_hash
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from schemas.trust import CertificateRequest, FleetTrust, IssuedCertificate, RefusedRequest
from store import codec, keys
from store.errors import StoreError, UndecodableError
from store.port import Delete, KeyValue, ModRevisionGuard, Put, Transport

log = logging.getLogger(__name__)

_RENEW_AT: Final = 2 / 3
_JITTER: Final = 0.1
SPREAD_S: Final = 120.0
"""After another authority has begun to sign, processes ask within this time, not all at once."""
_LOOK_S = 10.0
_FIRST_LOOK_S = 1.0
_ANSWER_S = 15.0
_ANSWER_BACKOFF = Backoff(first_s=0.1, limit_s=2.0)
_BACKOFF = Backoff(first_s=1.0, limit_s=300.0)
_ADDRESSES_AGE = timedelta(hours=1)
_HOST = re.compile(r"[0-9A-Za-z:][0-9A-Za-z.:-]{0,252}")
_NOT_A_NAME = re.compile(r"[^a-z0-9]+")


class RenewalError(Exception):
    """The certificate was not renewed; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applicant:
    """The process that asks for certificates."""

    role: Role
    name: str = ""
    """The name of its first certificate; default: the host name with a random end."""
    hardware_uuid: str = ""
    """For a node: the identity of its Mac."""
    addresses: Callable[[], Sequence[str]] = tuple
    """IP addresses and DNS names by which clients of other kinds reach the process."""


class Renewal:
    """Keeps the certificate in a folder current. Run `run()` in a task group."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        folder: IdentityFolder,
        applicant: Applicant,
        *,
        spread_s: float = SPREAD_S,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._folder = folder
        self._applicant = applicant
        self._spread_s = spread_s
        self._retries = Retries(_BACKOFF, clock)
        self._seen: tuple[object, ...] = ()
        self._due = clock.now()
        self.failure = ""
        """Reason why the last attempt failed; "" after a success, and while nothing is due."""
        self.renewals = 0
        """The number of certificates that this process has taken since its start."""
        self.not_after: datetime | None = None
        """The end of the current certificate; None before the first."""

    async def run(self) -> None:
        """Renew forever. A failure is logged and tried again."""
        while True:
            try:
                left_s = (self.due_at() - self._clock.now()).total_seconds()
                if left_s > 0:
                    await self._clock.sleep(min(left_s, _LOOK_S))
                    continue
                is_done = await self.renew()
            except (
                RenewalError,
                StoreError,
                UndecodableError,
                FolderError,
                AuthorityError,
            ) as error:
                why = str(error)
                duration = None if self.not_after is None else self.not_after - self._clock.now()
                is_late = duration is not None and duration < timedelta(0)
                # The store may be away for days; a line each five minutes is enough.
                log.log(
                    logging.ERROR if is_late else logging.WARNING,
                    "certificate not renewed",
                    extra={
                        "why": why,
                        "until": self.not_after and self.not_after.isoformat(),
                        "attempts": self._retries.failures + 1,
                    },
                )
                self.failure = why
                await self._retries.wait()
                continue
            self._retries.reset()
            self.failure = ""
            if not is_done:
                await self._clock.sleep(_LOOK_S)

    def due_at(self) -> datetime:
        """Return the time of the next request, which changes with the files. Raises FolderError, AuthorityError."""
        seen = (self._folder.state()[:2], tuple(self._applicant.addresses()))
        if seen == self._seen:
            return self._due
        now = self._clock.now()
        if not self._folder.is_issued:
            # The fleet has an authority once its trust was written here; a fleet without TLS is never asked.
            is_secured = self._folder.authorities.exists()
            return now if is_secured else now + timedelta(seconds=_FIRST_LOOK_S)
        pem = self._folder.certificate()
        certificate = load_certificate(pem)
        start, end = life_of(certificate)
        due = start + (end - start) * _RENEW_AT * (1 - _JITTER * random.random())
        first = load_authorities(self._folder.read_authorities())[0]
        if not any(is_signed_by(authority, first) for authority in load_authorities(pem)):
            due = min(due, now + timedelta(seconds=self._spread_s * random.random()))
        identity = identity_of(certificate)
        asked = {_canonical(address) for address in allowed_addresses(identity, seen[1])}
        if asked - addresses_of(certificate):
            due = min(due, max(now, start + _ADDRESSES_AGE))
        self._seen, self._due, self.not_after = seen, due, end
        return due

    async def renew(self) -> bool:
        """Ask for a certificate and take it; return false while the fleet has no authority.

        Raises:
            RenewalError: it was refused, or no signer answered.
            FolderError, AuthorityError: a file cannot be used or written.
            StoreError: the store did not answer.

        """
        item = await self._transport.get(keys.FLEET_TRUST)
        if item is None:
            if self._folder.is_issued:
                raise RenewalError("the store knows no authority of this fleet (trust/fleet)")
            return False
        fleet = codec.decode(FleetTrust, item)
        pending = await asyncio.to_thread(self._pending, fleet)
        key = keys.issued_key(pending.identity.role, pending.identity.name)
        certificate = await self._issued(key, pending)
        if certificate is None:
            await self._ask(pending)
            certificate = await self._wait(key, pending)
        await asyncio.to_thread(self._take, fleet, pending, certificate)
        await self._withdraw(pending)
        self.renewals += 1
        log.info(
            "certificate renewed",
            extra={"identity": pending.identity.uri, "serial": certificate.serial},
        )
        return True

    def _pending(self, fleet: FleetTrust) -> PendingRequest:
        """Return the key that waits for its certificate; a new one unless a request was made before."""
        folder, current = self._folder, None
        pending = read_pending(folder)
        if folder.is_issued:
            certificate = load_certificate(folder.certificate())
            current = identity_of(certificate)
            if current.fleet != fleet.fleet:
                raise RenewalError(
                    f"{folder.path} holds {current.uri}, and the store belongs to fleet {fleet.fleet}"
                )
            if (
                pending is not None
                and pending.key_hash == spki_hash(certificate.public_key()).hex()
            ):
                pending = (
                    None  # it was taken, and the process ended before it could delete the file
                )
        is_ours = pending is not None and pending.identity.fleet == fleet.fleet
        if pending is not None and is_ours and current in (None, pending.identity):
            return pending
        return write_pending(folder, current or self._first(fleet), self._applicant.addresses())

    def _first(self, fleet: FleetTrust) -> Identity:
        """Return the identity of the first certificate."""
        applicant = self._applicant
        name = applicant.name or f"{_host_name()}-{secrets.token_hex(3)}"
        try:
            return Identity(fleet.fleet, applicant.role, name)
        except IdentityError as error:
            raise RenewalError(str(error)) from error

    async def _ask(self, pending: PendingRequest) -> None:
        """Write the request, unless it waits in the store already."""
        applicant, folder = self._applicant, self._folder
        asked = CertificateRequest(
            request=pending.request,
            hardware_uuid=applicant.hardware_uuid,
            addresses=tuple(applicant.addresses()),
            proof=make_proof(folder.read_identity().encode(), pending.request)
            if folder.is_issued
            else "",
        )
        key = keys.request_key(pending.identity.role, pending.identity.name)
        item = await self._transport.get(key)
        if item is not None and _request_of(item) == pending.request:
            return
        await self._transport.commit([], [Put(key=key, value=codec.encode(asked))])

    async def _withdraw(self, pending: PendingRequest) -> None:
        """Delete the request if it is still there: a signer deletes it, `fleetctl cert install` may not."""
        identity = pending.identity
        item = await self._transport.get(keys.request_key(identity.role, identity.name))
        if item is not None and _request_of(item) == pending.request:
            guard = ModRevisionGuard(key=item.key, mod_revision=item.mod_revision)
            await self._transport.commit([guard], [Delete(key=item.key)])

    async def _wait(self, key: str, pending: PendingRequest) -> IssuedCertificate:
        """Wait for the answer of a signer."""
        identity = pending.identity
        refused = keys.refused_key(identity.role, identity.name)
        polls = Retries(_ANSWER_BACKOFF, self._clock)
        deadline = self._clock.monotonic() + _ANSWER_S
        while self._clock.monotonic() < deadline:
            issued_certificate = await self._issued(key, pending)
            if issued_certificate is not None:
                return issued_certificate
            item = await self._transport.get(refused)
            refusal = None if item is None else codec.decode(RefusedRequest, item)
            if refusal is not None and refusal.request_hash == request_hash(pending.request):
                self._folder.pending.unlink(missing_ok=True)
                raise RenewalError(f"the signer has refused: {refusal.why}")
            await polls.wait()
        raise RenewalError(
            f"the request of {identity.uri} waits: no signer has answered. A reconciler with --authority-dir does, or "
            "`fleetctl cert install` with an external authority"
        )

    async def _issued(self, key: str, pending: PendingRequest) -> IssuedCertificate | None:
        """Return the certificate for the pending key if it was issued."""
        item = await self._transport.get(key)
        certificate = None if item is None else codec.decode(IssuedCertificate, item)
        return (
            certificate
            if certificate is not None and certificate.key_hash == pending.key_hash
            else None
        )

    def _take(self, fleet: FleetTrust, pending: PendingRequest, found: IssuedCertificate) -> None:
        """Replace key and certificate in one step."""
        certificate = load_certificate(found.certificate)
        hash_ = spki_hash(certificate.public_key()).hex()
        if hash_ != pending.key_hash or identity_of(certificate) != pending.identity:
            raise RenewalError(
                f"the certificate in the store is not for {pending.identity.uri} and its new key"
            )
        if not self._folder.authorities.exists():
            self._folder.write_authorities(fleet.authorities)
        self._folder.write_identity(pending.key, found.certificate)
        self._folder.pending.unlink(missing_ok=True)


def own_addresses(*hosts: str) -> tuple[str, ...]:
    """Return the addresses for the certificate of a process that listens on these hosts; wildcards are left out."""
    found = ["127.0.0.1", "localhost"]
    for host in hosts:
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host).is_unspecified:
                continue
        if _HOST.fullmatch(host):
            found.append(host)
    return tuple(dict.fromkeys(found))


def _request_of(item: KeyValue) -> str:
    with contextlib.suppress(UndecodableError):
        return codec.decode(CertificateRequest, item).request
    return ""


def _host_name() -> str:
    name = _NOT_A_NAME.sub("-", socket.gethostname().partition(".")[0].lower()).strip("-")
    return name[:40] or "process"


def _canonical(address: str) -> str:
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(address))
    return address
