"""Handover: claims in one process, then real processes that take over under load."""

import asyncio
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import orjson
import pytest

from gateway import handover
from gateway.handover import HandOver, HandOverError, ListenerClaim, claim_listener
from machinery.clock import SystemClock
from machinery.http_server import ListenAddress, listen
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from tests.support.etcd import running_etcd
from tests.support.gateway_calls import wait_for_gateway
from tests.support.gateway_engine_scripts import DONE, chat, slow, streams
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_world import World
from tests.support.ports import free_port
from tests.support.store_certificates import Authority
from tests.support.waiting import until

CLOCK = SystemClock()
HERE = "127.0.0.1"


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@asynccontextmanager
async def owner(path: Path) -> AsyncIterator[tuple[ListenAddress, asyncio.Event]]:
    """A gateway that would hand over its socket."""
    taken = asyncio.Event()
    with listen(HERE, 0) as listener:
        where = ListenAddress(HERE, port_of(listener))
        giver = HandOver(path, ListenerClaim(listener), where, CLOCK)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(giver.run(taken.set))
            await until(lambda: path.exists())
            yield where, taken
            task.cancel()


async def claimed(path: Path, where: ListenAddress) -> ListenerClaim:
    """Claim in another thread, as another process would."""
    return await asyncio.to_thread(asyncio.run, claim_listener(path, where, CLOCK))


async def test_nobody_is_there(path: Path) -> None:
    claim = await claim_listener(path, ListenAddress(HERE, 0), CLOCK)
    with claim.listener:
        assert claim.predecessor is None


@pytest.mark.parametrize("port", [None, 0])
async def test_the_same_socket_is_handed_over(path: Path, port: int | None) -> None:
    async with owner(path) as (where, taken):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        claim = await claimed(path, ListenAddress(HERE, where.port if port is None else port))
        with claim.listener:
            assert port_of(claim.listener) == where.port
            assert not claim.listener.get_inheritable()
            heir = HandOver(path, claim, where, CLOCK)
            inode = path.stat().st_ino
            async with asyncio.TaskGroup() as group:
                task = group.create_task(heir.run(taken.set))
                await taken.wait()
                await until(lambda: path.stat().st_ino != inode)
                task.cancel()
            assert not path.exists()


async def test_another_address(path: Path) -> None:
    async with owner(path) as (where, taken):
        for asked in (ListenAddress(HERE, where.port - 1), ListenAddress("127.0.0.2", where.port)):
            with pytest.raises(HandOverError, match=f"listens on 127.0.0.1:{where.port}, not on"):
                await claimed(path, asked)
        assert not taken.is_set()


async def test_a_gateway_that_serves_plain_http(path: Path) -> None:
    async with owner(path) as (where, taken):
        claim = claim_listener(path, where, CLOCK, is_tls=True)
        with pytest.raises(
            HandOverError, match="serves plain HTTP, and this one would serve HTTPS"
        ):
            await asyncio.to_thread(asyncio.run, claim)
        assert not taken.is_set()


async def test_a_file_that_is_no_socket(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(HandOverError, match="is not a socket"):
        await claim_listener(path, ListenAddress(HERE, 0), CLOCK)
    assert path.read_text() == "mine"


async def test_a_socket_of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(path))
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)  # only root could change the owner
        with pytest.raises(HandOverError, match=rf"belongs to another user \(uid {owner}\)"):
            await claim_listener(path, ListenAddress(HERE, 0), CLOCK)


async def test_a_socket_without_a_listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    claim = await claim_listener(path, ListenAddress(HERE, 0), CLOCK)
    with claim.listener:
        assert claim.predecessor is None


@asynccontextmanager
async def saying(path: Path, answer: bytes) -> AsyncIterator[None]:
    """A listener that answers each successor with this message."""

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(answered, path):
        yield


@pytest.mark.parametrize("answer", [b"", b"hello\n", b"[]\n", b'{"version": 1}\n'])
async def test_a_predecessor_that_ends_or_sends_invalid_data(path: Path, answer: bytes) -> None:
    async with saying(path, answer):
        claim = await claimed(path, ListenAddress(HERE, 0))
        with claim.listener:
            assert claim.predecessor is None


async def test_a_predecessor_that_refuses(path: Path) -> None:
    async with saying(path, b'{"refused": "not you"}\n'):
        with pytest.raises(HandOverError, match="says: not you"):
            await claimed(path, ListenAddress(HERE, 0))


async def test_a_predecessor_that_hangs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_TIMEOUT_S", 0.1)
    with socket.socket(socket.AF_UNIX) as hung, listen(HERE, 0) as listener:
        hung.bind(str(path))
        hung.listen()
        with pytest.raises(HandOverError, match=r"does not answer within 0\.1 s"):
            await claim_listener(path, ListenAddress(HERE, port_of(listener)), CLOCK)
        claim = await claim_listener(path, ListenAddress(HERE, 0), CLOCK)  # there is another way
        claim.listener.close()


async def test_a_predecessor_that_hangs_after_it_gave_the_socket(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_TIMEOUT_S", 0.1)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    ours.setblocking(False)
    with theirs, listen(HERE, 0) as listener:
        where = ListenAddress(HERE, port_of(listener))
        heir = HandOver(path, ListenerClaim(listener, ours), where, CLOCK)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(heir.run(lambda: None))
            await until(lambda: path.exists())
            task.cancel()
        assert orjson.loads(theirs.recv(100)) == {"take": True}


async def test_a_predecessor_that_ends_after_it_gave_the_socket(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_TIMEOUT_S", 0.2)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    ours.setblocking(False)
    theirs.close()
    with listen(HERE, 0) as listener:
        heir = HandOver(path, ListenerClaim(listener, ours), ListenAddress(HERE, 1), CLOCK)
        await heir.wait_ready(lambda: False)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(heir.run(lambda: None))
            await until(lambda: path.exists())
            task.cancel()


@pytest.mark.parametrize("said", [b'{"versions": [2, 3]}\n', b"{}\n", b"GET / HTTP/1.1\r\n\r\n"])
async def test_newcomers_of_another_version(path: Path, said: bytes) -> None:
    async with owner(path) as (_, taken):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(said)
        assert "versions" in orjson.loads(await reader.readline())["refused"]
        writer.close()
        assert not taken.is_set()


pytestmark = pytest.mark.etcd

CHAT = "/v1/chat/completions"
# The load must leave CPU for the starting gateways.
UNHURRIED = slow(0.05, chat)


@dataclass
class Site:
    """An etcd, an engine, and a folder for gateways."""

    etcd: EtcdAddress
    engine: FakeEngine
    path: Path
    where: ListenAddress
    tls: ssl.SSLContext | None = None
    """Trusts the gateways' certificate; None for plain HTTP."""
    tls_flags: tuple[str, ...] = ()
    started: list[asyncio.subprocess.Process] = field(default_factory=list)

    @property
    def url(self) -> str:
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{self.where.host}:{self.where.port}"

    async def start(self, *more: str) -> asyncio.subprocess.Process:
        where = ("--port", str(self.where.port), "--etcd", str(self.etcd))
        flags = (
            *where,
            "--handover",
            str(self.path),
            "--drain-timeout",
            "20",
            *self.tls_flags,
            *more,
        )
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", *flags, stderr=subprocess.PIPE
        )
        self.started.append(child)
        return child

    async def one_left(self, *children: asyncio.subprocess.Process) -> asyncio.subprocess.Process:
        """Wait until all but one have handed over; return the last."""

        def left() -> list[asyncio.subprocess.Process]:
            return [child for child in children if child.returncode is None]

        await until(lambda: len(left()) == 1, limit_s=60, what="one gateway")
        assert [child.returncode for child in children].count(0) == len(children) - 1
        return left()[0]


@pytest.fixture
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    """Plain HTTP, or HTTPS where a test asks for it by an indirect parameter."""
    async with running_etcd(tmp_path) as etcd, running(FakeEngine("m-0", UNHURRIED)) as engine:
        transport = connect(etcd.address)
        await World(transport).serve("m", engine)
        # Not in tmp_path: paths of sockets are short (104 bytes on macOS).
        path = Path(f"/tmp/fleet-handover-{os.getpid()}")
        site = Site(etcd.address, engine, path, ListenAddress("127.0.0.1", free_port()))
        if getattr(request, "param", "http") == "https":
            authority = Authority(tmp_path, "ours")
            files = authority.issue("gateway")
            site.tls = ssl.create_default_context(cafile=authority.certificate)
            site.tls_flags = (
                *("--tls-cert", str(files.certificate)),
                *("--tls-key", str(files.key)),
            )
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
    """The results of the clients."""

    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    is_over: bool = False

    async def goes_on(self) -> None:
        more = self.answered + 50
        await until(lambda: self.answered > more, what="answers")

    async def ask(self, site: Site, *, keeps: bool) -> None:
        connector = aiohttp.TCPConnector(force_close=not keeps, ssl=site.tls or True)
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


@pytest.mark.ci
@pytest.mark.parametrize(
    "site", ["http", pytest.param("https", marks=pytest.mark.full)], indirect=True
)
async def test_nothing_is_refused_while_gateways_follow_each_other(
    site: Site, http: aiohttp.ClientSession
) -> None:
    # Two at once without a predecessor: one listens, and the other takes over.
    first = await site.one_left(await site.start(), await site.start())
    await wait_for_gateway(http, site.url, tls=site.tls)
    site.engine.script = streams(100, pause_s=0.03)
    body = {"model": "m", "stream": True}
    async with (
        http.post(f"{site.url}/v1/completions", json=body, ssl=site.tls or True) as response,
        asyncio.timeout(60),
    ):
        await response.content.readany()
        site.engine.script = UNHURRIED
        async with loaded(site) as load:
            second = await site.start()
            assert (await response.content.read()).endswith(DONE)
            assert await first.wait() == 0
            await load.goes_on()
            # Two at once again: one is quicker, and the other takes over from it.
            await site.one_left(await site.start(), await site.start())
            assert await second.wait() == 0
            await load.goes_on()
        assert load.wrong == []


@pytest.mark.ci
async def test_those_that_die_are_no_harm(
    site: Site, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    first = await site.start()
    await wait_for_gateway(http, site.url, tls=site.tls)
    # A successor without a reachable etcd never learns the fleet, so the first one continues.
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
    await wait_for_gateway(http, site.url, tls=site.tls)
    await until(site.path.exists)
    second.send_signal(signal.SIGTERM)
    async with asyncio.timeout(20):
        assert await second.wait() == 0
    assert not site.path.exists()
