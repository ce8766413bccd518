"""Proof of the current key: a request for the next certificate is signed with it. And the name of a request, its hash."""

import base64
import binascii
import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from identity.authority import AuthorityError, load_certificate

_ALGORITHM = ec.ECDSA(hashes.SHA256())


def make_proof(identity_pem: bytes, request: str) -> str:
    """Return the signature of a request by the key in an identity file, in base64. Raises AuthorityError."""
    try:
        key = serialization.load_pem_private_key(identity_pem, None)
    except (ValueError, TypeError) as error:
        raise AuthorityError(f"the current key cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise AuthorityError("the current key is no elliptic-curve key")
    return base64.b64encode(key.sign(request.encode(), _ALGORITHM)).decode()


def request_hash(request: str) -> str:
    """Return the hash by which a refusal names its request."""
    return hashlib.sha256(request.encode()).hexdigest()


def verify_proof(certificate: str, request: str, proof: str) -> bool:
    """Return whether the key of the certificate (PEM) has signed the request."""
    key = load_certificate(certificate).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return is_signed_with(key, request, proof)


def is_signed_with(key: ec.EllipticCurvePublicKey, text: str, proof: str) -> bool:
    """Return whether the key has signed a text, as `make_proof` does."""
    try:
        key.verify(base64.b64decode(proof, validate=True), text.encode(), _ALGORITHM)
    except (InvalidSignature, binascii.Error, ValueError):
        return False
    return True


def poll_text(request_id: str, authority_hash: bytes) -> str:
    """Return the text that a machine signs when it asks about its request to join.

    It names the authority that the machine has seen: a server in between with another one cannot use the signature.
    """
    return f"mlx-fleet join request {request_id} at authority {authority_hash.hex()}"
