"""Metrics of the store's use: calls, failures by reason, watches, revision and staleness."""

import asyncio
from contextlib import aclosing

import pytest

from machinery.prometheus import Sample, parse_samples, render
from machinery.virtual_time import VirtualClock
from store.errors import ConflictError, UnavailableError
from store.memory import MemoryTransport
from store.metrics import MeasuredTransport, StoreMetrics
from store.port import ModRevisionGuard, Put
from tests.support.prometheus_tools import check_metrics
from tests.support.store_faults import FaultyTransport


def samples(metrics: StoreMetrics) -> dict[str, float]:
    text = render([metrics])
    check_metrics(text.encode())
    return {_name(sample): float(sample.value) for sample in parse_samples(text)}


def _name(one: Sample) -> str:
    labels = ",".join(f"{name}={value}" for name, value in one.labels.items())
    return f"{one.name.removeprefix('fleet_store_')}{{{labels}}}"


async def test_calls_are_measured_with_their_failures() -> None:
    clock = VirtualClock()
    faulty, metrics = FaultyTransport(MemoryTransport(clock)), StoreMetrics(clock)
    transport = MeasuredTransport(faulty, metrics)
    assert "staleness_seconds{}" not in samples(metrics)
    revision = await transport.commit([], [Put(key="/a", value=b"1")])
    with pytest.raises(ConflictError):
        await transport.commit([ModRevisionGuard(key="/a", mod_revision=0)], [])
    await transport.get("/a")
    faulty.leave()
    with pytest.raises(UnavailableError):
        await transport.get("/a")
    found = samples(metrics)
    assert found["request_seconds_count{operation=commit}"] == 2
    assert found["request_seconds_count{operation=get}"] == 2
    assert found["errors_total{operation=commit,reason=conflict}"] == 1
    assert found["errors_total{operation=get,reason=unavailable}"] == 1
    assert found["revision{}"] == revision
    assert found["staleness_seconds{}"] < 60


async def test_an_open_watch_is_counted_and_heard() -> None:
    clock = VirtualClock()
    metrics = StoreMetrics(clock)
    transport = MeasuredTransport(MemoryTransport(clock), metrics)
    async with aclosing(transport.watch("/", after_revision=0)) as watch:
        await anext(watch)
        assert metrics.watches == 1
        revision = await transport.commit([], [Put(key="/a", value=b"1")])
        async with asyncio.timeout(10):
            batch = await anext(watch)
        assert batch.revision == metrics.revision == revision
    assert metrics.watches == 0
    assert samples(metrics)["watches{}"] == 0


async def test_a_failure_without_an_answer_does_not_count_as_heard() -> None:
    metrics = StoreMetrics(VirtualClock())
    with pytest.raises(UnavailableError), metrics.measure("get"):
        raise UnavailableError("away")
    assert metrics.staleness_s() is None
    with pytest.raises(ConflictError), metrics.measure("commit"):
        raise ConflictError("changed")
    assert metrics.staleness_s() is not None
