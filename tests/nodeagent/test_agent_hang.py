"""An engine whose worker thread hangs while its event loop answers: a real agent ends it and starts it again."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

import tests.support
from nodeagent.engines.engine_processes import EngineProcess
from schemas.wire.engine_address import EngineAddress
from store.etcd.member.embedded import EmbeddedEtcd
from tests.support.nodeagent_agents import CLOCK, NODE, AgentProcess, Desk
from tests.support.waiting import until

pytestmark = [pytest.mark.etcd, pytest.mark.mlx, pytest.mark.full, pytest.mark.timeout(300)]

_HOOK = Path(tests.support.__file__).parent / "hanging_worker"
_ROOT = _HOOK.parents[2]
# What a first step may take on a Mac: it compiles kernels and reads cold pages.
_COMPILATION_S = 6
_MARGIN_S = 10


@pytest.fixture(scope="module")
def hang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the file by which the workers of engines pause."""
    file = tmp_path_factory.mktemp("hang") / "hang"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{_HOOK}:{_ROOT}")
        patch.setenv("TEST_HANG_FILE", str(file))
        yield file


@pytest.fixture(scope="module")
async def agent(
    etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory, models_dir: Path, hang: Path
) -> AsyncIterator[AgentProcess]:
    made = AgentProcess(etcd, tmp_path_factory.mktemp("agent") / "state", models_dir, NODE)
    # An interpreter of its own reads the environment of now.
    made.start(tells_code=True)
    yield made
    hang.unlink(missing_ok=True)
    await made.end()


async def is_answered_whole(address: EngineAddress) -> bool:
    """Return whether an answer of 20 tokens arrives; False if it breaks off."""
    body = {"model": "tiny", "prompt": "1", "max_tokens": 20, "stream": True}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(f"{address.url}/v1/completions", json=body) as response,
        ):
            raw = await response.read()
    except aiohttp.ClientError:
        return False
    return b"[DONE]" in raw and b"error" not in raw


async def test_a_hung_worker_is_ended_and_a_slow_step_is_not(
    desk: Desk, agent: AgentProcess, hang: Path
) -> None:
    hang.write_text(str(_COMPILATION_S))
    await desk.assign("tiny-0", uid="u1")
    first = await agent.engine()
    await desk.until_published("tiny-0")
    hang.unlink()
    assert first.child.running()
    assert await is_answered_whole(first.address)

    hang.write_text("3600")
    began = CLOCK.monotonic()
    async with asyncio.TaskGroup() as group:
        client = group.create_task(is_answered_whole(first.address))
        await desk.until_withdrawn("tiny-0")
        ended_s = CLOCK.monotonic() - began
        hang.unlink()
        # A client learns of it at once, and a gateway goes on elsewhere; neither waits for its own time limit.
        async with asyncio.timeout(30):
            assert not await client
    assert 25 + _COMPILATION_S <= ended_s <= 30 + _COMPILATION_S + _MARGIN_S
    await until(lambda: not first.child.running(), limit_s=30)
    assert "EngineStuck" in agent.log.read_text()

    await desk.until_published("tiny-0")
    second = await agent.engine()
    assert second.child.record.pid != first.child.record.pid
    assert await is_answered_whole(second.address)
    await assert_a_hang_counts_on_after_its_clients_have_gone(desk, second, hang)


async def assert_a_hang_counts_on_after_its_clients_have_gone(
    desk: Desk, engine: EngineProcess, hang: Path
) -> None:
    hang.write_text("3600")
    async with asyncio.TaskGroup() as group:
        client = group.create_task(is_answered_whole(engine.address))
        await asyncio.wait([client], timeout=5)
        client.cancel()
    await desk.until_withdrawn("tiny-0")
    hang.unlink()
    await until(lambda: not engine.child.running(), limit_s=30)
