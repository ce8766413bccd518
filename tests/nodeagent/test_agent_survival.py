"""An engine survives the end and the pauses of its agent, a restored backup, and the end of etcd."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from nodeagent.engines import engine_processes
from schemas.meta import find_condition
from schemas.replica import RankStatus, Replica
from store import codec, keys, objects
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Delete, KeyChange, Put, WatchBatch
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.nodeagent_agents import NODE, AgentProcess, Desk, answers
from tests.support.values import present
from tests.support.waiting import until, until_async

pytestmark = [pytest.mark.etcd, pytest.mark.mlx, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
async def agent(
    etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory, models_dir: Path
) -> AsyncIterator[AgentProcess]:
    """Return an agent whose engine listens on a socket, as with `fleetctl up`."""
    with TemporaryDirectory(prefix="fleet-") as sockets:
        flags = ("--engine-sockets", sockets)
        state = tmp_path_factory.mktemp("agent") / "state"
        made = AgentProcess(etcd, state, models_dir, NODE, flags=flags)
        made.start()
        yield made
        await made.end()


@pytest.fixture
async def serving(desk: Desk, agent: AgentProcess) -> Replica:
    """Return a replica that is published, the same for all tests: its engine goes on, or is started again."""
    there = await objects.get(desk.store, Replica, "tiny-0")
    replica = there or await desk.assign("tiny-0", uid="lasting")
    await desk.until_published(replica.name)
    await desk.until_condition(replica.name, "True", "Serving")
    return replica


@pytest.mark.ci
async def test_engines_outlive_their_agent(
    desk: Desk, agent: AgentProcess, serving: Replica
) -> None:
    engine = await agent.engine()
    endpoint = await desk.until_published(serving.name)
    assert endpoint.spec.url == engine.address.url
    assert endpoint.spec.start_seconds > 0
    assert Path(engine.address.socket).parent.name == NODE
    await desk.until_condition(serving.name, "True", "Serving")
    peak = await desk.peak(serving.name)
    # Python and MLX alone take this much, and the tiny model no more than the rest.
    assert 64 * 2**20 <= peak <= 2 * 2**30
    assert peak % (64 * 2**20) == 0
    ready_since = await ready_time(desk, serving)
    watch = desk.store.watch(
        keys.ENDPOINT_PREFIX, after_revision=(await desk.store.status()).revision
    )
    old = await desk.lease_of(serving.name)
    await agent.kill()
    assert await answers(endpoint.spec.url)
    agent.start()

    async def published_anew() -> bool:
        return await desk.lease_of(serving.name) not in (old, None)

    await desk.until(published_anew, "published under the lease of the new agent")
    # The endpoint was written over, and not deleted before that.
    assert (await first_change(watch)).now is not None
    # The engine knows how long it took to start; the agent that started it is gone.
    assert (
        await desk.until_published(serving.name)
    ).spec.start_seconds == endpoint.spec.start_seconds
    assert (await agent.engine()).child.record.pid == engine.child.record.pid
    assert await answers(endpoint.spec.url)
    assert await desk.peak(serving.name) >= peak
    # It served all the time, also while the new agent probed it.
    await desk.until_condition(serving.name, "True", "Serving")
    assert await ready_time(desk, serving) == ready_since


async def ready_time(desk: Desk, replica: Replica) -> datetime:
    """Return when the rank's condition Ready changed last."""
    item = present(await desk.store.get(keys.rank_key(NODE, replica.name, 0)))
    ready = present(find_condition(codec.decode(RankStatus, item).conditions, "Ready"))
    return present(ready.last_transition_time)


async def test_nothing_is_gone_while_a_backup_is_restored(
    desk: Desk, agent: AgentProcess, serving: Replica
) -> None:
    engine = await agent.engine()
    lease = await desk.lease_of(serving.name)
    await desk.store.commit([], [Put(key=keys.RESTORING, value=b"{}")])
    await desk.store.commit([], [Delete(key=keys.spec_key("Replica", serving.name))])
    # What the agent hears after that it looks at after that, and this one it starts.
    await desk.assign("later-0", uid="later", path="nowhere")
    await until((agent.state_dir / "engines" / "later-0" / "engine.log").exists)
    assert engine.child.running()
    assert await desk.lease_of(serving.name) == lease
    assert await desk.condition("later-0") == ("", "")
    await desk.store.commit([], [codec.put_spec(serving), Delete(key=keys.RESTORING)])
    await desk.until_condition("later-0", "False", "ModelUnusable")
    assert engine.child.running()
    await desk.remove("later-0")


async def first_change(watch: AsyncGenerator[WatchBatch]) -> KeyChange:
    """Return what happened first since the watch began."""
    async with asyncio.timeout(30), aclosing(watch):
        async for batch in watch:
            if batch.changes:
                return batch.changes[0]
    raise AssertionError("the watch ended")


@pytest.mark.ci
async def test_a_frozen_agent_loses_its_endpoints_and_gets_them_back(
    desk: Desk, agent: AgentProcess, serving: Replica
) -> None:
    engine = await agent.engine()
    agent.send(signal.SIGSTOP)
    await desk.until_withdrawn(serving.name)
    assert await desk.store.get(keys.node_lease_key(NODE)) is None
    agent.send(signal.SIGCONT)
    await desk.until_published(serving.name)
    assert (await agent.engine()).child.record.pid == engine.child.record.pid


@pytest.mark.full
async def test_a_stopped_mac_starts_no_engine_until_it_may(
    desk: Desk, agent: AgentProcess, serving: Replica
) -> None:
    words = ("stop", "--local", "--state-dir", str(agent.state_dir))
    done = await run_fleetctl(*words)
    assert "1 engine ended" in done.out, done.err
    await desk.until_condition(serving.name, "False", "CannotStart")
    await desk.until_withdrawn(serving.name)
    assert not agent.engines()
    done = await run_fleetctl(*words, "--undo")
    assert "engines may start again" in done.out, done.err
    await desk.until_published(serving.name)
    await desk.until_condition(serving.name, "True", "Serving")


@pytest.mark.ci
async def test_engines_are_tended_while_etcd_is_away(
    desk: Desk, agent: AgentProcess, serving: Replica, etcd: EmbeddedEtcd
) -> None:
    first = await agent.engine()
    pid = present(etcd.supervisor.pid)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not etcd.supervisor.running)
    engine_processes.kill(first)
    await until(lambda: not first.child.running())
    second = await agent.engine()
    assert await until_async(lambda: answers(second.address.url), limit_s=60)
    await etcd.start()

    async def leads_to_the_second() -> bool:
        found = await desk.endpoint(serving.name)
        return found is not None and found.spec.url == second.address.url

    await desk.until(leads_to_the_second, "what runs is published")
    await desk.until_condition(serving.name, "True", "Serving")
    assert (await agent.engine()).child.record.pid == second.child.record.pid
