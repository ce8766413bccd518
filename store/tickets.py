"""Ticket verification by a ticket's holder: grants access to processes that may write to the store."""

import asyncio
import hashlib
import hmac
import re
from dataclasses import dataclass

from machinery.clock import Clock
from schemas.records import Ticket
from store import codec, keys
from store.errors import ConflictError, PermissionDeniedError, StoreError, UndecodableError
from store.port import Delete, ModRevisionGuard, Transport

# The format of insight/tickets.py.
_BEARER = re.compile(r"bearer ([0-9a-f]{8,64})\.([A-Za-z0-9_-]{20,200})", re.IGNORECASE | re.ASCII)
_STORE_S = 5.0
# Guessing must not cause a store request for each guess.
_WRONG_A_SECOND = 20
# How soon a revoked ticket ends a log that is followed with it.
_LOOK_AGAIN_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketDenial:
    """A refusal with its reason; `status` is an HTTP status."""

    status: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketGrant:
    """Access granted."""

    id: str
    user: str
    """The user's name as they gave it."""


class TicketChecker:
    """Verifies the tickets of one holder: `Node/<name>`, `Gateway/<id>`, `Reconciler/<id>` or `Dashboard/<id>`."""

    def __init__(self, transport: Transport, clock: Clock, holder: str) -> None:
        self._transport = transport
        self._clock = clock
        self._holder = holder
        self._second = 0
        self._wrong = 0

    async def check(self, authorization: str) -> TicketGrant | TicketDenial:
        """Verify the value of an `authorization` header."""
        match = _BEARER.fullmatch(authorization)
        if match is None:
            return TicketDenial(
                status=401,
                why="a ticket is required, which fleetctl writes to the store: use `fleetctl logs`, `top` "
                "or `support-bundle`",
            )
        if self._is_flooded():
            return TicketDenial(status=429, why="too many wrong tickets; try again in a second")
        id_, secret = match[1].lower(), match[2]
        ticket_grant = await self._read(id_)
        if isinstance(ticket_grant, TicketDenial):
            return ticket_grant
        digest = hashlib.sha256(secret.encode()).hexdigest()
        if ticket_grant is None or not hmac.compare_digest(digest, ticket_grant.hash):
            self._wrong += 1
            return TicketDenial(
                status=401,
                why="this ticket is not, or no longer, in the store; request another one",
            )
        return TicketGrant(id=id_, user=ticket_grant.user)

    async def redeem(self, authorization: str) -> TicketGrant | TicketDenial:
        """Verify a ticket and remove it from the store: of several attempts one succeeds."""
        granted = await self.check(authorization)
        if isinstance(granted, TicketDenial):
            return granted
        key = keys.ticket_key(self._holder, granted.id)
        try:
            async with asyncio.timeout(_STORE_S):
                item = await self._transport.get(key)
                if item is not None:
                    guard = ModRevisionGuard(key=key, mod_revision=item.mod_revision)
                    await self._transport.commit([guard], [Delete(key=key)])
                    return granted
        except ConflictError:
            pass
        except PermissionDeniedError:
            why = (
                "the store denies removing tickets: run `fleetctl init-auth` of this release again"
            )
            return TicketDenial(status=503, why=why)
        except (StoreError, TimeoutError) as error:
            why = f"the ticket cannot be removed while the store does not answer ({str(error) or 'no answer'})"
            return TicketDenial(status=503, why=why)
        return TicketDenial(status=401, why="this ticket was used already; request another one")

    async def _read(self, id_: str) -> Ticket | TicketDenial | None:
        try:
            async with asyncio.timeout(_STORE_S):
                item = await self._transport.get(keys.ticket_key(self._holder, id_))
            return None if item is None else codec.decode(Ticket, item)
        except PermissionDeniedError:
            why = "the store denies reading tickets: run `fleetctl init-auth` of this release again"
        except (StoreError, TimeoutError) as error:
            why = f"tickets cannot be verified while the store does not answer ({str(error) or 'no answer'})"
        except UndecodableError as error:
            why = f"another release wrote the ticket ({error})"
        return TicketDenial(status=503, why=why)

    def _is_flooded(self) -> bool:
        second = int(self._clock.monotonic())
        if second != self._second:
            self._second, self._wrong = second, 0
        return self._wrong >= _WRONG_A_SECOND

    def watch(self, granted: TicketGrant) -> "TicketWatch":
        """Return a watch on the ticket, for responses that last long."""
        return TicketWatch(self, self._clock, granted)

    async def is_gone(self, granted: TicketGrant) -> bool:
        """Return whether the ticket was removed; an unavailable store does not count as removal."""
        return await self._read(granted.id) is None


class TicketWatch:
    """Checks from time to time whether one ticket still exists."""

    def __init__(self, tickets: TicketChecker, clock: Clock, granted: TicketGrant) -> None:
        self._tickets = tickets
        self._clock = clock
        self._granted = granted
        self._looked_at = clock.monotonic()

    async def is_over(self) -> bool:
        """Return whether the ticket was revoked, or its lease expired."""
        now = self._clock.monotonic()
        if now - self._looked_at < _LOOK_AGAIN_S:
            return False
        self._looked_at = now
        return await self._tickets.is_gone(self._granted)
