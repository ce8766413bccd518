"""Models that cannot run: the deployment says why, per node, and recovers when it is mended."""

import re
from collections.abc import Awaitable, Callable
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


@pytest.mark.fleet
@pytest.mark.timeout(180)
async def test_advice_about_memory_and_folders_works(tmp_path: Path, models_dir: Path) -> None:
    async with running_fleet(tmp_path / "fleet", models_dir) as fleet:
        await alive(fleet)
        small = MANIFEST.format(name="small", path="tiny", context=512).rstrip("}\n")
        small += ", resources: {memory: SIZE}}\n"

        async def apply(text: str, *flags: str) -> str:
            done = await fleet.ctl("apply", "-f", "-", *flags, stdin=text.encode())
            assert done.code == 0, done.err
            return done.err

        await until_async(
            lambda: has_warning(apply, MANIFEST.format(name="typo", path="tinny", context=512)),
            limit_s=40,
            what="a warning about the folder",
        )
        await judged(fleet, "typo", "tinny", "ModelNotFound", "did you mean tiny?")
        # Another deployment made the agent inspect the model, so its proof is known.
        await fleet.applied(MANIFEST.format(name="first", path="tiny", context=512))
        await fleet.available("first")
        warned = await apply(small.replace("SIZE", "100Mi"), "--dry-run=server")
        assert (
            "modeldeployment/small: spec.resources.memory is 100 MiB, and the memory proof says"
            in warned
        )
        assert await apply(small.replace("SIZE", "100Mi")) == warned
        explained = (await fleet.ctl("explain", "placement", "small")).out
        assert "spec.resources.memory is 100 MiB, and the memory proof says" in explained

        async def advised() -> str:
            shown = (await fleet.ctl("get", "replica/small-0", "-o", "yaml")).out
            found = re.search(r"memory\s+proof\s+says.*?or\s+set\s+(\w+)", shown, re.DOTALL)
            return found[1] if found and "ended with" in shown else ""

        size = await until_async(
            advised, limit_s=60, what="advice of the replica that cannot start"
        )
        assert f"or set {size}" in warned
        assert "ProofCorrected" not in (await fleet.ctl("events")).out
        assert await apply(small.replace("SIZE", size)) == ""
        await fleet.available("small")


async def has_warning(apply: Callable[[str], Awaitable[str]], text: str) -> bool:
    return (
        "no Mac has a model tinny in its models folder; did you mean tiny? Models there: "
        in await apply(text)
    )


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
