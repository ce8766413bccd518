"""One real etcd for all clients: our embedded member's flags, but on a loopback port."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.gateway.parts import free_port
from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.binary import Binary
from store.etcd.member.embedded import command
from store.port import Put

_READY_S = 20.0
_BATCH = 100


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running etcd."""

    url: str
    pid: int


@asynccontextmanager
async def running_etcd(binary: Binary, folder: Path) -> AsyncIterator[Server]:
    """Run an etcd in the folder, with fsync, and end it afterwards."""
    url, log = f"http://127.0.0.1:{free_port()}", folder / "etcd.log"
    flags = (
        *command(binary, folder / "member", "bench"),
        # Of a flag that is given twice the last one counts.
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        "--host-whitelist=localhost,127.0.0.1",
    )
    with log.open("wb") as output:
        process = subprocess.Popen(flags, cwd=folder, stdout=output, stderr=output)  # noqa: ASYNC220 - once
    try:
        await _answers(url, log)
        yield Server(url=url, pid=process.pid)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


async def _answers(url: str, log: Path) -> None:
    transport = connect(EtcdAddress(endpoints=(url,)))
    try:
        async with asyncio.timeout(_READY_S):
            while True:
                try:
                    await transport.status()
                except StoreError:
                    await asyncio.sleep(0.05)
                else:
                    return
    except TimeoutError as error:
        raise SystemExit(f"etcd does not answer:\n{log.read_text()[-2000:]}") from error
    finally:
        await transport.close()


async def fill(url: str, prefix: str, documents: list[bytes]) -> None:
    """Write the documents below the prefix."""
    transport = connect(EtcdAddress(endpoints=(url,)))
    try:
        for start in range(0, len(documents), _BATCH):
            batch = documents[start : start + _BATCH]
            puts = [
                Put(key=f"{prefix}model-{number:06}", value=value)
                for number, value in enumerate(batch, start)
            ]
            await transport.commit([], puts)
    finally:
        await transport.close()
