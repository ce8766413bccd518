"""Join tokens in the store: creation, use and revocation.

A token's key is under a lease of its lifetime, so that etcd ends it; its end is checked by the clock as well, because a
lease may live longer than its time. A use is counted by compare-and-swap before anything is signed.
"""

import hashlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from identity.join_token import JoinToken, is_secret, new_token, secret_hash
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from schemas.meta import Labels
from schemas.trust import JoinRole, JoinTokenRecord, JoinTokenUse
from store import codec, keys
from store.errors import ConflictError
from store.port import (
    CreateRevisionGuard,
    Delete,
    Guard,
    KeyValue,
    ModRevisionGuard,
    Put,
    Transport,
)

DEFAULT_LIFETIME: Final = timedelta(hours=1)
MAX_LIFETIME: Final = timedelta(days=30)
# A hundred Macs with one token take turns.
_ATTEMPTS = 200
_BACKOFF = Backoff(first_s=0.01, limit_s=0.2)
# Compared with for an unknown id, so that it takes the time of a known one.
_NO_HASH = hashlib.sha256(b"").hexdigest()


class TokenRefusedError(Exception):
    """A token gives nothing; the message says why, and what to do. `is_known`: the secret was right."""

    def __init__(self, message: str, *, is_known: bool) -> None:
        super().__init__(message)
        self.is_known = is_known


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOptions:
    """Options of a new token: its limits, and the role and labels that it gives."""

    lifetime: timedelta = DEFAULT_LIFETIME
    uses: int = 1
    role: JoinRole = "node"
    name: str | None = None
    pool: str | None = None
    labels: Labels
    created_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrant:
    """A counted use of a token."""

    token: JoinTokenRecord
    guard: Guard
    """Holds as long as the token is not revoked and has not expired."""


async def create_token(
    transport: Transport,
    clock: Clock,
    authority_hash: bytes,
    entropy: bytes,
    options: TokenOptions,
) -> JoinToken:
    """Store a new token, and return it with its secret, which the store does not have.

    Raises:
        ConflictError: there is a token with this id.
        StoreError: the store did not answer.

    """
    token = new_token(authority_hash, entropy)
    now = clock.now()
    record = JoinTokenRecord(
        id=token.id,
        hash=secret_hash(token.secret_text),
        created=now,
        expires=now + options.lifetime,
        created_by=options.created_by,
        role=options.role,
        name=options.name,
        pool=options.pool,
        labels=options.labels,
        most_uses=options.uses,
    )
    lease = await transport.grant(max(1, int(options.lifetime.total_seconds())))
    key = keys.named(keys.JOIN_TOKEN_PREFIX, token.id)
    put = Put(key=key, value=codec.encode(record), lease=lease)
    await transport.commit([ModRevisionGuard(key=key, mod_revision=0)], [put])
    return token


async def list_tokens(transport: Transport) -> list[JoinTokenRecord]:
    """Return all tokens that have not expired, the newest first. Raises StoreError."""
    items = (await transport.list(keys.JOIN_TOKEN_PREFIX)).items
    join_token_records = [codec.decode(JoinTokenRecord, item) for item in items]
    return sorted(join_token_records, key=lambda record: (record.created, record.id), reverse=True)


async def revoke_token(transport: Transport, token_id: str) -> bool:
    """Delete a token, and return whether it existed. Certificates that it gave stay valid. Raises StoreError."""
    key = keys.named(keys.JOIN_TOKEN_PREFIX, token_id)
    item = await transport.get(key)
    if item is None:
        return False
    # Its lease has no other key.
    await (transport.revoke(item.lease) if item.lease else transport.commit([], [Delete(key=key)]))
    return True


async def check_token(
    transport: Transport, clock: Clock, token_id: str, secret: str
) -> tuple[JoinTokenRecord, KeyValue]:
    """Return the token with this id and secret, whether it has uses left or not.

    Raises:
        TokenRefusedError: there is no such token, the secret is wrong, or it has expired.
        StoreError: the store did not answer.

    """
    item = await transport.get(keys.named(keys.JOIN_TOKEN_PREFIX, token_id))
    record = None if item is None else codec.decode(JoinTokenRecord, item)
    is_right = is_secret(secret, _NO_HASH if record is None else record.hash)
    if item is None or record is None or not is_right:
        raise TokenRefusedError(
            "this token is not valid: it was never created here, was revoked, has expired, or has a typing mistake. "
            "Create one with `fleetctl token create`",
            is_known=False,
        )
    if clock.now() >= record.expires:
        raise TokenRefusedError(
            f"this token expired on {record.expires:%Y-%m-%d %H:%M} UTC. Create another one with `fleetctl token create`",
            is_known=True,
        )
    return record, item


async def use_token(
    transport: Transport, clock: Clock, token_id: str, secret: str, use: JoinTokenUse
) -> TokenGrant:
    """Count a use of the token, and return it. A use that was counted before is returned again.

    Raises:
        TokenRefusedError: the token does not exist, has expired, or has no uses left.
        ConflictError: too many others used it at the same time; try again.
        StoreError: the store did not answer.

    """
    retries = Retries(_BACKOFF, clock)
    for _ in range(_ATTEMPTS):
        record, item = await check_token(transport, clock, token_id, secret)
        guard = CreateRevisionGuard(key=item.key, create_revision=item.create_revision)
        if use in record.uses:
            return TokenGrant(token=record, guard=guard)
        if record.uses_left == 0:
            times = "once" if record.most_uses == 1 else f"{record.most_uses} times"
            raise TokenRefusedError(
                f"this token was used {times}, as often as it allows. Create another one with `fleetctl token create`",
                is_known=True,
            )
        counted = record.model_copy(update={"uses": (*record.uses, use)})
        unchanged = ModRevisionGuard(key=item.key, mod_revision=item.mod_revision)
        put = Put(key=item.key, value=codec.encode(counted), lease=item.lease)
        try:
            await transport.commit([unchanged], [put])
        except ConflictError:
            await retries.wait()
            continue
        return TokenGrant(token=counted, guard=guard)
    raise ConflictError("the token is used by too many machines at the same time; try again")
