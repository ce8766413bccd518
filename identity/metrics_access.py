"""Access to metrics and health beyond loopback: by an identity of the fleet, a ticket, or Prometheus' bearer token."""

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from identity.names import Role
from identity.peers import peer_of
from machinery import process_secrets
from machinery.connection_limits import is_loopback
from machinery.http_server import SSL_OBJECT
from machinery.options import FILE, Option, options
from store.tickets import TicketChecker, TicketDenial

INSECURE_METRICS: Final = "--insecure-metrics"
"""The flag that shows metrics to every client."""
# A token is guessed over the network, so 128 bits in base32 are enough.
_TOKEN = re.compile(r"[!-~]{26,512}")
_BEARER = re.compile(r"bearer ([!-~]{1,600})", re.IGNORECASE | re.ASCII)
_FORM = (
    "expected one line of 26 to 512 characters without spaces, such as from `openssl rand -hex 32`"
)


class TokenFileError(Exception):
    """The file with the metrics token cannot be used; the message says why."""


class MetricsToken:
    """The bearer token in a file, which is read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            TokenFileError: it cannot be used.

        """
        self._path = path
        self._state = self._stat()
        self._token = self._read()

    @property
    def token(self) -> str:
        """The token. Raises TokenFileError: the file has changed and cannot be used."""
        state = self._stat()
        if state != self._state:
            self._token = self._read()
            self._state = state
        return self._token

    def is_valid(self, token: str) -> bool:
        """Return whether the text is the token, in constant time; False while the file cannot be used."""
        try:
            own = self.token
        except TokenFileError:
            return False
        return hmac.compare_digest(_digest(own), _digest(token))

    def _stat(self) -> tuple[int, ...]:
        try:
            result = self._path.stat()
        except OSError:
            return ()
        return (result.st_mtime_ns, result.st_size, result.st_ino, result.st_mode)

    def _read(self) -> str:
        try:
            text = process_secrets.read_secret_file(self._path).decode().strip()
        except process_secrets.OpenSecretError as error:
            raise TokenFileError(str(error)) from error
        except OSError as error:
            raise TokenFileError(
                f"{self._path} cannot be read: {error.strerror or error}"
            ) from error
        except UnicodeDecodeError as error:
            raise TokenFileError(f"{self._path} holds no token; {_FORM}") from error
        if not _TOKEN.fullmatch(text):
            raise TokenFileError(f"{self._path} holds no token; {_FORM}")
        return text


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessDenial:
    """A refusal; `status` is an HTTP status."""

    status: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAccess:
    """Decides which clients may read the metrics and the health of one process."""

    tickets: TicketChecker
    roles: frozenset[Role]
    """The roles that may read them."""
    token: MetricsToken | None = None
    is_open: bool = False
    """True if every client may: --insecure-metrics."""

    async def denial(self, scope: Mapping[str, Any]) -> AccessDenial | None:
        """Return the refusal of a request (an ASGI scope); None if it may read."""
        if self.is_open or is_local(scope):
            return None
        peer = peer_of(scope.get("state", {}).get(SSL_OBJECT))
        if peer is not None and peer.identity.role in self.roles:
            return None
        authorization = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        if authorization:
            return await self._check(authorization)
        if peer is not None:
            return AccessDenial(status=403, message=f"{peer.identity.uri}: {self._rule()}")
        return AccessDenial(status=401, message=self._rule())

    async def _check(self, authorization: str) -> AccessDenial | None:
        bearer = _BEARER.fullmatch(authorization)
        if self.token is not None and bearer is not None and self.token.is_valid(bearer[1]):
            return None
        found = await self.tickets.check(authorization)
        if not isinstance(found, TicketDenial):
            return None
        status = found.status if found.status != 401 else 403
        return AccessDenial(status=status, message=f"{found.why}; {self._rule()}")

    def _rule(self) -> str:
        roles = " or ".join(sorted(self.roles))
        return (
            f"other machines read metrics and health with a certificate of the fleet (role {roles}), a ticket of "
            "fleetctl, or the token in --metrics-token-file as `Authorization: Bearer TOKEN`; "
            f"{INSECURE_METRICS} shows them to every client"
        )


def is_local(scope: Mapping[str, Any]) -> bool:
    """Return whether the client is on this machine: on loopback, at the server's own address, or on a unix socket."""
    client, server = scope.get("client"), scope.get("server")
    if not client:
        return True
    try:
        # No other machine can hold a TCP connection with the address that it connects to.
        return is_loopback(client[0]) or bool(server and client[0] == server[0])
    except ValueError:
        return False


metrics_flags: Final = options(
    "FLEET",
    Option(
        "--metrics-token-file",
        "File (mode 0600) with the bearer token for metrics on other machines: agents and gateways ask for it, "
        "Prometheus and reconcilers without an identity send it.",
        type=FILE,
    ),
    Option(
        INSECURE_METRICS,
        "Show metrics and health to every machine that reaches this process.",
        is_flag=True,
    ),
)
"""Adds --metrics-token-file, for `read_metrics_token`, and --insecure-metrics."""


def read_metrics_token(path: Path | None) -> MetricsToken | None:
    """Return the token of --metrics-token-file; None without it.

    Raises:
        click.UsageError: the file cannot be used.

    """
    if path is None:
        return None
    try:
        return MetricsToken(path.expanduser().absolute())
    except TokenFileError as error:
        raise click.UsageError(f"--metrics-token-file: {error}") from error
