"""The doctor and the support bundle at a fleet that is well, and at one that is not."""

import json
import tarfile
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, model_deployment, running_fleet
from tests.support.waiting import until_async


async def levels(fleet: Fleet) -> dict[str, str]:
    """Return the worst that the doctor says of each part."""
    done = await fleet.ctl("doctor", "-o", "json")
    assert done.err == ""
    told = json.loads(done.out)
    assert done.code == (0 if told["ok"] else 1)
    order = ["OK", "UNKNOWN", "WARN", "FAIL"]
    worst: dict[str, str] = {}
    for one in told["findings"]:
        worst[one["check"]] = max(worst.get(one["check"], "OK"), one["level"], key=order.index)
    return worst


@pytest.mark.ci
@pytest.mark.fleet
@pytest.mark.timeout(180)
async def test_a_fleet_that_is_well_and_one_that_is_not(tmp_path: Path, models_dir: Path) -> None:
    async with running_fleet(tmp_path / "fleet", models_dir) as fleet:
        await fleet.applied(model_deployment(contextLength=512))
        await fleet.available("tiny")

        async def is_well() -> bool:
            return set((await levels(fleet)).values()) <= {"OK", "UNKNOWN", "WARN"}

        await until_async(is_well, limit_s=30, what="a fleet without a FAIL")
        well = await levels(fleet)
        parts = (
            "store",
            "quota",
            "leader",
            "store reads",
            "endpoints",
            "nodes",
            "memory",
            "agents",
            "clocks",
            "gateways",
            "engines",
            "machines",
            "objects",
        )
        assert {part: well[part] for part in parts} == dict.fromkeys(parts, "OK")

        path = tmp_path / "bundle.tar.gz"
        done = await fleet.ctl("support-bundle", "-o", str(path))
        assert done.code == 0, done.err
        assert "previous" not in done.err  # each engine was started once, which is no news
        with tarfile.open(path) as tar:
            names = {name.partition("/")[2] for name in tar.getnames()}
        assert names >= {
            "objects/replicas.json", "node-node-1/vitals.json", "node-node-1/agent.log",
            "node-node-1/tiny-0-rank-0.log",
        }  # fmt: skip
        assert any(name.startswith("gateway-") and name.endswith("/gateway.log") for name in names)

        fleet.kill("reconciler")
        fleet.kill("node-1")
        fleet.kill_engines("node-1")

        async def is_ill() -> bool:
            found = await levels(fleet)
            return found["leader"] == found["nodes"] == "FAIL"

        await until_async(is_ill, limit_s=30, what="what is dead to be missed")
        done = await fleet.ctl("support-bundle", "-o", str(path), "--force")
        assert done.code == 0
        assert "warning: missing: node-node-1/vitals.json: node/node-1 does not answer" in done.err
