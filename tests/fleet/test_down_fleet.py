"""`fleetctl down --fleet` of two Macs over ssh, with etcd, engines and a stream in flight; killed half way, and again."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from nodeagent.engines.engine_processes import find_engines
from store.etcd.member.binary import locate
from tests.support.fleet import Done, engine_port, model_deployment
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.ports import free_port
from tests.support.release_nodes import BACKEND, ReleaseNode
from tests.support.waiting import until, until_async

pytestmark = [pytest.mark.full, pytest.mark.fleet, pytest.mark.timeout(400)]

MANIFEST = model_deployment(replicas=2, contextLength=2048)
PROGRAMS = ("fleetctl", "fleet-nodeagent", "fleet-reconciler", "fleet-gateway", "python")
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me a story"}],
    "max_tokens": 400,
    "stream": True,
    "ignore_eos": True,
}


class Mac(ReleaseNode):
    """A Mac whose release is this checkout: its programs start those of this environment."""

    def link(self) -> None:
        programs = self.prefix / "versions" / "0.1.0" / "bin"
        programs.mkdir(parents=True)
        for name in PROGRAMS:
            path = Path(sys.executable).parent / name
            (programs / name).write_text(f'#!/bin/sh\nexec {path} "$@"\n')
            (programs / name).chmod(0o755)
        (programs.parent / ".complete").touch()
        (self.prefix / "current").symlink_to("versions/0.1.0")
        self._layout.mkdir(parents=True)
        (self._layout / "current").symlink_to(self.prefix / "current")

    def service(self, *words: str) -> str:
        return self.run(str(self.prefix / "current/bin/fleetctl"), "service", *words)

    def installed(self, part: str, program: Path | None, *flags: str) -> None:
        path = program or self.prefix / "current" / "bin" / f"fleet-{part}"
        words = (*BACKEND, "--program", str(path))
        self.service("install", part, *words, "--", *flags)

    def pids(self) -> dict[str, int | None]:
        """Return the processes of its services."""
        script = f"{self.prefix}/current/bin/fleetctl service status -o json || true"
        rows = json.loads(self.run("/bin/sh", "-c", script))
        return {row["name"]: row["pid"] for row in rows}

    def engines(self) -> int:
        return len(find_engines(self.state_dir / "engines"))


class DownFleet:
    """Two Macs: the first one has everything, the second one an agent."""

    def __init__(self, root: Path, models_dir: Path) -> None:
        self.root, self.models_dir = root, models_dir
        self.macs = [Mac(f"mac-{number}", root / f"mac-{number}") for number in (1, 2)]
        self.etcd = f"http://127.0.0.1:{free_port()}"
        self.gateway = free_port()

    async def start(self) -> None:
        first, _ = self.macs
        for mac in self.macs:
            await mac.server.start()
            mac.link()
        peers = f"http://127.0.0.1:{free_port()}"
        first.installed(
            "etcd",
            locate(None).path,
            *("--listen-client-urls", self.etcd, "--advertise-client-urls", self.etcd),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"default={peers}"),
        )
        first.installed("reconciler", None, "--etcd", self.etcd, "--api-port", "0")
        first.installed("gateway", None, "--etcd", self.etcd, "--port", str(self.gateway))
        for mac in self.macs:
            mac.installed(
                "nodeagent",
                None,
                *("--name", mac.name, "--memory", "4Gi", "--part-of-machine"),
                *("--models-dir", str(self.models_dir), "--etcd", self.etcd),
                *("--engine-port", str(engine_port()), "--api-port", "0"),
            )

    async def end(self) -> None:
        for mac in self.macs:
            await mac.end()

    def words(self, *more: str) -> tuple[str, ...]:
        flags: list[str] = []
        for mac in self.macs:
            flags += ["--target", mac.target, "--host-key", mac.server.fingerprint]
            flags += ["--identity", str(mac.server.key_file)]
        return ("down", "--fleet", "--etcd", self.etcd, *flags, *more)

    async def down(self, *more: str) -> Done:
        return await run_fleetctl(*self.words(*more), limit_s=200)

    async def answers(self) -> None:
        """Wait until both replicas answer."""

        async def look() -> bool:
            done = await run_fleetctl("get", "md", "tiny", "-o", "json", "--etcd", self.etcd)
            if done.code:
                return False
            return bool(json.loads(done.out)["status"].get("readyReplicas") == 2)

        await until_async(look, what="two replicas", limit_s=120, every_s=0.5)

    def running(self) -> dict[str, list[str]]:
        """Return the services that run, by Mac."""
        return {
            mac.name: sorted(name for name, pid in mac.pids().items() if pid is not None)
            for mac in self.macs
        }


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep host keys and the file of a run out of the user's home."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("FLEETCTL_CONFIG", str(folder / "config.toml"))
        yield


@pytest.fixture
async def fleet(tmp_path: Path, models_dir: Path) -> AsyncIterator[DownFleet]:
    made = DownFleet(tmp_path / "fleet", models_dir)
    try:
        await made.start()
        manifest = tmp_path / "tiny.yaml"
        manifest.write_text(MANIFEST)
        await until_async(
            lambda: _is_done("apply", "-f", str(manifest), "--etcd", made.etcd), what="apply"
        )
        await made.answers()
        yield made
    finally:
        await made.end()


async def _is_done(*words: str) -> bool:
    return not (await run_fleetctl(*words)).code


async def read_stream(url: str, begun: asyncio.Event) -> tuple[int, bool]:
    """Return the number of chunks of a long answer, and whether it ended as it should."""
    count, is_whole = 0, False
    async with aiohttp.ClientSession() as http, http.post(url, json=BODY) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            count += line.startswith(b"data: {")
            is_whole = is_whole or line.strip() == b"data: [DONE]"
            if count > 2:
                begun.set()
    return count, is_whole


async def test_a_whole_fleet_goes_down_in_order_and_comes_back(fleet: DownFleet) -> None:
    first, second = fleet.macs
    everything = {"mac-1": ["etcd", "gateway", "nodeagent", "reconciler"], "mac-2": ["nodeagent"]}
    assert fleet.running() == everything
    assert [mac.engines() for mac in fleet.macs] == [1, 1]

    shown = await fleet.down("--dry-run")
    assert shown.code == 0, shown.err
    steps = [line.split("(")[0].strip() for line in shown.out.splitlines()[1:-1]]
    assert steps == [
        "1. gateway of mac-1",
        "2. reconciler of mac-1",
        "3. nodeagent of mac-1, mac-2",
        "4. etcd of mac-1",
    ]
    asked = await fleet.down()
    assert (asked.code, "give --yes" in asked.err) == (2, True)
    await second.server.stop()
    refused = await fleet.down("--yes")
    assert refused.code == 1
    assert "nothing was changed" in refused.err
    assert "node/mac-2: " in refused.err
    assert "--except NODE" in refused.err
    assert fleet.running() == everything
    await second.server.start()

    # A stream is in flight, and fleetctl is killed when the reconciler has stopped.
    url, begun = f"http://127.0.0.1:{fleet.gateway}/v1/chat/completions", asyncio.Event()
    async with asyncio.TaskGroup() as group:
        stream = group.create_task(read_stream(url, begun))
        await begun.wait()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fleetctl", *fleet.words("--yes")),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        while b"reconciler stopped" not in (line := await process.stdout.readline()):
            assert line, "fleetctl ended"
        process.kill()
        await process.wait()
    assert stream.result() == (stream.result()[0], True)
    assert stream.result()[0] > 100

    # As if the Mac with etcd had lost power meanwhile: the file of the first run knows the Macs.
    first.service("stop", "etcd")
    done = await fleet.down("--yes")
    assert (done.code, done.err) == (
        0,
        "etcd does not answer; going on with the Macs of the run that stopped it\n",
    )
    assert "stopped already: mac-1" in done.out
    assert fleet.running() == {"mac-1": [], "mac-2": []}
    assert [mac.engines() for mac in fleet.macs] == [0, 0]
    again = await fleet.down("--yes")
    assert (again.code, "which Macs the fleet has is unknown" in again.err) == (1, True)

    for mac in fleet.macs:
        mac.service("start")
    # The status in the store is still that of before.
    await until(lambda: [mac.engines() for mac in fleet.macs] == [1, 1], limit_s=90, what="engines")
    await fleet.answers()
    whole = await fleet.down("--yes", "--grace-period", "5s")
    assert whole.code == 0, whole.err
    lines = whole.out.splitlines()
    assert [line for line in lines if line.endswith("stopped")][-1] == "node/mac-1: etcd stopped"
    assert fleet.running() == {"mac-1": [], "mac-2": []}
