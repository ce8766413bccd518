"""Tickets as their holder sees them: is who asks somebody who may write to the store? Remembers for a moment, writes nothing."""

import asyncio
import hashlib
import hmac
import re
from dataclasses import dataclass

from machinery.clock import Clock
from schemas.records import Ticket
from store import codec, keys
from store.codec import UndecodableError
from store.errors import PermissionDeniedError, StoreError
from store.port import Transport

# As fleetctl/fleets/process_client.py makes them.
_BEARER = re.compile(r"bearer ([0-9a-f]{8,64})\.([A-Za-z0-9_-]{20,200})", re.IGNORECASE | re.ASCII)
_STORE_S = 5.0
# Whoever guesses must not have us ask the store for each guess.
_WRONG_A_SECOND = 20
# How soon a ticket that was taken back ends what is being followed.
_LOOK_AGAIN_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketDenial:
    """Who asks may not, and why; `status` is HTTP's."""

    status: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketGrant:
    """Who asks may."""

    id: str
    user: str
    """Who they say they are."""


class TicketChecker:
    """The tickets of one holder, `Node/<name>` or `Gateway/<id>`."""

    def __init__(self, transport: Transport, clock: Clock, holder: str) -> None:
        self._transport = transport
        self._clock = clock
        self._holder = holder
        self._second = 0
        self._wrong = 0

    async def check(self, authorization: str) -> TicketGrant | TicketDenial:
        """Return whether the value of the header `authorization` is a ticket that lives."""
        told = _BEARER.fullmatch(authorization)
        if told is None:
            return TicketDenial(
                status=401,
                why="this needs a ticket, which fleetctl writes to the store: use `fleetctl logs`, `top` or `support-bundle`",
            )
        if self._is_flooded():
            return TicketDenial(status=429, why="too many wrong tickets; try again in a second")
        id_, secret = told[1].lower(), told[2]
        found = await self._look(id_)
        if isinstance(found, TicketDenial):
            return found
        digest = hashlib.sha256(secret.encode()).hexdigest()
        if found is None or not hmac.compare_digest(digest, found.hash):
            self._wrong += 1
            return TicketDenial(
                status=401, why="this ticket is not, or no longer, in the store; ask for another"
            )
        return TicketGrant(id=id_, user=found.user)

    async def _look(self, id_: str) -> Ticket | TicketDenial | None:
        try:
            async with asyncio.timeout(_STORE_S):
                item = await self._transport.get(keys.ticket_key(self._holder, id_))
            return None if item is None else codec.decode(Ticket, item)
        except PermissionDeniedError:
            why = "the store does not let it read tickets: run `fleetctl init-auth` of this release again"
        except (StoreError, TimeoutError) as error:
            why = f"tickets cannot be checked while the store is away ({str(error) or 'no answer'})"
        except UndecodableError as error:
            why = f"the ticket is of another release ({error})"
        return TicketDenial(status=503, why=why)

    def _is_flooded(self) -> bool:
        second = int(self._clock.monotonic())
        if second != self._second:
            self._second, self._wrong = second, 0
        return self._wrong >= _WRONG_A_SECOND

    def watch(self, granted: TicketGrant) -> "TicketWatch":
        """Return whom to ask whether the ticket lives on, while something is followed with it."""
        return TicketWatch(self, self._clock, granted)

    async def is_gone(self, granted: TicketGrant) -> bool:
        """Return whether the store says that the ticket is no more; a store that is away says nothing."""
        return await self._look(granted.id) is None


class TicketWatch:
    """Looks now and then whether one ticket is still there."""

    def __init__(self, tickets: TicketChecker, clock: Clock, granted: TicketGrant) -> None:
        self._tickets = tickets
        self._clock = clock
        self._granted = granted
        self._looked_at = clock.monotonic()

    async def is_over(self) -> bool:
        """Return whether the ticket was taken back, or its lease ran out."""
        now = self._clock.monotonic()
        if now - self._looked_at < _LOOK_AGAIN_S:
            return False
        self._looked_at = now
        return await self._tickets.is_gone(self._granted)
