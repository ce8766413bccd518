"""Models that cannot run: what a deployment advises works."""

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, model_deployment, running_fleet
from tests.support.waiting import until_async

pytestmark = [pytest.mark.full, pytest.mark.fleet, pytest.mark.timeout(180)]


def manifest(name: str, path: str = "tiny", **spec: object) -> str:
    return model_deployment(name, model={"path": path}, contextLength=512, **spec)


async def test_advice_about_memory_and_folders_works(tmp_path: Path, models_dir: Path) -> None:
    async with running_fleet(tmp_path / "fleet", models_dir) as fleet:
        small = manifest("small", resources={"memory": "SIZE"})

        async def apply(text: str, *flags: str) -> str:
            done = await fleet.ctl("apply", "-f", "-", *flags, stdin=text.encode())
            assert done.code == 0, done.err
            return done.err

        await until_async(
            lambda: has_warning(apply, manifest("typo", "tinny")),
            limit_s=40,
            what="a warning about the folder",
        )
        await judged(fleet, "typo", "tinny", "ModelNotFound", "did you mean tiny?")
        # Another deployment made the agent inspect the model, so its proof is known.
        await fleet.applied(manifest("first"))
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
        "no Mac reports a model tinny in its models folder yet; did you mean tiny? Models there: "
        in await apply(text)
    )


async def judged(fleet: Fleet, name: str, path: str, *said: str) -> None:
    """Apply a deployment and wait until its refusal says all of `said`."""
    await fleet.applied(manifest(name, path))

    async def look() -> bool:
        described = (await fleet.ctl("describe", f"md/{name}")).out
        return all(word in described for word in (*said, "0/1 nodes fit", "Warning", "node-1"))

    await until_async(look, limit_s=40, what=f"{name}: {said}")
