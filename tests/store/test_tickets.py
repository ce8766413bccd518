"""Tests of `store.tickets`: only tickets in the store are accepted."""

import hashlib
from dataclasses import replace

import pytest
from typing_extensions import override

from schemas.records import Ticket
from store import codec, keys
from store.errors import PermissionDeniedError, StoreError, UnavailableError
from store.memory import MemoryTransport
from store.port import Delete, KeyValue, Put
from store.tickets import TicketChecker, TicketDenial, TicketGrant
from tests.support.clock import FakeClock

ID, SECRET = "0123456789abcdef", "s" * 43
HOLDER = "Node/mac-1"
GOOD = f"Bearer {ID}.{SECRET}"


async def written(holder: str = HOLDER) -> MemoryTransport:
    store = MemoryTransport(FakeClock())
    ticket = Ticket(hash=hashlib.sha256(SECRET.encode()).hexdigest(), user="anna@studio")
    await store.commit([], [Put(key=keys.ticket_key(holder, ID), value=codec.encode(ticket))])
    return store


async def test_a_ticket_in_the_store_is_accepted() -> None:
    tickets = TicketChecker(await written(), FakeClock(), HOLDER)
    assert await tickets.check(GOOD) == TicketGrant(id=ID, user="anna@studio")
    assert await tickets.check(GOOD.replace("Bearer", "bearer")) == TicketGrant(
        id=ID, user="anna@studio"
    )


async def test_a_redeemed_ticket_is_gone() -> None:
    store = await written()
    tickets = TicketChecker(store, FakeClock(), HOLDER)
    assert await tickets.redeem(GOOD[:-1] + "t") == await tickets.check(GOOD[:-1] + "t")
    assert await tickets.redeem(GOOD) == TicketGrant(id=ID, user="anna@studio")
    assert await store.get(keys.ticket_key(HOLDER, ID)) is None
    again = await tickets.redeem(GOOD)
    assert isinstance(again, TicketDenial)
    assert again.status == 401


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param("", id="nothing"),
        pytest.param("Bearer", id="no-ticket"),
        pytest.param(f"Basic {ID}.{SECRET}", id="another-scheme"),
        pytest.param(f"Bearer {SECRET}", id="no-id"),
        pytest.param(f"Bearer ../{ID}.{SECRET}", id="a-path"),
        pytest.param(f"Bearer {ID}.{SECRET}\n", id="a-line"),
        pytest.param(f"Bearer {ID}.{SECRET[1:]}", id="part-of-the-secret"),
        pytest.param(f"Bearer {ID}.{SECRET}x", id="more-than-the-secret"),
        pytest.param(f"Bearer fedcba9876543210.{SECRET}", id="another-id"),
    ],
)
async def test_anything_else_is_refused(shown: str) -> None:
    denied = await TicketChecker(await written(), FakeClock(), HOLDER).check(shown)
    assert isinstance(denied, TicketDenial)
    assert denied.status == 401
    assert SECRET not in denied.why


@pytest.mark.parametrize("holder", ["Node/mac", "Node/mac-11", "Gateway/mac-1"])
async def test_a_ticket_is_for_one_holder(holder: str) -> None:
    denied = await TicketChecker(await written(), FakeClock(), holder).check(GOOD)
    assert isinstance(denied, TicketDenial)


async def test_guesses_are_rate_limited() -> None:
    clock = FakeClock()
    tickets = TicketChecker(await written(), clock, HOLDER)
    statuses = set()
    for number in range(40):
        denied = await tickets.check(f"Bearer {number:016x}.{SECRET}")
        assert isinstance(denied, TicketDenial)
        statuses.add(denied.status)
    assert statuses == {401, 429}
    assert isinstance(await tickets.check(GOOD), TicketDenial)
    await clock.advance(1.0)
    assert isinstance(await tickets.check(GOOD), TicketGrant)


class Failing(MemoryTransport):
    """A store that answers every call with an error."""

    error: StoreError = UnavailableError("etcd is away")

    @override
    async def get(self, key: str) -> KeyValue | None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "word"),
    [
        pytest.param(UnavailableError("etcd is away"), "etcd is away", id="away"),
        pytest.param(PermissionDeniedError("no"), "init-auth", id="no-role"),
    ],
)
async def test_tickets_are_refused_while_the_store_is_unavailable(
    error: StoreError, word: str
) -> None:
    store = Failing(FakeClock())
    store.error = error
    denied = await TicketChecker(store, FakeClock(), HOLDER).check(GOOD)
    assert isinstance(denied, TicketDenial)
    assert (denied.status, word in denied.why) == (503, True)


async def test_a_followed_log_ends_with_its_ticket_only() -> None:
    store, clock = await written(), FakeClock()
    granted = await TicketChecker(store, clock, HOLDER).check(GOOD)
    assert isinstance(granted, TicketGrant)
    away = TicketChecker(Failing(clock), clock, HOLDER).watch(granted)
    there = TicketChecker(store, clock, HOLDER).watch(granted)
    other = TicketChecker(store, clock, HOLDER).watch(replace(granted, id="fedcba9876543210"))
    # It was checked a moment ago.
    assert not await other.is_over()
    await clock.advance(60)
    assert [await watch.is_over() for watch in (away, there, other)] == [False, False, True]
    await store.commit([], [Delete(key=keys.ticket_key(HOLDER, ID))])
    await clock.advance(60)
    assert await there.is_over()
