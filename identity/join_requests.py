"""Requests of machines that ask to join without a token, and the decisions of administrators about them.

A signer writes a request at `joinrequest/<id>`, under a lease that it renews while the machine waits. An administrator
answers at `joindecision/<id>`; the answer names the key that was compared.
"""

import base64
from typing import Final

from machinery.clock import Clock
from schemas.trust import JoinDecision, PendingJoin
from store import codec, keys
from store.errors import ConflictError
from store.port import ModRevisionGuard, Put, Transport

REQUEST_LIFETIME_S: Final = 600
"""The life of a request after its machine last asked about it, and of a decision."""
MAX_WAIT_S: Final = 3600.0
"""The longest time for which a machine can wait with one request."""
MAX_PENDING: Final = 20
_ID_BYTES = 10


class TooManyRequestsError(Exception):
    """As many machines wait as may, and all of them are answered: they fetch their certificates soon."""


def request_id(key_hash: str) -> str:
    """Return the id of the request with a key: the beginning of its hash."""
    return base64.b32encode(bytes.fromhex(key_hash)[:_ID_BYTES]).decode().lower()


async def list_requests(transport: Transport) -> list[PendingJoin]:
    """Return all requests, the oldest first. Raises StoreError."""
    items = (await transport.list(keys.JOIN_REQUEST_PREFIX)).items
    pending_joins = [codec.decode(PendingJoin, item) for item in items]
    return sorted(pending_joins, key=lambda join: (join.created, join.id))


async def add_request(transport: Transport, wanted: PendingJoin) -> None:
    """Store a request; one with the same key is there already.

    If as many wait as may, the oldest without an answer ends, however often its machine asks: strangers that take all
    places then keep none.

    Raises:
        TooManyRequestsError: too many machines wait, and all of them are answered.
        StoreError: the store did not answer.

    """
    key = keys.named(keys.JOIN_REQUEST_PREFIX, wanted.id)
    requests = await list_requests(transport)
    if wanted.id in (request.id for request in requests):
        return
    waiting = [request for request in requests if not request.is_issued]
    if len(waiting) >= MAX_PENDING:
        for join in waiting:
            if await find_decision(transport, join) is None:
                await remove_request(transport, join)
                break
        else:
            raise TooManyRequestsError(
                f"{MAX_PENDING} machines have an answer and have not fetched it yet; try again in a minute, or use a token"
            )
    lease = await transport.grant(REQUEST_LIFETIME_S)
    put = Put(key=key, value=codec.encode(wanted), lease=lease)
    try:
        await transport.commit([ModRevisionGuard(key=key, mod_revision=0)], [put])
    except ConflictError:
        await transport.revoke(lease)  # the same machine at another signer


async def find_request(transport: Transport, wanted: str) -> PendingJoin | None:
    """Return a request; None if there is none. Raises StoreError."""
    item = await transport.get(keys.named(keys.JOIN_REQUEST_PREFIX, wanted))
    return None if item is None else codec.decode(PendingJoin, item)


async def renew_request(transport: Transport, clock: Clock, found: PendingJoin) -> None:
    """Renew the lease of a request, unless its machine has waited too long. Raises StoreError."""
    item = await transport.get(keys.named(keys.JOIN_REQUEST_PREFIX, found.id))
    waited_s = (clock.now() - found.created).total_seconds()
    if item is not None and item.lease and waited_s < MAX_WAIT_S:
        await transport.keep_alive(item.lease)


async def mark_issued(transport: Transport, found: PendingJoin) -> None:
    """Record that a request's certificate is signed: its lease ends it. Raises StoreError."""
    item = await transport.get(keys.named(keys.JOIN_REQUEST_PREFIX, found.id))
    if item is None:
        return
    changed = found.model_copy(update={"is_issued": True})
    guard = ModRevisionGuard(key=item.key, mod_revision=item.mod_revision)
    put = Put(key=item.key, value=codec.encode(changed), lease=item.lease)
    await transport.commit([guard], [put])


async def remove_request(transport: Transport, found: PendingJoin) -> None:
    """Delete a request whose machine has its certificate, or has given up. Raises StoreError."""
    item = await transport.get(keys.named(keys.JOIN_REQUEST_PREFIX, found.id))
    if item is not None and item.lease:
        await transport.revoke(item.lease)


async def decide(
    transport: Transport, clock: Clock, about: PendingJoin, user: str, *, is_approved: bool
) -> None:
    """Answer a request; a later answer replaces an earlier one. Raises StoreError."""
    decision = JoinDecision(
        key_hash=about.key_hash, is_approved=is_approved, decided=clock.now(), decided_by=user
    )
    lease = await transport.grant(REQUEST_LIFETIME_S)
    key = keys.named(keys.JOIN_DECISION_PREFIX, about.id)
    await transport.commit([], [Put(key=key, value=codec.encode(decision), lease=lease)])


async def find_decision(
    transport: Transport, about: PendingJoin
) -> tuple[JoinDecision, ModRevisionGuard] | None:
    """Return the answer to a request, and the guard that it stands; None if there is none. Raises StoreError."""
    item = await transport.get(keys.named(keys.JOIN_DECISION_PREFIX, about.id))
    if item is None:
        return None
    join_decision = codec.decode(JoinDecision, item)
    if join_decision.key_hash != about.key_hash:
        return None
    return join_decision, ModRevisionGuard(key=item.key, mod_revision=item.mod_revision)
