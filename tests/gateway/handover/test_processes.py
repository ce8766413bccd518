"""Real processes that take over from each other under load."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from gateway.routing.table import Origin
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from tests.gateway.fake_engine import FakeEngine, running
from tests.gateway.scripts import DONE, chat, slow, streams
from tests.gateway.world import World
from tests.support.etcd import running_etcd
from tests.support.ports import free_port
from tests.support.waiting import until, until_async

pytestmark = pytest.mark.etcd

CHAT = "/v1/chat/completions"
# So that the load leaves the machine to the gateways that start.
UNHURRIED = slow(0.05, chat)


@dataclass
class Site:
    """An etcd, an engine, and a place for gateways."""

    etcd: EtcdAddress
    engine: FakeEngine
    path: Path
    where: Origin
    started: list[asyncio.subprocess.Process] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.where.host}:{self.where.port}"

    async def start(self, *more: str) -> asyncio.subprocess.Process:
        where = ("--port", str(self.where.port), "--etcd", str(self.etcd))
        flags = (*where, "--handover", str(self.path), "--drain-timeout", "20", *more)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", *flags, stderr=subprocess.PIPE
        )
        self.started.append(child)
        return child

    async def one_left(self, *children: asyncio.subprocess.Process) -> asyncio.subprocess.Process:
        """Wait for all but one to have handed over; return that one."""

        def left() -> list[asyncio.subprocess.Process]:
            return [child for child in children if child.returncode is None]

        await until(lambda: len(left()) == 1, limit_s=60, what="one gateway")
        assert [child.returncode for child in children].count(0) == len(children) - 1
        return left()[0]

    async def serves(self, http: aiohttp.ClientSession) -> None:
        async def healthy() -> bool:
            try:
                async with http.get(f"{self.url}/health") as response:
                    return "m" in (await response.json())["models"]
            except aiohttp.ClientError:
                return False

        await until_async(healthy, what="the gateway")


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with (
        running_etcd(tmp_path) as etcd,
        running(FakeEngine("m-0", UNHURRIED)) as engine,
    ):
        transport = connect(etcd.address)
        await World(transport).serve("m", engine)
        # Not in tmp_path: paths of sockets are short (104 bytes on macOS).
        path = Path(f"/tmp/fleet-handover-{os.getpid()}")
        site = Site(etcd.address, engine, path, Origin("127.0.0.1", free_port()))
        try:
            yield site
        finally:
            for child in site.started:
                if child.returncode is None:
                    child.kill()
                await child.communicate()
            path.unlink(missing_ok=True)
            await transport.close()


@dataclass
class Load:
    """What clients saw."""

    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    is_over: bool = False

    async def goes_on(self) -> None:
        more = self.answered + 50
        await until(lambda: self.answered > more, what="answers")

    async def ask(self, site: Site, *, keeps: bool) -> None:
        connector = aiohttp.TCPConnector(force_close=not keeps)
        async with aiohttp.ClientSession(connector=connector) as http:
            while not self.is_over:
                try:
                    async with http.post(f"{site.url}{CHAT}", json={"model": "m"}) as response:
                        if response.status != 200:
                            self.wrong.append(f"{response.status} {await response.text()}")
                        await response.read()
                except aiohttp.ClientError as error:
                    self.wrong.append(repr(error))
                self.answered += 1


@asynccontextmanager
async def loaded(site: Site) -> AsyncIterator[Load]:
    load = Load()
    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(load.ask(site, keeps=number % 2 == 0))
        yield load
        load.is_over = True


async def test_nothing_is_refused_while_gateways_follow_each_other(
    site: Site, http: aiohttp.ClientSession
) -> None:
    # Two at once, and nobody before them: one listens, and the other takes over.
    first = await site.one_left(await site.start(), await site.start())
    await site.serves(http)
    site.engine.script = streams(100, pause_s=0.03)
    body = {"model": "m", "stream": True}
    async with (
        http.post(f"{site.url}/v1/completions", json=body) as response,
        asyncio.timeout(60),
    ):
        await response.content.readany()
        site.engine.script = UNHURRIED
        async with loaded(site) as load:
            second = await site.start()
            assert (await response.content.read()).endswith(DONE)
            assert await first.wait() == 0
            await load.goes_on()
            # Again two at once: one is quicker, and is followed by the other.
            await site.one_left(await site.start(), await site.start())
            assert await second.wait() == 0
            await load.goes_on()
        assert load.wrong == []


async def test_those_that_die_are_no_harm(
    site: Site, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    first = await site.start()
    await site.serves(http)
    # A newcomer that never learns the fleet, for its etcd is not there: so the first one goes on.
    nowhere = EtcdAddress(socket=tmp_path / "nowhere")
    hopeless = Site(nowhere, site.engine, site.path, site.where)
    async with loaded(site) as load, asyncio.timeout(60):
        newcomer = await hopeless.start()
        assert newcomer.stderr is not None
        await newcomer.stderr.readline()  # it says that etcd is away
        await load.goes_on()
        newcomer.kill()
        await newcomer.communicate()
        await load.goes_on()
    assert load.wrong == []
    assert first.returncode is None
    first.kill()
    await first.wait()
    assert site.path.exists()
    second = await site.start()
    await site.serves(http)
    await until(site.path.exists)
    second.send_signal(signal.SIGTERM)
    async with asyncio.timeout(20):
        assert await second.wait() == 0
    assert not site.path.exists()
