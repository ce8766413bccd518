"""TLS of an engine's listener: the identity of its node, and the peers and plain connections that it accepts.

    tls = EngineTls(Credentials(IdentityFolder(path), clock), service.metrics.tls)
    server = HttpServer(config, on_signal, tls.options().acceptor)
    group.create_task(tls.run(clock, lambda: server.server_state.connections))

Gateways of the fleet are accepted, and the agent of the engine's own node. The folder belongs to the agent, which keeps
it up to date: certificate, revocations and the fleet's mode are followed without a restart, and the engine needs
neither the store nor its agent for them.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from engine.api.connections import EngineHttpProtocol
from engine.api.link import EngineLink
from engine.metrics import TlsMetrics
from identity.credentials import Credentials, CredentialsError
from identity.folder import IdentityFolder
from identity.names import Role
from identity.peers import peer_of
from machinery.clock import Clock
from machinery.process_secrets import disable_core_dumps
from machinery.tls_server import TlsOptions
from schemas.trust import TlsMode
from schemas.wire.errors import Refusal

log = logging.getLogger(__name__)

_ACCEPTED: Final = frozenset({Role.GATEWAY, Role.NODE})
# A handshake takes 1 ms of CPU. The threads of a model and its gateways' requests need the rest.
_UNFINISHED_HANDSHAKES = 64
_POLL_S = 0.5
# 503, because a gateway then tries another engine: it may not know yet that the mode has changed.
_TLS_REQUIRED = Refusal(
    status=503,
    message="This engine accepts TLS connections of the gateways of its fleet only. Send requests to a gateway.",
    code="tls_required",
    retry_after_s=1,
)


def read_credentials(folder: Path | None, node: str, clock: Clock) -> Credentials | None:
    """Return the identity in the folder, with which the engine serves TLS; None without a folder.

    Raises:
        CredentialsError: the identity cannot be used, or is not that of the node.

    """
    if folder is None:
        return None
    disable_core_dumps()  # the memory holds the node's key
    credentials = Credentials(IdentityFolder(folder), clock)
    if (credentials.identity.role, credentials.identity.name) != (Role.NODE, node):
        raise CredentialsError(
            f"{folder} is the identity of {credentials.identity.uri}; expected that of node {node}"
        )
    return credentials


class EngineTls:
    """The TLS settings of one engine's connections, which follow the folder of its node's identity."""

    def __init__(self, credentials: Credentials, metrics: TlsMetrics) -> None:
        self._credentials = credentials
        self._metrics = metrics
        self.peers: Final = credentials.server(_ACCEPTED, only_own_node=True)
        """The contexts of new connections."""
        self._mode = credentials.mode
        self._is_due = False
        """True while connections may be open that would not be accepted now."""
        credentials.on_change(self._changed)
        metrics.count_expired = lambda: self.peers.verifier.expired
        metrics.certificate_end_s = credentials.not_after.timestamp()

    def options(self) -> TlsOptions:
        """Return the options of the listener."""
        return TlsOptions(
            certificate=self.peers,
            plain_response=_TLS_REQUIRED.http_response(),
            accepts_plain=lambda: self._credentials.mode is not TlsMode.STRICT,
            unfinished_handshakes=_UNFINISHED_HANDSHAKES,
            on_failure=self._metrics.failures.add,
        )

    async def run(self, clock: Clock, connections: Callable[[], Iterable[Any]]) -> None:
        """Follow the folder, and close connections that would not be accepted any more, forever."""
        while True:
            await clock.sleep(_POLL_S)
            self._credentials.refresh()
            if self._is_due:
                self._is_due = self._close_unwanted(connections())

    def _changed(self) -> None:
        self._is_due = True
        self._metrics.certificate_end_s = self._credentials.not_after.timestamp()
        if self._credentials.mode is not self._mode:
            self._mode = self._credentials.mode
            log.info("the fleet's TLS mode has changed", extra={"mode": self._mode.value})

    def _close_unwanted(self, connections: Iterable[Any]) -> bool:
        """Close connections of revoked peers, and plain ones if they are refused; return whether some are left."""
        revoked = self._credentials.trust().revoked
        is_strict, is_left = self._credentials.mode is TlsMode.STRICT, False
        for connection in tuple(connections):
            if not isinstance(connection, EngineHttpProtocol | EngineLink):
                continue
            peer = peer_of(connection.transport.get_extra_info("ssl_object"))
            if peer is None and is_strict:
                is_left = True  # until its request is answered
                connection.retire()
            elif peer is not None and peer.serial in revoked:
                connection.transport.abort()
                self._metrics.closed.add("Revoked")
                log.warning(
                    "connection closed; its peer is revoked", extra={"peer": peer.identity.uri}
                )
        return is_left
