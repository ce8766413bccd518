"""Models that cannot run: the deployment says why, per node, and recovers when it is mended."""

from pathlib import Path

import pytest

from tests.support.commands import run_module
from tests.support.fleet import Fleet, running_fleet
from tests.support.waiting import until_async

pytestmark = pytest.mark.full

MANIFEST = """
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {{name: {name}}}
spec: {{model: {{path: {path}}}, contextLength: {context}}}
"""


@pytest.mark.fleet
@pytest.mark.timeout(180)
async def test_models_that_cannot_run(tmp_path: Path, models_dir: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    await run_module("tests.support.tiny_model", str(models / "cut"))
    weights = models / "cut" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    (models / "bare").mkdir()
    (models / "tiny").symlink_to(models_dir / "tiny")
    async with running_fleet(tmp_path / "fleet", models) as fleet:
        await alive(fleet)
        await judged(fleet, "missing", "nowhere", "ModelNotFound", "does not exist")
        await judged(fleet, "bare", "bare", "has no config.json")
        await judged(fleet, "cut", "cut", "was cut short")
        await judged(fleet, "long", "tiny", "ContextTooLong", "4096", context=100_000)
        weights.write_bytes(whole)
        await fleet.available("cut")

        fleet.kill("node-1")
        await fleet.ended("node-1")
        fleet.start_agent("node-1", memory="100Mi")

        async def is_small() -> bool:
            return "100 MiB" in (await fleet.ctl("get", "nodes")).out

        await until_async(is_small, limit_s=40, what="the node's new memory")
        await judged(fleet, "large", "tiny", "InsufficientMemory", "needs ", "100 MiB")


async def judged(fleet: Fleet, name: str, path: str, *said: str, context: int = 512) -> None:
    """Apply a deployment and wait until its refusal says all of `said`."""
    await fleet.applied(MANIFEST.format(name=name, path=path, context=context))

    async def look() -> bool:
        described = (await fleet.ctl("describe", f"md/{name}")).out
        return all(word in described for word in (*said, "0/1 nodes fit", "Warning", "node-1"))

    await until_async(look, limit_s=40, what=f"{name}: {said}")


async def alive(fleet: Fleet) -> None:
    """A node that is there says so as a condition, shows its labels, and cannot be deleted."""
    ready = await fleet.ctl("wait", "node/node-1", "--for=condition=Ready", "--timeout=20s")
    assert ready.code == 0, ready.err
    described = (await fleet.ctl("describe", "node", "node-1")).out
    assert "fleet/node=node-1" in described
    assert "LeaseHeld" in described
    refused = await fleet.ctl("delete", "node/node-1")
    assert refused.code == 1
    assert "Node/node-1 is alive" in refused.err
    unheard = await fleet.ctl("wait", "node/node-1", "--for=condition=Redy", "--timeout=100ms")
    assert "it has no such condition, only " in unheard.err
    assert " DiskPressure, " in unheard.err
