"""Sessions of browsers: a signed cookie in place of an API key, which pages cannot send with every request.

A cookie names the key and carries a fingerprint of it. It ends with the key: when that is deleted, rotated away or
expired, or after twelve hours. Nothing is stored, so sessions survive a restart as long as the signing key does.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

from machinery import process_secrets
from machinery.clock import Clock
from machinery.files import write_atomically
from schemas.records import ApiKey

COOKIE: Final = "fleet-session"
LIFE_S: Final = 12 * 3600
_COOKIE_FORM: Final = re.compile(r"([a-z0-9.-]{1,128})\|(\d{1,12})\|([0-9a-f]{32})\|([0-9a-f]{64})")
_SECRET_FILE: Final = "session.key"  # noqa: S105 - a name
_SECRET_BYTES: Final = 32


class Sessions:
    """Makes and checks session cookies."""

    def __init__(
        self, secret: bytes, clock: Clock, keys: Callable[[], Mapping[str, ApiKey] | None]
    ) -> None:
        """`keys` returns the fleet's API keys by name; None before they were read."""
        self._secret = secret
        self._clock = clock
        self._keys = keys

    def make(self, name: str) -> str | None:
        """Return a cookie for a key, by its name; None if the key is unknown."""
        known = self._keys()
        key = None if known is None else known.get(name)
        if key is None:
            return None
        ends = int(self._now().timestamp()) + LIFE_S
        text = f"{name}|{ends}|{self._fingerprint(key.hash)}"
        return f"{text}|{self._sign(text)}"

    def find(self, cookie: str) -> ApiKey | None:
        """Return the key of a cookie; None if the session is over, or was never one."""
        match = _COOKIE_FORM.fullmatch(cookie)
        known = self._keys()
        if match is None or known is None:
            return None
        name, ends, fingerprint, signature = match.groups()
        if not hmac.compare_digest(signature, self._sign(cookie.rpartition("|")[0])):
            return None
        key, now = known.get(name), self._now()
        if key is None or int(ends) <= now.timestamp():
            return None
        if key.expires is not None and key.expires <= now:
            return None
        valid = [key.hash, *(old.hash for old in key.previous if old.expires > now)]
        return key if fingerprint in map(self._fingerprint, valid) else None

    def _now(self) -> datetime:
        return self._clock.now()

    def _fingerprint(self, hash_: str) -> str:
        return hmac.new(self._secret, b"key " + hash_.encode(), hashlib.sha256).hexdigest()[:32]

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret, b"cookie " + text.encode(), hashlib.sha256).hexdigest()


def session_secret(folder: Path | None) -> bytes:
    """Return the signing key in a folder, which is made if it does not exist; a new one without a folder.

    Raises:
        OSError: the file cannot be read or written.
        machinery.process_secrets.OpenSecretError: other users may read it.

    """
    if folder is None:
        return secrets.token_bytes(_SECRET_BYTES)
    path = folder / _SECRET_FILE
    if path.exists():
        found = process_secrets.read_secret_file(path).strip()
        if len(found) >= _SECRET_BYTES:
            return found
    text = secrets.token_hex(_SECRET_BYTES)
    write_atomically(path, text, mode=0o600)
    return text.encode()
