"""Retention of the audit log: by age and by number, and a wrong clock removes nothing that is new."""

import pytest

from machinery.clock import SystemClock
from reconciler.services.change_retention import MOST_RECORDS, ChangeRetention, surplus_records
from store import keys
from store.memory import MemoryTransport
from store.port import Put

DAY_MS = 24 * 3600 * 1000
NOW_MS = 1_800_000_000_000


def record_key(age_days: float, suffix: str = "a") -> str:
    return keys.change_key(int(NOW_MS - age_days * DAY_MS), suffix)


@pytest.mark.parametrize(
    ("ages", "now_ms", "removed"),
    [
        pytest.param((), NOW_MS, 0, id="nothing"),
        pytest.param((31, 29, 0), NOW_MS, 1, id="older than 30 days"),
        pytest.param((31, 29, 0), NOW_MS + 365 * DAY_MS, 1, id="a clock that is a year ahead"),
        pytest.param((40, 35), NOW_MS, 0, id="a fleet at rest keeps its last month"),
        pytest.param((31, 29, -60), NOW_MS, 1, id="a record from the future"),
    ],
)
def test_old_records_are_surplus(ages: tuple[float, ...], now_ms: int, removed: int) -> None:
    found = [record_key(age) for age in ages]
    assert surplus_records(found, now_ms) == found[:removed]


def test_the_oldest_of_too_many_are_surplus() -> None:
    found = sorted(record_key(1, f"{n:08}") for n in range(MOST_RECORDS + 3))
    assert surplus_records(found, NOW_MS) == found[:3]


async def test_surplus_records_are_removed_from_the_store() -> None:
    store = MemoryTransport(SystemClock())
    now_ms = int(SystemClock().now().timestamp() * 1000)
    old = [keys.change_key(now_ms - 40 * DAY_MS, f"{n:08}") for n in range(150)]
    kept = keys.change_key(now_ms, "new")
    for key in (*old, kept):
        await store.commit([], [Put(key=key, value=b"{}")])
    await ChangeRetention(store, SystemClock()).remove_surplus()
    assert [item.key for item in (await store.list(keys.CHANGE_PREFIX)).items] == [kept]
