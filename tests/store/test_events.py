"""Tests of `store.events`: events last an hour, repetitions are counted, a lost event is no failure."""

import asyncio
import logging

import pytest

from schemas.event import Event, ObjectReference
from store import codec, keys
from store.events import EventRecorder
from store.memory import MemoryTransport
from store.port import Put
from tests.support.clock import FakeClock
from tests.support.store_faults import FaultyTransport
from tests.support.waiting import until_async

ABOUT = ObjectReference(kind="Replica", name="qwen-0", uid="u")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> FaultyTransport:
    return FaultyTransport(MemoryTransport(clock))


@pytest.fixture
def recorder(store: FaultyTransport, clock: FakeClock) -> EventRecorder:
    return EventRecorder(store, clock, source="test")


async def events(store: FaultyTransport) -> list[Event]:
    listing = await store.inner.list(keys.EVENT_PREFIX)
    return [codec.decode_object(Event, item) for item in listing.items]


async def test_a_repeated_event_is_counted(
    store: FaultyTransport, clock: FakeClock, recorder: EventRecorder
) -> None:
    first_seen = clock.now()
    for _ in range(3):
        await recorder.record(ABOUT, "Placed", "on a", type_="Warning")
        await clock.advance(60)
    (event,) = await events(store)
    assert (event.spec.count, event.spec.type, event.spec.source) == (3, "Warning", "test")
    assert event.spec.first_seen == first_seen
    assert (event.spec.last_seen - first_seen).total_seconds() == 120


async def test_a_different_message_is_another_event(
    store: FaultyTransport, clock: FakeClock, recorder: EventRecorder
) -> None:
    await recorder.record(ABOUT, "Placed", "on a")
    await recorder.record(ABOUT, "Placed", "on b")
    await recorder.record(ABOUT.model_copy(update={"uid": "v"}), "Placed", "on a")
    await EventRecorder(store, clock, source="other").record(ABOUT, "Placed", "on a")
    assert [event.spec.count for event in await events(store)] == [1, 1, 1, 1]


async def test_a_running_recorder_writes_in_batches(
    store: FaultyTransport, recorder: EventRecorder
) -> None:
    """One of them cannot be written; the others are written one by one."""
    await recorder.record(ABOUT, "Placed", "on 1")
    (item,) = (await store.list(keys.EVENT_PREFIX)).items
    await store.commit([], [Put(key=item.key, value=b"from the future")])
    async with asyncio.TaskGroup() as group:
        task = group.create_task(recorder.run())
        await asyncio.sleep(0)
        for number in range(100):
            await recorder.record(ABOUT, "Placed", f"on {number % 90}")
        assert len((await store.list(keys.EVENT_PREFIX)).items) == 1

        async def written() -> bool:
            items = (await store.list(keys.EVENT_PREFIX)).items
            read = [codec.decode(Event, one) for one in items if one.key != item.key]
            return sorted(event.spec.count for event in read) == [1] * 80 + [2] * 9

        await until_async(written)
        task.cancel()
    listing = await store.list(keys.EVENT_PREFIX)
    await recorder.record(ABOUT, "Placed", "on 5")
    (again,) = [
        one for one in (await store.list(keys.EVENT_PREFIX)).items if one not in listing.items
    ]
    assert codec.decode(Event, again).spec.count == 3


async def test_events_expire_after_an_hour_and_share_leases(
    store: FaultyTransport, clock: FakeClock, recorder: EventRecorder
) -> None:
    await recorder.record(ABOUT, "Placed", "on a")
    await clock.advance(500)
    await recorder.record(ABOUT, "Placed", "on b")
    await clock.advance(500)
    await recorder.record(ABOUT, "Placed", "on c")
    listing = await store.list(keys.EVENT_PREFIX)
    assert len({item.lease for item in listing.items}) == 2
    await clock.advance(2601)
    assert [event.spec.message for event in await events(store)] == ["on c"]
    await clock.advance(1000)
    assert await events(store) == []


async def test_the_name_of_an_event_has_a_limited_length(
    store: FaultyTransport, recorder: EventRecorder
) -> None:
    await recorder.record(ABOUT.model_copy(update={"name": "n" * 128}), "Placed", "on a")
    (event,) = await events(store)
    assert len(event.name) <= 128


async def test_a_lost_event_is_logged_and_is_no_failure(
    store: FaultyTransport, recorder: EventRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    store.leave()
    with caplog.at_level(logging.INFO):
        await recorder.record(ABOUT, "Placed", "on a")
    assert "event lost" in caplog.text
    store.come_back()
    assert await events(store) == []


async def test_an_unreadable_event_is_no_failure(
    store: FaultyTransport, recorder: EventRecorder
) -> None:
    await recorder.record(ABOUT, "Placed", "on a")
    (item,) = (await store.list(keys.EVENT_PREFIX)).items
    await store.commit([], [Put(key=item.key, value=b"from the future")])
    await recorder.record(ABOUT, "Placed", "on a")
    await recorder.record(ABOUT, "Placed", "on b")


async def test_a_lease_that_the_store_forgot_costs_one_event(
    store: FaultyTransport, recorder: EventRecorder
) -> None:
    await recorder.record(ABOUT, "Placed", "on a")
    (item,) = (await store.list(keys.EVENT_PREFIX)).items
    await store.inner.revoke(item.lease)
    await recorder.record(ABOUT, "Placed", "on b")
    await recorder.record(ABOUT, "Placed", "on c")
    assert [event.spec.message for event in await events(store)] == ["on c"]
