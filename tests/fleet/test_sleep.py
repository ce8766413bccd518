"""A Mac sleeps and is woken: real agents and engines, frozen processes, and real magic packets on a bridge."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest
from typing_extensions import override

from machinery import processes
from schemas.node import NodeStatus
from schemas.replica import Replica
from store import codec, keys, objects
from store.etcd.connect import connect
from tests.support.fleet import Fleet, engine_port, model_deployment
from tests.support.netns import Networks, available
from tests.support.waiting import until, until_async

pytestmark = [
    pytest.mark.ci,
    pytest.mark.fleet,
    pytest.mark.etcd,
    pytest.mark.mlx,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not available(), reason="needs network namespaces"),
]
POOL = """
apiVersion: fleet/v1alpha1
kind: NodePool
metadata: {name: sleepers}
spec: {nodes: [sleeper], power: {mode: SleepWhenIdle, idleTime: 5s}}
"""


class SleepyFleet(Fleet):
    """A fleet of two Macs on a bridge; `sleeper` may sleep, `relay` may not."""

    networks: Networks

    @property
    @override
    def url(self) -> str:
        return f"http://{self.networks.client_address(1)}:{self.gateway_port}"

    def start_mac(self, number: int, name: str) -> None:
        """Start an agent and the network card of its machine in a namespace."""
        place, root = self.networks.place(number), self.root / name
        root.mkdir()
        agent = (
            *("--etcd", str(self.etcd.address), "--name", name, "--address", place.client_host),
            *("--state-dir", str(root), "--models-dir", str(self.models_dir), "--memory", "8Gi"),
            *("--engine-port", str(engine_port()), "--api-port", "0"),
            *("--insecure-engines", "--insecure-http"),
        )
        programs = {
            "agent": ("tests.support.sleeping_agent", "c0", *agent),
            "card": ("tests.support.wake_card", "c0", str(root), str(self.packets(name))),
        }
        for program, words in programs.items():
            self._children[f"{name}-{program}"] = processes.spawn(
                (*place.prefix, sys.executable, "-m", *words), log=self.log(f"{name}-{program}")
            )

    def packets(self, name: str) -> Path:
        """Return the file with the senders of the magic packets that reached a Mac."""
        return self.root / f"{name}.packets"

    async def status(self, name: str) -> NodeStatus | None:
        transport = connect(self.etcd.address)
        try:
            item = await transport.get(keys.status_key("Node", name))
        finally:
            await transport.close()
        return None if item is None else codec.decode(NodeStatus, item)

    async def replicas(self) -> dict[str, tuple[str, str]]:
        transport = connect(self.etcd.address)
        try:
            found = await objects.list_all(transport, Replica)
        finally:
            await transport.close()
        return {r.name: (r.metadata.uid, r.spec.ranks[0].node) for r in found}


@asynccontextmanager
async def sleepy_fleet(root: Path, models_dir: Path) -> AsyncIterator[SleepyFleet]:
    with Networks(2).made() as networks:
        fleet = SleepyFleet(root, models_dir)
        fleet.networks = networks
        try:
            await fleet.etcd.start()
            fleet.start_reconciler()
            fleet.start_mac(0, "relay")
            fleet.start_mac(1, "sleeper")
            fleet.start_gateway(
                "--host", networks.client_address(1), "--insecure-http", "--auth", "off"
            )
            await fleet.joined(2)
            yield fleet
        finally:
            for name in ("relay", "sleeper"):
                frozen = fleet.root / name / "frozen-pids"
                for word in frozen.read_text().split() if frozen.exists() else ():
                    psutil.Process(int(word)).resume()
            await fleet.stop()


async def completion(fleet: SleepyFleet) -> str:
    """Return the text of a completion by the gateway."""
    body = {"model": "tiny", "prompt": "1", "max_tokens": 3, "temperature": 0}
    limit = aiohttp.ClientTimeout(total=180)
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(f"{fleet.url}/v1/completions", json=body) as response,
    ):
        tree = await response.json()
    assert response.status == 200, tree
    return str(tree["choices"][0]["text"])


async def test_a_frozen_mac_is_woken_by_a_magic_packet_of_another(
    tmp_path: Path, models_dir: Path
) -> None:
    async with sleepy_fleet(tmp_path, models_dir) as fleet:
        await fleet.applied(POOL)
        spec = {"placement": {"pools": ["sleepers"]}, "contextLength": 64}
        await fleet.applied(model_deployment(**spec))
        await fleet.available("tiny", limit_s=120)
        text = await completion(fleet)
        before, (engine,) = await fleet.replicas(), fleet.engine_pids("sleeper")

        frozen = fleet.root / "sleeper" / "frozen-pids"
        await until(frozen.exists, limit_s=120, what="the Mac sleeps")
        await until(
            lambda: psutil.Process(engine).status() == psutil.STATUS_STOPPED, what="SIGSTOP"
        )
        status = await fleet.status("sleeper")
        assert status is not None
        assert status.asleep_since is not None

        async def is_withdrawn() -> bool:
            return await fleet.endpoints() == set()

        await until_async(is_withdrawn, what="the endpoint's end")
        # Longer than a lease, and than the time in which a lost node's replica would be missed.
        await asyncio.sleep(10)
        assert await fleet.replicas() == before
        shown = await fleet.ctl("get", "nodes", "--no-headers")
        assert "sleeper" in shown.out
        assert "Asleep" in next(line for line in shown.out.splitlines() if "sleeper" in line)
        # It may have slept before the first request, too.
        packets = fleet.packets("sleeper").read_text()

        assert await completion(fleet) == text
        senders = set(fleet.packets("sleeper").read_text().removeprefix(packets).split())
        assert senders == {fleet.networks.place(0).client_host}
        assert fleet.engine_pids("sleeper") == {engine}
        assert await fleet.replicas() == before

        async def is_awake() -> bool:
            now = await fleet.status("sleeper")
            return now is not None and now.asleep_since is None

        await until_async(is_awake, what="the status says awake")

        async def is_recorded() -> bool:
            return "NodeWoken" in (await fleet.ctl("events")).out

        await until_async(is_recorded, what="the event of the wake")
        assert "NodeNotReady" not in (await fleet.ctl("events")).out
