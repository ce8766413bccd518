"""The simulation with real processes and a real etcd: kill -9 of any process, again and again, then convergence.

Agents are hollow (`python -m nodeagent.hollow`), one process each: killing one also kills its engines, as a power cut
does. By default this takes some seconds; `pytest -m soak tests/simulation` runs a minute.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import pytest

from schemas.meta import is_true
from schemas.replica import Endpoint, Replica
from store import keys, objects
from store.errors import StoreError
from store.etcd.connect import connect
from store.port import Transport
from tests.simulation.history import State
from tests.simulation.laws import (
    draining_comes_first,
    edits_are_whole,
    memory_suffices,
    surge_is_bounded,
)
from tests.support.cluster import killing_signal
from tests.support.fleet import Fleet
from tests.support.waiting import until, until_async

pytestmark = pytest.mark.full

AGENTS = 20
WANTED = {"big": 10, "mid": 6, "low": 4}
MANIFEST = """
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {{name: {name}}}
spec: {{model: {{path: {name}}}, replicas: {replicas}, contextLength: {context}}}
"""
# Those that ask nothing of time: a history has revisions, and no clock.
LAWS = (memory_suffices, edits_are_whole, draining_comes_first, surge_is_bounded)


@asynccontextmanager
async def running(root: Path) -> AsyncIterator[Fleet]:
    """Run etcd, two reconcilers and all agents."""
    fleet = Fleet(root, root / "models")
    try:
        await fleet.etcd.start()
        for name in ("reconciler-1", "reconciler-2"):
            fleet.start(name, "reconciler", "--node-grace-period", "3", "--log-level", "error")
        for number in range(AGENTS):
            flags = ("--first", str(number), "--load", "0.3", "--log-level", "error")
            fleet.start(f"hollow-{number}", "nodeagent.hollow", *flags)
        yield fleet
    finally:
        await fleet.stop()


async def kill_something(fleet: Fleet, dice: random.Random) -> None:
    """Kill a process that is drawn, and start it again."""
    drawn = dice.randrange(10)
    if drawn == 0:
        pid = fleet.etcd.supervisor.pid
        assert pid is not None
        os.kill(pid, killing_signal())
        await until(lambda: not fleet.etcd.supervisor.running, what="etcd's end")
        await fleet.etcd.start()
        return
    name = f"reconciler-{drawn}" if drawn <= 2 else f"hollow-{dice.randrange(AGENTS)}"
    fleet.kill(name)
    await fleet.ended(name)
    fleet.restart(name)


async def is_whole(store: Transport) -> bool:
    """Return whether every replica that is wanted answers, and there is no other."""
    try:
        replicas = await objects.list_all(store, Replica)
        endpoints = {e.spec.replica_uid for e in await objects.list_all(store, Endpoint)}
    except StoreError:
        return False
    counts = dict.fromkeys(WANTED, 0)
    for replica in replicas:
        counts[replica.spec.deployment] += 1
    return (
        counts == WANTED
        and {r.metadata.uid for r in replicas} == endpoints
        and all(r.status and is_true(r.status.conditions, "Ready") for r in replicas)
    )


async def broken_laws(store: Transport, upto: int) -> list[str]:
    """Return what of everything that was ever written went against a law."""
    state = State()
    broken: list[str] = []
    async with aclosing(store.watch(keys.ROOT, after_revision=1)) as batches:
        async for batch in batches:
            for revision, changes in groupby(batch.changes, key=attrgetter("mod_revision")):
                steps = [state.take(change.key, change.now) for change in changes]
                told = [law(step) for step in steps if step is not None for law in LAWS]
                broken.extend(f"revision {revision}: {wrong}" for wrong in told if wrong)
            if batch.changes and batch.changes[-1].mod_revision >= upto:
                return broken
    raise AssertionError("the history ends too early")


async def endure(root: Path, seconds: int) -> None:
    """Kill one process a second, edit the specs meanwhile, and wait until the fleet comes to rest."""
    dice = random.Random(seconds)
    async with running(root) as fleet:
        await fleet.joined(AGENTS)
        for name, replicas in WANTED.items():
            await fleet.applied(MANIFEST.format(name=name, replicas=replicas, context=2048))
        store = connect(fleet.etcd.address)
        try:
            await until_async(lambda: is_whole(store), limit_s=60, what="all replicas")
            for second in range(seconds):
                async with asyncio.TaskGroup() as group:
                    group.create_task(asyncio.sleep(1))
                    group.create_task(kill_something(fleet, dice))
                if second % 7 == 3:  # a rollout into the middle of it
                    manifest = MANIFEST.format(name="mid", replicas=6, context=2048 + second)
                    await fleet.applied(manifest)
            await until_async(lambda: is_whole(store), limit_s=120, what="all replicas again")
            await at_rest(store)
            upto = (await store.status()).revision
            await fleet.applied(MANIFEST.format(name="big", replicas=9, context=2048))
            assert await broken_laws(store, upto + 1) == []
        finally:
            await store.close()


async def at_rest(store: Transport) -> None:
    """Wait until nothing but leases is kept up: no write for some seconds."""

    async def is_quiet() -> bool:
        before = (await store.status()).revision
        await asyncio.sleep(4)
        return (await store.status()).revision == before

    await until_async(is_quiet, limit_s=60, what="no more writes")


@pytest.mark.etcd
@pytest.mark.fleet
@pytest.mark.timeout(300)
async def test_twenty_agents_and_a_killer(tmp_path: Path) -> None:
    await endure(tmp_path, 10)


@pytest.mark.soak
@pytest.mark.etcd
@pytest.mark.fleet
@pytest.mark.timeout(600)
async def test_twenty_agents_and_a_killer_for_a_minute(tmp_path: Path) -> None:
    await endure(tmp_path, 60)
