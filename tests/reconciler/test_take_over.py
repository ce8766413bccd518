"""The leader is killed in the middle of assigning: its heir goes on, and nothing is assigned twice or lost."""

import asyncio
import signal
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import pytest

from machinery import processes
from machinery.clock import SystemClock
from machinery.processes import ChildProcess
from schemas.replica import Replica
from store import codec, keys
from store.etcd.connect import connect
from store.port import KeyValue, Transport
from tests.support import forker
from tests.support.etcd import running_etcd
from tests.support.fleets import GIB, deployment
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.waiting import until, until_async

CLOCK = SystemClock()
NODES, DEPLOYMENTS, PER_DEPLOYMENT = 20, 100, 4
# Little more than what is to be placed there: a replica that is not counted would not fit.
MEMORY_GIB = 60


async def listen(store: Transport, revision: int, heard: list[tuple[str, KeyValue | None]]) -> None:
    watch = store.watch(keys.spec_prefix("Replica"), after_revision=revision)
    async with aclosing(watch):
        async for batch in watch:
            heard.extend((change.key, change.now) for change in batch.changes)


async def leader_of(store: Transport, children: list[ChildProcess]) -> ChildProcess:
    holder = await until_async(lambda: store.get(keys.ELECTION_RECONCILER), limit_s=20)
    pid = int(holder.value.decode().rpartition("/")[2].split()[0])
    return next(child for child in children if child.record.pid == pid)


@pytest.mark.etcd
@pytest.mark.timeout(120)
async def test_what_a_killed_leader_began_is_finished_once(tmp_path: Path) -> None:
    async with running_etcd(tmp_path / "etcd") as etcd:
        store = connect(etcd.address)
        for at in range(NODES):
            status = node_status(f"mac-{at}", memory_gib=MEMORY_GIB)
            await store.commit([], [put_node(f"mac-{at}", status), put_lease(f"mac-{at}")])
        words = ("--etcd", f"unix:{etcd.address.socket}")
        children = [forker.start("reconciler", words, log=tmp_path / f"{n}.log") for n in (1, 2)]
        heard: list[tuple[str, KeyValue | None]] = []
        try:
            leader = await leader_of(store, children)
            revision = (await store.status()).revision
            async with asyncio.TaskGroup() as group:
                ear = group.create_task(listen(store, revision, heard))
                made = [
                    codec.put_spec(deployment(name=f"d{at:02}", replicas=PER_DEPLOYMENT))
                    for at in range(DEPLOYMENTS)
                ]
                await store.commit([], made)
                await until(lambda: len(heard) >= 40, limit_s=30, what="the first assignments")
                leader.send(signal.SIGKILL)
                await until(
                    lambda: len(heard) >= DEPLOYMENTS * PER_DEPLOYMENT, limit_s=60, what="the rest"
                )
                await CLOCK.sleep(0.5)  # what is claimed is that nothing more comes
                ear.cancel()
        finally:
            for child in children:
                child.send(signal.SIGKILL)
                await processes.wait_ended(child, CLOCK, limit_s=30)
            await store.close()
    names = {f"d{at:02}-{n}" for at in range(DEPLOYMENTS) for n in range(PER_DEPLOYMENT)}
    assert Counter(key.rpartition("/")[2] for key, _ in heard) == Counter(names)
    used: Counter[str] = Counter()
    for _, item in heard:
        assert item is not None
        (rank,) = codec.decode_object(Replica, item).spec.ranks
        used[rank.node] += rank.memory.total_bytes
    assert max(used.values()) <= MEMORY_GIB * GIB
