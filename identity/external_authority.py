"""Certificates that an external authority has signed (step-ca, an own PKI): what must hold before one is used.

The authority's certificate is in `trust/fleet`, and its key nowhere in the fleet. Processes ask as always, at
`csr/<role>/<name>`, with their names in the request; a person takes it to the authority and installs the answer.
"""

from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from identity.authority import (
    UNREADABLE,
    AuthorityError,
    Leaf,
    addresses_of,
    allowed_addresses,
    identity_of,
    is_signed_by,
    load_authorities,
    read_request,
    serial_text,
    spki_hash,
)
from identity.names import Identity
from schemas.trust import MAX_PEM

_LEAST_LIFE: Final = timedelta(hours=1)
_MOST_INTERMEDIATES: Final = 4


def read_signed(
    chain: str, identity: Identity, request: str, authorities: str, now: datetime
) -> Leaf:
    """Return the certificate in a PEM text, with intermediate authorities after it, if the fleet can use it.

    Raises:
        AuthorityError: something about it is wrong; the message says what, and what was expected.

    """
    if len(chain) > MAX_PEM:
        raise AuthorityError(f"the file is larger than {MAX_PEM >> 10} KiB")
    try:
        leaf, *intermediates = load_authorities(chain)
        key_hash = spki_hash(read_request(request.encode()))
        if spki_hash(leaf.public_key()) != key_hash:
            raise AuthorityError(
                f"it is for another key than the request of {identity.uri}; sign what `fleetctl cert csr` prints"
            )
        if identity_of(leaf) != identity:
            raise AuthorityError(
                f"it is for {identity_of(leaf).uri}; expected the URI {identity.uri}"
            )
        found = addresses_of(leaf)
        if identity.dns_name not in found:
            raise AuthorityError(f"the DNS name {identity.dns_name} is missing in it")
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        if not (names.critical or list(leaf.subject)):
            raise AuthorityError(
                "its subjectAltName must be critical, because its subject is empty"
            )
        others = found - {identity.dns_name}
        refused = others - set(allowed_addresses(identity, tuple(others)))
        if refused:
            raise AuthorityError(
                f"a certificate of the role {identity.role} must not have {', '.join(sorted(refused))}"
            )
        if leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME):
            raise AuthorityError(
                "it has a common name (CN), which etcd's JSON gateway refuses beside a password; sign it with an empty "
                "subject"
            )
        _check_use(leaf)
        if leaf.not_valid_before_utc > now or leaf.not_valid_after_utc < now + _LEAST_LIFE:
            raise AuthorityError(
                f"it is valid from {leaf.not_valid_before_utc:%Y-%m-%d %H:%M} to {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} "
                "UTC; expected at least an hour from now on"
            )
        _check_chain(leaf, intermediates, load_authorities(authorities))
        return Leaf(
            pem=chain,
            serial=serial_text(leaf),
            key_hash=key_hash.hex(),
            not_after=leaf.not_valid_after_utc,
        )
    except UNREADABLE as error:
        if isinstance(error, AuthorityError):
            raise
        raise AuthorityError(f"a certificate in it cannot be read: {error}") from error


def _check_use(leaf: x509.Certificate) -> None:
    extensions = leaf.extensions
    try:
        usage = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        extensions.get_extension_for_class(x509.AuthorityKeyIdentifier)
    except x509.ExtensionNotFound as error:
        raise AuthorityError(
            f"the extension {error.oid._name} is missing in it"  # noqa: SLF001 - its only readable name
        ) from error
    wanted = {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    if not wanted <= set(usage):
        raise AuthorityError("it must be for servers and clients (serverAuth, clientAuth)")
    if _is_authority(leaf):
        raise AuthorityError("it is the certificate of an authority, not of a process")


def _check_chain(
    leaf: x509.Certificate,
    intermediates: list[x509.Certificate],
    trusted: tuple[x509.Certificate, ...],
) -> None:
    if len(intermediates) > _MOST_INTERMEDIATES:
        raise AuthorityError(f"there are more than {_MOST_INTERMEDIATES} intermediate authorities")
    last = leaf
    for certificate in intermediates:
        if not (_is_authority(certificate) and is_signed_by(last, certificate)):
            raise AuthorityError(
                "the certificates in the file are no chain: each must be signed by the next one"
            )
        last = certificate
    for certificate in (
        *intermediates,
        *(certificate for certificate in trusted if is_signed_by(last, certificate)),
    ):
        check_authority(certificate)
    if not any(is_signed_by(last, certificate) for certificate in trusted):
        names = " or ".join(certificate.subject.rfc4514_string() for certificate in trusted)
        raise AuthorityError(f"no authority of the fleet has signed it; expected {names}")


def check_authority(certificate: x509.Certificate) -> None:
    """Refuse an authority that TLS libraries refuse in their strict mode (RFC 5280, 4.2.1), as ours do.

    Raises:
        AuthorityError: an extension is missing or not as it must be; the message says which.

    """
    name = certificate.subject.rfc4514_string()
    extensions = certificate.extensions
    try:
        constraints = extensions.get_extension_for_class(x509.BasicConstraints)
        usage = extensions.get_extension_for_class(x509.KeyUsage)
        extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        if certificate.subject != certificate.issuer:
            extensions.get_extension_for_class(x509.AuthorityKeyIdentifier)
    except x509.ExtensionNotFound as error:
        raise AuthorityError(
            f"the certificate of the authority {name} has no extension {error.oid._name}"  # noqa: SLF001 - as above
        ) from error
    if not (constraints.critical and constraints.value.ca and usage.value.key_cert_sign):
        raise AuthorityError(
            f"the certificate of {name} is not an authority's: basicConstraints must be critical with CA true, and "
            "keyUsage must have keyCertSign"
        )


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False
