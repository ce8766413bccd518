"""The key that waits for its certificate, on disk before its request leaves: a crash at any moment loses no key.

pending.pem in the folder of the identity: the private key and its request (PKCS#10), 0600.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from identity.authority import UNREADABLE, new_key, spki_hash
from identity.folder import FolderError, IdentityFolder
from identity.names import Identity, IdentityError, parse_identity
from machinery import process_secrets
from machinery.files import make_private_folder, write_atomically

_REQUEST = "-----BEGIN CERTIFICATE REQUEST-----"


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRequest:
    """A new key, and the request for its certificate."""

    identity: Identity
    key: bytes = field(repr=False)
    request: str
    key_hash: str
    """SHA-256 of the public key, as in `IssuedCertificate`."""


def read_pending(folder: IdentityFolder) -> PendingRequest | None:
    """Return what waits in the folder; None if nothing does, or if the file cannot be used."""
    with contextlib.suppress(OSError, IdentityError, x509.ExtensionNotFound, *UNREADABLE):
        return _parse(process_secrets.read_secret_file(folder.pending).decode())
    return None


def write_pending(
    folder: IdentityFolder, identity: Identity, addresses: Sequence[str]
) -> PendingRequest:
    """Make a new key for the identity, and return it with its request once both are on disk. Raises FolderError."""
    key, request = new_key(identity, addresses)
    text = key.decode() + request.decode()
    try:
        make_private_folder(folder.path)
        write_atomically(folder.pending, text, mode=0o600)
    except OSError as error:
        raise FolderError(
            f"{folder.pending} cannot be written: {error.strerror or error}"
        ) from error
    return _parse(text)


def _parse(text: str) -> PendingRequest:
    key, mark, request = text.partition(_REQUEST)
    private = serialization.load_pem_private_key(key.encode(), None)
    asked = x509.load_pem_x509_csr((mark + request).encode())
    if spki_hash(asked.public_key()) != spki_hash(private.public_key()):
        raise ValueError("the request is for another key")
    names = asked.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
    return PendingRequest(
        identity=parse_identity(uri),
        key=key.encode(),
        request=mark + request,
        key_hash=spki_hash(private.public_key()).hex(),
    )
