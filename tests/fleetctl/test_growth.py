"""From the embedded etcd to three members with TLS, as docs/operations/store.md says."""

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from machinery import processes
from machinery.clock import SystemClock
from machinery.supervisor import Program, Supervisor
from store import keys
from store.errors import UnavailableError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.binary import locate, unfit_for_clusters
from store.port import Transport
from tests.support.cluster import killing_signal, quiet_port
from tests.support.fleet import Fleet, fleetctl, running_fleet
from tests.support.store_certificates import Authority, Identity
from tests.support.streams import Stream, stream
from tests.support.waiting import until, until_async

pytestmark = pytest.mark.full

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "store.md"
NAMES = ("a", "b", "c")

MANIFEST = """
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: tiny}
spec: {model: {path: tiny}, contextLength: 512}
"""


def documented() -> str:
    """Return the command that the page says to run on the first machine."""
    block = PAGE.read_text().split("test_growth.py runs this command -->\n```\n")[1]
    return block.partition("```")[0]


class Cluster:
    """Three members by the page's command, on this machine's ports instead of three machines."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self._folder = folder
        ports = {(n, p): quiet_port() for n in (1, 2, 3) for p in ("2379", "2380")}
        self._ports = {f"10.0.0.{n}:{p}": f"127.0.0.1:{port}" for (n, p), port in ports.items()}
        client = authority.issue("client")
        self.address = EtcdAddress(
            endpoints=tuple(f"https://127.0.0.1:{ports[n, '2379']}" for n in (1, 2, 3)),
            ca=authority.certificate,
            certificate=client.certificate,
            key=client.key,
        )
        self.flags = (
            *("--etcd", ",".join(self.address.endpoints)),
            *("--etcd-ca", str(authority.certificate)),
            *("--etcd-cert", str(client.certificate)),
            *("--etcd-key", str(client.key)),
        )
        self.members = [
            self._supervisor(number, name, authority.issue(name), authority.certificate)
            for number, name in enumerate(NAMES, 1)
        ]

    def _supervisor(self, number: int, name: str, own: Identity, ca: Path) -> Supervisor:
        """Return a member: the page's command, with this one's name, addresses and files."""
        program, *flags = documented().split()
        assert program == "etcd"
        command = [str(locate(None).path)]
        for flag in flags:
            if not flag.startswith("--initial-cluster="):
                flag = flag.replace("10.0.0.1", f"10.0.0.{number}")  # noqa: PLW2901 - one flag's way
            flag = re.sub(  # noqa: PLW2901
                r"10\.0\.0\.\d:23\d\d", lambda found: self._ports[found[0]], flag
            )
            replaced = {
                "--name=a": f"--name={name}",
                "--data-dir=/usr/local/var/mlx-fleet-etcd": f"--data-dir={self._folder / name}",
            }.get(flag, flag)
            for old, new in (("=a.crt", own.certificate), ("=a.key", own.key), ("=ca.pem", ca)):
                if replaced.endswith(old):
                    replaced = replaced.replace(old, f"={new}")
            command.append(replaced)
        made = Program(
            name=name,
            command=tuple(command),
            log=self._folder / f"{name}.log",
            record=self._folder / f"{name}.pid",
            grace_s=3.0,
        )
        return Supervisor(made, SystemClock())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Transport]:
        transport = connect(self.address)

        async def answers() -> bool:
            for member in self.members:
                assert member.running, processes.last_lines(member.program.log)
            try:
                await transport.get("/ready")
            except UnavailableError:
                return False
            return True

        try:
            for member in self.members:
                await member.start()
            await until_async(answers, limit_s=30, what="a quorum")
            yield transport
        finally:
            await transport.close()
            for member in self.members:
                await member.stop()


def moved(fleet: Fleet, name: str, flags: tuple[str, ...]) -> None:
    """Start a process of the fleet again, with another etcd."""
    _, words = fleet._commands[name]
    place = words.index("--etcd")
    words[place : place + 2] = flags
    fleet.restart(name)


@pytest.mark.skipif(
    bool(unfit_for_clusters(locate(None).version)), reason="the etcd here must stay alone"
)
@pytest.mark.fleet
@pytest.mark.timeout(180)
async def test_a_fleet_grows_out_of_its_machine_and_its_engines_serve_on(
    tmp_path: Path, models_dir: Path
) -> None:
    cluster = Cluster(tmp_path, Authority(tmp_path, "authority"))
    file = str(tmp_path / "fleet.backup")
    async with (
        running_fleet(tmp_path / "fleet", models_dir) as fleet,
        cluster.running() as transport,
    ):
        await fleet.applied(MANIFEST)
        await fleet.available("tiny")
        engines = fleet.engine_pids("node-1")
        before = await fleet.ctl("get", "md/tiny", "-o", "yaml")
        # Agents and reconcilers stop; engines go on.
        for name in ("node-1", "reconciler"):
            fleet.kill(name)
            await fleet.ended(name)
        saved = await fleet.ctl("backup", file)
        assert saved.code == 0, saved.err
        done = await fleetctl("restore", file, *cluster.flags)
        assert done.code == 0, done.err
        fleet.kill("gateway")
        await fleet.ended("gateway")
        await fleet.kill_etcd()
        for name in ("node-1", "reconciler", "gateway"):
            moved(fleet, name, cluster.flags)
        await until_async(lambda: _has_endpoint(transport), limit_s=40, what="an endpoint")
        waited = ("wait", "md/tiny", "--for=condition=Available", "--timeout=30s")
        available = await fleetctl(*waited, *cluster.flags)
        assert available.code == 0, available.err + fleet.words()
        assert fleet.engine_pids("node-1") == engines, "the engine was started again"
        after = await fleetctl("get", "md/tiny", "-o", "yaml", *cluster.flags)
        assert _identity(after.out) == _identity(before.out)
        await fleet.routed("tiny", 1)

        # One of the three machines is lost, and another model is wanted all the same.
        lost = cluster.members[0]
        assert lost.pid is not None
        os.kill(lost.pid, killing_signal())
        await until(lambda: not lost.running, what="the end of a member")
        changed = await fleetctl(
            "apply", "-f", "-", *cluster.flags, stdin=MANIFEST.replace("tiny}", "two}", 1).encode()
        )
        assert changed.code == 0, changed.err
        one = Stream()
        await stream(fleet.url, "tiny", "x", max_tokens=4, into=one)
        assert one.succeeded, one.error


async def _has_endpoint(transport: Transport) -> bool:
    try:
        return bool((await transport.list(keys.ENDPOINT_PREFIX)).items)
    except UnavailableError:
        return False


def _identity(shown: str) -> list[str]:
    """Return the lines of an object that must never change."""
    wanted = ("uid:", "generation:", "creationTimestamp:")
    return [line.strip() for line in shown.splitlines() if line.strip().startswith(wanted)]
