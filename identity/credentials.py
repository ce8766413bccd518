"""The identity of this process in use: TLS contexts that follow the files of its folder.

    credentials = Credentials(IdentityFolder(path), clock)
    group.create_task(credentials.watch())
    server = credentials.server(frozenset({Role.GATEWAY}))       # an engine's listener: gateways alone
    client = credentials.client(frozenset({Role.NODE}))          # a gateway's connections to engines
    await loop.create_connection(..., ssl=client.context, server_hostname=identity.dns_name)

A context serves the connections that begin now. After a renewal `context` is another one, and standing connections go
on. `on_change` tells of every change, for what has to close the connections of revoked peers.
"""

import logging
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from identity.authority import AuthorityError, identity_of, load_certificate
from identity.folder import FolderError, IdentityFolder
from identity.names import Identity, Role
from identity.peers import Peer, PeerVerifier, Trust, install, peer_of
from machinery.clock import Clock
from schemas.trust import TlsMode, TlsReport, TrustSnapshot

log = logging.getLogger(__name__)

GRACE: Final = timedelta(days=7)
"""The time for which expired certificates are accepted while the store is away: they cannot be renewed then."""
_STORE_IS_AWAY: Final = timedelta(minutes=10)
_POLL_S = 0.5
_HTTP_1 = ("http/1.1",)
_TLS_1_2_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


TlsReporter: TypeAlias = Callable[[], TlsReport | None]


def no_report() -> TlsReport | None:
    """Report that this process has no certificate."""
    return None


class CredentialsError(Exception):
    """The files of an identity cannot be used; the message names them and says what to do."""


class PeerContext:
    """The TLS context for one kind of connection, and what it has refused."""

    def __init__(
        self,
        credentials: "Credentials",
        verifier: PeerVerifier,
        purpose: int,
        protocols: tuple[str, ...] = _HTTP_1,
    ) -> None:
        """`protocols`: the protocols above TLS (ALPN), the preferred one first."""
        self.verifier: Final = verifier
        self._protocols = list(protocols)
        self._credentials = credentials
        self._purpose = purpose
        self.context: ssl.SSLContext = self._load()
        """The context for new connections; another object after each change of the files."""

    def reload(self) -> None:
        """Read the files again. Raises CredentialsError: they cannot be used, and the old context stays."""
        self.context = self._load()

    def _load(self) -> ssl.SSLContext:
        context = self._credentials.load(self._purpose)
        context.set_alpn_protocols(self._protocols)
        if self.verifier.is_optional:
            is_asked = bool(self.verifier.roles)
            context.verify_mode = ssl.CERT_OPTIONAL if is_asked else ssl.CERT_NONE
        install(context, self.verifier)
        return context


class Credentials:
    """Certificate, key and trust of this process."""

    def __init__(self, folder: IdentityFolder, clock: Clock) -> None:
        """Read the folder.

        Raises:
            CredentialsError: a file is missing or cannot be used.

        """
        self.folder: Final = folder
        self._clock = clock
        self._contexts: list[PeerContext] = []
        self._handlers: list[Callable[[], None]] = []
        self._seen = folder.state()
        self._snapshot: TrustSnapshot | None = None
        self._revoked: frozenset[str] = frozenset()
        self.not_after = datetime.min.replace(tzinfo=UTC)
        """The end of this process's certificate."""
        self.identity: Identity = self._read()
        """The identity of this process."""

    @property
    def mode(self) -> TlsMode:
        """The fleet's mode as last seen in the store."""
        return self._snapshot.mode if self._snapshot is not None else TlsMode.PERMISSIVE

    def report(self) -> TlsReport:
        """Return what other processes may know of this one's TLS."""
        return TlsReport(identity=self.identity.uri, mode=self.mode)

    def trust(self) -> Trust:
        """Return the rules by which peers are accepted now."""
        snapshot = self._snapshot
        if snapshot is None:
            return Trust(fleet=self.identity.fleet)
        is_away = self._clock.now() - snapshot.seen >= _STORE_IS_AWAY
        return Trust(
            fleet=self.identity.fleet,
            revoked=self._revoked,
            grace=GRACE if is_away else timedelta(0),
        )

    def server(
        self,
        roles: frozenset[Role],
        *,
        is_optional: bool = False,
        only_own_node: bool = False,
        protocols: tuple[str, ...] = _HTTP_1,
    ) -> PeerContext:
        """Return the contexts of a listener for clients with one of the roles. Without roles no client is asked for a certificate.

        `only_own_node`: of the nodes, only the one with this process's name is accepted. `protocols`: above TLS (ALPN).
        """
        verifier = PeerVerifier(
            trust=self.trust,
            clock=self._clock,
            roles=roles,
            is_optional=is_optional,
            node=self.identity.name if only_own_node else "",
        )
        return self._add(PeerContext(self, verifier, ssl.PROTOCOL_TLS_SERVER, protocols))

    def client(self, roles: frozenset[Role]) -> PeerContext:
        """Return the contexts of connections to servers with one of the roles.

        Dial with `server_hostname=identity.dns_name`, whatever the address is.
        """
        verifier = PeerVerifier(trust=self.trust, clock=self._clock, roles=roles)
        return self._add(PeerContext(self, verifier, ssl.PROTOCOL_TLS_CLIENT))

    def _add(self, made: PeerContext) -> PeerContext:
        self._contexts.append(made)
        return made

    def load(self, purpose: int) -> ssl.SSLContext:
        """Return a context with the files as they are now. Raises CredentialsError."""
        folder = self.folder
        context = ssl.SSLContext(purpose)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_ciphers(_TLS_1_2_CIPHERS)
        context.verify_mode = ssl.CERT_REQUIRED
        if purpose == ssl.PROTOCOL_TLS_SERVER:
            # Our clients keep connections and never resume sessions: tickets would be made and sent in vain.
            context.num_tickets = 0
        try:
            context.load_cert_chain(folder.identity, password=_no_password)
            context.load_verify_locations(folder.authorities)
        except (ssl.SSLError, OSError) as error:
            raise CredentialsError(
                f"{folder.path} holds no usable identity ({error}); expected identity.pem and ca.pem. Run "
                "`fleetctl join` again, or give the folder of an identity"
            ) from error
        return context

    def on_change(self, handler: Callable[[], None]) -> None:
        """Call the handler after each change of certificate, authorities or trust."""
        self._handlers.append(handler)

    def is_revoked(self, ssl_object: object) -> bool:
        """Return whether the peer of a standing connection was revoked since its handshake."""
        peer: Peer | None = peer_of(ssl_object)
        return peer is not None and peer.serial in self.trust().revoked

    async def watch(self) -> None:
        """Follow the files, forever. Files that cannot be used are logged, and what was read before stays."""
        while True:
            await self._clock.sleep(_POLL_S)
            self.refresh()

    def refresh(self) -> None:
        """Read the files if they have changed."""
        state = self.folder.state()
        if state == self._seen:
            return
        only_trust = state[:2] == self._seen[:2]
        self._seen = state
        try:
            self.identity = self._read()
            if not only_trust:
                for context in self._contexts:
                    context.reload()
        except CredentialsError as error:
            log.error("identity not reloaded; the old one stays", extra={"why": str(error)})  # noqa: TRY400 - the reason is in the message
            return
        if not only_trust:
            log.info("identity reloaded", extra={"identity": self.identity.uri})
        for handler in self._handlers:
            handler()

    def _read(self) -> Identity:
        try:
            certificate = load_certificate(self.folder.certificate())
            identity = identity_of(certificate)
            self._snapshot = self.folder.read_trust()
        except (FolderError, AuthorityError) as error:
            raise CredentialsError(str(error)) from error
        if self._snapshot is not None and self._snapshot.fleet != identity.fleet:
            raise CredentialsError(
                f"{self.folder.trust} is of another fleet than the certificate beside it; delete it"
            )
        self._revoked = frozenset(self._snapshot.revoked if self._snapshot is not None else ())
        self.not_after = certificate.not_valid_after_utc
        return identity


def _no_password() -> bytes:
    """Refuse an encrypted key. Without it, OpenSSL asks for the password on the terminal."""
    raise CredentialsError(
        "the identity's key is encrypted, and there is no terminal to ask for its password"
    )
