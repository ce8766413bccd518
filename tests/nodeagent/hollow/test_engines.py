"""Groups of hollow Macs: real agents decide over simulated ranks in virtual time."""

from collections.abc import Callable
from typing import Any

import pytest

from nodeagent.hollow import HollowEngine
from nodeagent.hollow.engines import GOLDEN_ANSWER
from schemas.formation import GoldenAnswer
from schemas.replica import LeavingRank
from store import keys
from store.port import Delete
from tests.support.nodeagent_hollow import HollowFleet, in_hollow_fleet
from tests.support.values import present

WRONG = GoldenAnswer(pieces=("x",), logprobs=(-0.1,))
on_three_macs = in_hollow_fleet("a", "b", "c")


async def conditions(it: HollowFleet, first: str = "a", second: str = "b") -> tuple[str, str]:
    return await it.condition(first, 0), await it.condition(second, 1)


async def serving(it: HollowFleet, **fields: Any) -> None:
    await it.assign("a", "b", **fields)
    await it.clock.sleep(9)
    assert await it.endpoint() is not None


@on_three_macs
async def test_ranks_join_load_and_serve_behind_a_golden_answer(it: HollowFleet) -> None:
    await it.assign("a", "b")
    await it.clock.sleep(3)
    assert await conditions(it) == ("1 Loading", "1 Loading")
    await it.clock.sleep(6)
    assert await conditions(it) == ("1 Serving", "1 Following")
    assert present(await it.endpoint()).spec.node == "a"
    assert present(await it.report("a", 0)).golden == GOLDEN_ANSWER
    assert present(await it.report("b", 1)).golden is None
    await it.clock.sleep(5)
    before = await it.revision()
    await it.clock.sleep(60)
    assert await it.revision() == before, "an idle group writes nothing"
    # Deletion: all ranks end, and say so.
    await it.assign("a", "b", is_deleting=True)
    await it.clock.sleep(4)
    assert it.running() == ""
    assert await it.condition("a", 0, "Stopped") == "1 EngineEnded"
    assert await it.condition("b", 1, "Stopped") == "1 EngineEnded"
    assert await it.endpoint() is None


@pytest.mark.parametrize("waited_s", [30, 160])
@on_three_macs
async def test_ranks_wait_for_each_other_but_not_for_ever(it: HollowFleet, waited_s: int) -> None:
    it.agents["b"].cancel()
    await it.assign("a", "b")
    await it.clock.sleep(waited_s)
    if waited_s > 150:
        assert await it.condition("a", 0, "EpochOver") == "1 RankStuck"
        assert it.running() == ""
        return
    assert await it.condition("a", 0) == "1 Joining"
    it.start("b")
    await it.clock.sleep(9)
    assert await it.condition("a", 0) == "1 Serving"


def crash(engine: HollowEngine) -> None:
    engine.end(-9)


def freeze(engine: HollowEngine) -> None:
    engine.is_silent = True


def stick(engine: HollowEngine) -> None:
    engine.is_stuck = True


@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize(("act", "reason", "after_s"), [
    (crash, "RankEnded", 1.5), (freeze, "RankSilent", 4.5), (stick, "RankStuck", 5.0),
])  # fmt: skip
@on_three_macs
async def test_a_loss_is_noticed_and_the_next_epoch_serves(
    it: HollowFleet, act: Callable[[HollowEngine], None], reason: str, after_s: float, victim: str
) -> None:
    await serving(it)
    act(it.rank(victim))
    await it.clock.sleep(after_s)
    number = "ab".index(victim)
    assert await it.condition(victim, number, "EpochOver") == f"1 {reason}"
    await it.clock.sleep(4)
    assert await it.endpoint() is None
    assert await it.condition("ab"[1 - number], 1 - number, "EpochOver") == "1 RankEnded"
    assert it.running() == ""
    # Nothing begins by itself.
    await it.clock.sleep(60)
    assert it.running() == ""
    await it.assign("a", "b", epoch=2, golden=GOLDEN_ANSWER)
    await it.clock.sleep(9)
    assert await conditions(it) == ("2 Serving", "2 Following")
    assert await it.condition("a", 0, "EpochOver") == ""


@on_three_macs
async def test_a_higher_epoch_ends_the_one_that_serves(it: HollowFleet) -> None:
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


@on_three_macs
async def test_a_member_is_replaced_by_a_spare(it: HollowFleet) -> None:
    await serving(it)
    it.rank("a").end(1)
    await it.clock.sleep(3)
    await it.assign("b", "c", epoch=2)
    await it.clock.sleep(10)
    assert await conditions(it, "b", "c") == ("2 Serving", "2 Following")
    # The other rank's report, and the other Mac's, are gone: nothing of the first epoch is left.
    assert await it.report("b", 1) is None
    assert await it.report("a", 0) is None
    assert it.running() == "bc"
    # Also if no agent was running when it happened.
    it.agents["c"].cancel()
    leaving = LeavingRank(node="c", rank=1, memory_bytes=1)
    await it.assign("b", "a", epoch=3, leaving=(leaving,))
    await it.clock.sleep(10)
    assert it.running() == "ab"
    it.start("c")
    await it.clock.sleep(5)
    assert await it.report("c", 1) is None
    assert await it.condition("a", 1) == "3 Following"


@on_three_macs
async def test_a_restarted_agent_continues_or_reports_the_end(it: HollowFleet) -> None:
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


@on_three_macs
async def test_an_engine_that_cannot_start_is_reported_once(it: HollowFleet) -> None:
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


@pytest.mark.parametrize("golden", [None, GOLDEN_ANSWER])
@on_three_macs
async def test_a_wrong_answer_is_never_served(it: HollowFleet, golden: GoldenAnswer | None) -> None:
    insane = GOLDEN_ANSWER.model_copy(update={"logprobs": (-1.0, -1.0, -1.0)})
    it.macs["a"].health.answer = insane if golden is None else WRONG
    await it.assign("a", "b", golden=golden)
    await it.clock.sleep(9)
    assert await it.condition("a", 0, "EpochOver") == "1 GoldenFailed"
    assert await it.endpoint() is None
    await it.clock.sleep(4)
    assert it.running() == ""


@on_three_macs
async def test_a_reference_is_made_first_where_the_model_fits_one_mac(it: HollowFleet) -> None:
    it.macs["a"].health.answer = WRONG
    await it.assign("a", "b", fits_single=True)
    await it.clock.sleep(3)
    assert await conditions(it) == ("1 MakingReference", "1 Joining")
    await it.clock.sleep(12)
    assert await it.condition("a", 0, "EpochOver") == "1 GoldenFailed"
    golden = present(present(await it.report("a", 0)).golden)
    assert golden.is_reference
    it.macs["a"].health.answer = GOLDEN_ANSWER
    await it.assign("a", "b", epoch=2, fits_single=True, golden=golden)
    await it.clock.sleep(12)
    assert await it.condition("a", 0) == "2 Serving"
    assert it.macs["a"].references.made == 1


@on_three_macs
async def test_without_a_reference_the_first_answer_has_to_do(it: HollowFleet) -> None:
    it.macs["a"].references.error = "out of memory"
    await it.assign("a", "b", fits_single=True)
    await it.clock.sleep(16)
    assert await it.condition("a", 0) == "1 Serving"


@on_three_macs
async def test_a_reference_ends_with_its_replica(it: HollowFleet) -> None:
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


@on_three_macs
async def test_a_rank_that_gives_no_answer_is_asked_again(it: HollowFleet) -> None:
    it.macs["a"].health.probe_error = "no memory for that now"
    await it.assign("a", "b")
    await it.clock.sleep(8)
    assert await it.condition("a", 0) == "1 ProbeFailed"
    it.macs["a"].health.probe_error = ""
    await it.clock.sleep(4)
    assert await it.condition("a", 0) == "1 Serving"
