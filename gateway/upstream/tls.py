"""TLS of connections to engines: the gateway's identity, and the nodes whose engines prove theirs.

    tls = EngineTls(credentials)
    transport, connection = await address.connect(loop, make, tls.context, tls.server_name(address.node))

An engine that refuses the gateway says so after the handshake: in TLS 1.3 the client's handshake has ended by then.
`EngineLinks` counts such an end as `REFUSED`.
"""

import ssl
from functools import lru_cache
from typing import Final

from identity.credentials import Credentials
from identity.names import Identity, Role
from machinery.prometheus import Counter
from machinery.tls_server import failure_reason
from schemas.wire.engine_address import SYSTEM_AUTHORITIES

REFUSED: Final = "ClosedByEngine"
_NODES: Final = frozenset({Role.NODE})


class EngineTls:
    """TLS contexts for engines, and a count of the failures."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials: Final = credentials
        self._peers: Final = credentials.client(_NODES)

    @property
    def context(self) -> ssl.SSLContext:
        """The context for new connections."""
        return self._peers.context

    def server_name(self, node: str) -> str:
        """Return the name that the engines of the node prove."""
        return Identity(self.credentials.identity.fleet, Role.NODE, node).dns_name


@lru_cache(maxsize=64)
def external_context(authorities: str) -> ssl.SSLContext:
    """Return the TLS context for external servers: their certificate and name are verified, from TLS 1.2 on.

    `authorities`: certificates in PEM form, or `SYSTEM_AUTHORITIES`.
    """
    own = None if authorities == SYSTEM_AUTHORITIES else authorities
    context = ssl.create_default_context(cadata=own)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def new_failures() -> Counter:
    """Return the metric of failed TLS connections to engines."""
    return Counter(
        "fleet_gateway_engine_tls_failures_total",
        "TLS connections to engines that failed, by reason; ClosedByEngine: after the handshake, as refused peers see it.",
        ("reason",),
    )


def reason_of(error: OSError) -> str:
    """Return one word for the reason of a failed connection; empty if TLS is not the reason."""
    return failure_reason(error) if isinstance(error, ssl.SSLError) else ""


def message_of(error: ssl.SSLError) -> str:
    """Return the reason of a failed connection for people."""
    verification = getattr(error, "verify_message", "")
    return f"TLS: {verification or error.reason or error}"
