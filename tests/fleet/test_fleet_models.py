"""`fleetctl models` on a fleet of real processes: two agents with disks of their own, and a hub."""

from pathlib import Path

import pytest

from machinery.clock import SystemClock
from models.model_store.store import ModelStore
from tests.support.fleet import model_deployment
from tests.support.fleet_load import hub_fleet
from tests.support.hub import COMMIT, StandInHub

pytestmark = [pytest.mark.fleet, pytest.mark.full, pytest.mark.timeout(300)]

REPO = "mlx-community/Tiny-Test-4bit"
FOLDER = f"mlx-community--Tiny-Test-4bit@{COMMIT[:12]}"
MACS = ("node-1", "node-2")
DEPLOYMENT = model_deployment(model={"hub": {"repo": REPO}}, contextLength=256, concurrency=1)


async def test_models_are_pulled_listed_pinned_and_removed_on_two_macs(
    tmp_path: Path, smollm2: Path
) -> None:
    source = smollm2 / "SmolLM2-135M-Instruct"
    hub = StandInHub(
        repos={REPO: {p.name: p.read_bytes() for p in source.iterdir() if p.is_file()}}
    )

    def names(node: str) -> list[str]:
        return [model.name for model in ModelStore(tmp_path / node, SystemClock()).models()]

    agents = {node: ("--models-dir", str(tmp_path / node)) for node in MACS}
    for node in MACS:
        (tmp_path / node).mkdir()
    async with hub_fleet(tmp_path, hub, agents) as fleet:
        where = ("--hub-endpoint", hub.endpoint)
        done = await fleet.ctl("models", "pull", REPO, "--all", *where, limit_s=120)
        assert (done.code, done.out.count("present")) == (0, 2), done.err
        assert (names("node-1"), names("node-2")) == ([FOLDER], [FOLDER])
        listed = await fleet.ctl("models", "list")
        assert listed.out.count(FOLDER) == 2, listed.err

        assert (await fleet.ctl("models", "pin", REPO, "--nodes", "node-1")).code == 0
        done = await fleet.ctl("models", "rm", REPO, "--nodes", "node-1", "--yes")
        assert (done.code, "is pinned" in done.err) == (1, True)
        done = await fleet.ctl("models", "rm", REPO, "--nodes", "node-2", "--yes")
        assert (done.code, names("node-2")) == (0, []), done.err

        # An engine runs it from the disk; what a deployment names stays.
        await fleet.applied(DEPLOYMENT)
        await fleet.available("tiny", limit_s=120)
        assert (await fleet.ctl("models", "check", "--hash")).out.endswith("whole\n")
        assert (await fleet.ctl("models", "unpin", REPO, "--nodes", "node-1")).code == 0
        done = await fleet.ctl("models", "rm", REPO, "--nodes", "node-1", "--yes")
        assert (done.code, "modeldeployment/tiny" in done.err) == (1, True)
        listed = await fleet.ctl("models", "list")
        assert "modeldeployment/tiny" in listed.out
