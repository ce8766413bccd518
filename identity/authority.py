"""The certificate authority of a fleet: a P-256 key that signs the certificates of processes.

Lifetimes and extensions follow RFC 5280 and pass OpenSSL's strict checks.
"""

import contextlib
import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from identity.names import DOMAIN, Identity, IdentityError, Role, parse_identity

AUTHORITY_LIFETIME: Final = timedelta(days=3652)
LEAF_LIFETIME: Final = timedelta(days=30)
BACKDATED: Final = timedelta(hours=1)
"""For clocks that are behind."""
_MAX_REQUEST_BYTES = 16 << 10
_MAX_ADDRESSES = 32
_NAME_PREFIX = "mlx-fleet "
# A fleet's uid is the beginning of its first authority's hash.
_FLEET_DIGITS = 32


UNREADABLE: Final = (
    *(ValueError, TypeError, UnsupportedAlgorithm),
    *(x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)
"""The errors by which cryptography refuses what others have sent; they have no base class."""


class AuthorityError(ValueError):
    """A key, a certificate or a request cannot be used; the message says why and what was expected."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A signed certificate."""

    pem: str
    """The certificate in PEM, without its authority."""
    serial: str
    """Upper-case hexadecimal digits."""
    key_hash: str
    """SHA-256 of its public key (SubjectPublicKeyInfo, RFC 7469), hexadecimal."""
    not_after: datetime


class Authority:
    """A certificate and its key, which sign."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.certificate: Final = certificate
        self._key = key
        self.fleet: Final = fleet_of(certificate)

    @classmethod
    def create(cls, now: datetime, fleet: str = "") -> "Authority":
        """Return an authority with a new key, for a new fleet if none is given."""
        key = ec.generate_private_key(ec.SECP256R1())
        fleet = fleet or spki_hash(key.public_key()).hex()[:_FLEET_DIGITS]
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME_PREFIX + fleet)])
        key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = _builder(key.public_key(), now, AUTHORITY_LIFETIME).subject_name(name)
        builder = builder.issuer_name(name)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        builder = builder.add_extension(_usage(is_authority=True), critical=True)
        builder = builder.add_extension(key_id, critical=False)
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id), critical=False
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, certificate: str, key: bytes, passphrase: bytes | None = None) -> "Authority":
        """Return the authority in two PEM texts; the key may be encrypted.

        Raises:
            AuthorityError: a text is not what it should be, or the passphrase is wrong.

        """
        try:
            loaded = serialization.load_pem_private_key(key, passphrase)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise AuthorityError(
                f"the authority's key cannot be read: {error}. Expected a P-256 key in PEM, and its passphrase if it "
                "is encrypted"
            ) from error
        found = load_certificate(certificate)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise AuthorityError("the authority's key is no elliptic-curve key; expected P-256")
        if spki_hash(found.public_key()) != spki_hash(loaded.public_key()):
            raise AuthorityError("the authority's key does not belong to its certificate")
        return cls(found, loaded)

    @property
    def pem(self) -> str:
        """The certificate in PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    @property
    def spki_hash(self) -> bytes:
        """SHA-256 of the public key, by which joining Macs know the authority."""
        return spki_hash(self.certificate.public_key())

    def key_pem(self, passphrase: bytes | None = None) -> bytes:
        """Return the key in PEM (PKCS#8), encrypted if a passphrase is given."""
        encryption: serialization.KeySerializationEncryption = (
            serialization.NoEncryption()
            if passphrase is None
            else serialization.BestAvailableEncryption(passphrase)
        )
        return self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        )

    def sign(
        self,
        request: bytes,
        identity: Identity,
        now: datetime,
        *,
        addresses: Sequence[str] = (),
        lifetime: timedelta = LEAF_LIFETIME,
    ) -> Leaf:
        """Return a certificate for the key in a request (PKCS#10, PEM).

        Only the key is taken from the request. The names are the identity's, and those of `addresses` that it may
        have: IP addresses and DNS names by which clients that do not know identities reach the process.

        Raises:
            AuthorityError: the request is invalid.

        """
        public_key = read_request(request)
        builder = _builder(public_key, now, lifetime).subject_name(x509.Name([]))
        builder = builder.issuer_name(self.certificate.subject)
        builder = builder.add_extension(
            _subject(identity, allowed_addresses(identity, addresses)), critical=True
        )
        builder = builder.add_extension(
            x509.BasicConstraints(ca=False, path_length=None), critical=True
        )
        builder = builder.add_extension(_usage(is_authority=False), critical=True)
        # etcd's servers and our agents and gateways are clients as well.
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
        builder = builder.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False
        )
        own_id = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own_id.value),
            critical=False,
        )
        signed = builder.sign(self._key, hashes.SHA256())
        return Leaf(
            pem=signed.public_bytes(serialization.Encoding.PEM).decode(),
            serial=serial_text(signed),
            key_hash=spki_hash(public_key).hex(),
            not_after=signed.not_valid_after_utc,
        )


def new_key(identity: Identity | None = None, addresses: Sequence[str] = ()) -> tuple[bytes, bytes]:
    """Return a new P-256 key, and the request (PKCS#10) for its certificate; both in PEM.

    An external authority takes the names from the request. Ours decides about them itself.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    if identity is not None:
        names = _subject(identity, allowed_addresses(identity, addresses))
        request = request.add_extension(names, critical=True)
    return pem, request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def read_request(request: bytes) -> ec.EllipticCurvePublicKey:
    """Return the public key in a request whose signature proves that the sender has the private key.

    Raises:
        AuthorityError: the request is invalid.

    """
    wanted = "expected a certificate signing request (PKCS#10) in PEM for a P-256 key"
    if len(request) > _MAX_REQUEST_BYTES:
        raise AuthorityError(f"the request is larger than {_MAX_REQUEST_BYTES >> 10} KiB; {wanted}")
    try:
        csr = x509.load_pem_x509_csr(request)
        public_key = csr.public_key()
        if not isinstance(public_key, ec.EllipticCurvePublicKey) or not isinstance(
            public_key.curve, ec.SECP256R1
        ):
            raise AuthorityError(f"the request is for another kind of key; {wanted}")
        if not csr.is_signature_valid:
            raise AuthorityError("the request's signature is wrong: its sender has not the key")
    except (*UNREADABLE, InvalidSignature) as error:
        if isinstance(error, AuthorityError):
            raise
        raise AuthorityError(f"the request cannot be read; {wanted}") from error
    return public_key


def load_certificate(pem: str) -> x509.Certificate:
    """Return the first certificate of a PEM text. Raises AuthorityError."""
    try:
        return x509.load_pem_x509_certificate(pem.encode())
    except UNREADABLE as error:
        raise AuthorityError(
            "expected a certificate in PEM, which begins with -----BEGIN CERTIFICATE-----"
        ) from error


def load_authorities(pem: str) -> tuple[x509.Certificate, ...]:
    """Return the certificates of a bundle, in order. Raises AuthorityError: there is none."""
    try:
        return tuple(x509.load_pem_x509_certificates(pem.encode()))
    except UNREADABLE as error:
        raise AuthorityError(
            "expected certificates of authorities in PEM, which begin with -----BEGIN CERTIFICATE-----"
        ) from error


def is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Return whether the authority's key has signed the certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def life_of(certificate: x509.Certificate) -> tuple[datetime, datetime]:
    """Return beginning and end of the certificate's use: it is valid a little before, for clocks that are behind."""
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return (start + BACKDATED if start + BACKDATED < end else start), end


def addresses_of(certificate: x509.Certificate) -> frozenset[str]:
    """Return the IP addresses and DNS names in a certificate, its identity's DNS name among them."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    return frozenset((*names.get_values_for_type(x509.DNSName), *addresses))


def allowed_addresses(identity: Identity, asked: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses that the identity's certificate may have.

    The address that a Mac claims cannot be checked, and a client that knows no identities, such as a browser, trusts
    it: a stolen node could so answer for the gateway. Nodes have clients of their own fleet only, which expect the DNS
    name of an identity; no certificate has such a name of another, or a wildcard.
    """
    if identity.role in (Role.NODE, Role.ADMIN):
        return ()
    return tuple(
        one
        for one in asked
        if "*" not in one and not f".{one.lower().rstrip('.')}".endswith(f".{DOMAIN}")
    )


def fleet_of(authority: x509.Certificate) -> str:
    """Return the uid of the authority's fleet. Raises AuthorityError."""
    names = authority.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    name = str(names[0].value) if names else ""
    if not name.startswith(_NAME_PREFIX):
        raise AuthorityError(
            f"the certificate is of {name or 'an authority without a name'}, not of a fleet's authority"
        )
    return name.removeprefix(_NAME_PREFIX)


def identity_of(certificate: x509.Certificate) -> Identity:
    """Return the identity in a process's certificate. Raises AuthorityError: it has none."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        if len(uris) != 1:
            raise AuthorityError(
                f"expected one identity in the certificate, found {len(uris)} URIs"
            )
        return parse_identity(uris[0])
    except x509.ExtensionNotFound as error:
        raise AuthorityError("the certificate has no names, so it is no process's") from error
    except IdentityError as error:
        raise AuthorityError(str(error)) from error
    except UNREADABLE as error:
        if isinstance(error, AuthorityError):
            raise
        raise AuthorityError("the names in the certificate cannot be read") from error


def spki_hash(key: object) -> bytes:
    """Return SHA-256 of a public key's SubjectPublicKeyInfo (RFC 7469)."""
    assert isinstance(key, ec.EllipticCurvePublicKey)
    encoded = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(encoded).digest()


def serial_text(certificate: x509.Certificate) -> str:
    """Return the serial number as `SSLObject.getpeercert()` writes it."""
    text = f"{certificate.serial_number:X}"
    return text.zfill(len(text) + len(text) % 2)


def pem_of(certificate: x509.Certificate) -> str:
    """Return the certificate in PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def request_for(key: bytes) -> bytes:
    """Return a new request (PKCS#10, PEM) for a key in PEM. Raises AuthorityError: it is no P-256 key."""
    try:
        pem_private_key = serialization.load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise AuthorityError(f"the key cannot be read: {error}") from error
    if not isinstance(pem_private_key, ec.EllipticCurvePrivateKey):
        raise AuthorityError("the key is no elliptic-curve key; expected P-256")
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(pem_private_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _builder(
    key: ec.EllipticCurvePublicKey, now: datetime, lifetime: timedelta
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - BACKDATED).not_valid_after(now + lifetime)


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(identity: Identity, addresses: Sequence[str]) -> x509.SubjectAlternativeName:
    if len(addresses) > _MAX_ADDRESSES:
        raise AuthorityError(f"{len(addresses)} addresses; at most {_MAX_ADDRESSES} are allowed")
    own = (x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.dns_name))
    return x509.SubjectAlternativeName([*own, *map(_address, dict.fromkeys(addresses))])


def _address(text: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(text))
    try:
        return x509.DNSName(text)
    except ValueError as error:
        raise AuthorityError(f"{text!r} is neither an IP address nor a DNS name") from error
