"""Larger groups, unequal Macs, and a cable that is cut: minutes of starts, so not for every run.

pytest -m soak -n 0 -s tests/fleet/test_shard_soak.py
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from machinery import processes
from tests.support import netns
from tests.support.commands import run_module
from tests.support.fleet import Fleet, engine_port, model_deployment, running_fleet
from tests.support.shards import Group, Heard, ask, asking, group_of, listen, nothing_runs
from tests.support.waiting import until

pytestmark = [pytest.mark.fleet, pytest.mark.mlx, pytest.mark.soak, pytest.mark.timeout(900)]

MANIFEST = """
apiVersion: fleet/v1alpha1
kind: ShardGroup
metadata: {{name: several}}
spec:
  members: [{members}]
  parallelism: {parallelism}
---
"""


def big(members: str, parallelism: str, concurrency: int) -> str:
    """Return the manifests of a group and its deployment."""
    size = {"contextLength": 4096, "concurrency": concurrency}
    group = MANIFEST.format(members=members, parallelism=parallelism)
    return group + model_deployment("big", sharding="several", **size)


def chat(text: str, tokens: int = 40) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "big", "messages": messages, "max_tokens": tokens, "temperature": 0}


@asynccontextmanager
async def fleet_of(root: Path, *words: str, nodes: int) -> AsyncIterator[Fleet]:
    """Run a fleet that has a tiny model of this kind."""
    folder = root / "models" / "tiny"
    await run_module("tests.support.tiny_model", str(folder), *words, "--endless")
    async with running_fleet(root / "fleet", folder.parent, nodes=nodes, grace_s=5.0) as fleet:
        yield fleet


async def ended(group: Group) -> None:
    done = await group.fleet.ctl("delete", "modeldeployment/big")
    assert done.code == 0, done.err
    await nothing_runs(group.fleet)


async def test_unequal_macs_get_layers_by_their_memory(tmp_path: Path) -> None:
    """A layer's caches take 128 MiB: of six the smaller Mac has room for one or two."""
    async with fleet_of(tmp_path, "--arch", "qwen2", "--layers", "6", nodes=0) as fleet:
        fleet.start_agent("node-1", memory="8Gi")
        fleet.start_agent("node-2", memory="1200Mi")
        await fleet.joined(2)
        members = "{node: node-1}, {node: node-2}"
        await fleet.applied(big(members, "Pipeline", 64))
        async with group_of(fleet, "big") as group:
            replica = await group.serving()
            first, second = replica.spec.ranks
            assert first.layers + second.layers == 6
            assert first.layers > second.layers > 0
            assert second.memory.total_bytes <= 1200 * 2**20 < first.memory.total_bytes
            before = await ask(fleet, [chat(f"client {n}") for n in range(4)])
            epoch = await group.epoch()
            os.kill(group.rank(1).pid, signal.SIGKILL)
            await group.serving(after=epoch)
            assert await ask(fleet, [chat(f"client {n}") for n in range(4)]) == before
            await ended(group)


async def test_a_cable_is_cut_and_mended(tmp_path: Path) -> None:
    """Packets between two Macs vanish without a word; requests and the store are on another network."""
    with netns.Networks(2).made() as networks:
        async with fleet_of(tmp_path, "--arch", "llama", nodes=0) as fleet:
            agents = [start_inside(fleet, networks, number) for number in range(2)]
            try:
                await fleet.joined(2)
                await cut_and_mended(fleet, networks)
            finally:
                for agent in agents:
                    await processes.end(agent, fleet.clock, grace_s=10)


def start_inside(fleet: Fleet, networks: netns.Networks, number: int) -> processes.ChildProcess:
    """Start an agent, and so its engines, in a namespace of its own."""
    place, name = networks.place(number), f"node-{number + 1}"
    flags = (
        *("--etcd", str(fleet.etcd.address), "--name", name, "--address", place.client_host),
        *("--state-dir", str(fleet.root / name), "--models-dir", str(fleet.models_dir)),
        *("--memory", "8Gi", "--part-of-machine", "--engine-port", str(engine_port())),
    )
    command = [*place.prefix, sys.executable, "-m", "nodeagent", *flags]
    return processes.spawn(command, log=fleet.log(name))


async def cut_and_mended(fleet: Fleet, networks: netns.Networks) -> None:
    members = ", ".join(
        f"{{node: node-{number + 1}, addresses: [{networks.place(number).peer_host}]}}"
        for number in range(2)
    )
    await fleet.applied(big(members, "Tensor", 4))
    async with group_of(fleet, "big") as group:
        await group.serving()
        before, epoch, heard = await ask(fleet, [chat("we hold", 16)]), await group.epoch(), Heard()
        async with asking(fleet) as client, asyncio.TaskGroup() as tasks:
            tasks.create_task(listen(client, chat("we hold", 600), heard))
            await until(heard.has_begun, what="the stream")
            networks.cut_peers(1)
            began = fleet.clock.monotonic()
            why = await group.noticed(epoch)
            noticed_s = fleet.clock.monotonic() - began
            networks.mend_peers(1)
            await group.serving(after=epoch)
            served_s = fleet.clock.monotonic() - began
        print(
            f"cable cut: noticed after {noticed_s:.1f} s ({why}), served after {served_s:.1f} s; {heard.error}"
        )
        assert heard.finish or heard.error
        assert await ask(fleet, [chat("we hold", 16)]) == before
        await ended(group)
