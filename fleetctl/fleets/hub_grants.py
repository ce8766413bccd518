"""Tokens of hubs for the agents that fetch for a person: from the store to a Mac, and gone when it has the model."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from pydantic import SecretStr

from machinery.clock import SystemClock
from reconciler.services.hub_grants import find_token
from schemas.records import HubToken
from store import codec, keys
from store.leases import LeaseSession
from store.port import Delete, Put, Transport

# A grant of a command that died ends a minute later.
_TTL_S: Final = 60
_NAME: Final = "pull"


async def hub_token(transport: Transport, endpoint: str, own: str) -> HubToken | None:
    """Return the token of the person (`own`), otherwise that which the store has for the endpoint.

    Raises:
        StoreError: the store did not answer, or this user may not read it.

    """
    if not own:
        return await find_token(transport, endpoint)
    now = SystemClock().now()
    return HubToken(name=_NAME, endpoint=endpoint, token=SecretStr(own), created=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubGrants:
    """The grants of one pull."""

    transport: Transport
    folder: str
    nodes: set[str] = field(default_factory=set)

    async def withdraw(self, node: str) -> None:
        """Take the token from a node that has ended its fetch. Raises StoreError."""
        if node in self.nodes:
            self.nodes.discard(node)
            key = keys.hub_grant_key(node, self.folder)
            await self.transport.commit([], [Delete(key=key)])


@asynccontextmanager
async def granted(
    transport: Transport, nodes: Sequence[str], folder: str, token: HubToken | None
) -> AsyncIterator[HubGrants]:
    """Grant a token to nodes for the fetch of one folder, under a lease that ends with the block.

    Raises:
        StoreError: the store did not answer, or this user may not write grants.

    """
    grants = HubGrants(transport=transport, folder=folder)
    if token is None:
        yield grants
        return
    session = LeaseSession(transport, SystemClock(), ttl_s=_TTL_S)
    await session.open()
    try:
        for node in nodes:
            key = keys.hub_grant_key(node, folder)
            put = Put(key=key, value=codec.encode(token), lease=session.id)
            await transport.commit([], [put])
            grants.nodes.add(node)
        async with asyncio.TaskGroup() as tasks:
            renewal = tasks.create_task(session.keep())
            yield grants
            renewal.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        await session.close()
