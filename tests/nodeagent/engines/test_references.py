"""A reference answer: one process with the whole model, and the stored answer."""

import asyncio
from pathlib import Path

import psutil
import pytest

from nodeagent.engines.engine_processes import EngineOrder
from nodeagent.engines.references import GoldenReferences, ReferenceState, ReferenceTasks
from schemas.formation import GoldenAnswer
from schemas.wire import engine_config
from schemas.wire.engine_config import EngineConfig
from tests.support.nodeagent_groups import GOLDEN
from tests.support.waiting import until

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(180)]


def order(models_dir: Path, uid: str = "u1") -> EngineOrder:
    config = EngineConfig(
        model_dir=models_dir / "tiny", replica="tiny-0", replica_uid=uid, context_length=64
    )
    return EngineOrder(config=config)


def running(folder: Path) -> list[psutil.Process]:
    """Return the processes that make references below the folder."""
    processes = []
    for process in psutil.process_iter():
        try:
            if engine_config.is_golden(process.cmdline()) and folder in Path(process.cwd()).parents:
                processes.append(process)
        except psutil.Error:
            continue
    return processes


@pytest.mark.ci
async def test_an_answer_is_made_once_and_kept(tmp_path: Path, models_dir: Path) -> None:
    made = await GoldenReferences(tmp_path).make(order(models_dir))
    assert made.is_reference
    assert len(made.pieces) == len(made.logprobs) > 1
    (path,) = (tmp_path / "goldens").iterdir()
    path.write_text(GOLDEN.model_dump_json(by_alias=True))
    assert await GoldenReferences(tmp_path).make(order(models_dir)) == GOLDEN
    assert running(tmp_path) == []


@pytest.mark.ci
async def test_the_error_of_a_failed_reference_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"ended with 2: .*does not exist"):
        await GoldenReferences(tmp_path).make(order(tmp_path))


async def test_stopping_a_reference_ends_its_process(tmp_path: Path, models_dir: Path) -> None:
    async with asyncio.TaskGroup() as group:
        maker = ReferenceTasks(GoldenReferences(tmp_path), group)
        maker.start(order(models_dir))
        await until(lambda: bool(running(tmp_path)), what="one process begins")
        maker.stop("tiny-0")
    assert running(tmp_path) == []


async def test_what_an_agent_left_behind_is_ended(tmp_path: Path, models_dir: Path) -> None:
    async with asyncio.TaskGroup() as group:
        maker = ReferenceTasks(GoldenReferences(tmp_path), group)
        maker.start(order(models_dir))
        await until(lambda: bool(running(tmp_path)), what="one process begins")
        GoldenReferences(tmp_path / "elsewhere").sweep()
        assert running(tmp_path) != []
        GoldenReferences(tmp_path).sweep()
        await until(lambda: not running(tmp_path), what="it is ended")
    assert maker.observe("tiny-0", "u1") == (ReferenceState.FAILED, None)


class Told:
    """References that are made when the test says so."""

    def __init__(self) -> None:
        self.answers: dict[str, asyncio.Future[GoldenAnswer]] = {}

    async def make(self, order: EngineOrder) -> GoldenAnswer:
        self.answers[order.config.replica_uid] = asyncio.get_running_loop().create_future()
        return await self.answers[order.config.replica_uid]

    def sweep(self) -> None:
        """Nothing is left behind."""


async def test_a_reference_is_of_one_replica_and_not_of_the_next(tmp_path: Path) -> None:
    told = Told()
    async with asyncio.TaskGroup() as group:
        maker = ReferenceTasks(told, group)
        assert maker.observe("tiny-0", "u1") == (ReferenceState.NOT_TRIED, None)
        maker.start(order(tmp_path))
        await asyncio.sleep(0)
        assert maker.observe("tiny-0", "u1") == (ReferenceState.RUNNING, None)
        assert maker.observe("tiny-0", None) == (ReferenceState.RUNNING, None)
        assert maker.observe("tiny-0", "u2") == (ReferenceState.NOT_TRIED, None)
        maker.start(order(tmp_path, "u2"))
        await asyncio.sleep(0)
        told.answers["u2"].set_result(GOLDEN)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert maker.observe("tiny-0", "u2") == (ReferenceState.FOUND, GOLDEN)
        assert told.answers["u1"].cancelled()
        maker.start(order(tmp_path, "u3"))
        await asyncio.sleep(0)
        told.answers["u3"].set_exception(OSError("no memory"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert maker.observe("tiny-0", "u3") == (ReferenceState.FAILED, None)
