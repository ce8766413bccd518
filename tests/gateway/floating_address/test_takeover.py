"""Two gateway processes on two machines of one network, and a client that knows only their floating address."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
import pytest

from machinery.clock import SystemClock
from machinery.processes import ChildProcess, end, spawn
from store.etcd.address import EtcdAddress
from tests.support import netns
from tests.support.netns import Networks
from tests.support.ports import free_port
from tests.support.store_tcp_etcd import TcpEtcd
from tests.support.waiting import until_async

pytestmark = [
    pytest.mark.full,
    pytest.mark.etcd,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        sys.platform != "linux" or not netns.available(), reason="needs network namespaces"
    ),
]


@dataclass(slots=True)
class Stand:
    """An etcd in the network of the members, and the machines, which clients reach in another network."""

    root: Path
    networks: Networks
    etcd: TcpEtcd
    etcd_url: str
    port: int = field(default_factory=free_port)
    gateways: dict[int, ChildProcess] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return self.networks.client_address(200)

    def start(self, machine: int) -> None:
        prefix = self.networks.place(machine).prefix
        flags = ("--host", "0.0.0.0", "--port", str(self.port), "--insecure-http", "--auth", "off")
        floating = ("--floating-address", f"{self.address}/24")
        self.gateways[machine] = spawn(
            (*prefix, sys.executable, "-m", "gateway", "--etcd", self.etcd_url, *flags, *floating),
            log=self.root / f"gateway-{machine}.log",
        )

    def process(self, machine: int) -> psutil.Process:
        """Return the gateway, which `ip netns exec` has become."""
        return psutil.Process(self.gateways[machine].record.pid)

    async def status(self, host: str) -> int:
        """Ask a gateway by a new connection; 0: no answer."""
        timeout = aiohttp.ClientTimeout(total=0.5)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as http,
                http.get(f"http://{host}:{self.port}/health") as response,
            ):
                return response.status
        except (aiohttp.ClientError, TimeoutError):
            return 0

    async def answers(self) -> bool:
        return await self.status(self.address) == 200

    async def has_address(self, machine: int) -> bool:
        prefix = self.networks.place(machine).prefix
        process = await asyncio.create_subprocess_exec(
            *(*prefix, "ip", "-4", "address", "show", "to", self.address),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        return self.address.encode() in out

    async def wait(self, reached: Callable[[], Awaitable[bool]], what: str) -> float:
        """Wait for something; return how long that took, in seconds."""
        began_s = SystemClock().monotonic()
        try:
            await until_async(reached, limit_s=30, what=what)
        except AssertionError as error:
            logs = "\n".join(log.read_text()[-3000:] for log in self.root.glob("gateway-*.log"))
            raise AssertionError(f"{error}\n{logs}") from error
        return SystemClock().monotonic() - began_s

    async def moved(self, to: int) -> bool:
        return await self.has_address(to) and not await self.has_address(1 - to)


@asynccontextmanager
async def stand(root: Path) -> AsyncIterator[Stand]:
    """Run two gateways; the first one holds the address."""
    clock, port = SystemClock(), free_port()
    with Networks(2).made() as networks:
        probe = EtcdAddress(endpoints=(f"http://127.0.0.1:{port}",))
        listen = f"--listen-client-urls=http://0.0.0.0:{port}"
        etcd = TcpEtcd(root, listen, probe=probe)
        found = Stand(root, networks, etcd, f"http://{networks.join_peers()}:{port}")
        await etcd.start()
        try:
            for machine in range(2):
                found.start(machine)
                await found.wait(found.answers, "the floating address")
            other = networks.place(1).client_host

            async def is_up() -> bool:
                return await found.status(other) == 200

            await found.wait(is_up, "the second gateway")
            assert await found.moved(to=0)
            yield found
        finally:
            for process in found.gateways.values():
                process.send(signal.SIGCONT)
                await end(process, clock, grace_s=5.0)
            await etcd.supervisor.stop()


async def test_the_address_moves_within_five_seconds_of_a_kill(tmp_path: Path) -> None:
    async with stand(tmp_path) as found:
        os.kill(found.process(0).pid, signal.SIGKILL)

        async def is_gone() -> bool:
            return not await found.has_address(0)

        # The machine lives on, and its keeper removes the address long before the lease ends.
        gone_s = await found.wait(is_gone, "the end of the address")
        moved_s = gone_s + await found.wait(found.answers, "the take-over")
        print(f"kill -9: removed after {gone_s:.2f} s, answers after {moved_s:.2f} s")
        assert moved_s < 5
        assert await found.moved(to=1)
        # The killed one comes back, and leaves the address where it is.
        assert not found.gateways[0].running()
        found.start(0)
        own = found.networks.place(0).client_host

        async def is_up() -> bool:
            return await found.status(own) == 200

        await found.wait(is_up, "the first gateway again")
        assert await found.moved(to=1)
        # A stopped gateway hands the address on at once.
        stopping = found.gateways[1]
        stopping.send(signal.SIGTERM)
        handed_s = await found.wait(lambda: found.moved(to=0), "the hand-over")
        await found.wait(found.answers, "an answer")
        print(f"SIGTERM: moved after {handed_s:.2f} s")
        assert handed_s < 5


async def test_the_kernel_removes_the_address_when_the_keeper_is_killed_as_well(
    tmp_path: Path,
) -> None:
    async with stand(tmp_path) as found:
        gateway = found.process(0)
        (keeper,) = gateway.children()
        began_s = SystemClock().monotonic()
        for process in (keeper, gateway):
            process.kill()
        await found.wait(lambda: found.moved(to=1), "the take-over")
        await found.wait(found.answers, "an answer")
        moved_s = SystemClock().monotonic() - began_s
        print(f"kill -9 of both: moved after {moved_s:.2f} s")
        assert moved_s < 10


async def test_a_frozen_gateway_loses_the_address(tmp_path: Path) -> None:
    async with stand(tmp_path) as found:
        found.gateways[0].send(signal.SIGSTOP)
        moved_s = await found.wait(lambda: found.moved(to=1), "the take-over")
        moved_s += await found.wait(found.answers, "an answer")
        print(f"SIGSTOP: answers after {moved_s:.2f} s")
        assert moved_s < 10
        found.gateways[0].send(signal.SIGCONT)


async def test_a_holder_that_only_lost_etcd_gives_way_to_the_new_holder(tmp_path: Path) -> None:
    async with stand(tmp_path) as found:
        found.networks.cut_peers(0)

        async def taken() -> bool:
            return await found.has_address(1)

        taken_s = await found.wait(taken, "the take-over")
        overlap_s = await found.wait(lambda: found.moved(to=1), "the end of the overlap")
        print(f"partition: taken after {taken_s:.2f} s, overlap {overlap_s:.2f} s")
        assert overlap_s < 5
        await found.wait(found.answers, "an answer")
        found.networks.mend_peers(0)


async def test_the_address_stays_while_etcd_is_away(tmp_path: Path) -> None:
    async with stand(tmp_path) as found:
        await found.etcd.supervisor.end()
        ends_s = SystemClock().monotonic() + 10
        answered = []
        while SystemClock().monotonic() < ends_s:
            answered.append(await found.status(found.address))
        assert len(answered) > 20
        assert set(answered) == {200}
        assert await found.moved(to=0)
        await found.etcd.supervisor.start()
        await found.wait(found.answers, "an answer")
