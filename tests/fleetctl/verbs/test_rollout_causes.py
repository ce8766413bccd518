"""Change causes across annotate, patch, `rollout undo` and edits: fleetctl and a leading reconciler on one store."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from reconciler.deployments.rollout.revisions import template_hash
from schemas.deployment import ModelDeployment, Revision
from schemas.meta import CHANGE_CAUSE
from store import objects
from tests.support.fleetctl_manifests import DEPLOYMENT
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.reconciler_gitops import leading
from tests.support.waiting import until_async


@pytest.fixture
async def led(fleet: MemoryFleet, tmp_path: Path) -> AsyncIterator[MemoryFleet]:
    """Return a store in memory with a leading reconciler, and the deployment chat."""
    async with leading(fleet.store, tmp_path):
        await fleet.applied(DEPLOYMENT.replace("NAME", "chat"))
        await wait_recorded(fleet, 1)
        yield fleet


async def deployment(led: MemoryFleet) -> ModelDeployment:
    obj = await objects.get(led.store, ModelDeployment, "chat")
    assert obj is not None
    return obj


async def change(led: MemoryFleet, *words: str, revision: int) -> None:
    """Run a command, and wait until the reconciler has recorded its version as this revision."""
    done = await led.ctl(*words)
    assert done.code == 0, done.err
    await wait_recorded(led, revision)


async def wait_recorded(led: MemoryFleet, revision: int) -> None:
    async def recorded() -> bool:
        newest = template_hash(await deployment(led))
        found = await objects.list_all(led.store, Revision)
        return (newest, revision) in [(one.spec.template, one.spec.revision) for one in found]

    await until_async(recorded, what=f"revision {revision}")


async def annotate(led: MemoryFleet, cause: str) -> None:
    done = await led.ctl("annotate", "md/chat", f"{CHANGE_CAUSE}={cause}", "--overwrite")
    assert done.code == 0, done.err


async def patch(led: MemoryFleet, length: int, *, revision: int) -> None:
    text = f"spec: {{contextLength: {length}}}"
    await change(led, "patch", "md/chat", "-p", text, revision=revision)


async def causes(led: MemoryFleet) -> dict[int, str]:
    """Return the cause of each revision, as `rollout history` prints it."""
    lines = (await led.ctl("rollout", "history", "chat")).out.splitlines()[2:]
    rows = [line.removeprefix("*").split(maxsplit=3) for line in lines]
    return {int(row[0]): row[3] for row in rows}


async def cause_now(led: MemoryFleet) -> str | None:
    return (await deployment(led)).metadata.annotations.get(CHANGE_CAUSE)


async def test_an_undo_brings_back_the_cause_of_its_revision(led: MemoryFleet) -> None:
    await annotate(led, "longer context")
    await patch(led, 1024, revision=2)
    assert await cause_now(led) == "longer context"
    await patch(led, 2048, revision=3)
    assert await cause_now(led) is None
    await change(led, "rollout", "undo", "chat", revision=4)
    assert await cause_now(led) == "longer context"
    assert (await causes(led))[4] == "undo to revision 2: longer context"
    # It belongs to the version that came back, and not to the next change.
    await patch(led, 3072, revision=5)
    assert await cause_now(led) is None
    assert (await causes(led))[5] == "contextLength 1024 -> 3072"


async def test_an_undo_to_a_revision_without_a_cause_has_none(led: MemoryFleet) -> None:
    assert (await led.ctl("annotate", "md/chat", "owner=anna")).code == 0
    text = f"metadata: {{annotations: {{{CHANGE_CAUSE}: longer context}}}}\nspec: {{contextLength: 1024}}"
    await change(led, "patch", "md/chat", "-p", text, revision=2)
    await change(led, "rollout", "undo", "chat", revision=3)
    assert (await deployment(led)).metadata.annotations == {"owner": "anna"}
    assert (await causes(led))[3] == "undo to revision 1"


async def test_a_cause_that_is_written_for_the_undo_stays(led: MemoryFleet) -> None:
    await annotate(led, "longer context")
    await patch(led, 1024, revision=2)
    await patch(led, 2048, revision=3)
    await annotate(led, "3 is too slow")
    await change(led, "rollout", "undo", "chat", revision=4)
    assert await cause_now(led) == "3 is too slow"
    assert (await causes(led))[4] == "3 is too slow"
