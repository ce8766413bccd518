"""Documents about trust: the fleet's authorities and mode, revoked certificates, and requests for certificates.

They are no API objects: `fleetctl secure`, `cert` and `join` write them, and no manifest can.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, StringConstraints

from schemas.meta import ApiModel, Labels, ObjectName

MAX_PEM = 64 << 10
"""Most characters of certificates in one document."""
Pem = Annotated[str, StringConstraints(max_length=MAX_PEM)]
Serial = Annotated[str, StringConstraints(pattern=r"^[0-9A-F]{2,64}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Address = Annotated[str, StringConstraints(max_length=253)]
FleetUid = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
HardwareUuid = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z-]{0,64}$")]
JoinTokenId = Annotated[str, StringConstraints(pattern=r"^[a-z2-7]{8}$")]
JoinRole: TypeAlias = Literal["node", "gateway", "reconciler", "admin"]
"""The roles that a join token can give."""
MAX_TOKEN_USES = 1000


class TlsMode(StrEnum):
    """The use of TLS between the fleet's processes, in the order of a migration (as Istio's PeerAuthentication)."""

    PERMISSIVE = "permissive"
    """Listeners accept TLS and plain connections; clients dial plain ones."""
    TLS = "tls"
    """Listeners accept both; clients dial TLS."""
    STRICT = "strict"
    """Listeners refuse plain connections."""


class AuthorityExchange(ApiModel):
    """The exchange of the fleet's authority for a new one: `fleetctl cert rotate-authority`.

    The new one is trusted first, then it comes first and signs, then the old one goes.
    """

    incoming: Sha256
    """SHA-256 of the new authority's public key (SubjectPublicKeyInfo)."""
    begun: datetime


class FleetTrust(ApiModel):
    """The trust of the whole fleet: the value of `trust/fleet`. A fleet without it has no certificates."""

    fleet: FleetUid
    authorities: Pem
    """Certificates of the authorities, in PEM. During an exchange there are two; the first one signs."""
    mode: TlsMode = TlsMode.PERMISSIVE
    exchange: AuthorityExchange | None = None


class RevokedCertificate(ApiModel):
    """One revoked certificate: the value of `trust/revoked/<serial>`."""

    identity: Annotated[str, StringConstraints(max_length=300)]
    """Its URI."""
    revoked: datetime
    not_after: datetime
    """Its end, after which the entry is not needed."""
    why: Annotated[str, StringConstraints(max_length=200)] = ""


class EarlierCertificate(ApiModel):
    """A certificate that was replaced, and is valid until it ends."""

    serial: Serial
    not_after: datetime


class IssuedCertificate(ApiModel):
    """The current certificate of an identity: the value of `trust/issued/<role>/<name>`.

    It binds the name to a key: another key gets the name only by a token for the name, or after its removal.
    """

    certificate: Pem
    """In PEM, for the process that asked."""
    serial: Serial
    key_hash: Sha256
    """SHA-256 of its public key (SubjectPublicKeyInfo, RFC 7469)."""
    issued: datetime
    not_after: datetime
    hardware_uuid: Annotated[str, StringConstraints(max_length=100)] = ""
    """The Mac that it was issued to, as it said itself: shown to administrators, and no proof of anything."""
    earlier: Annotated[tuple[EarlierCertificate, ...], Field(max_length=100)] = ()
    """Certificates that were replaced and have not ended yet; a revocation is about them as well."""


class CertificateRequest(ApiModel):
    """A process's request for its next certificate: the value of `csr/<role>/<name>`, which it alone may write."""

    request: Annotated[str, StringConstraints(max_length=16 << 10)]
    """The request (PKCS#10) for a new key, in PEM."""
    hardware_uuid: Annotated[str, StringConstraints(max_length=100)] = ""
    addresses: Annotated[tuple[Address, ...], Field(max_length=32)] = ()
    """IP addresses and DNS names of the process."""
    proof: Annotated[str, StringConstraints(max_length=200)] = ""
    """The request signed with the current key (ECDSA with SHA-256, base64); empty if there is none yet."""


class RefusedRequest(ApiModel):
    """The refusal of a request for a certificate: the value of `trust/refused/<role>/<name>`.

    The signer removes it with the next certificate of the identity, or after ten minutes.
    """

    request_hash: Sha256
    """SHA-256 of the request's PEM text: the process may have asked again meanwhile."""
    why: Annotated[str, StringConstraints(max_length=1000)]
    refused: datetime


class TlsReport(ApiModel):
    """The TLS of a live process, in the value of its lease key. `fleetctl secure` goes on when every process is ready."""

    identity: Annotated[str, StringConstraints(max_length=300)]
    """The URI in its certificate."""
    mode: TlsMode
    """The mode that it follows now."""


class TrustSnapshot(ApiModel):
    """The trust as a process last saw it in the store: the file `trust.json` beside its certificate.

    An agent writes it for its engines. Every process starts with it while the store does not answer.
    """

    fleet: FleetUid
    mode: TlsMode = TlsMode.PERMISSIVE
    revoked: Annotated[tuple[Serial, ...], Field(max_length=100_000)] = ()
    seen: datetime
    """The last time at which the store answered."""


class JoinTokenUse(ApiModel):
    """One use of a join token. The same key and name again are the same use, so that a lost answer costs nothing."""

    key_hash: Sha256
    """SHA-256 of the key that got the certificate (SubjectPublicKeyInfo)."""
    name: ObjectName


class JoinTokenRecord(ApiModel):
    """A join token as it is stored: the value of `secret/JoinToken/<id>`, under a lease that ends with it."""

    id: JoinTokenId
    hash: Sha256
    """SHA-256 of the secret. A secret has 128 random bits, so a slow hash would add no protection."""
    created: datetime
    expires: datetime
    created_by: Annotated[str, StringConstraints(max_length=200)] = ""
    role: JoinRole = "node"
    name: ObjectName | None = None
    """The only name that it gives; None: the name that the machine asks for."""
    pool: ObjectName | None = None
    """The pool whose labels a node gets."""
    labels: Labels = Field(default_factory=dict)
    """Labels that a node gets, those of the pool included."""
    most_uses: Annotated[int, Field(ge=1, le=MAX_TOKEN_USES)] = 1
    uses: Annotated[tuple[JoinTokenUse, ...], Field(max_length=MAX_TOKEN_USES)] = ()

    @property
    def uses_left(self) -> int:
        """The number of uses that are left."""
        return max(0, self.most_uses - len(self.uses))


RequestId = Annotated[str, StringConstraints(pattern=r"^[a-z2-7]{16}$")]
ShortText = Annotated[str, StringConstraints(pattern=r"^[ -~]*$", max_length=100)]


class PendingJoin(ApiModel):
    """A machine without a token that asks to join: the value of `joinrequest/<id>`, which a signer writes under a lease."""

    id: RequestId
    name: ObjectName
    request: Annotated[str, StringConstraints(max_length=16 << 10)]
    """The request (PKCS#10) for its certificate, in PEM."""
    key_hash: Sha256
    hardware_uuid: HardwareUuid
    addresses: Annotated[tuple[Address, ...], Field(max_length=32)] = ()
    source: ShortText = ""
    """The address that it asked from."""
    chip: ShortText = ""
    memory_bytes: Annotated[int, Field(ge=0)] = 0
    created: datetime
    is_issued: bool = False
    """True once its certificate is signed."""


class JoinDecision(ApiModel):
    """An administrator's answer to a request: the value of `joindecision/<id>`, under a lease."""

    key_hash: Sha256
    """The key that was compared; the decision is about no other."""
    is_approved: bool
    decided: datetime
    decided_by: Annotated[str, StringConstraints(max_length=200)] = ""
