"""The authority's keys in a backup: encrypted with a passphrase (scrypt and AES-256-GCM), never otherwise."""

import base64
import binascii
import os
import secrets
from typing import Annotated, Final, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from identity.authority import Authority, AuthorityError
from identity.authority_folder import AuthorityFolder

LEAST_PASSPHRASE: Final = 12
_LOG2_N: Final = 17
"""128 MiB and a third of a second for each guess (OWASP's first recommendation for scrypt)."""
_SALT_BYTES: Final = 16
_NONCE_BYTES: Final = 12
_AAD: Final = b"mlx-fleet authority 1"
_Text = Annotated[str, StringConstraints(max_length=1 << 20)]


class _Sealed(BaseModel):
    """The text in the backup."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kdf: Literal["scrypt"] = "scrypt"
    log2_n: Annotated[int, Field(ge=10, le=20)] = _LOG2_N
    salt: _Text
    nonce: _Text
    content: _Text


class _Pair(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    certificate: str
    key: str


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    current: _Pair
    following: _Pair | None = None


def new_passphrase() -> str:
    """Return a passphrase of 128 random bits, in groups that a person can copy."""
    text = base64.b32encode(secrets.token_bytes(16)).decode().rstrip("=").lower()
    return "-".join(text[start : start + 5] for start in range(0, len(text), 5))


def seal(folder: AuthorityFolder, passphrase: str) -> str:
    """Return the authorities in the folder, encrypted. Raises AuthorityError."""
    if len(passphrase) < LEAST_PASSPHRASE:
        raise AuthorityError(
            f"the passphrase has {len(passphrase)} characters; expected {LEAST_PASSPHRASE} or more"
        )
    current, following = folder.load(), folder.following()
    pair = None if following is None else _pair(following)
    content = _Content(current=_pair(current), following=pair)
    salt, nonce = os.urandom(_SALT_BYTES), os.urandom(_NONCE_BYTES)
    cipher = AESGCM(_derive(passphrase, salt, _LOG2_N))
    sealed = cipher.encrypt(nonce, content.model_dump_json().encode(), _AAD)
    found = _Sealed(salt=_text(salt), nonce=_text(nonce), content=_text(sealed))
    return found.model_dump_json()


def unseal(text: str, passphrase: str, folder: AuthorityFolder) -> Authority:
    """Write the authorities to the folder, which must have none; return the current one. Raises AuthorityError."""
    try:
        sealed = _Sealed.model_validate_json(text)
        salt, nonce, content = map(_bytes, (sealed.salt, sealed.nonce, sealed.content))
        plain = AESGCM(_derive(passphrase, salt, sealed.log2_n)).decrypt(nonce, content, _AAD)
        pairs = _Content.model_validate_json(plain)
    except InvalidTag as error:
        raise AuthorityError(
            "the passphrase is not that of the backup's authority, or the text was changed"
        ) from error
    except (ValidationError, binascii.Error, ValueError) as error:
        raise AuthorityError("the authority in the backup is damaged") from error
    current = Authority.load(pairs.current.certificate, pairs.current.key.encode())
    folder.write(current)
    if pairs.following is not None:
        following = pairs.following
        folder.write_next(Authority.load(following.certificate, following.key.encode()))
    return current


def _pair(authority: Authority) -> _Pair:
    return _Pair(certificate=authority.pem, key=authority.key_pem().decode())


def _derive(passphrase: str, salt: bytes, log2_n: int) -> bytes:
    return Scrypt(salt=salt, length=32, n=1 << log2_n, r=8, p=1).derive(passphrase.strip().encode())


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
