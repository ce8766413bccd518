"""A whole fleet with users, whose etcd freezes or becomes ten times slower: it is at work again within ten seconds."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from store import keys
from store.errors import StoreError
from store.etcd import users
from store.etcd.connect import connect
from store.port import Transport
from tests.support import slow_cpu
from tests.support.fleet import Fleet, fleetctl
from tests.support.ports import free_port
from tests.support.store_metrics import call_counts
from tests.support.store_tcp_etcd import TcpEtcd
from tests.support.waiting import until_async

pytestmark = [pytest.mark.fleet, pytest.mark.etcd, pytest.mark.full, pytest.mark.timeout(420)]

AGENTS = ("node-1", "node-2", "node-3")
HOLLOW = 50
SLOW_S = 60.0
RECOVERY_S = 10.0
WINDOW_S = 20.0
DEPLOYMENT = """
apiVersion: fleet/v1alpha1
kind: NodePool
metadata: {{name: {name}}}
spec: {{nodes: [node-1]}}
"""


@dataclass(kw_only=True)
class SlowFleet:
    """A fleet, its etcd, and the test's own view of the store."""

    fleet: Fleet
    etcd: TcpEtcd
    root: Transport
    pools: int = 0

    async def is_at_work(self) -> bool:
        """Return whether every process holds its lease and one leads."""
        try:
            nodes = await self.root.list(keys.NODE_LEASE_PREFIX)
            gateways = await self.root.list(keys.GATEWAY_LEASE_PREFIX)
            leader = await self.root.get(keys.ELECTION_RECONCILER)
        except StoreError:
            return False
        return (
            len(nodes.items) == len(AGENTS) + HOLLOW
            and len(gateways.items) == 2
            and leader is not None
        )

    async def has_reconciled(self, name: str) -> bool:
        """Return whether the leader has looked at the pool."""
        try:
            return await self.root.get(keys.status_key("NodePool", name)) is not None
        except StoreError:
            return False

    async def new_pool(self) -> str:
        """Apply a new object; return its name."""
        self.pools += 1
        name = f"pool-{self.pools}"
        await self.fleet.applied(DEPLOYMENT.format(name=name))
        return name


@asynccontextmanager
async def slow_fleet(folder: Path, models_dir: Path) -> AsyncIterator[SlowFleet]:
    """Run a reconciler, three agents, two gateways and fifty hollow agents, each process with its password."""
    # The usual bcrypt. All tokens end while etcd is slow, so that every process needs a new one at once.
    async with TcpEtcd(folder, "--auth-token=simple", "--auth-token-ttl=10") as etcd:
        fleet = Fleet(folder, models_dir, etcd=etcd)
        fleet.passwords = folder / "passwords"
        nodes = [word for name in AGENTS for word in ("--node", name)]
        where = ("--etcd", etcd.url, "--out", str(fleet.passwords))
        for step in (("--prepare", *nodes), ("--enable",)):
            ran = await fleetctl("init-auth", *step, *where)
            assert ran.code == 0, ran.err
        for copy, of in (("gateway-2", "gateway"), ("hollow", "root")):
            shutil.copy(fleet.passwords / f"{of}.env", fleet.passwords / f"{copy}.env")
        who = users.read_credentials(fleet.passwords / "root.env")
        etcd.address = replace(etcd.address, username=who.user, password=who.password)
        root = connect(etcd.address)
        try:
            fleet.start_reconciler()
            for name in AGENTS:
                fleet.start_agent(name)
            fleet.start_gateway()
            fleet.start("gateway-2", "gateway", "--port", str(free_port()))
            fleet.start("hollow", "nodeagent.hollow", "--count", str(HOLLOW))
            found = SlowFleet(fleet=fleet, etcd=etcd, root=root)
            await until_async(found.is_at_work, limit_s=90, what="the fleet's start")
            yield found
        finally:
            await root.close()
            await fleet.stop()


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(slow_cpu.frozen, id="frozen"),
        pytest.param(slow_cpu.duty_cycle, id="duty-cycle"),
    ],
)
async def test_a_fleet_with_users_is_at_work_soon_after_a_slow_minute(
    tmp_path: Path,
    models_dir: Path,
    trouble: Callable[[int], AbstractAsyncContextManager[None]],
) -> None:
    clock = SystemClock()
    async with slow_fleet(tmp_path, models_dir) as fleet:
        url, pid = fleet.etcd.url, fleet.etcd.supervisor.pid
        assert pid is not None
        name = await fleet.new_pool()
        await until_async(lambda: fleet.has_reconciled(name), limit_s=30)
        begun = await call_counts(url)
        await clock.sleep(WINDOW_S)
        before = await call_counts(url)
        quiet = before.begun.total() - begun.begun.total()
        async with trouble(pid):
            await clock.sleep(SLOW_S)
        healed_at = clock.monotonic()
        await until_async(fleet.is_at_work, limit_s=RECOVERY_S, what="the fleet's recovery")
        recovered_s = clock.monotonic() - healed_at
        async with asyncio.timeout(RECOVERY_S):
            name = await fleet.new_pool()
            await until_async(lambda: fleet.has_reconciled(name))
        reconciled_s = clock.monotonic() - healed_at
        await clock.sleep(max(0.0, RECOVERY_S - reconciled_s))
        settled = await call_counts(url)
        await clock.sleep(WINDOW_S)
        after = await call_counts(url)
        load = after.begun.total() - settled.begun.total()
        print(
            f"Authenticate before {dict(before.authenticated)}, after {dict(after.authenticated)}; "
            f"at work after {recovered_s:.1f} s, an apply carried out after {reconciled_s:.1f} s; "
            f"calls in {WINDOW_S:g} s: quiet {quiet}, afterwards {load}"
        )
        assert load < 2 * quiet
        # The six processes, the hollow one, the test and its `apply`: a few tokens each, no storm.
        assert after.authenticated.total() - before.authenticated.total() <= 80
