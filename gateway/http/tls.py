"""TLS of the listener for clients: its certificates by server name, and the response to plain HTTP there.

Clients get the certificate of --tls-cert, or that of the gateway's identity. Processes of the fleet name the gateway by the
DNS name of its identity: they get that identity whatever clients get, and they are asked for theirs.
"""

import ssl
from collections.abc import Callable
from typing import Final

from gateway import errors
from identity.credentials import Credentials
from identity.names import DOMAIN, Role
from machinery.tls_server import ContextSource, TlsOptions

# A handshake costs about 1 ms of CPU, so more at once would only make all of them slower.
_UNFINISHED_HANDSHAKES = 256
# The part of the open files that unfinished handshakes may take.
_SHARE_OF_FILES = 8
_PEERS: Final = frozenset({Role.RECONCILER, Role.ADMIN, Role.GATEWAY, Role.NODE, Role.DASHBOARD})


class GatewayContexts:
    """The TLS contexts of one gateway."""

    def __init__(self, certificate: ContextSource | None, credentials: Credentials) -> None:
        """`certificate`: the one of --tls-cert."""
        self._public = certificate or credentials.server(frozenset(), is_optional=True)
        self._peers = credentials.server(_PEERS, is_optional=True)

    @property
    def context(self) -> ssl.SSLContext:
        """The context for clients, which are asked for no certificate."""
        return self._public.context

    def context_for(self, name: str) -> ssl.SSLContext:
        """Return the context for a client that asks for the name."""
        is_peer = name.lower().endswith(f".{DOMAIN}")
        return self._peers.context if is_peer else self._public.context


def tls_options(
    certificate: ContextSource | None,
    credentials: Credentials | None,
    *,
    accepts_plain: bool,
    max_files: int,
    on_shed: Callable[[], None],
) -> TlsOptions | None:
    """Return the options of the listener; None for plain HTTP. `max_files`: the limit of open files; 0: none."""
    limit = max_files // _SHARE_OF_FILES or _UNFINISHED_HANDSHAKES
    contexts = None if credentials is None else GatewayContexts(certificate, credentials)
    served = contexts or certificate
    if served is None:
        return None
    return TlsOptions(
        certificate=served,
        context_for=None if contexts is None else contexts.context_for,
        plain_response=errors.https_required().http_response(),
        accepts_plain=lambda: accepts_plain,
        unfinished_handshakes=min(_UNFINISHED_HANDSHAKES, limit),
        on_shed=on_shed,
    )
