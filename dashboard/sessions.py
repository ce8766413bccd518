"""Sessions of browsers: a signed cookie in place of an API key, which pages cannot send with every request.

A cookie names the key and carries a fingerprint of it. It ends with the key: when that is deleted, rotated away or
expired, or after twelve hours. The cookie of a login link names a user in place of a key. Nothing is stored on disk, so
sessions survive a restart as long as the signing key does.
"""

import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from machinery import process_secrets
from machinery.clock import Clock
from machinery.files import write_atomically
from schemas.records import ApiKey, Role

COOKIE: Final = "fleet-session"
LIFE_S: Final = 12 * 3600
_COOKIE_FORM: Final = re.compile(
    r"((?:link:)?[a-z0-9.-]{1,128})\|(\d{1,12})\|([0-9a-f]{32})\|([0-9a-f]{64})"
)
_SECRET_FILE: Final = "session.key"  # noqa: S105 - a name
_SECRET_BYTES: Final = 32
_MOST_SECRETS: Final = 1000
_LINK: Final = "link:"
"""Begins the name in a cookie that a login link was exchanged for; no key has such a name."""
_NO_NAME: Final = re.compile(r"[^a-z0-9.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A session that has not ended."""

    name: str
    """The name of the key, or the user of the login link."""
    role: Role


class Sessions:
    """Makes and checks session cookies."""

    def __init__(
        self, secret: bytes, clock: Clock, keys: Callable[[], Mapping[str, ApiKey] | None]
    ) -> None:
        """`keys` returns the fleet's API keys by name; None before they were read."""
        self._secret = secret
        self._clock = clock
        self._keys = keys
        self._secrets: OrderedDict[str, str] = OrderedDict()

    def keep_secret(self, cookie: str, secret: str) -> None:
        """Keep the API key that a session began with, in memory alone, for its chats."""
        self._secrets[_digest(cookie)] = secret
        while len(self._secrets) > _MOST_SECRETS:
            self._secrets.popitem(last=False)

    def secret_of(self, cookie: str) -> str:
        """Return the API key of a session; empty if it is over, or began by a link or before a restart."""
        digest = _digest(cookie)
        if digest in self._secrets and self.find(cookie) is None:
            del self._secrets[digest]
        return self._secrets.get(digest, "")

    def end(self, cookie: str) -> None:
        """Forget the API key of a session."""
        self._secrets.pop(_digest(cookie), None)

    def make(self, name: str) -> str | None:
        """Return a cookie for a key, by its name; None if the key is unknown."""
        known = self._keys()
        key = None if known is None else known.get(name)
        if key is None:
            return None
        return self._cookie(name, self._fingerprint(key.hash))

    def make_admin(self, user: str) -> str:
        """Return a cookie with the role admin for a user that may write to the store."""
        name = _LINK + (_NO_NAME.sub("-", user.lower())[:120] or "admin")
        return self._cookie(name, self._fingerprint(name))

    def _cookie(self, name: str, fingerprint: str) -> str:
        text = f"{name}|{int(self._now().timestamp()) + LIFE_S}|{fingerprint}"
        return f"{text}|{self._sign(text)}"

    def find(self, cookie: str) -> Session | None:
        """Return the session of a cookie; None if it is over, or was never one."""
        match = _COOKIE_FORM.fullmatch(cookie)
        if match is None:
            return None
        name, ends, fingerprint, signature = match.groups()
        is_ours = hmac.compare_digest(signature, self._sign(cookie.rpartition("|")[0]))
        if not is_ours or int(ends) <= self._now().timestamp():
            return None
        if name.startswith(_LINK):
            return Session(name=name.removeprefix(_LINK), role="admin")
        key = (self._keys() or {}).get(name)
        return None if key is None else self._of_key(key, fingerprint)

    def _of_key(self, key: ApiKey, fingerprint: str) -> Session | None:
        now = self._now()
        if key.expires is not None and key.expires <= now:
            return None
        valid = [key.hash, *(old.hash for old in key.previous if old.expires > now)]
        if fingerprint not in map(self._fingerprint, valid):
            return None
        return Session(name=key.name, role=key.role)

    def _now(self) -> datetime:
        return self._clock.now()

    def _fingerprint(self, hash_: str) -> str:
        return hmac.new(self._secret, b"key " + hash_.encode(), hashlib.sha256).hexdigest()[:32]

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret, b"cookie " + text.encode(), hashlib.sha256).hexdigest()


def _digest(cookie: str) -> str:
    return hashlib.sha256(cookie.encode("latin-1", "replace")).hexdigest()


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
