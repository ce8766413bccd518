"""Sessions of browsers: a signed cookie in place of an API key, which pages cannot send with every request.

A cookie names the key and carries a fingerprint of it. It ends with the key: when that is deleted, rotated away or
expired; after twelve hours; and after one hour without use. The cookie of a login link names a user in place of a key.
A cookie carries the time of its last use and is renewed, so that sessions survive a restart as long as the signing key
does. Only sessions that were ended by a logout are stored, until they would have ended by themselves.
"""

import hashlib
import hmac
import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from machinery import process_secrets
from machinery.clock import Clock
from machinery.files import write_atomically
from schemas.records import ApiKey, Role

log = logging.getLogger(__name__)
T = TypeVar("T")

COOKIE: Final = "fleet-session"
LIFE_S: Final = 12 * 3600
IDLE_S: Final = 3600
"""A session that is not used for so long is over."""
_RENEW_S: Final = 300
"""The time of the last use in a cookie is at most this old."""
_COOKIE_FORM: Final = re.compile(
    r"((?:link:)?[a-z0-9.-]{1,128})\|(\d{1,12})\|(\d{1,12})\|([0-9a-f]{32})\|([0-9a-f]{32})\|([0-9a-f]{64})"
)
_SECRET_FILE: Final = "session.key"  # noqa: S105 - a name
_SECRET_BYTES: Final = 32
_ENDED_FILE: Final = "session-ended.json"
_MOST_SECRETS: Final = 1000
_MOST_SESSIONS: Final = 10_000
_LINK: Final = "link:"
"""Begins the name in a cookie that a login link was exchanged for; no key has such a name."""
_NO_NAME: Final = re.compile(r"[^a-z0-9.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A session that has not ended."""

    name: str
    """The name of the key, or the user of the login link."""
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cookie:
    """The parts of a cookie that we signed."""

    name: str
    ends_s: int
    used_s: int
    """The last use that it knows of."""
    id: str
    fingerprint: str


class _Ended(msgspec.Struct):
    """Sessions that were ended by a logout."""

    ends_s: dict[str, int] = msgspec.field(default_factory=dict)
    """By id, the time at which each would have ended."""
    until_s: int = 0
    """All sessions that would have ended by this time are ended."""

    def has(self, id_: str, ends_s: int) -> bool:
        """Return whether the session was ended."""
        return id_ in self.ends_s or ends_s <= self.until_s


def _read_ended(path: Path | None) -> _Ended:
    """Return the ended sessions of a file; none if it does not exist."""
    if path is None:
        return _Ended()
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Ended)
    except FileNotFoundError:
        return _Ended()
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("ended sessions not read", extra={"path": str(path), "why": str(error)})
        return _Ended()


class Sessions:
    """Makes and checks session cookies."""

    def __init__(
        self,
        secret: bytes,
        clock: Clock,
        keys: Callable[[], Mapping[str, ApiKey] | None],
        folder: Path | None = None,
        *,
        most: int = _MOST_SESSIONS,
    ) -> None:
        """Read the sessions that were ended.

        Args:
            secret: The signing key.
            clock: The clock.
            keys: Returns the fleet's API keys by name; None before they were read.
            folder: Folder in which ended sessions are kept; None: a restart forgets them.
            most: Sessions that are remembered by their ids.

        """
        self._secret = secret
        self._clock = clock
        self._keys = keys
        self._most = most
        self._secrets: OrderedDict[str, str] = OrderedDict()
        self._used: OrderedDict[str, float] = OrderedDict()
        self._file = None if folder is None else folder / _ENDED_FILE
        self._ended = _read_ended(self._file)

    def keep_secret(self, cookie: str, secret: str) -> None:
        """Keep the API key that a session began with, in memory alone, for its chats."""
        found = self._read(cookie)
        if found is not None:
            _put(self._secrets, found.id, secret, _MOST_SECRETS)

    def secret_of(self, cookie: str) -> str:
        """Return the API key of a session; empty if it is over, or began by a link or before a restart."""
        found = self._read(cookie)
        if found is None:
            return ""
        if found.id in self._secrets and self.find(cookie) is None:
            del self._secrets[found.id]
        return self._secrets.get(found.id, "")

    def end(self, cookie: str) -> None:
        """End a session, and forget its API key."""
        found = self._read(cookie)
        if found is not None:
            self._secrets.pop(found.id, None)
            # Forget sessions that would be over by now; when there are too many others, end all
            # that began as early.
            now_s, ended = self._now().timestamp(), self._ended
            ended.ends_s = {id_: ends_s for id_, ends_s in ended.ends_s.items() if ends_s > now_s}
            if len(ended.ends_s) >= self._most:
                by_end = sorted(ended.ends_s, key=ended.ends_s.__getitem__)
                ended.until_s = ended.ends_s[by_end[self._most // 2]]
                ended.ends_s = {
                    k: end_s for k, end_s in ended.ends_s.items() if end_s > ended.until_s
                }
            self._ended.ends_s[found.id] = found.ends_s
            self._save_ended()

    def _save_ended(self) -> None:
        if self._file is None:
            return
        try:
            write_atomically(self._file, msgspec.json.encode(self._ended).decode())
        except OSError as error:
            log.warning("ended sessions not saved", extra={"why": error.strerror})

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
        now_s = int(self._now().timestamp())
        return self._write(
            _Cookie(
                name=name,
                ends_s=now_s + LIFE_S,
                used_s=now_s,
                id=secrets.token_hex(16),
                fingerprint=fingerprint,
            )
        )

    def _write(self, cookie: _Cookie) -> str:
        parts = (cookie.name, cookie.ends_s, cookie.used_s, cookie.id, cookie.fingerprint)
        text = "|".join(map(str, parts))
        return f"{text}|{self._sign(text)}"

    def _read(self, cookie: str) -> _Cookie | None:
        """Return the parts of a cookie; None if we did not sign it."""
        match = _COOKIE_FORM.fullmatch(cookie)
        if match is None:
            return None
        name, ends, used, id_, fingerprint, signature = match.groups()
        if not hmac.compare_digest(signature, self._sign(cookie.rpartition("|")[0])):
            return None
        return _Cookie(
            name=name, ends_s=int(ends), used_s=int(used), id=id_, fingerprint=fingerprint
        )

    def find(self, cookie: str) -> Session | None:
        """Return the session of a cookie, and note that it is used; None if it is over, or was never one."""
        found = self._read(cookie)
        session = None if found is None else self._check(found)
        if found is None or not isinstance(session, Session):
            return None
        _put(self._used, found.id, self._now().timestamp(), self._most)
        return session

    def end_reason(self, cookie: str) -> str:
        """Return why the session of a cookie is over; empty if it is not, or was never one."""
        found = self._read(cookie)
        reason = "" if found is None else self._check(found)
        return "" if isinstance(reason, Session) else reason

    def _check(self, cookie: _Cookie) -> Session | str:
        """Return the session of a cookie, or why it is over."""
        now_s = self._now().timestamp()
        if self._ended.has(cookie.id, cookie.ends_s):
            return "you have logged out"
        if cookie.ends_s <= now_s:
            return f"it has lasted {LIFE_S // 3600} hours"
        if max(cookie.used_s, self._used.get(cookie.id, 0.0)) + IDLE_S <= now_s:
            return f"it was not used for {IDLE_S // 60} minutes"
        if cookie.name.startswith(_LINK):
            return Session(name=cookie.name.removeprefix(_LINK), role="admin")
        known = self._keys()
        if known is None:
            return ""  # they were not read yet
        key = known.get(cookie.name)
        return f"the key {cookie.name} was deleted" if key is None else self._of_key(key, cookie)

    def renewed(self, cookie: str) -> tuple[str, int] | None:
        """Return a cookie that knows of the use now, and the rest of its life in seconds; None if that is not due."""
        found = self._read(cookie)
        now_s = int(self._now().timestamp())
        if found is None or found.used_s + _RENEW_S > now_s or self.find(cookie) is None:
            return None
        return self._write(replace(found, used_s=now_s)), found.ends_s - now_s

    def _of_key(self, key: ApiKey, cookie: _Cookie) -> Session | str:
        now = self._now()
        if key.expires is not None and key.expires <= now:
            return f"the key {key.name} has expired"
        valid = [key.hash, *(old.hash for old in key.previous if old.expires > now)]
        if cookie.fingerprint not in map(self._fingerprint, valid):
            return f"the key {key.name} was rotated"
        return Session(name=key.name, role=key.role)

    def _now(self) -> datetime:
        return self._clock.now()

    def _fingerprint(self, hash_: str) -> str:
        return hmac.new(self._secret, b"key " + hash_.encode(), hashlib.sha256).hexdigest()[:32]

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret, b"cookie " + text.encode(), hashlib.sha256).hexdigest()


def _put(kept: OrderedDict[str, T], key: str, value: T, most: int) -> None:
    """Set a value as the newest one, and drop the oldest ones beyond a number."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)


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
