"""Connections to the fleet's processes: the TLS context and the name that a process at an address must prove."""

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from identity.credentials import Credentials, PeerContext
from identity.metrics_access import MetricsToken
from identity.names import Identity, IdentityError, Role, name_of_gateway, parse_identity
from machinery.connection_limits import is_loopback
from machinery.tls_client import Trust
from schemas.records import GatewayLease
from schemas.trust import TlsMode, TlsReport

_DIALED: Final = (Role.NODE, Role.GATEWAY, Role.RECONCILER, Role.DASHBOARD)
_HOW = "Give the folder of an identity with --identity-dir"


class UntrustedAddressError(Exception):
    """A process must not be dialled at an address; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """The TLS arguments of a connection, as aiohttp takes them."""

    ssl: Trust = True
    server_hostname: str | None = None
    """The name that the server must prove; None: that of the URL."""
    token: MetricsToken | None = None
    """The token for its metrics; None: it needs none, or must not be sent one."""


class Dialer:
    """Decides how to dial processes; follows the identity, the mode and revocations."""

    def __init__(
        self,
        credentials: Credentials | None = None,
        *,
        trust: Trust = True,
        token: MetricsToken | None = None,
    ) -> None:
        """`trust`: the authorities of gateways that serve a certificate of their own; `token`: for their metrics."""
        self._own: Final = credentials
        self._token = token
        self._trust = trust
        self._revoked: frozenset[str] = frozenset()
        self._contexts: dict[Role, PeerContext] = {}
        if credentials is not None:
            self._revoked = credentials.trust().revoked
            self._contexts = {role: credentials.client(frozenset({role})) for role in _DIALED}
            credentials.on_change(self._close_revoked)

    @property
    def has_identity(self) -> bool:
        """True if processes see an identity."""
        return self._own is not None

    def node(self, name: str, url: str) -> Dial:
        """Return how to dial the agent of a node. Raises UntrustedAddressError."""
        if url.startswith("https:"):
            return self._peer(Role.NODE, name)
        self._check_plain(f"node/{name}", url)
        return Dial()

    def gateway(self, id_: str, lease: GatewayLease) -> Dial:
        """Return how to dial a registered gateway. Raises UntrustedAddressError."""
        is_https = lease.url.startswith("https:")
        if self._own is not None and lease.tls is not None and is_https:
            return self._peer(Role.GATEWAY, name_of_gateway(id_))
        if not (is_https and self._own is None):
            self._check_plain(f"gateway/{id_}", lease.url)
        # Others on the network must not read the token.
        is_shown = self._token is not None and (is_https or is_local(lease.url))
        return Dial(ssl=self._trust, token=self._token if is_shown else None)

    def peer(self, role: Role, id_: str, url: str, tls: TlsReport | None) -> Dial:
        """Return how to dial a process whose lease reports its identity. Raises UntrustedAddressError."""
        label = f"{role}/{id_}"
        if not url.startswith("https:"):
            self._check_plain(label, url)
            return Dial()
        if tls is None:
            raise UntrustedAddressError(
                f"{label} at {url} reports no identity; is it an older release?"
            )
        try:
            identity = parse_identity(tls.identity)
        except IdentityError as error:
            raise UntrustedAddressError(f"{label}: {error}") from error
        if identity.role != role:
            raise UntrustedAddressError(f"{label} reports {identity.uri}, which is no {role}")
        return self._peer(role, identity.name)

    def address(self) -> Dial:
        """Return how to dial a gateway at an address that a person gives, whose id is not known."""
        return Dial(ssl=self._trust)

    def _peer(self, role: Role, name: str) -> Dial:
        if self._own is None:
            raise UntrustedAddressError(
                f"{role}/{name} demands TLS of the fleet, and there is no identity here. {_HOW}"
            )
        try:
            identity = Identity(self._own.identity.fleet, role, name)
        except IdentityError as error:
            raise UntrustedAddressError(f"{role}/{name}: {error}") from error
        return Dial(ssl=self._contexts[role].context, server_hostname=identity.dns_name)

    def _check_plain(self, label: str, url: str) -> None:
        """Refuse a process without an identity where the mode is strict, unless it is on this machine."""
        if self._own is None or self._own.mode is not TlsMode.STRICT or is_local(url):
            return
        raise UntrustedAddressError(
            f"{label} at {url} does not prove its identity, and the fleet's TLS mode is strict. Start it with "
            "--identity-dir, or go back with `fleetctl secure`"
        )

    def _close_revoked(self) -> None:
        """Let no standing connection of a pool be used after a revocation: they belong to the old context."""
        assert self._own is not None
        revoked = self._own.trust().revoked
        if revoked != self._revoked:
            self._revoked = revoked
            for context in self._contexts.values():
                context.reload()


def is_local(url: str) -> bool:
    """Return whether the host of a URL is this machine's loopback."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or is_loopback(host)
    except ValueError:
        return False
