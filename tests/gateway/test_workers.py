"""A gateway of several workers: real processes behind one port, killed and stopped."""

import asyncio
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import pytest
from click.testing import CliRunner

from gateway.__main__ import main
from identity.names import name_of_gateway, worker_id
from schemas.records import GatewayLease
from store import codec, keys
from store.etcd.connect import connect
from store.port import Transport
from tests.support.etcd import running_etcd
from tests.support.gateway_calls import gateway_process
from tests.support.gateway_engine_scripts import DONE, streams
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_world import World
from tests.support.ports import free_port
from tests.support.waiting import until_async

_FINISHED = re.compile(
    r'^fleet_gateway_requests_total\{model="m",outcome="ok"\} (\d+)$', re.MULTILINE
)


@dataclass(frozen=True)
class Stand:
    """Two workers, one engine, and the store that they share."""

    port: int
    parent: asyncio.subprocess.Process
    transport: Transport
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.parent.pid).children()

    async def own_urls(self) -> list[str]:
        """Return the addresses at which the workers answer one by one."""
        listing = await self.transport.list(keys.GATEWAY_LEASE_PREFIX)
        return [codec.decode(GatewayLease, item).url for item in listing.items]

    async def are_ready(self) -> bool:
        """Return whether two workers know the model."""
        urls = await self.own_urls()
        return len(urls) == 2 and all([await self._knows_model(url) for url in urls])

    async def _knows_model(self, url: str) -> bool:
        try:
            async with self.http.get(f"{url}/health") as response:
                return bool((await response.json())["models"].get("m", {}).get("ready"))
        except aiohttp.ClientError:
            return False

    async def complete(self) -> int:
        """Send a request on a connection of its own; return its status."""
        body = {"model": "m", "stream": True}
        async with self.http.post(f"{self.url}/v1/completions", json=body) as response:
            assert (await response.read()).endswith(DONE)
            return response.status

    async def finished(self) -> list[int]:
        """Return the number of answered requests of each worker."""
        found = []
        for url in await self.own_urls():
            async with self.http.get(f"{url}/metrics") as response:
                match = _FINISHED.search(await response.text())
                found.append(int(match[1]) if match else 0)
        return found


@asynccontextmanager
async def stand(
    tmp_path: Path, http: aiohttp.ClientSession, *, stream_s: float = 0.1
) -> AsyncIterator[Stand]:
    """Run two workers, whose engine streams for so long."""
    port = free_port()
    async with (
        running_etcd(tmp_path) as etcd,
        running(FakeEngine("m-0", streams(10, pause_s=stream_s / 10))) as engine,
        gateway_process(
            *("--port", str(port), "--workers", "2", "--etcd", str(etcd.address))
        ) as parent,
    ):
        transport = connect(etcd.address)
        await World(transport).serve("m", engine)
        found = Stand(port, parent, transport, http)
        await until_async(found.are_ready, what="two workers")
        yield found
        await transport.close()


@pytest.mark.ci
@pytest.mark.etcd
async def test_workers_share_a_port_and_answer_for_themselves(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with stand(tmp_path, http) as two:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(two.complete()) for _ in range(40)]
        assert {task.result() for task in tasks} == {200}
        assert sum(await two.finished()) == 40
        assert str(two.port) not in " ".join(await two.own_urls())


@pytest.mark.etcd
async def test_a_killed_worker_is_started_again(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with stand(tmp_path, http) as two:
        victim, other = two.workers()
        victim.kill()
        # The other one accepts all connections meanwhile; those that the dead one had accepted are lost.
        assert [await two.complete() for _ in range(10)] == [200] * 10

        async def is_replaced() -> bool:
            pids = {worker.pid for worker in two.workers()}
            return len(pids) == 2 and victim.pid not in pids and await two.are_ready()

        await until_async(is_replaced, what="another worker")
        assert other.is_running()
        assert await two.complete() == 200


@pytest.mark.ci
@pytest.mark.etcd
async def test_sigterm_lets_streams_of_all_workers_finish(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with stand(tmp_path, http, stream_s=8) as two, asyncio.TaskGroup() as group:
        streams_ = [group.create_task(two.complete()) for _ in range(20)]

        async def have_begun() -> bool:
            return sum([await _in_flight(two, url) for url in await two.own_urls()]) == 20

        await until_async(have_begun, what="streams at the engine")
        two.parent.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert [await stream for stream in streams_] == [200] * 20
            assert await two.parent.wait() == 0


async def _in_flight(two: Stand, url: str) -> int:
    async with two.http.get(f"{url}/metrics") as response:
        match = re.search(r"^fleet_gateway_in_flight (\d+)", await response.text(), re.MULTILINE)
        return int(match[1]) if match else 0


@pytest.mark.ci
@pytest.mark.etcd
async def test_workers_end_when_their_parent_was_killed(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with stand(tmp_path, http) as two:
        workers = two.workers()
        two.parent.kill()

        async def have_ended() -> bool:
            return not any(worker.is_running() for worker in workers)

        await until_async(have_ended, what="the end of the workers")


@pytest.mark.ci
@pytest.mark.etcd
async def test_what_no_start_can_mend_ends_the_gateway(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        async with (
            running_etcd(tmp_path) as etcd,
            gateway_process(
                *("--port", str(free_port()), "--workers", "2"),
                *("--worker-port", port, "--etcd", str(etcd.address)),
            ) as parent,
        ):
            assert parent.stderr is not None
            said = (await parent.stderr.read()).decode()
            assert f"worker 1 cannot listen on 127.0.0.1:{port}: Address already in use" in said
            assert await parent.wait() == 3


def test_a_handover_of_several_workers_is_refused(tmp_path: Path) -> None:
    flags = [
        "--port",
        "0",
        "--etcd",
        "unix:/s",
        "--workers",
        "2",
        "--handover",
        str(tmp_path / "s"),
    ]
    result = CliRunner().invoke(main, flags)
    assert (result.exit_code, "leave out one of the two" in result.stderr) == (2, True)


def test_workers_share_the_name_in_the_certificate() -> None:
    ids = [worker_id("edge-2", number) for number in (1, 2, 3)]
    assert ids == ["edge-2", "edge-2~2", "edge-2~3"]
    assert {name_of_gateway(id_) for id_ in ids} == {"edge-2"}
