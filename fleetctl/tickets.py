"""The right to read what an agent or a gateway tells nobody else: written to the store, where only fleetctl may."""

import asyncio
import hashlib
import os
import pwd
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from machinery.clock import SystemClock
from schemas.ticket import TICKET_TTL_S, Ticket
from store import codec, keys
from store.lease import LeaseSession
from store.port import MAX_OPERATIONS, Put, Transport

_ID_BYTES, _SECRET_BYTES = 8, 32


@asynccontextmanager
async def ticket(transport: Transport, holder: str) -> AsyncIterator[str]:
    """Yield `ID.SECRET` for the header `authorization: Bearer ID.SECRET` of requests to one holder.

    `holder` is `Node/<name>` or `Gateway/<id>`. The ticket lives under a lease that is renewed for as long as the
    block runs, and revoked at its end; after a kill -9 of ours it lives for a minute. An error of the block is raised
    as it is, in no group.

    Raises:
        StoreError: it could not be written (PermissionDeniedError: only fleet-admin may).

    """
    async with several(transport, (holder,)) as bearers:
        yield bearers[holder]


@asynccontextmanager
async def several(transport: Transport, holders: Sequence[str]) -> AsyncIterator[Mapping[str, str]]:
    """Yield a ticket for each holder, with a secret of its own, all under one lease; `ticket` says more."""
    made = {holder: secrets.token_hex(_ID_BYTES) for holder in holders}
    secret = {holder: secrets.token_urlsafe(_SECRET_BYTES) for holder in holders}
    session = LeaseSession(transport, SystemClock(), ttl_s=TICKET_TTL_S)
    await session.open()
    try:
        puts = [_put(holder, made[holder], secret[holder], session.id) for holder in holders]
        for at in range(0, len(puts), MAX_OPERATIONS):
            await transport.commit([], puts[at : at + MAX_OPERATIONS])
        async with asyncio.TaskGroup() as tasks:
            kept = tasks.create_task(session.keep())
            yield {holder: f"{made[holder]}.{secret[holder]}" for holder in holders}
            kept.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        await session.close()


def _put(holder: str, made: str, secret: str, lease: int) -> Put:
    written = Ticket(hash=hashlib.sha256(secret.encode()).hexdigest(), user=whoami())
    return Put(key=keys.ticket_key(holder, made), value=codec.encode(written), lease=lease)


def whoami() -> str:
    """Return who runs this command, such as `anna@studio`."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container, say
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"
