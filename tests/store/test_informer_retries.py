"""Tests of how `store.informer` retries: after breaks, refusals and silence."""

import asyncio
import logging
from itertools import pairwise
from pathlib import Path

import pytest
from typing_extensions import override

from machinery.clock import SystemClock
from store.errors import PermissionDeniedError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.memory import MemoryTransport
from tests.support.clock import FakeClock
from tests.support.store_faults import FaultyTransport
from tests.support.store_informers import put, running
from tests.support.store_metrics import call_counts
from tests.support.store_tcp_etcd import TcpEtcd


async def opened_at(
    clock: FakeClock, stands_s: float, for_s: float, *, jitter: float
) -> list[float]:
    """Return the times at which an informer opens watches that each last so long."""
    faulty = FaultyTransport(MemoryTransport(clock))
    opened: list[float] = []

    async def break_them() -> None:
        while True:
            seen = faulty.watches
            while faulty.watches == seen:
                await clock.sleep(0.001)
            opened.append(clock.monotonic())
            await clock.sleep(stands_s)
            faulty.leave()
            faulty.come_back()

    async with asyncio.TaskGroup() as group:
        breaking = group.create_task(break_them())
        await asyncio.sleep(0)
        async with running(faulty, "/a/", clock, jitter=lambda: jitter):
            await clock.advance(for_s)
        breaking.cancel()
    return opened


async def test_a_watch_that_breaks_at_once_backs_off() -> None:
    opened = await opened_at(FakeClock(), 0.0, 18.0, jitter=1.0)
    gaps = [after - before for before, after in pairwise(opened)]
    assert gaps == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], abs=0.01)


async def test_a_watch_that_lasted_is_reopened_soon() -> None:
    opened = await opened_at(FakeClock(), 6.0, 60.0, jitter=1.0)
    gaps = [after - before for before, after in pairwise(opened)]
    assert gaps == pytest.approx([6.1] * 9, abs=0.02)


async def test_many_informers_reconnect_with_jitter() -> None:
    opened = await opened_at(FakeClock(), 0.0, 1.0, jitter=0.0)
    assert opened[1] - opened[0] == pytest.approx(0.05, abs=0.005)


class RefusingTransport(FaultyTransport):
    """A store that refuses this process; it counts the questions."""

    questions = 0

    @override
    def _check(self) -> None:
        self.questions += 1
        raise PermissionDeniedError("etcd requires a user and a password, and got none")


@pytest.mark.parametrize("is_synced", [False, True])
async def test_a_refused_informer_asks_ever_more_rarely(*, is_synced: bool) -> None:
    clock = FakeClock()
    refusing = RefusingTransport(MemoryTransport(SystemClock()))
    async with running(refusing, "/a/", clock, jitter=lambda: 0.0) as informer:
        if is_synced:
            informer._synced.set()
        await clock.advance(600)
        assert refusing.questions < 100  # it was a thousand
        assert informer.refusal == "etcd requires a user and a password, and got none"


async def test_an_idle_watch_that_is_reopened_logs_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await opened_at(FakeClock(), 17.0, 600.0, jitter=1.0)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.etcd
@pytest.mark.parametrize("way", ["grpc", "http"])
async def test_a_watch_on_a_silent_etcd_stays_open(tmp_path: Path, way: str) -> None:
    """etcd reports progress every few minutes: the process asks whether it is there."""
    async with TcpEtcd(tmp_path) as etcd:
        begun = (await call_counts(etcd.url)).begun["Watch"]
        transport = connect(EtcdAddress(endpoints=(etcd.url,), transport=way), idle_s=1.0)  # type: ignore[arg-type]
        async with running(transport, "/r/") as informer:
            await informer.wait_synced()
            revision = await put(transport, "/elsewhere", "1")
            await asyncio.sleep(4)
            assert (informer.staleness_s() or 0) < 1.5
            assert informer.revision <= revision
            assert (await call_counts(etcd.url)).begun["Watch"] == begun + 1
            await informer.reached(await put(transport, "/r/a", "1"))
        await transport.close()
