"""A model on a group of two: the same answers as one process gives, and it outlives its ranks, its agents and its Macs.

One fleet and one life, for every start of a rank costs seconds. The figures that it prints are for people (`pytest -s`):
nothing is held to a time but that nobody hangs.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas.replica import Replica
from tests.support.commands import run_module
from tests.support.fleet import Fleet, running_fleet
from tests.support.shards import Group, Heard, asking, group_of, listen, nothing_runs, ranks_of
from tests.support.waiting import until, until_async

pytestmark = [pytest.mark.fleet, pytest.mark.mlx, pytest.mark.timeout(600)]

MANIFEST = """
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: alone}
spec:
  model: {path: tiny}
  contextLength: 1024
  concurrency: 8
"""
SHARDED = """
apiVersion: fleet/v1alpha1
kind: ShardGroup
metadata: {name: pair}
spec:
  members: [{node: node-1}, {node: node-2}, {node: node-3}]
  size: 2
  parallelism: Tensor
  fallbacks: [{parallelism: Pipeline}]
---
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: big}
spec:
  model: {path: tiny}
  sharding: pair
  contextLength: 1024
  concurrency: 8
"""
CLIENTS = 8
TOKENS = 48


def chat(model: str, number: int) -> dict[str, Any]:
    """Return what client `number` asks."""
    messages = [{"role": "user", "content": f"client {number}: we hold these truths"}]
    return {"model": model, "messages": messages, "max_tokens": TOKENS, "temperature": 0}


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    root = tmp_path_factory.mktemp("shard")
    folder = root / "models" / "tiny"
    # Tensor works with it, and Pipeline: three layers cannot be shared evenly.
    words = ("--arch", "qwen2", "--layers", "3", "--endless")
    await run_module("tests.support.tiny_model", str(folder), *words)
    async with running_fleet(root / "fleet", folder.parent, nodes=3, grace_s=3.0) as found:
        yield found


async def test_a_pair_lives_through_everything(fleet: Fleet) -> None:
    wanted = await texts_of_one(fleet)
    await fleet.applied(SHARDED)
    async with group_of(fleet, "big") as group:
        replica = await group.serving()
        assert nodes(replica) == ["node-1", "node-2"]
        assert way(replica) == ("Tensor", 0)
        await all_at_once(group, wanted)
        await agents_killed(group, wanted)
        await ranks_killed(group, wanted)
        await rank_frozen(group, wanted)
        await macs_lost(group, wanted)
        await nothing_stays(group)


async def texts_of_one(fleet: Fleet) -> list[str]:
    """Return what one process answers, which goes afterwards."""
    await fleet.applied(MANIFEST)
    await fleet.available("alone")
    await fleet.routed("alone", 1)
    heard = await ask(fleet, "alone", CLIENTS)
    assert {one.finish for one in heard} == {"length"}, heard
    done = await fleet.ctl("delete", "modeldeployment/alone")
    assert done.code == 0, done.err
    return [one.text for one in heard]


async def ask(fleet: Fleet, model: str, clients: int) -> list[Heard]:
    """Have so many clients stream at once; each must get a whole answer."""
    heard = [Heard() for _ in range(clients)]
    async with asking(fleet) as client, asyncio.TaskGroup() as tasks:
        for number, one in enumerate(heard):
            tasks.create_task(listen(client, chat(model, number), one))
    assert [one.error for one in heard] == [""] * clients
    return heard


async def all_at_once(group: Group, wanted: list[str]) -> None:
    heard = await ask(group.fleet, group.name, CLIENTS)
    assert [one.text for one in heard] == wanted
    async with asking(group.fleet) as client:
        whole = await client.chat.completions.create(**chat(group.name, 0))
    assert whole.choices[0].message.content == wanted[0]


@asynccontextmanager
async def disturbed(group: Group, wanted: list[str], what: str) -> AsyncIterator[int]:
    """Yield the epoch while clients stream; see that a later one serves, and what became of everybody."""
    heard, clock = [Heard() for _ in range(2)], group.fleet.clock
    epoch = await group.epoch()
    async with asking(group.fleet) as client, asyncio.TaskGroup() as tasks:
        for number, one in enumerate(heard):
            tasks.create_task(listen(client, chat(group.name, number), one))
        await until(lambda: all(one.chunks > 2 for one in heard), what="all streams")
        yield epoch
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
    assert (await ask(group.fleet, group.name, 1))[0].text == wanted[0]


async def agents_killed(group: Group, wanted: list[str]) -> None:
    """Whoever kills an agent ends no answer and no rank; the next one finds what the last one left."""
    before = ranks_of(group.fleet)
    for name in ("node-1", "node-2"):
        heard = [Heard()]
        async with asking(group.fleet) as client, asyncio.TaskGroup() as tasks:
            tasks.create_task(listen(client, chat(group.name, 1), heard[0]))
            await until(lambda: heard[0].chunks > 2, what="the stream")  # noqa: B023 - waited for here
            group.fleet.kill(name)
            await group.fleet.ended(name)
            group.fleet.restart(name)
        assert heard[0].text == wanted[1], heard[0].error
        await group.serving()
    assert ranks_of(group.fleet) == before


async def ranks_killed(group: Group, wanted: list[str]) -> None:
    for number in (1, 0):
        pid = group.rank(number).pid
        async with disturbed(group, wanted, f"kill -9 of rank {number}"):
            os.kill(pid, signal.SIGKILL)


async def rank_frozen(group: Group, wanted: list[str]) -> None:
    """It lives, and gets nowhere: the third failure in a row, and the fallback's turn."""
    pid = group.rank(1).pid
    async with disturbed(group, wanted, "SIGSTOP of rank 1"):
        os.kill(pid, signal.SIGSTOP)
    replica = await group.serving()
    assert way(replica) == ("Pipeline", 1)
    assert sorted(rank.layers for rank in replica.spec.ranks) == [1, 2]


async def macs_lost(group: Group, wanted: list[str]) -> None:
    """The first Mac loses its agent for good: its rank goes by itself, and the spare takes its place."""
    async with disturbed(group, wanted, "an agent is gone for good"):
        group.fleet.kill("node-1")
    assert nodes(await group.serving()) == ["node-2", "node-3"]
    group.fleet.kill("node-3")
    group.fleet.kill_engines("node-3")
    await group.tells("0 of 1 replicas ready", "1/3 members fit, 2 are needed", "node-1", "node-3")
    for name in ("node-1", "node-3"):
        group.fleet.restart(name)


async def nothing_stays(group: Group) -> None:
    done = await group.fleet.ctl("delete", "modeldeployment/big", "shardgroup/pair")
    assert done.code == 0, done.err
    await nothing_runs(group.fleet)
    assert await group.replica() is None
    listed = await group.fleet.ctl("get", "replicas,shardgroups", "-o", "name")
    assert listed.out == "", listed

    async def look() -> bool:
        return not await group.reports() and not await group.fleet.endpoints()

    await until_async(look, what="the end of all reports")


def nodes(replica: Replica) -> list[str]:
    return [rank.node for rank in replica.spec.ranks]


def way(replica: Replica) -> tuple[str, int]:
    """Return how the model is split, and by which fallback."""
    assert replica.spec.formation is not None
    return replica.spec.formation.parallelism, replica.spec.formation.fallback
