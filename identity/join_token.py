"""Join tokens: one text with all that a Mac needs to trust the fleet, and to be trusted by it once. Pure.

    mf1.<SHA-256 of the authority's key, 52 characters>.<id, 8>.<secret, 26>

All parts are base32 in lower case without padding (RFC 4648). The hash comes first because it is checked first: the
secret is sent only to a server that the authority has certified (as kubeadm does with the hash of its CA).
"""

import base64
import binascii
import hashlib
import hmac
import re
from dataclasses import dataclass, field

_FORM = re.compile(r"mf1\.([a-z2-7]{52})\.([a-z2-7]{8})\.([a-z2-7]{26})")
_MAX_LENGTH = 200
_HASH_BYTES, _ID_BYTES, _SECRET_BYTES = 32, 5, 16


class TokenError(ValueError):
    """A text is no join token; the message never contains it."""


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A join token."""

    authority_hash: bytes
    """SHA-256 of the authority's public key (SubjectPublicKeyInfo, RFC 7469)."""
    id: str
    """Its public name."""
    secret: bytes = field(repr=False)
    """128 random bits."""

    def render(self) -> str:
        """Return the text that a person copies."""
        return f"mf1.{_encode(self.authority_hash)}.{self.id}.{self.secret_text}"

    @property
    def secret_text(self) -> str:
        """The secret as it is in the token, and as it is sent."""
        return _encode(self.secret)


def new_token(authority_hash: bytes, entropy: bytes) -> JoinToken:
    """Return a token made of 21 random bytes."""
    if len(authority_hash) != _HASH_BYTES or len(entropy) != _ID_BYTES + _SECRET_BYTES:
        raise ValueError("expected a SHA-256 and 21 random bytes")
    return JoinToken(authority_hash, _encode(entropy[:_ID_BYTES]), entropy[_ID_BYTES:])


def parse_token(text: str) -> JoinToken:
    """Return the token in a text.

    Raises:
        TokenError: the text has another form.

    """
    found = _FORM.fullmatch(text.strip()[:_MAX_LENGTH])
    if found is None:
        raise TokenError(
            "this is no join token; expected the text that `fleetctl token create` printed, as in "
            "mf1.<52 characters>.<8 characters>.<26 characters>"
        )
    try:
        return JoinToken(_decode(found[1]), found[2], _decode(found[3]))
    except binascii.Error as error:
        raise TokenError("this join token has a typing mistake") from error


def secret_hash(secret_text: str) -> str:
    """Return what the store has of a secret: its SHA-256. A secret has 128 random bits, so a slow hash adds nothing."""
    return hashlib.sha256(secret_text.encode()).hexdigest()


def is_secret(secret_text: str, stored_hash: str) -> bool:
    """Return whether a secret has the stored hash; takes the same time for every answer."""
    return hmac.compare_digest(secret_hash(secret_text), stored_hash)


def _encode(raw: bytes) -> str:
    return base64.b32encode(raw).decode().lower().rstrip("=")


def _decode(text: str) -> bytes:
    return base64.b32decode(text.upper() + "=" * (-len(text) % 8))
