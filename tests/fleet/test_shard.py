"""A model on a group: the same answers as one process gives, and it outlives its ranks, its agents and its Macs.

One fleet for all, for every start of a rank costs seconds of imports. The figures that are printed are for people
(`pytest -s`): nothing is held to a time but that nobody hangs.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from schemas.replica import Replica
from tests.support.commands import run_module
from tests.support.fleet import Fleet, model_deployment, running_fleet
from tests.support.shards import Group, Heard, ask, asking, group_of, listen, nothing_runs, ranks_of
from tests.support.waiting import until

pytestmark = [pytest.mark.fleet, pytest.mark.mlx, pytest.mark.timeout(600)]

GROUP = """
apiVersion: fleet/v1alpha1
kind: ShardGroup
metadata: {{name: {group}}}
spec:
  members: [{{node: node-1}}, {{node: node-2}}, {{node: node-3}}]
  {shape}
---
"""
CLIENTS = 8


def sharded(name: str, group: str, shape: str) -> str:
    """Return the manifests of a group and its deployment."""
    size = model_deployment(name, sharding=group, contextLength=512, concurrency=8)
    return GROUP.format(group=group, shape=shape) + size


def chat(model: str, number: int) -> dict[str, Any]:
    """Return what client `number` asks."""
    messages = [{"role": "user", "content": f"client {number}: we hold these truths"}]
    return {"model": model, "messages": messages, "max_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    root = tmp_path_factory.mktemp("shard")
    folder = root / "models" / "tiny"
    # Tensor works on 2 and 3 ranks, Pipeline too: on two its three layers cannot be shared evenly.
    shape = ("--layers", "3", "--heads", "6", "--kv-heads", "6", "--hidden", "96")
    await run_module(
        "tests.support.tiny_model", str(folder), "--arch", "qwen2", *shape, "--endless"
    )
    async with running_fleet(root / "fleet", folder.parent, nodes=3, grace_s=3.0) as found:
        yield found


@pytest.fixture(scope="module")
async def wanted(fleet: Fleet) -> list[str]:
    """Return what one process answers to each client, which goes afterwards."""
    await fleet.applied(model_deployment("alone", contextLength=512, concurrency=8))
    await fleet.available("alone")
    await fleet.routed("alone", 1)
    texts = await ask(fleet, [chat("alone", number) for number in range(CLIENTS)])
    await deleted(fleet, "modeldeployment/alone")
    return texts


@pytest.mark.ci
async def test_a_pair_outlives_a_rank(fleet: Fleet, wanted: list[str]) -> None:
    await fleet.applied(sharded("big", "pair", "size: 2"))
    async with group_of(fleet, "big") as group:
        replica = await group.serving()
        assert (nodes(replica), way(replica)) == (["node-1", "node-2"], ("Tensor", 0))
        await all_at_once(group, wanted)
        pid = group.rank(0).pid
        async with disturbed(group, wanted, "kill -9 of rank 0"):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.ci
async def test_a_pair_outlives_agents_files_and_macs(fleet: Fleet, wanted: list[str]) -> None:
    await fleet.applied(sharded("big", "pair", "size: 2"))
    async with group_of(fleet, "big") as group:
        await group.serving()
        await agents_killed(group, wanted)
        await files_broken(group, wanted)
        pid = group.rank(1).pid
        async with disturbed(group, wanted, "SIGSTOP of rank 1"):
            os.kill(pid, signal.SIGSTOP)
        await macs_lost(group, wanted)


@pytest.mark.full
async def test_two_stand_in_for_three(fleet: Fleet, wanted: list[str]) -> None:
    """One Mac is off, and there is no spare: layers are dealt out to two as the fallback says, with the same answer."""
    fleet.kill("node-2")
    try:
        done = await fleet.ctl("wait", "node/node-2", "--for=condition=Ready=False")
        assert done.code == 0, done.err
        shape = "fallbacks: [{size: 2, parallelism: Pipeline}]"
        await fleet.applied(sharded("three", "trio", shape))
        async with group_of(fleet, "three") as group:
            replica = await group.serving()
            assert (nodes(replica), way(replica)) == (["node-1", "node-3"], ("Pipeline", 1))
            assert sorted(rank.layers for rank in replica.spec.ranks) == [1, 2]
            assert await ask(fleet, [chat("three", 0)]) == wanted[:1]
            await nothing_stays(group, "trio")
    finally:
        await fleet.ended("node-2")
        fleet.restart("node-2")
        await fleet.joined(3)


async def all_at_once(group: Group, wanted: list[str]) -> None:
    assert await ask(group.fleet, [chat(group.name, n) for n in range(CLIENTS)]) == wanted
    async with asking(group.fleet) as client:
        whole = await client.chat.completions.create(**chat(group.name, 0))
    assert whole.choices[0].message.content == wanted[0]


@asynccontextmanager
async def disturbed(group: Group, wanted: list[str], what: str) -> AsyncIterator[None]:
    """Do something to the group while clients stream; see that a later epoch serves, and what became of everybody."""
    heard, clock = [Heard() for _ in range(2)], group.fleet.clock
    epoch = await group.epoch()
    async with asking(group.fleet) as client, asyncio.TaskGroup() as tasks:
        for number, one in enumerate(heard):
            tasks.create_task(listen(client, chat(group.name, number), one))
        await until(lambda: all(one.has_begun() for one in heard), what="all streams")
        yield
        began = clock.monotonic()
        why = await group.noticed(epoch)
        noticed_s = clock.monotonic() - began
        await group.serving(after=epoch)
        served_s = clock.monotonic() - began
    told = [one.error or "whole" for one in heard]
    print(f"{what}: noticed after {noticed_s:.1f} s ({why}), served after {served_s:.1f} s; {told}")
    for one, text in zip(heard, wanted, strict=False):
        # Whole and right, or right as far as it goes and then told so.
        assert one.text == text or (one.error and text.startswith(one.text)), one
    assert await ask(group.fleet, [chat(group.name, 0)]) == wanted[:1]


async def agents_killed(group: Group, wanted: list[str]) -> None:
    """kill -9 of an agent ends no answer and no rank; the next one finds what the last one left."""
    before = {rank.pid for rank in ranks_of(group.fleet)}
    for name in ("node-1", "node-2"):
        heard = Heard()
        async with asking(group.fleet) as client, asyncio.TaskGroup() as tasks:
            tasks.create_task(listen(client, chat(group.name, 1), heard))
            await until(heard.has_begun, what="the stream")
            group.fleet.kill(name)
            await group.fleet.ended(name)
            group.fleet.restart(name)
        assert (heard.text, heard.error) == (wanted[1], "")
        await group.serving()
    assert {rank.pid for rank in ranks_of(group.fleet)} == before


async def files_broken(group: Group, wanted: list[str]) -> None:
    """Rank 1 is killed, and no further start works: the third failure in a row is the last; then a person mends it."""
    fleet, tokenizer = group.fleet, group.fleet.models_dir / "tiny" / "tokenizer.json"
    whole, epoch, one = tokenizer.read_text(), await group.epoch(), Heard()
    pid = group.rank(1).pid
    async with asking(fleet) as client, asyncio.TaskGroup() as tasks:
        # Long enough that it still runs when the rank is killed.
        tasks.create_task(listen(client, chat(group.name, 0) | {"max_tokens": 400}, one))
        await until(one.has_begun, what="the stream")
        tokenizer.write_text("{}")
        os.kill(pid, signal.SIGKILL)
        why = await group.noticed(epoch)
    print(f"kill -9 of rank 1, and no further start works: {why}; {one.error}")
    assert one.error
    heard = min(len(one.text), len(wanted[0]))
    assert one.text[:heard] == wanted[0][:heard]
    said = await group.unavailable("CrashLooping")
    assert "failed 3 times in a row" in said
    assert "fleetctl rollout restart" in said
    await nothing_runs(fleet)
    # On a slow machine the group serves for a minute before the kill, which clears the failures before it.
    assert await group.epoch() in (epoch + 1, epoch + 2)
    tokenizer.write_text(whole)
    done = await fleet.ctl("rollout", "restart", "modeldeployment/big")
    assert done.code == 0, done.err
    await group.serving()


async def macs_lost(group: Group, wanted: list[str]) -> None:
    """The first Mac loses its agent for good: its rank goes by itself, and the spare takes its place. Then another."""
    try:
        async with disturbed(group, wanted, "an agent is gone for good"):
            group.fleet.kill("node-1")
        assert nodes(await group.serving()) == ["node-2", "node-3"]
        group.fleet.kill("node-3")
        assert group.fleet.kill_engines("node-3") == 1
        said = await group.unavailable("Unschedulable")
        assert "1/3 members fit, 2 are needed" in said
        assert "node-1" in said
        # While two of its Macs are away, and the third waits for them.
        await nothing_stays(group, "pair")
    finally:
        for name in ("node-1", "node-3"):
            group.fleet.kill(name)
            await group.fleet.ended(name)
            group.fleet.restart(name)
        await group.fleet.joined(3)


async def deleted(fleet: Fleet, *names: str) -> None:
    for name in names:
        done = await fleet.ctl("delete", name)
        assert done.code == 0, done.err


async def nothing_stays(group: Group, name: str) -> None:
    """Delete the deployment and its group: no process, no object and no report is left."""
    await deleted(group.fleet, f"modeldeployment/{group.name}", f"shardgroup/{name}")
    await nothing_runs(group.fleet)
    await group.nothing_said()


def nodes(replica: Replica) -> list[str]:
    return [rank.node for rank in replica.spec.ranks]


def way(replica: Replica) -> tuple[str, int]:
    """Return how the model is split, and by which fallback."""
    assert replica.spec.formation is not None
    return replica.spec.formation.parallelism, replica.spec.formation.fallback
