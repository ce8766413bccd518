"""`fleetctl apply --prune` killed in mid-write, again and again: the next one finishes what it began."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from manifests import apply_sets
from schemas.deployment import ModelDeployment
from store import objects
from store.port import Transport
from tests.fleetctl.test_apply import deployment
from tests.support.fleet import Fleet
from tests.support.waiting import until_async

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180)]

COUNT = 250
FLAGS = ("--applyset=many", "--prune")


def manifests(prefix: str) -> str:
    return "".join(deployment(f"{prefix}-{n:03}", replicas=0) for n in range(COUNT))


async def stay(transport: Transport) -> set[str]:
    found = await objects.list_all(transport, ModelDeployment)
    return {obj.name for obj in found if obj.metadata.deletion_timestamp is None}


async def of_set(transport: Transport) -> set[str]:
    found = await objects.list_all(transport, ModelDeployment)
    left = [obj for obj in found if obj.metadata.deletion_timestamp is None]
    return {obj.name for obj in left if apply_sets.apply_set_of(obj) == "many"}


async def killed_at(shared: Fleet, transport: Transport, file: Path, revisions: int) -> None:
    """Run the command, and kill it when it has written so often."""
    before = (await transport.status()).revision
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleetctl", "apply", "-f", str(file), *FLAGS),
        *("--etcd", str(shared.etcd.address)),
        stdout=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )

    async def is_under_way() -> bool:
        written = (await transport.status()).revision - before
        return written >= revisions or process.returncode is not None

    try:
        await until_async(is_under_way, limit_s=60, what="writes of apply")
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()


async def test_killed_again_and_again(shared: Fleet, transport: Transport, tmp_path: Path) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(manifests("old"))
    new.write_text(manifests("new"))
    done = await shared.ctl("apply", "-f", str(old), *FLAGS)
    assert done.code == 0, done.err
    # In turn: the inventory is wider; some are written; some are pruned.
    for revisions in (1, 3, 20):
        await killed_at(shared, transport, new, revisions)
        held = {key.name for key in (await apply_sets.read_set(transport, "many")).members}
        assert await of_set(transport) <= held
    done = await shared.ctl("apply", "-f", str(new), *FLAGS)
    assert done.code == 0, done.err
    wanted = {f"new-{n:03}" for n in range(COUNT)}
    assert await stay(transport) == wanted
    assert {key.name for key in (await apply_sets.read_set(transport, "many")).members} == wanted
    again = await shared.ctl("apply", "-f", str(new), *FLAGS)
    assert set(again.out.splitlines()) == {f"modeldeployment/{name} unchanged" for name in wanted}
