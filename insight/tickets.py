"""Tickets: the right to read from agents and gateways, for processes that may write to the store."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from machinery.clock import SystemClock
from machinery.os_user import current_user
from schemas.records import TICKET_TTL_S, Ticket
from store import codec, keys
from store.errors import StoreError
from store.leases import LeaseSession
from store.port import MAX_OPERATIONS, Put, Transport

_ID_BYTES, _SECRET_BYTES = 8, 32


@asynccontextmanager
async def issue_ticket(transport: Transport, holder: str) -> AsyncIterator[str]:
    """Yield `ID.SECRET` for the header `authorization: Bearer ID.SECRET` of requests to one process.

    `holder` is `Node/<name>` or `Gateway/<id>`. The store holds the ticket's hash, and only fleetctl may write there.
    The ticket lives under a lease that is renewed while the block runs and revoked at its end. After a kill -9 it
    lives for another minute. An exception of the block is raised as it is, not in an exception group.

    Raises:
        StoreError: the ticket cannot be written (PermissionDeniedError: only fleet-admin may write tickets).

    """
    async with issue_tickets(transport, (holder,)) as bearers:
        yield bearers[holder]


@asynccontextmanager
async def issue_tickets(
    transport: Transport, holders: Sequence[str]
) -> AsyncIterator[Mapping[str, str]]:
    """Yield a ticket for each holder, each with its own secret, all under one lease; see `issue_ticket`."""
    ids = {holder: secrets.token_hex(_ID_BYTES) for holder in holders}
    secret = {holder: secrets.token_urlsafe(_SECRET_BYTES) for holder in holders}
    session = LeaseSession(transport, SystemClock(), ttl_s=TICKET_TTL_S)
    await session.open()
    try:
        puts = [_put_ticket(holder, ids[holder], secret[holder], session.id) for holder in holders]
        for at in range(0, len(puts), MAX_OPERATIONS):
            await transport.commit([], puts[at : at + MAX_OPERATIONS])
        async with asyncio.TaskGroup() as tasks:
            renewal = tasks.create_task(session.keep())
            yield {holder: f"{ids[holder]}.{secret[holder]}" for holder in holders}
            renewal.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        await session.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginTicket:
    """The right to log in at one dashboard, once, within a minute."""

    bearer: str
    """`ID.SECRET`."""
    key: str
    revision: int
    """Revision of the store that has the ticket."""

    async def is_used(self, transport: Transport) -> bool:
        """Wait until the ticket is gone, and return whether that was before its minute was over."""
        try:
            # The lease removes the ticket as well, a moment after its end.
            async with asyncio.timeout(TICKET_TTL_S - 1):
                async for batch in transport.watch(self.key, after_revision=self.revision):
                    if batch.changes:
                        return True
        except (StoreError, TimeoutError):
            pass
        return False


async def issue_login_ticket(transport: Transport, dashboard: str) -> LoginTicket:
    """Write a ticket for the dashboard of this id; it outlives this process.

    Raises:
        StoreError: the ticket cannot be written (PermissionDeniedError: only fleet-admin may write tickets).

    """
    holder, id_ = f"Dashboard/{dashboard}", secrets.token_hex(_ID_BYTES)
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    put = _put_ticket(holder, id_, secret, await transport.grant(TICKET_TTL_S))
    revision = await transport.commit([], [put])
    return LoginTicket(bearer=f"{id_}.{secret}", key=put.key, revision=revision)


def _put_ticket(holder: str, id_: str, secret: str, lease: int) -> Put:
    ticket = Ticket(hash=hashlib.sha256(secret.encode()).hexdigest(), user=current_user())
    return Put(key=keys.ticket_key(holder, id_), value=codec.encode(ticket), lease=lease)
