"""Models by their hub id on a fleet of real processes: fetched, verified, served; and what goes wrong on the way."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from schemas.deployment import ModelDeployment
from schemas.replica import Replica
from store import objects
from store.etcd.connect import connect
from store.port import Transport
from tests.support.fleet import Fleet, model_deployment
from tests.support.fleet_load import hub_fleet
from tests.support.hub import COMMIT, StandInHub
from tests.support.waiting import until, until_async

pytestmark = [pytest.mark.fleet, pytest.mark.full, pytest.mark.timeout(300)]

REPO = "mlx-community/Tiny-Test-4bit"
NAME = "tiny-test-4bit"
FOLDER = f"mlx-community--Tiny-Test-4bit@{COMMIT[:12]}"
DEPLOYMENT = model_deployment(model={"hub": {"repo": REPO}}, contextLength=256, concurrency=1)
MIB = 1 << 20
# Read as a tokenizer's file by nobody; it makes the download long enough to be killed in.
BALLAST = "ballast.txt"


@asynccontextmanager
async def fleet_with_hub(
    root: Path, model: Path, *, ballast: int = 0
) -> AsyncIterator[tuple[Fleet, StandInHub]]:
    """Run a fleet whose node has no models, and a hub that has this one."""
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    if ballast:
        files[BALLAST] = random.Random(7).randbytes(ballast)
    hub, models = StandInHub(repos={REPO: files}), root / "models"
    models.mkdir()
    async with hub_fleet(root, hub, {"node-1": ("--models-dir", str(models))}) as fleet:
        yield fleet, hub


async def read_conditions(store: Transport) -> str:
    """Return the conditions of all deployments and replicas as text."""
    statuses = [deployment.status for deployment in await objects.list_all(store, ModelDeployment)]
    ranks = [replica.status for replica in await objects.list_all(store, Replica)]
    conditions = [
        condition for status in (*statuses, *ranks) if status for condition in status.conditions
    ]
    return "\n".join(f"{one.type} {one.reason}: {one.message}" for one in conditions)


async def shown(fleet: Fleet, words: str) -> str:
    """Wait until a condition has the words; return all conditions."""
    store = connect(fleet.etcd.address)
    texts = [""]

    async def look() -> bool:
        texts[0] = await read_conditions(store)
        return words in texts[0]

    try:
        await until_async(look, limit_s=90, every_s=0.2, what=words)
    except AssertionError as error:
        raise AssertionError(f"no {words} in:\n{texts[0]}\n{fleet.words()}") from error
    finally:
        await store.close()
    return texts[0]


async def test_a_model_named_by_its_hub_id_is_fetched_and_answers(
    tmp_path: Path, smollm2: Path
) -> None:
    """`fleetctl run` writes the deployment, waits for the fetch and streams the answer."""
    model = smollm2 / "SmolLM2-135M-Instruct"
    async with fleet_with_hub(tmp_path, model) as (fleet, hub):
        asked = await fleet.ctl(
            *("run", REPO, "What is the capital of France?", "--gateway", fleet.url),
            *("--temperature", "0", "--max-tokens", "16"),
            limit_s=200,
        )
        assert asked.code == 0, asked.err + fleet.words()
        assert "Paris" in asked.out
        assert (tmp_path / "models" / FOLDER / "config.json").is_file()
        assert f"modeldeployment/{NAME} created" in asked.err
        assert f"{REPO}: Downloading: " in asked.err
        described = await fleet.ctl("describe", f"md/{NAME}")
        assert "ModelFetched" in described.out, described.out

        hub.branches["main"] = "ab" * 20
        hub.branches["old"] = COMMIT
        hub.seen.clear()
        await fleet.ctl("rollout", "restart", f"md/{NAME}")
        await fleet.available(NAME, limit_s=120)
        assert hub.requests("GET", "/revision/") == [], (
            "a restart must not resolve the branch again"
        )
        await fleet.ctl("rollout", "refresh", f"md/{NAME}")
        await until(lambda: bool(hub.requests("GET", "/revision/main")), what="a new look")
        await shown(fleet, "RolloutComplete")
        history = await fleet.ctl("rollout", "history", f"md/{NAME}")
        assert "hub.revision" in history.out, history.out


async def test_an_agent_killed_in_the_middle_goes_on_where_it_was(
    tmp_path: Path, models_dir: Path
) -> None:
    size = 24 * MIB
    async with fleet_with_hub(tmp_path, models_dir / "tiny", ballast=size) as (fleet, hub):
        hub.faults.bytes_per_s = 4 * MIB
        await fleet.applied(DEPLOYMENT)
        await shown(fleet, "Downloading: ")
        await until(lambda: hub.body_bytes > size // 3, limit_s=60, what="a third of the bytes")
        fleet.kill("node-1")
        await fleet.ended("node-1")
        hub.faults.bytes_per_s = None
        fleet.restart("node-1")
        await fleet.available("tiny", limit_s=120)
        whole = sum(len(content) for content in hub.repos[REPO].values())
        # At most what was on the wire, or not recorded yet, comes twice.
        assert hub.body_bytes < whole + size // 2, (hub.body_bytes, whole)
