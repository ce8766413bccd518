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
from tests.support.fleet import Fleet
from tests.support.hub import COMMIT, StandInHub
from tests.support.waiting import until, until_async

pytestmark = [pytest.mark.fleet, pytest.mark.full, pytest.mark.timeout(300)]

REPO = "mlx-community/Tiny-Test-4bit"
NAME = "tiny-test-4bit"
FOLDER = f"mlx-community--Tiny-Test-4bit@{COMMIT[:12]}"
DEPLOYMENT = """
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {{name: tiny}}
spec:
  model: {{hub: {{repo: {repo}}}}}
  contextLength: 256
  concurrency: 1
"""
MIB = 1 << 20
# Read as a tokenizer's file by nobody; it makes the download long enough to be killed in.
BALLAST = "ballast.txt"


@asynccontextmanager
async def fleet_with_hub(
    root: Path, model: Path, *, ballast: int = 0
) -> AsyncIterator[tuple[Fleet, StandInHub]]:
    """Run a fleet whose node has no models, and a hub that has this one."""
    models = root / "models"
    models.mkdir()
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    if ballast:
        files[BALLAST] = random.Random(7).randbytes(ballast)
    hub = StandInHub(repos={REPO: files})
    fleet = Fleet(root / "f", models)
    async with hub.serve():
        try:
            await fleet.etcd.start()
            fleet.start_reconciler("--hub-endpoint", hub.endpoint)
            fleet.start_agent("node-1")
            fleet.start_gateway()
            await fleet.joined(1)
            yield fleet, hub
        finally:
            await fleet.stop()


async def deploy(fleet: Fleet) -> None:
    await fleet.applied(DEPLOYMENT.format(repo=REPO))


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
        await deploy(fleet)
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


async def test_a_wrong_bit_starts_no_engine_and_names_the_file(
    tmp_path: Path, models_dir: Path
) -> None:
    ballast = 8 * MIB
    async with fleet_with_hub(tmp_path, models_dir / "tiny", ballast=ballast) as (fleet, hub):
        hub.faults.flip_bit_at = ballast - 1
        await deploy(fleet)
        found = await shown(fleet, "HashMismatch")
        assert BALLAST in found
        assert fleet.engine_pids("node-1") == set()
        assert not (tmp_path / "models" / FOLDER).exists()


async def test_a_hub_that_is_down_is_a_condition_and_its_return_converges(
    tmp_path: Path, models_dir: Path
) -> None:
    async with fleet_with_hub(tmp_path, models_dir / "tiny") as (fleet, hub):
        hub.faults.status, hub.faults.failures = 503, 1_000_000
        await deploy(fleet)
        found = await shown(fleet, "SourceUnreachable")
        assert "503" in found
        hub.faults.failures = 0
        await fleet.available("tiny", limit_s=150)


async def test_a_gated_model_needs_a_token_which_only_the_fetching_node_gets(
    tmp_path: Path, models_dir: Path
) -> None:
    async with fleet_with_hub(tmp_path, models_dir / "tiny") as (fleet, hub):
        hub.token = "hf_" + "s3cret" * 4
        await deploy(fleet)
        await shown(fleet, "Unauthorized")
        made = await fleet.ctl(
            *("create", "hubtoken", "hub", "--endpoint", hub.endpoint, "--token-file", "-"),
            stdin=hub.token.encode(),
        )
        assert made.code == 0, made.err
        await fleet.ctl("rollout", "refresh", "md/tiny")
        await fleet.available("tiny", limit_s=150)
        logs = "".join(path.read_text() for path in fleet.root.glob("**/*.log"))
        assert "s3cret" not in logs + (await fleet.ctl("events")).out
