"""A whole fleet of real processes, each of which a test can kill and start again."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

import aiohttp

from machinery import processes
from machinery.clock import SystemClock
from machinery.supervisor import Supervisor
from nodeagent.engines.engine_processes import find_engines, stop_all
from store import keys
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd
from tests.support import forker
from tests.support.ports import free_port
from tests.support.waiting import until, until_async


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The output of a command, and its exit code."""

    code: int
    out: str
    err: str


_ranges = count(os.getpid())


def engine_port() -> int:
    """Return the first of two hundred ports for engines, below those that the kernel hands out.

    Another fleet may have the same range: engines take the next port that is free.
    """
    return 12_000 + next(_ranges) % 90 * 200


async def fleetctl(*words: str, stdin: bytes = b"", limit_s: float = 60.0) -> Done:
    """Run the real command, as a user would."""
    async with asyncio.timeout(limit_s):
        run = forker.SHARED.run if is_forked(words) else from_scratch
        code, out, err = await run(words, stdin)
    assert b"Traceback" not in err, err.decode()
    return Done(code=code, out=out.decode(), err=err.decode())


def is_forked(words: Sequence[str]) -> bool:
    """Return whether a command may be a fork: `up` and `demo` stay and start others."""
    return forker.is_sound() and not {"up", "demo"} & set(words[:1])


async def from_scratch(words: Sequence[str], stdin: bytes) -> tuple[int, bytes, bytes]:
    """Run the command with all its imports; return its exit code and what it wrote."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleetctl", *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(stdin)
    assert process.returncode is not None
    return process.returncode, out, err


def model_deployment(name: str = "tiny", /, **spec: object) -> str:
    """Return the manifest of a deployment; without `model` it is of the folder `tiny`."""
    spec = {"model": {"path": "tiny"}, **spec}
    head = {"apiVersion": "fleet/v1alpha1", "kind": "ModelDeployment"}
    return json.dumps({**head, "metadata": {"name": name}, "spec": spec}) + "\n"


class Member(Protocol):
    """An etcd that the fleet uses, as it says of itself."""

    @property
    def address(self) -> EtcdAddress: ...

    @property
    def supervisor(self) -> Supervisor: ...

    async def start(self) -> None: ...


class Fleet:
    """etcd in this test's hands, the rest as child processes."""

    def __init__(self, root: Path, models_dir: Path, *, etcd: Member | None = None) -> None:
        self.root = root
        self.models_dir = models_dir
        self.clock = SystemClock()
        self.etcd = etcd or EmbeddedEtcd(locate(None), root / "etcd", self.clock)
        self.passwords: Path | None = None
        """The folder of `init-auth`, if etcd asks for passwords."""
        self.gateway_port = free_port()
        self._children: dict[str, processes.ChildProcess] = {}
        self._killed: list[processes.ChildProcess] = []
        self._commands: dict[str, tuple[str, list[str]]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway_port}"

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"

    def start(self, name: str, module: str, *flags: str) -> None:
        """Start a process of the fleet under a name of its own."""
        etcd = str(self.etcd.address)
        who = f"node-{name}" if module == "nodeagent" else name
        flags = (*flags, *self._password_of(who))
        self._commands[name] = module, ["--etcd", etcd, *flags]
        self.restart(name)

    def _password_of(self, who: str) -> tuple[str, ...]:
        if self.passwords is None:
            return ()
        file = str(self.passwords / f"{who}.env")
        return ("--etcd-password-file", file, "--etcd-prefix", self.etcd.address.prefix)

    def restart(self, name: str) -> None:
        """Start a process again, with the flags it had."""
        module, words = self._commands[name]
        self._children[name] = forker.start(module, words, log=self.log(name))

    def start_reconciler(self, *flags: str, grace_s: float = 30.0) -> None:
        # Any port: tests run beside each other.
        port = () if "--api-port" in flags else ("--api-port", "0")
        grace = ("--node-grace-period", str(grace_s))
        self.start("reconciler", "reconciler", *grace, *port, *flags)

    def start_agent(self, name: str, *flags: str, memory: str = "8Gi") -> None:
        self.start(
            name,
            "nodeagent",
            *("--name", name, "--memory", memory),
            *("--state-dir", str(self.root / name)),
            *("--models-dir", str(self.models_dir)),
            "--part-of-machine",
            *("--engine-port", str(engine_port()), "--api-port", "0"),
            *flags,
        )

    def start_gateway(self, *flags: str) -> None:
        self.start("gateway", "gateway", "--port", str(self.gateway_port), *flags)

    def kill(self, name: str) -> None:
        """End a process as a power cut would."""
        child = self._children[name]
        child.send(signal.SIGKILL)
        # Looked at once more at the end, so that it is reaped whatever takes its place.
        self._killed.append(child)

    def pid(self, name: str) -> int:
        """Return the pid of a process."""
        return self._children[name].record.pid

    async def ended(self, name: str) -> None:
        await processes.wait_ended(self._children[name], self.clock, limit_s=10)

    async def kill_etcd(self) -> None:
        pid = self.etcd.supervisor.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not self.etcd.supervisor.running, what="etcd's end")

    def kill_engines(self, node: str) -> int:
        """Kill all engines of a node; return how many there were."""
        engines = find_engines(self.root / node / "engines")
        for engine in engines:
            engine.child.send(signal.SIGKILL)
        return len(engines)

    def engine_pids(self, node: str) -> set[int]:
        engines = find_engines(self.root / node / "engines")
        return {engine.child.record.pid for engine in engines}

    async def ctl(self, *words: str, stdin: bytes = b"", limit_s: float = 60.0) -> Done:
        """Run fleetctl against this fleet."""
        who = ("--etcd", str(self.etcd.address), *self._password_of("admin"))
        return await fleetctl(*words, *who, stdin=stdin, limit_s=limit_s)

    async def applied(self, manifest: str) -> None:
        """Apply a manifest given as text."""
        done = await self.ctl("apply", "-f", "-", stdin=manifest.encode())
        assert done.code == 0, done.err

    async def available(self, name: str, *, limit_s: float = 60.0) -> None:
        """Wait until the deployment is Available."""
        what = ("wait", f"modeldeployment/{name}", "--for=condition=Available")
        done = await self.ctl(*what, f"--timeout={limit_s}s", limit_s=limit_s + 20)
        assert done.code == 0, done.err + self.words()

    def words(self) -> str:
        """Return the last words of every process, for a failing test."""
        logs = sorted(self.root.glob("**/*.log"))
        return "\n".join(f"{log.name}: {processes.last_lines(log, 3)}" for log in logs)

    async def endpoints(self) -> set[str]:
        """Return the names of the replicas that have an endpoint in the store."""
        transport = connect(self.etcd.address)
        try:
            listing = await transport.list(keys.ENDPOINT_PREFIX)
        finally:
            await transport.close()
        return {keys.replica_of(item.key) for item in listing.items}

    async def joined(self, count: int) -> None:
        """Wait until so many nodes hold their leases and have described themselves."""
        transport = connect(self.etcd.address)

        async def look() -> bool:
            leases = await transport.list(keys.NODE_LEASE_PREFIX)
            described = await transport.list(keys.status_prefix("Node"))
            return len(leases.items) >= count <= len(described.items)

        try:
            await until_async(look, limit_s=60, what=f"{count} nodes")
        finally:
            await transport.close()

    async def routed(self, model: str, count: int) -> None:
        """Wait until the gateway knows of so many endpoints for a model."""

        async def look() -> bool:
            try:
                async with (
                    aiohttp.ClientSession() as session,
                    session.get(f"{self.url}/health") as response,
                ):
                    tree = await response.json()
            except aiohttp.ClientError:
                return False
            return bool(tree["models"].get(model, {}).get("ready") == count)

        await until_async(look, limit_s=40, what=f"{count} endpoints of {model} in the gateway")

    async def stop(self) -> None:
        for child in (*self._children.values(), *self._killed):
            await processes.end(child, self.clock, grace_s=10)
        for node in self.root.iterdir():
            await stop_all(node / "engines", self.clock, grace_s=10)
        await self.etcd.supervisor.stop()


@asynccontextmanager
async def running_fleet(
    root: Path,
    models_dir: Path,
    *,
    nodes: int = 1,
    grace_s: float = 30.0,
    memory: str = "8Gi",
) -> AsyncIterator[Fleet]:
    """Run a fleet: etcd, a reconciler, agents node-1 and up, a gateway."""
    fleet = Fleet(root, models_dir)
    try:
        await fleet.etcd.start()
        fleet.start_reconciler(grace_s=grace_s)
        for number in range(1, nodes + 1):
            fleet.start_agent(f"node-{number}", memory=memory)
        fleet.start_gateway()
        await fleet.joined(nodes)
        yield fleet
    finally:
        await fleet.stop()
