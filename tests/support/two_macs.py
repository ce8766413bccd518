"""Two "Macs" on one machine: network namespaces with addresses of their own, and fleetctl and agents inside.

The first runs `fleetctl up --join`, the second joins it. The test itself is a third machine of that network, without an
identity. Needs root on Linux (`netns.available()`).
"""

import asyncio
import json
import os
import re
import shlex
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from machinery import processes
from machinery.clock import SystemClock
from nodeagent.engines.engine_processes import stop_all
from tests.support.fleet import Done, engine_port, model_deployment
from tests.support.netns import Networks, available
from tests.support.ports import free_port

MARKS = (
    pytest.mark.full,
    pytest.mark.fleet,
    pytest.mark.etcd,
    pytest.mark.skipif(not available(), reason="needs network namespaces"),
)
"""Of every test on two machines."""
SPREAD = model_deployment(
    replicas=3, contextLength=512, placement={"spreadBy": ["fleet/node"]}
).encode()
"""A model with a replica on each node."""


@dataclass(slots=True)
class Mac:
    """One machine."""

    root: Path
    address: str
    prefix: tuple[str, ...]
    models: Path
    port: int = field(default_factory=free_port)
    """Of its gateway."""
    children: dict[str, processes.ChildProcess] = field(default_factory=dict)
    networks: Networks | None = None
    number: int = 0
    """Its place in the networks."""

    @property
    def data(self) -> Path:
        """The data folder of its `fleetctl up`."""
        return self.root / "data"

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.port}"

    def environment(self) -> dict[str, str]:
        own = {"FLEETCTL_CONFIG": str(self.root / "config.toml"), "HOME": str(self.root)}
        return {**os.environ, **own}

    async def run(self, *words: str, stdin: bytes = b"", limit_s: float = 120.0) -> Done:
        """Run fleetctl on this machine."""
        process = await asyncio.create_subprocess_exec(
            *(*self.prefix, sys.executable, "-m", "fleetctl", *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.environment(),
        )
        try:
            async with asyncio.timeout(limit_s):
                out, err = await process.communicate(stdin)
        except TimeoutError:
            process.kill()
            raise
        assert b"Traceback" not in err, err.decode()
        assert process.returncode is not None
        return Done(code=process.returncode, out=out.decode(), err=err.decode())

    async def ok(self, *words: str, stdin: bytes = b"", limit_s: float = 120.0) -> str:
        """Run fleetctl on this machine's own fleet; return what it prints."""
        words = (*words, "--data-dir", str(self.data))
        done = await self.run(*words, stdin=stdin, limit_s=limit_s)
        assert done.code == 0, f"{words[:2]}: {done.err}{done.out}\n{self.last_words()}"
        return done.out

    def up_words(self, *flags: str) -> tuple[str, ...]:
        """Return `fleetctl up` for this machine."""
        return (
            *("up", "--nodes", "2", "--node-memory", "2Gi", "--models-dir", str(self.models)),
            *("--port", str(self.port), "--engine-port", str(engine_port()), *flags),
        )

    async def up(self, *flags: str) -> str:
        """Start a fleet here that other machines may join; return what is printed."""
        words = self.up_words("--join", self.address, *flags)
        return await self.ok(*words, "--detach", limit_s=180)

    def start(self, name: str, *command: str) -> None:
        """Start a process on this machine, with the last part of the command line of a program."""
        self.children[name] = processes.spawn(
            (*self.prefix, *command), log=self.root / f"{name}.log", environment=self.environment()
        )

    def kill(self, name: str) -> None:
        self.children[name].send(signal.SIGKILL)

    def cut(self) -> None:
        """Take its cable away."""
        assert self.networks is not None
        self.networks.cut_clients(self.number)

    def mend(self) -> None:
        assert self.networks is not None
        self.networks.mend_clients(self.number)

    def supervisor(self) -> int:
        """Return the process id of `fleetctl up`."""
        return int(json.loads((self.data / "fleet.json").read_text())["pid"])

    def trust(self) -> ssl.SSLContext:
        """Return a client's trust in the fleet's authority, without an identity."""
        return ssl.create_default_context(cafile=self.data / "authority" / "ca.pem")

    def client(self) -> aiohttp.ClientSession:
        """Return a client of this machine's gateway."""
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.trust()))

    def last_words(self) -> str:
        logs = sorted(self.root.glob("**/*.log"))
        return "\n".join(f"{log.name}: {processes.last_lines(log, 3)}" for log in logs)

    async def stop(self) -> None:
        clock = SystemClock()
        for child in self.children.values():
            await processes.end(child, clock, grace_s=10.0)
        for folder in self.root.glob("**/engines"):
            await stop_all(folder, clock, grace_s=10.0)
        if self.data.exists():
            await self.run("down", "--data-dir", str(self.data))


@asynccontextmanager
async def two_macs(root: Path, models: Path) -> AsyncIterator[tuple[Mac, Mac]]:
    """Make two machines in one network; end everything that they run."""
    with Networks(2).made() as networks:
        macs = []
        for number in range(2):
            place = networks.place(number)
            folder = root / f"mac-{number + 1}"
            folder.mkdir()
            mac = Mac(folder, place.client_host, tuple(place.prefix), models)
            mac.networks, mac.number = networks, number
            macs.append(mac)
        try:
            yield macs[0], macs[1]
        finally:
            for mac in reversed(macs):
                await mac.stop()


async def joined(first: Mac, second: Mac, name: str = "mac-2") -> str:
    """Let the second machine join the first one's fleet, and start its agent; return the token."""
    token = (await first.ok("token", "create", "-o", "token")).strip()
    place = ("--name", name, "--identity-dir", str(second.root / name / "identity"))
    done = await second.run("join", "-", f"{first.address}:4002", *place, stdin=token.encode())
    assert done.code == 0, done.err + first.last_words()
    found = re.search(r"start it with: fleet-nodeagent (.*)", done.out)
    assert found is not None, done.out
    start_agent(second, name, found[1])
    await registered(first, name)
    return token


async def registered(first: Mac, name: str) -> None:
    """Wait until the node is Ready."""
    deadline = asyncio.get_running_loop().time() + 60
    words = ("wait", f"node/{name}", "--for=condition=Ready", "--timeout=10s")
    while True:
        done = await first.run(*words, "--data-dir", str(first.data))
        if done.code == 0:
            return
        assert asyncio.get_running_loop().time() < deadline, done.err
        await asyncio.sleep(0.2)


def start_agent(mac: Mac, name: str, flags: str) -> None:
    """Start the agent with the flags that `join` has printed."""
    mac.start(
        name,
        *(sys.executable, "-m", "nodeagent", *shlex.split(flags)),
        *("--models-dir", str(mac.models), "--memory", "2Gi", "--part-of-machine"),
        *("--engine-port", str(engine_port())),
    )
