"""The authorization of routes that change a Mac: a certificate of an administrator, or a ticket where there is no TLS."""

from dataclasses import dataclass

from fastapi import Request

from identity.credentials import Credentials
from identity.names import Role
from identity.peers import peer_of
from machinery.http_server import SSL_OBJECT
from schemas.trust import TlsMode
from schemas.wire.errors import Refusal, RefusedError
from store.tickets import TicketChecker, TicketDenial


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminAccess:
    """Admits administrators to the routes that change what one agent keeps."""

    node: str
    tickets: TicketChecker
    credentials: Credentials | None
    """The agent's identity; None: it listens on loopback, or the operator insists on plain HTTP."""
    action: str
    """The verb and object of what only administrators do, such as `stops engines`."""
    without_store: str = ""
    """Sentence about what works while the store is away; empty if nothing does."""

    async def authorize(self, request: Request, authorization: str) -> str:
        """Return the name of the administrator or user. Raises RefusedError."""
        peer = peer_of(request.scope.get("state", {}).get(SSL_OBJECT))
        if peer is not None and peer.identity.role is Role.ADMIN:
            return peer.identity.uri
        own = self.credentials
        if own is not None and own.mode is not TlsMode.PERMISSIVE:
            raise self.refused(
                403,
                f"only a certificate of the role admin {self.action} (`fleetctl join` writes one with a token of that "
                "role; give its folder with --identity-dir)",
            )
        found = await self.tickets.check(authorization)
        if isinstance(found, TicketDenial):
            more = f". {self.without_store}" if self.without_store else ""
            raise self.refused(found.status, f"{found.why}{more}")
        return found.user

    def refused(self, status: int, message: str) -> RefusedError:
        """Return the exception that makes a route answer with a refusal."""
        extra = ((b"www-authenticate", b"Bearer"),) if status == 401 else ()
        text = f"{self.node}: {message}"
        return RefusedError(
            Refusal(status=status, message=text, type="refused", extra_headers=extra)
        )
