"""To zero and back on the first request, and a canary that the gateway's own figures condemn: real engines, real clients."""

import json
from pathlib import Path

import openai
import pytest

from tests.support.fleet import Fleet, model_deployment, running_fleet
from tests.support.fleet_load import replicas, rolled_out, under_load
from tests.support.waiting import until_async

pytestmark = pytest.mark.full

SCALED = {"minReplicas": 0, "maxReplicas": 2, "idleTime": "3s", "scaleDownStabilization": "1s"}


def canary(context: int, least: int) -> str:
    """Return a version that must generate so many tokens a second."""
    analysis = {"minRequests": 5, "minTokensPerSecond": least}
    steps = [{"weight": 50, "pause": "2s"}]
    rollout = {"canary": {"steps": steps, "analysis": analysis}}
    return model_deployment(contextLength=context, rollout=rollout)


@pytest.mark.fleet
@pytest.mark.timeout(300)
async def test_load_decides(tmp_path: Path, models_dir: Path) -> None:
    async with running_fleet(tmp_path, models_dir) as fleet:
        await fleet.applied(model_deployment(contextLength=512, autoscaling=SCALED))
        await rolled_out(fleet)
        await ended(fleet)
        await woken(fleet)
        await tried(fleet)


async def ended(fleet: Fleet) -> None:
    """Without requests the last replica ends."""

    async def is_empty() -> bool:
        return not await replicas(fleet)

    await until_async(is_empty, limit_s=60, what="zero replicas")
    await fleet.routed("tiny", 0)


async def woken(fleet: Fleet) -> None:
    """The first request waits for the engine, and is answered like any other."""
    client = openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
    async with client:
        answer = await client.completions.create(model="tiny", prompt="hello", max_tokens=4)
    assert answer.choices[0].finish_reason in ("length", "stop")


async def status(fleet: Fleet) -> dict[str, object]:
    done = await fleet.ctl("get", "md/tiny", "-o", "json")
    assert done.code == 0, done.err
    found: dict[str, object] = json.loads(done.out)["status"]
    return found


async def tried(fleet: Fleet) -> None:
    """One version is too slow for what is asked, and is rolled back; the next is good, and stays."""
    await fleet.applied(canary(512, 0))
    await rolled_out(fleet)
    before = (await status(fleet))["stableTemplate"]
    async with under_load(fleet):
        await fleet.applied(canary(640, 1_000_000))
        done = await fleet.ctl("rollout", "status", "md/tiny", "--timeout=90s", limit_s=120)
        assert done.code == 1
        assert "tokens/s, 1000000 is required" in done.err, done.err
        assert (await status(fleet))["stableTemplate"] == before
        await fleet.applied(canary(768, 1))
        await rolled_out(fleet)
    assert (await status(fleet))["stableTemplate"] != before
