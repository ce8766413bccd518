"""`fleetctl get`: formats, selection, errors and imports."""

import asyncio
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from store import keys
from store.errors import UnavailableError
from store.etcd.connect import connect
from store.port import Delete, Put, Transport
from tests.support.fleet import Fleet
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.store_tcp_etcd import TcpEtcd
from tests.support.waiting import until

pytestmark = pytest.mark.etcd

MANIFESTS = """
apiVersion: fleet/v1alpha1
kind: NodePool
metadata: {name: studio}
spec: {nodes: [mac-1]}
---
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: qwen, labels: {team: a, lab.io/rack: "7"}}
spec: {model: {path: qwen3}, servedNames: [standard], replicas: 2, placement: {pools: [studio]}}
---
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: llama-10, labels: {team: b}}
spec: {model: {path: llama}}
---
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: llama-2}
spec: {model: {path: llama}, replicas: 3}
"""
# Long ago, so that ages do not depend on the time of the test.
LONG_AGO = b'"creationTimestamp":"2000-01-01T00:00:00Z"'


@pytest.fixture(scope="module")
async def fleet(shared_fleet: MemoryFleet, shared_transport: Transport) -> MemoryFleet:
    """Return a store with some objects in it, which no test changes."""
    await shared_fleet.applied(MANIFESTS)
    await shared_transport.commit(
        [],
        [
            Put(
                key=f"{keys.ENDPOINT_PREFIX}mac-1/qwen-0",
                value=b'{"apiVersion":"fleet/v1alpha1","kind":"Endpoint","metadata":{"name":"qwen-0"},"spec":'
                b'{"deployment":"qwen","node":"mac-1","url":"http://10.0.0.5:4100","servedNames":["qwen","standard"]}}',
            ),
            Put(
                key=keys.spec_key("Node", "mac-1"),
                value=b'{"apiVersion":"fleet/v1alpha1","kind":"Node","metadata":{"name":"mac-1","uid":"n1","labels":{"lab":"x"},'
                + LONG_AGO
                + b'},"spec":{"draining":true}}',
            ),
            Put(key=keys.node_lease_key("mac-1"), value=b"{}"),
            Put(
                key=f"{keys.API_KEY_PREFIX}ci",
                value=b'{"name":"ci","hash":"00ff","created":"2000-01-01T00:00:00Z","models":["qwen"],"role":"user"}',
            ),
        ],
    )
    return shared_fleet


async def test_get_imports_nothing_slow(shared: Fleet) -> None:
    """`get` reads trees: pydantic's models and servers' libraries take several times as long to import."""
    code = (
        "import sys\n"
        "from fleetctl.__main__ import main\n"
        "main(standalone_mode=False)\n"
        "heavy = ('pydantic', 'aiohttp', 'fastapi', 'ruamel', 'tabulate', 'rich')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)\n"
    )
    words = ("get", "md", "-o", "yaml", "--etcd", str(shared.etcd.address))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert out.startswith(b"apiVersion: v1\n")
    assert err == b"[]\n"


class Watching:
    """A running `fleetctl get -w`, and its output."""

    def __init__(self, process: asyncio.subprocess.Process, lines: asyncio.StreamReader) -> None:
        self._process = process
        self._lines = lines

    async def line(self) -> str:
        async with asyncio.timeout(60):
            return (await self._lines.readline()).decode().replace("\r\n", "\n")

    async def lines(self, count: int) -> list[str]:
        return [await self.line() for _ in range(count)]

    async def interrupted(self) -> int:
        """Press Ctrl-C; return the exit code."""
        self._process.send_signal(signal.SIGINT)
        async with asyncio.timeout(30):
            return await self._process.wait()


@asynccontextmanager
async def watching(etcd: str, *words: str, on_terminal: bool = False) -> AsyncIterator[Watching]:
    lines = asyncio.StreamReader()
    ours, theirs = pty.openpty() if on_terminal else os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleetctl", "get", *words, "--etcd", etcd), stdout=theirs
    )
    os.close(theirs)
    loop = asyncio.get_running_loop()
    reading, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(ours, "rb", buffering=0)
    )
    try:
        yield Watching(process, lines)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        reading.close()


def pool(name: str, nodes: int | None = None) -> list[Put]:
    spec = b'{"kind":"NodePool","metadata":{"name":"%s"},"spec":{"nodes":[]}}' % name.encode()
    puts = [Put(key=keys.spec_key("NodePool", name), value=spec)]
    if nodes is not None:
        status = (
            b'{"nodes":%d,"conditions":[{"type":"Ready","status":"True","reason":"x"}]}' % nodes
        )
        puts.append(Put(key=keys.status_key("NodePool", name), value=status))
    return puts


@pytest.mark.timeout(240)
async def test_each_change_is_printed_once_in_aligned_columns(
    shared: Fleet, transport: Transport
) -> None:
    await transport.commit([], [*pool("a-long-name", 3), *pool("b")])
    etcd = str(shared.etcd.address)
    async with AsyncExitStack() as stack:
        table, names, columns = [
            await stack.enter_async_context(watching(etcd, "np", "-w", *words, on_terminal=not n))
            for n, words in enumerate(
                (
                    (),
                    ("-o", "name"),
                    ("-o", "custom-columns=NAME:.metadata.name,N:.status.nodes"),
                )
            )
        ]
        assert await table.lines(3) == [
            "NAME          READY     NODES   AGE\n",
            "a-long-name   True      3       <unknown>\n",
            "b             Unknown   ?       <unknown>\n",
        ]
        assert await names.lines(2) == ["nodepool/a-long-name\n", "nodepool/b\n"]
        assert (await columns.lines(3))[2] == "b             <none>\n"
        # The lease of a node does not concern a watch of pools.
        await transport.commit([], [Put(key=keys.node_lease_key("x"), value=b"{}")])
        await transport.commit([], pool("b", 12))
        assert await table.line() == "b             True      12      <unknown>\n"
        assert await columns.line() == "b             12\n"
        await transport.commit([], [Delete(key=keys.spec_key("NodePool", "b"))])
        assert (await table.line()).split()[0] == "b"
        assert await table.interrupted() == 130


async def _counting(transport: Transport, heard: asyncio.Event) -> None:
    """Change a pool repeatedly until the watch prints it: nothing reports when a watch is established."""
    for number in count(1):
        with suppress(UnavailableError):
            await transport.commit([], pool("new", number))
        with suppress(TimeoutError):
            await asyncio.wait_for(heard.wait(), 0.2)
            return


async def _next_number(watch: Watching, transport: Transport) -> int:
    """Return the number of nodes of the first object that is printed from now on."""
    heard = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(_counting(transport, heard))
        name, number = (await watch.line()).split()
        heard.set()
    assert name == "new"
    return int(number)


@pytest.mark.timeout(240)
async def test_watch_and_an_outage_of_etcd(tmp_path: Path) -> None:
    async with TcpEtcd(tmp_path) as etcd, AsyncExitStack() as stack:
        transport = connect(etcd.address)
        stack.push_async_callback(transport.close)
        await transport.commit([], pool("old", 1))
        words = ("np", "-w", "-o", 'jsonpath={.metadata.name} {.status.nodes}{"\\n"}')
        watch = await stack.enter_async_context(watching(etcd.url, *words))
        assert (await watch.line()).split() == ["old", "1"]
        assert await _next_number(watch, transport) >= 1
        pid = etcd.supervisor.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not etcd.supervisor.running, what="etcd's end")
        await etcd.start()
        assert await _next_number(watch, transport) >= 1
        assert await watch.interrupted() == 130
