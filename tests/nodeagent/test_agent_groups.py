"""Two agents and one group of real ranks: formed, checked, broken in every way, formed again."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from nodeagent.engines.engine_processes import EngineProcess
from schemas.formation import EpochSecret
from schemas.meta import find_condition, is_true
from schemas.replica import Endpoint, RankStatus, Replica
from store import codec, keys
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Put
from tests.support.fleet import engine_port
from tests.support.nodeagent_agents import AgentProcess, Desk, answers
from tests.support.nodeagent_groups import group
from tests.support.ports import free_port
from tests.support.values import present
from tests.support.waiting import until, until_async

pytestmark = [pytest.mark.ci, pytest.mark.etcd, pytest.mark.mlx, pytest.mark.timeout(300)]

NAMES = ("left", "right")
NAME = "tiny-0"
# The tests check that the loss is noticed; the limit of 5 s needs an idle machine.
_NOTICED_S = 60


class Pair:
    """Two agents, and the desk where the test writes epochs."""

    def __init__(self, agents: dict[str, AgentProcess], desk: Desk) -> None:
        self.agents = agents
        self.desk = desk
        self.epoch = 0

    async def form(self, *, has_secret: bool = True, **fields: Any) -> Replica:
        """Write the next epoch; without its secret, as a restored store has it."""
        self.epoch += 1
        # The uid chooses the ports of the epoch: another test run must not choose the same.
        uid = f"pair-{os.getpid()}"
        made = group(*NAMES, name=NAME, uid=uid, epoch=self.epoch, port=free_port(), **fields)
        ranks = tuple(
            rank.model_copy(update={"addresses": ("127.0.0.1",)}) for rank in made.spec.ranks
        )
        source = made.spec.model.model_copy(update={"path": "tiny"})
        changed = {"ranks": ranks, "model": source, "served_names": ("tiny",)}
        made = made.model_copy(update={"spec": made.spec.model_copy(update=changed)})
        secret = codec.encode(EpochSecret(epoch=self.epoch, secret="s3cret"))
        secrets = [Put(key=keys.epoch_secret_key(node, NAME), value=secret) for node in NAMES]
        await self.desk.store.commit([], [codec.put_spec(made), *(secrets if has_secret else ())])
        return made

    async def report(self, number: int) -> RankStatus | None:
        item = await self.desk.store.get(keys.rank_key(NAMES[number], NAME, number))
        return None if item is None else codec.decode(RankStatus, item)

    async def until_condition(self, number: int, reason: str, type_: str = "Ready") -> RankStatus:
        """Wait until the rank's agent says this of the current epoch."""

        async def so() -> RankStatus | None:
            found = await self.report(number)
            if found is None or found.epoch != self.epoch:
                return None
            said = find_condition(found.conditions, type_)
            return found if said is not None and said.reason == reason else None

        what = f"rank {number} is {type_}: {reason}"
        return await until_async(so, limit_s=_NOTICED_S, what=what)

    async def until_serving(self) -> Endpoint:
        await self.until_condition(0, "Serving")
        await self.until_condition(1, "Following")
        return await self.desk.until_published(NAME)

    async def lease(self) -> int | None:
        """Return the lease that the endpoint hangs on."""
        item = await self.desk.store.get(keys.endpoint_key(NAMES[0], NAME))
        return None if item is None else item.lease

    def ranks(self) -> list[EngineProcess]:
        """Return the ranks that run, of both agents."""
        return [engine for agent in self.agents.values() for engine in agent.engines()]

    async def until_over(self) -> list[str]:
        """Wait until both agents gave the epoch up and nothing of it is left; return their reasons."""
        reasons = []
        for number in range(2):

            async def over(number: int = number) -> RankStatus | None:
                found = await self.report(number)
                is_mine = found is not None and found.epoch == self.epoch
                return (
                    found if found and is_mine and is_true(found.conditions, "EpochOver") else None
                )

            found = await until_async(over, limit_s=_NOTICED_S, what=f"rank {number} is given up")
            said = present(find_condition(found.conditions, "EpochOver"))
            reasons.append(said.reason)
        await until(lambda: not self.ranks(), limit_s=_NOTICED_S, what="no rank is left")
        await self.desk.until_withdrawn(NAME)
        return reasons


@pytest.fixture(scope="module")
async def agents(
    etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory, models_dir: Path
) -> AsyncIterator[dict[str, AgentProcess]]:
    """Return two agents of one machine, whose ranks listen on sockets of one folder."""
    folder = tmp_path_factory.mktemp("pair")
    with TemporaryDirectory(prefix="fleet-") as sockets:
        flags = ("--engine-sockets", sockets)
        port = engine_port()
        made = {
            name: AgentProcess(
                etcd, folder / name, models_dir, name, port=port + 80 * number, flags=flags
            )
            for number, name in enumerate(NAMES)
        }
        for agent in made.values():
            agent.start()
        yield made
        for agent in made.values():
            await agent.end()


async def test_a_group_lives_breaks_and_lives_again(
    agents: dict[str, AgentProcess], desk: Desk
) -> None:
    pair = Pair(agents, desk)

    # Backups hold no secrets: the restored epoch is given up, and the next one forms with new ones.
    await pair.form(has_secret=False)
    assert await pair.until_over() == ["RankEnded"] * 2

    # One process makes the reference first; the group answers the same.
    await pair.form(fits_single=True)
    await pair.until_condition(0, "MakingReference")
    endpoint = await pair.until_serving()
    assert await answers(endpoint.spec.url)
    first = present(await pair.report(0))
    assert first.golden is not None
    assert first.golden.is_reference
    assert [(rank.epoch, rank.memory_bytes) for rank in pair.ranks()] == [(pair.epoch, 2**30)] * 2

    # Agents that are killed go on with their ranks.
    pids = {rank.child.record.pid for rank in pair.ranks()}
    old = await pair.lease()
    for name in NAMES:
        await agents[name].kill()
        agents[name].start()

    async def published_anew() -> bool:
        return await pair.lease() not in (old, None)

    await desk.until(published_anew, "published under the lease of the new agent")
    await pair.until_serving()
    assert {rank.child.record.pid for rank in pair.ranks()} == pids

    # A rank is killed: both agents say so, and nothing is left.
    pair.ranks()[1].child.send(signal.SIGKILL)
    assert await pair.until_over() == ["RankEnded", "RankEnded"]

    # A rank is frozen: its agent says so, and the other one goes with it.
    await pair.form(golden=first.golden)
    endpoint = await pair.until_serving()
    assert await answers(endpoint.spec.url)
    frozen = pair.ranks()[0]
    os.kill(frozen.child.record.pid, signal.SIGSTOP)
    assert await pair.until_over() == ["RankSilent", "RankEnded"]

    # What the reconciler ends, all agents end.
    await pair.form(golden=first.golden)
    await pair.until_serving()
    await desk.remove(NAME)
    await until(lambda: not pair.ranks(), limit_s=_NOTICED_S, what="no rank is left")
    await desk.until_withdrawn(NAME)
    for agent in agents.values():
        processes = [
            process for process in psutil.process_iter() if str(agent.state_dir) in _folder(process)
        ]
        assert [process for process in processes if "engine" in " ".join(process.cmdline())] == []


def _folder(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except psutil.Error:
        return ""
