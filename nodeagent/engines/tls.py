"""The node's identity between an agent, its engines and the gateways that its endpoints invite.

Engines of a node with an identity serve TLS from their start. The fleet's mode decides how gateways dial them, and so
which URL the agent publishes: `http://` while it is permissive, `https://` from mode tls on.
"""

import ssl
from pathlib import Path

from identity.credentials import Credentials
from identity.names import Role
from machinery.clock import Clock
from schemas.trust import TlsMode
from schemas.wire.engine_address import EngineAddress

# Engines and gateways follow the mode within a second. Before they have, some of them refuse plain connections.
_FOLLOWED_S = 5.0


class NodeTls:
    """TLS of one node's engines, seen from its agent."""

    def __init__(self, credentials: Credentials, clock: Clock) -> None:
        self._credentials = credentials
        self._clock = clock
        self._own = credentials.client(frozenset({Role.NODE}))
        self._mode = credentials.mode
        self._changed_s = clock.monotonic() - _FOLLOWED_S
        """The time of the last change of the mode."""
        credentials.on_change(self._follow)

    @property
    def folder(self) -> Path:
        """The folder of the identity, which engines read as well."""
        return self._credentials.folder.path

    @property
    def node(self) -> str:
        """The name of the node."""
        return self._credentials.identity.name

    @property
    def context(self) -> ssl.SSLContext:
        """The context for new connections to the node's own engines."""
        return self._own.context

    @property
    def server_name(self) -> str:
        """The name that the node's own engines prove."""
        return self._credentials.identity.dns_name

    def advertised(self, address: EngineAddress) -> EngineAddress:
        """Return the address of an engine as gateways shall dial it now."""
        is_plain = self._mode is TlsMode.PERMISSIVE and (
            self._clock.monotonic() - self._changed_s >= _FOLLOWED_S
        )
        return address._replace(node="") if is_plain else address

    def _follow(self) -> None:
        if self._credentials.mode is not self._mode:
            self._mode, self._changed_s = self._credentials.mode, self._clock.monotonic()
