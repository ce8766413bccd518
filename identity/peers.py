"""Verification of the peer of a TLS connection: its fleet, role, name, time and revocation.

OpenSSL verifies the chain and, for a server, the DNS name. The rest is checked here, in the moment when the handshake
ends and before a byte of the application is sent, by the `SSLObject` of the context. Contexts of asyncio, uvloop,
aiohttp and uvicorn all use it.

Times are checked here as well, because a certificate may be used for a while after its end when it cannot be renewed
(`Trust.grace`).
"""

import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from typing_extensions import override

from identity.names import Identity, IdentityError, Role, parse_identity
from machinery.clock import Clock
from machinery.tls_server import RecordSSLObject

PeerCertificate: TypeAlias = dict[str, Any]
"""A certificate as `SSLObject.getpeercert()` returns it."""

# X509_V_FLAG_NO_CHECK_TIME of <openssl/x509_vfy.h>: the ssl module has no name for it.
_NO_CHECK_TIME = 0x200000
_ANYTHING = frozenset(Role)


class PeerError(ssl.SSLCertVerificationError):
    """A peer is refused; the message says why."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.refusal: Final = reason
        """The reason as one word, for metrics."""
        self.verify_message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """The rules of one moment by which peers are accepted."""

    fleet: str
    """The uid of the fleet."""
    revoked: frozenset[str] = frozenset()
    """Serial numbers of revoked certificates, as upper-case hexadecimal digits."""
    grace: timedelta = timedelta(0)
    """The time for which a certificate is accepted after its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A verified peer."""

    identity: Identity
    serial: str
    """The serial number of its certificate, as upper-case hexadecimal digits."""
    not_after: datetime


@dataclass(slots=True)
class PeerVerifier:
    """Verifies the peers of connections, and counts the refused."""

    trust: Callable[[], Trust]
    clock: Clock
    roles: frozenset[Role] = _ANYTHING
    """The roles that are accepted at this place."""
    node: str = ""
    """The only node that is accepted; empty: every one."""
    is_optional: bool = False
    """True if a peer without a certificate is accepted."""
    refused: Counter[str] = field(default_factory=Counter)
    """The number of refused peers by reason."""
    expired: int = 0
    """The number of peers that were accepted after the end of their certificate."""

    def verify(self, certificate: PeerCertificate | None, server_name: str | None) -> Peer | None:
        """Return the verified peer; None if it has no certificate and needs none.

        `server_name`: the DNS name of the server that was dialled; None at a server.

        Raises:
            PeerError: the peer is refused.

        """
        if not certificate:
            if self.is_optional:
                return None
            raise self._error("NoCertificate", "the peer has no certificate")
        uris = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
        if len(uris) != 1:
            raise self._error(
                "NoIdentity", f"the certificate has {len(uris)} URIs; expected its identity alone"
            )
        try:
            identity = parse_identity(uris[0])
        except IdentityError as error:
            raise self._error("NoIdentity", str(error)) from error
        peer = Peer(
            identity=identity,
            serial=str(certificate["serialNumber"]),
            not_after=_time(certificate["notAfter"]),
        )
        fleet = self.trust().fleet
        if peer.identity.fleet != fleet:
            raise self._error(
                "OtherFleet", f"{peer.identity.uri} belongs to another fleet; this one is {fleet}"
            )
        if peer.identity.role not in self.roles:
            expected = " or ".join(sorted(self.roles))
            raise self._error(
                "WrongRole", f"{peer.identity.uri} has no role here; expected {expected}"
            )
        if self.node and peer.identity.role is Role.NODE and peer.identity.name != self.node:
            raise self._error(
                "OtherNode", f"{peer.identity.uri} has no role here; the only node is {self.node}"
            )
        if server_name is not None and peer.identity.dns_name != server_name:
            raise self._error(
                "WrongName", f"{peer.identity.uri} answered; expected the identity of {server_name}"
            )
        self._check_time(peer, certificate)
        if peer.serial in self.trust().revoked:
            raise self._error(
                "Revoked", f"the certificate of {peer.identity.uri} ({peer.serial}) is revoked"
            )
        return peer

    def _check_time(self, peer: Peer, certificate: PeerCertificate) -> None:
        now = self.clock.now()
        if now < _time(certificate["notBefore"]):
            raise self._error(
                "NotYetValid",
                f"the certificate of {peer.identity.uri} is valid from {certificate['notBefore']}: check the clocks",
            )
        if now < peer.not_after:
            return
        if now >= peer.not_after + self.trust().grace:
            raise self._error(
                "Expired",
                f"the certificate of {peer.identity.uri} ended on {certificate['notAfter']}: it was not renewed",
            )
        self.expired += 1

    def _error(self, reason: str, message: str) -> PeerError:
        self.refused[reason] += 1
        return PeerError(reason, message)


def _time(text: str) -> datetime:
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(text), UTC)


class VerifiedSSLObject(RecordSSLObject):
    """One TLS connection whose peer is verified before anything else is read or sent."""

    verifier: PeerVerifier
    """Set by `install`, for all connections of a context."""
    peer: Peer | None = None
    """The peer, once the handshake has ended."""

    @override
    def do_handshake(self) -> None:
        """Finish the handshake. Raises PeerError."""
        super().do_handshake()
        self.peer = self.verifier.verify(
            self.getpeercert(), None if self.server_side else self.server_hostname
        )


def install(context: ssl.SSLContext, verifier: PeerVerifier) -> None:
    """Let the verifier decide about the peers of all connections of the context."""
    context.verify_flags = ssl.VerifyFlags(
        context.verify_flags | ssl.VerifyFlags.VERIFY_X509_STRICT | _NO_CHECK_TIME
    )
    context.sslobject_class = type("_SSLObject", (VerifiedSSLObject,), {"verifier": verifier})


def peer_of(ssl_object: object) -> Peer | None:
    """Return the verified peer of a connection, from its transport's extra info `ssl_object`; None without TLS."""
    return ssl_object.peer if isinstance(ssl_object, VerifiedSSLObject) else None
