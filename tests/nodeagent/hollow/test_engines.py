"""Groups of hollow Macs: real agents decide over simulated ranks in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from machinery import virtual_time
from machinery.virtual_time import VirtualClock
from nodeagent.hollow import (
    HollowEngine,
    HollowMac,
    HollowTiming,
    SharedCaches,
    hollow_status,
    models_on_disk,
)
from nodeagent.hollow.engines import GOLDEN_ANSWER
from schemas.formation import GoldenAnswer
from schemas.meta import find_condition
from schemas.replica import Endpoint, LeavingRank, RankStatus
from store import codec, keys, objects
from store.memory import MemoryTransport
from store.port import Delete
from tests.support.nodeagent_groups import group
from tests.support.world import GEOMETRY

_PACE = HollowTiming(load_s=5, probe_s=1, drain_s=2)
_WRONG = GoldenAnswer(pieces=("x",), logprobs=(-0.1,))


class Room:
    """Hollow Macs a, b, c, and a desk at which the test plays the reconciler."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self.clock = VirtualClock()
        self.store = MemoryTransport(self.clock)
        self._feed = SharedCaches(self.store, self.clock)
        self.macs = {name: self._mac(name) for name in ("a", "b", "c")}
        self.tasks = [group.create_task(self._feed.run())]
        self.agents = {name: self.start(name) for name in self.macs}

    def _mac(self, name: str) -> HollowMac:
        return HollowMac(
            clock=self.clock,
            status=hollow_status(name),
            models=models_on_disk({"qwen": GEOMETRY}),
            pace=lambda _: _PACE,
        )

    def start(self, name: str) -> asyncio.Task[None]:
        task = self._group.create_task(self.macs[name].agent(self.store, self._feed).run())
        self.tasks.append(task)
        return task

    async def assign(self, *nodes: str, **fields: Any) -> None:
        await self.store.commit([], [codec.put_spec(group(*nodes, **fields))])

    def rank(self, name: str) -> HollowEngine:
        (hollow_engine,) = self.macs[name].engines.running()
        return hollow_engine

    def running(self) -> str:
        """Return on which Macs ranks run."""
        return "".join(name for name, mac in self.macs.items() if mac.engines.running())

    async def endpoint(self) -> Endpoint | None:
        return await objects.get(self.store, Endpoint, "qwen-0")

    async def report(self, node: str, rank: int) -> RankStatus | None:
        item = await self.store.get(keys.rank_key(node, "qwen-0", rank))
        return None if item is None else codec.decode(RankStatus, item)

    async def condition(self, node: str, rank: int, type_: str = "Ready") -> str:
        """Return the epoch and the reason that the node's agent reports."""
        status = await self.report(node, rank)
        found = find_condition(status.conditions, type_) if status is not None else None
        return f"{status.epoch} {found.reason}" if status is not None and found is not None else ""


@asynccontextmanager
async def room() -> AsyncIterator[Room]:
    async with asyncio.TaskGroup() as group:
        made = Room(group)
        await made.clock.sleep(1)
        try:
            yield made
        finally:
            for task in made.tasks:
                task.cancel()


def played(scene: Callable[[Room], Awaitable[None]]) -> None:
    async def main() -> None:
        async with room() as made:
            await scene(made)

    virtual_time.run(main())


async def serving(it: Room, **fields: Any) -> None:
    await it.assign("a", "b", **fields)
    await it.clock.sleep(9)
    assert await it.endpoint() is not None


def test_ranks_join_load_and_serve_behind_a_golden_answer() -> None:
    async def scene(it: Room) -> None:
        await it.assign("a", "b")
        await it.clock.sleep(3)
        assert (await it.condition("a", 0), await it.condition("b", 1)) == (
            "1 Loading",
            "1 Loading",
        )
        await it.clock.sleep(6)
        assert (await it.condition("a", 0), await it.condition("b", 1)) == (
            "1 Serving",
            "1 Following",
        )
        found = await it.endpoint()
        assert found is not None
        assert found.spec.node == "a"
        leading, following = await it.report("a", 0), await it.report("b", 1)
        assert leading is not None
        assert leading.golden == GOLDEN_ANSWER
        assert following is not None
        assert following.golden is None
        # Deletion: all ranks end, and say so.
        await it.assign("a", "b", is_deleting=True)
        await it.clock.sleep(4)
        assert it.running() == ""
        assert await it.condition("a", 0, "Stopped") == "1 EngineEnded"
        assert await it.condition("b", 1, "Stopped") == "1 EngineEnded"
        assert await it.endpoint() is None

    played(scene)


def test_ranks_wait_for_each_other() -> None:
    async def scene(it: Room) -> None:
        it.agents["b"].cancel()
        await it.assign("a", "b")
        await it.clock.sleep(30)
        assert await it.condition("a", 0) == "1 Joining"
        it.start("b")
        await it.clock.sleep(9)
        assert await it.condition("a", 0) == "1 Serving"

    played(scene)


def test_a_rank_that_waits_too_long_gives_up() -> None:
    async def scene(it: Room) -> None:
        it.agents["b"].cancel()
        await it.assign("a", "b")
        await it.clock.sleep(160)
        assert await it.condition("a", 0, "EpochOver") == "1 RankStuck"
        assert it.running() == ""

    played(scene)


def crash(engine: HollowEngine) -> None:
    engine.end(-9)


def freeze(engine: HollowEngine) -> None:
    engine.is_silent = True


def stick(engine: HollowEngine) -> None:
    engine.is_stuck = True


@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize(
    ("act", "reason", "after_s"),
    [(crash, "RankEnded", 1.5), (freeze, "RankSilent", 4.5), (stick, "RankStuck", 5.0)],
)
def test_a_loss_is_noticed_and_the_next_epoch_serves(
    act: Callable[[HollowEngine], None], reason: str, after_s: float, victim: str
) -> None:
    async def scene(it: Room) -> None:
        await serving(it)
        act(it.rank(victim))
        await it.clock.sleep(after_s)
        number = "ab".index(victim)
        assert await it.condition(victim, number, "EpochOver") == f"1 {reason}"
        await it.clock.sleep(4)
        assert await it.endpoint() is None
        other = "ab"[1 - number]
        assert await it.condition(other, 1 - number, "EpochOver") == "1 RankEnded"
        assert it.running() == ""
        # Nothing begins by itself.
        await it.clock.sleep(60)
        assert it.running() == ""
        await it.assign("a", "b", epoch=2, golden=GOLDEN_ANSWER)
        await it.clock.sleep(9)
        assert (await it.condition("a", 0), await it.condition("b", 1)) == (
            "2 Serving",
            "2 Following",
        )
        assert await it.condition("a", 0, "EpochOver") == ""

    played(scene)


def test_a_higher_epoch_ends_the_one_that_serves() -> None:
    async def scene(it: Room) -> None:
        await serving(it)
        before = it.rank("a")
        await it.assign("a", "b", epoch=2)
        await it.clock.sleep(0.5)
        # The rank of the first epoch is still ending: its memory must still be counted.
        assert await it.condition("a", 0) == "1 Serving"
        assert await it.endpoint() is None
        assert it.running() == "ab"
        await it.clock.sleep(10)
        assert await it.condition("a", 0) == "2 Serving"
        assert it.rank("a") is not before

    played(scene)


def test_a_member_is_replaced_by_a_spare() -> None:
    async def scene(it: Room) -> None:
        await serving(it)
        it.rank("a").end(1)
        await it.clock.sleep(3)
        await it.assign("b", "c", epoch=2)
        await it.clock.sleep(10)
        assert (await it.condition("b", 0), await it.condition("c", 1)) == (
            "2 Serving",
            "2 Following",
        )
        # The other rank's report, and the other Mac's, are gone: nothing of the first epoch is left.
        assert await it.report("b", 1) is None
        assert await it.report("a", 0) is None
        assert it.running() == "bc"
        # Also if no agent was running when it happened.
        it.agents["c"].cancel()
        left = LeavingRank(node="c", rank=1, memory_bytes=1)
        await it.assign("b", "a", epoch=3, leaving=(left,))
        await it.clock.sleep(10)
        assert it.running() == "ab"
        it.start("c")
        await it.clock.sleep(5)
        assert await it.report("c", 1) is None
        assert await it.condition("a", 1) == "3 Following"

    played(scene)


def test_a_restarted_agent_continues_or_reports_the_end() -> None:
    async def scene(it: Room) -> None:
        await serving(it)
        rank = it.rank("b")
        it.agents["b"].cancel()
        await it.clock.sleep(6)
        it.agents["b"] = it.start("b")
        await it.clock.sleep(3)
        assert it.rank("b") is rank
        assert await it.condition("b", 1) == "1 Following"
        assert await it.endpoint() is not None
        it.agents["b"].cancel()
        it.macs["b"].lose_power()
        await it.store.commit([], [Delete(key=keys.rank_key("b", "qwen-0", 1))])
        await it.clock.sleep(3)
        it.start("b")
        await it.clock.sleep(3)
        # It knows that it has had its rank of this epoch, and does not start it a second time.
        assert await it.condition("b", 1, "EpochOver") == "1 RankEnded"
        assert it.running() == ""

    played(scene)


def test_an_engine_that_cannot_start_is_reported_once() -> None:
    async def scene(it: Room) -> None:
        it.macs["b"].engines.start_error = "no space left on device"
        await it.assign("a", "b")
        await it.clock.sleep(2)
        assert await it.condition("b", 1, "EpochOver") == "1 CannotStart"
        it.macs["b"].engines.start_error = ""
        await it.clock.sleep(5)
        assert it.running() == "a"
        await it.assign("a", "b", epoch=2)
        await it.clock.sleep(12)
        assert await it.condition("b", 1) == "2 Following"

    played(scene)


@pytest.mark.parametrize("golden", [None, GOLDEN_ANSWER])
def test_a_wrong_answer_is_never_served(golden: GoldenAnswer | None) -> None:
    async def scene(it: Room) -> None:
        insane = GOLDEN_ANSWER.model_copy(update={"logprobs": (-1.0, -1.0, -1.0)})
        it.macs["a"].health.answer = insane if golden is None else _WRONG
        await it.assign("a", "b", golden=golden)
        await it.clock.sleep(9)
        assert await it.condition("a", 0, "EpochOver") == "1 GoldenFailed"
        assert await it.endpoint() is None
        await it.clock.sleep(4)
        assert it.running() == ""

    played(scene)


def test_a_reference_is_made_first_where_the_model_fits_one_mac() -> None:
    async def scene(it: Room) -> None:
        it.macs["a"].health.answer = _WRONG
        await it.assign("a", "b", fits_single=True)
        await it.clock.sleep(3)
        assert await it.condition("a", 0) == "1 MakingReference"
        assert await it.condition("b", 1) == "1 Joining"
        await it.clock.sleep(12)
        assert await it.condition("a", 0, "EpochOver") == "1 GoldenFailed"
        status = await it.report("a", 0)
        assert status is not None
        assert status.golden is not None
        assert status.golden.is_reference
        it.macs["a"].health.answer = GOLDEN_ANSWER
        await it.assign("a", "b", epoch=2, fits_single=True, golden=status.golden)
        await it.clock.sleep(12)
        assert await it.condition("a", 0) == "2 Serving"
        assert it.macs["a"].references.made == 1

    played(scene)


def test_without_a_reference_the_first_answer_has_to_do() -> None:
    async def scene(it: Room) -> None:
        it.macs["a"].references.error = "out of memory"
        await it.assign("a", "b", fits_single=True)
        await it.clock.sleep(16)
        assert await it.condition("a", 0) == "1 Serving"

    played(scene)


def test_a_reference_ends_with_its_replica() -> None:
    async def scene(it: Room) -> None:
        await it.assign("a", "b", fits_single=True)
        await it.clock.sleep(2)
        await it.store.commit([], [Delete(key=keys.spec_key("Replica", "qwen-0"))])
        await it.clock.sleep(3)
        assert it.running() == ""
        # Another replica of the name begins anew.
        await it.assign("a", "b", uid="u2", fits_single=True)
        await it.clock.sleep(16)
        assert await it.condition("a", 0) == "1 Serving"
        assert it.macs["a"].references.made == 2

    played(scene)


def test_a_rank_that_loses_its_probe_answers_tries_again() -> None:
    async def scene(it: Room) -> None:
        it.macs["a"].health.probe_error = "no memory for that now"
        await it.assign("a", "b")
        await it.clock.sleep(8)
        assert await it.condition("a", 0) == "1 ProbeFailed"
        it.macs["a"].health.probe_error = ""
        await it.clock.sleep(4)
        assert await it.condition("a", 0) == "1 Serving"

    played(scene)


def test_idle_groups_write_nothing() -> None:
    async def scene(it: Room) -> None:
        await serving(it)
        await it.clock.sleep(5)
        before = (await it.store.status()).revision
        await it.clock.sleep(60)
        assert (await it.store.status()).revision == before

    played(scene)
