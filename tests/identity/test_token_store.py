"""Join tokens in the store: uses, ends and revocation; on a real etcd one of a hundred takes the only use."""

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from identity import token_store
from identity.join_token import JoinToken
from identity.token_store import (
    TokenGrant,
    TokenOptions,
    TokenRefusedError,
    create_token,
    use_token,
)
from machinery.clock import SystemClock
from schemas.trust import JoinTokenUse
from store.errors import ConflictError
from store.etcd.connect import connect
from store.memory import MemoryTransport
from store.port import Put, Transport
from tests.support.clock import FakeClock
from tests.support.etcd import running_etcd

PINNED = bytes(32)
WRONG = "a" * 26


def a_use(number: int = 0, name: str = "mac-1") -> JoinTokenUse:
    return JoinTokenUse(key_hash=f"{number:064x}", name=name)


class Desk:
    """A store with a token; `clock` is the caller's, and `store_clock` ends leases."""

    def __init__(self) -> None:
        self.clock, self.store_clock = FakeClock(), FakeClock()
        self.store = MemoryTransport(self.store_clock)

    async def create(self, **options: Any) -> JoinToken:
        made = TokenOptions(labels={}, **options)
        return await create_token(self.store, self.clock, PINNED, os.urandom(21), made)

    async def use(self, token: JoinToken, number: int = 0, name: str = "mac-1") -> TokenGrant:
        use = a_use(number, name)
        return await use_token(self.store, self.clock, token.id, token.secret_text, use)


@pytest.fixture
def desk() -> Desk:
    return Desk()


async def test_a_token_gives_as_many_uses_as_it_says(desk: Desk) -> None:
    token = await desk.create(uses=2)
    for number in (1, 2):
        assert (await desk.use(token, number)).token.uses_left == 2 - number
    with pytest.raises(TokenRefusedError, match="used 2 times, as often as it allows"):
        await desk.use(token, 3)


async def test_the_same_key_and_name_again_is_the_same_use(desk: Desk) -> None:
    token = await desk.create()
    await desk.use(token, 1)
    assert (await desk.use(token, 1)).token.uses == (a_use(1),)
    with pytest.raises(TokenRefusedError, match="used once"):
        await desk.use(token, 1, "mac-2")


async def test_a_token_ends_by_the_clock_even_if_its_lease_lives_on(desk: Desk) -> None:
    token = await desk.create(lifetime=timedelta(hours=1))
    await desk.clock.advance(3599)
    await desk.use(token)
    await desk.clock.advance(1)
    with pytest.raises(TokenRefusedError, match="expired on 2026-01-01 01:00 UTC") as caught:
        await desk.use(token)
    assert caught.value.is_known


async def test_the_store_ends_a_token_by_its_lease(desk: Desk) -> None:
    token = await desk.create(lifetime=timedelta(seconds=60))
    await desk.use(token)  # keeps the lease
    await desk.store_clock.advance(61)
    assert await token_store.list_tokens(desk.store) == []


async def test_a_wrong_secret_is_refused_like_an_unknown_id(desk: Desk) -> None:
    token = await desk.create()
    refusals = []
    for id_ in (token.id, "aaaaaaaa"):
        with pytest.raises(TokenRefusedError) as caught:
            await use_token(desk.store, desk.clock, id_, WRONG, a_use())
        assert not caught.value.is_known
        refusals.append(str(caught.value))
    assert refusals[0] == refusals[1]


async def test_a_revoked_token_gives_nothing_not_even_a_use_that_was_counted(desk: Desk) -> None:
    token = await desk.create()
    grant = await desk.use(token)
    assert await token_store.revoke_token(desk.store, token.id)
    assert not await token_store.revoke_token(desk.store, token.id)
    with pytest.raises(TokenRefusedError):
        await desk.use(token)
    with pytest.raises(ConflictError):
        await desk.store.commit([grant.guard], [Put(key="/issued", value=b"")])


async def test_the_store_has_no_secret(desk: Desk) -> None:
    token = await desk.create()
    stored = b"".join(item.value for item in (await desk.store.list("/")).items)
    assert token.secret_text.encode() not in stored
    assert token.secret_text not in repr(token)


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[Transport]:
    async with running_etcd(tmp_path) as running:
        transport = connect(running.address)
        yield transport
        await transport.close()


@pytest.mark.etcd
async def test_one_of_a_hundred_parallel_uses_is_counted(etcd: Transport) -> None:
    clock, start = SystemClock(), asyncio.Barrier(100)
    token = await create_token(etcd, clock, PINNED, os.urandom(21), TokenOptions(labels={}))

    async def attempt(number: int) -> bool:
        await start.wait()
        try:
            await use_token(etcd, clock, token.id, token.secret_text, a_use(number))
        except TokenRefusedError:
            return False
        return True

    counted = await asyncio.gather(*map(attempt, range(100)))
    assert sum(counted) == 1
    [record] = await token_store.list_tokens(etcd)
    assert record.uses == (a_use(counted.index(True)),)
