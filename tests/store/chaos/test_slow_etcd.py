"""Tests of an etcd with users that is slow or frozen: its clients are back soon, and ask for few tokens."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from store import keys
from store.errors import StoreError
from store.etcd.connect import connect
from store.informer import Informer
from store.port import Transport
from tests.support import slow_cpu
from tests.support.store_guarded_etcd import Guarded, guarded_etcd
from tests.support.store_metrics import call_counts
from tests.support.waiting import until

pytestmark = [pytest.mark.ci, pytest.mark.etcd]

PROCESSES = 6
SLOW_S = 4.0
RECOVERY_S = 10.0


class Client:
    """The work of one process on the store: watches, and a call every tenth of a second."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._clock = SystemClock()
        self.answered_at = 0.0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for kind in ("Replica", "ModelDeployment", "Node", "NodePool"):
                prefix = keys.spec_prefix(kind)
                informer = Informer(self._transport, prefix, lambda item: item.value, self._clock)
                group.create_task(informer.run())
            group.create_task(self._call())

    async def _call(self) -> None:
        while True:
            asked_at = self._clock.monotonic()
            try:
                await self._transport.get(keys.spec_key("Node", "a"))
                self.answered_at = asked_at
            except StoreError:
                pass
            await self._clock.sleep(0.1)


@asynccontextmanager
async def clients(guarded: Guarded, way: str) -> AsyncIterator[list[Client]]:
    async with AsyncExitStack() as stack:
        transports = [connect(guarded.address("reconciler", way=way)) for _ in range(PROCESSES)]
        for transport in transports:
            stack.push_async_callback(transport.close)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        found = [Client(transport) for transport in transports]
        tasks = [group.create_task(client.run()) for client in found]
        try:
            yield found
        finally:
            for task in tasks:
                task.cancel()


@pytest.mark.parametrize(
    ("way", "trouble"),
    [
        pytest.param("grpc", slow_cpu.duty_cycle, id="grpc-slow"),
        pytest.param("grpc", slow_cpu.frozen, id="grpc-frozen", marks=pytest.mark.full),
        pytest.param("http", slow_cpu.duty_cycle, id="http-slow", marks=pytest.mark.full),
        pytest.param("http", slow_cpu.frozen, id="http-frozen", marks=pytest.mark.full),
    ],
)
async def test_clients_with_passwords_are_back_soon(
    tmp_path: Path, way: str, trouble: Callable[[int], AbstractAsyncContextManager[None]]
) -> None:
    """Tokens end meanwhile, so that each client needs a new one from an etcd that has no time."""
    clock = SystemClock()
    # A quarter of a second of CPU for each request, hence seconds while etcd has a tenth of a core.
    flags = ("--bcrypt-cost=12", "--auth-token=simple", "--auth-token-ttl=3")
    async with guarded_etcd(tmp_path, *flags) as guarded, clients(guarded, way) as found:
        await until(lambda: all(client.answered_at for client in found))
        before = (await call_counts(guarded.etcd.url)).authenticated
        pid = guarded.etcd.supervisor.pid
        assert pid is not None
        async with trouble(pid):
            await clock.sleep(SLOW_S)
        healed_at = clock.monotonic()
        await until(lambda: all(client.answered_at > healed_at for client in found))
        assert clock.monotonic() - healed_at < RECOVERY_S
        await clock.sleep(1)
        after = (await call_counts(guarded.etcd.url)).authenticated
        print(f"Authenticate before {dict(before)}, after {dict(after)}")
        assert after.total() - before.total() <= 2 * PROCESSES
