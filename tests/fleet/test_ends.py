"""Reconcilers and agents end within seconds after a signal, though the store does not answer."""

import signal
from pathlib import Path

import pytest

from machinery import processes
from machinery.clock import SystemClock
from tests.support import slow_cpu
from tests.support.fleet import Fleet
from tests.support.store_guarded_etcd import guarded_etcd

pytestmark = [pytest.mark.fleet, pytest.mark.etcd, pytest.mark.full]

LIMIT_S = 8.0


@pytest.mark.parametrize("way", ["grpc", "http"])
@pytest.mark.parametrize("frozen_s", [0.0, 6.0])
async def test_processes_end_while_the_store_does_not_answer(
    tmp_path: Path, way: str, frozen_s: float
) -> None:
    clock = SystemClock()
    async with guarded_etcd(tmp_path) as guarded:
        fleet = Fleet(tmp_path, tmp_path / "models", etcd=guarded.etcd)
        fleet.passwords = guarded.passwords
        pid = guarded.etcd.supervisor.pid
        assert pid is not None
        try:
            fleet.start_reconciler("--etcd-transport", way)
            fleet.start_agent("mac-1", "--etcd-transport", way)
            guarded.etcd.address = guarded.address("root")
            await fleet.joined(1)
            async with slow_cpu.frozen(pid):
                await clock.sleep(frozen_s)
                for name in ("reconciler", "mac-1"):
                    fleet._children[name].send(signal.SIGTERM)
                for name in ("reconciler", "mac-1"):
                    child = fleet._children[name]
                    assert await processes.wait_ended(child, clock, limit_s=LIMIT_S), name
        finally:
            await fleet.stop()
