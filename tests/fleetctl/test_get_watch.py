"""`fleetctl get -w`: what changes as it changes, in columns that stay; on a terminal and in a pipe."""

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
from tests.support.store_tcp_etcd import TcpEtcd
from tests.support.waiting import until

pytestmark = pytest.mark.etcd


class Watching:
    """A `fleetctl get -w` under way, and what it prints."""

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
    found = [Put(key=keys.spec_key("NodePool", name), value=spec)]
    if nodes is not None:
        status = (
            b'{"nodes":%d,"conditions":[{"type":"Ready","status":"True","reason":"x"}]}' % nodes
        )
        found.append(Put(key=keys.status_key("NodePool", name), value=status))
    return found


@pytest.mark.timeout(240)
async def test_changes_are_shown_once_and_in_their_columns(
    shared: Fleet, transport: Transport
) -> None:
    await transport.commit([], [*pool("a-long-name", 3), *pool("b")])
    etcd = str(shared.etcd.address)
    async with AsyncExitStack() as stack:
        table, events, names, columns = [
            await stack.enter_async_context(watching(etcd, "np", "-w", *words, on_terminal=not n))
            for n, words in enumerate(
                (
                    (),
                    ("--output-watch-events", "--no-headers"),
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
        assert (await events.line()).split() == ["ADDED", "a-long-name", "True", "3", "<unknown>"]
        assert (await events.line()).split() == ["ADDED", "b", "Unknown", "?", "<unknown>"]
        assert await names.lines(2) == ["nodepool/a-long-name\n", "nodepool/b\n"]
        assert (await columns.lines(3))[2] == "b             <none>\n"
        # A node's lease is nothing to who watches pools.
        await transport.commit([], [Put(key=keys.node_lease_key("x"), value=b"{}")])
        await transport.commit([], pool("b", 12))
        assert await table.line() == "b             True      12      <unknown>\n"
        assert await events.line() == "MODIFIED   b             True      12      <unknown>\n"
        assert await columns.line() == "b             12\n"
        await transport.commit([], [Delete(key=keys.spec_key("NodePool", "b"))])
        assert (await table.line()).split()[0] == "b"
        assert (await events.line()).split()[:2] == ["DELETED", "b"]
        assert await table.interrupted() == 130


async def _counting(transport: Transport, heard: asyncio.Event) -> None:
    """Change a pool again and again until somebody has heard of it: nothing says when a watch stands."""
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
async def test_only_changes_if_wanted_and_an_etcd_that_comes_back(tmp_path: Path) -> None:
    async with TcpEtcd(tmp_path) as etcd, AsyncExitStack() as stack:
        transport = connect(etcd.address)
        stack.push_async_callback(transport.close)
        await transport.commit([], pool("old", 1))
        words = ("np", "--watch-only", "-o", 'jsonpath={.metadata.name} {.status.nodes}{"\\n"}')
        watch = await stack.enter_async_context(watching(etcd.url, *words))
        assert await _next_number(watch, transport) >= 1
        pid = etcd.supervisor.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not etcd.supervisor.running, what="etcd's end")
        await etcd.start()
        assert await _next_number(watch, transport) >= 1
        assert await watch.interrupted() == 130
