"""`fleetctl apply` and `diff` with other writers: what is kept, refused and pruned."""

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
from tests.support.fleet import Done, Fleet
from tests.support.fleetctl_manifests import deployment_manifest, pool_manifest
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.waiting import until_async

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180)]


async def run_verb(fleet: MemoryFleet, verb: str, text: str, *flags: str) -> Done:
    return await fleet.ctl(verb, "-f", "-", *flags, stdin=text.encode())


async def scaled(fleet: MemoryFleet, name: str, count: int) -> None:
    """Change the number of replicas as another writer does."""
    done = await fleet.ctl("scale", f"md/{name}", f"--replicas={count}")
    assert done.code == 0, done.err


async def test_output_of_get_is_applied_without_a_change(shared_fleet: MemoryFleet) -> None:
    await shared_fleet.applied(deployment_manifest("printed"))
    await scaled(shared_fleet, "printed", 5)
    get = ("get", "md/printed", "-o", "yaml")
    printed, owners = (
        (await shared_fleet.ctl(*get)).out,
        await shared_fleet.ctl(*get, "--show-managed-fields"),
    )
    again = await run_verb(shared_fleet, "apply", printed)
    assert (again.code, again.out, again.err) == (0, "modeldeployment/printed unchanged\n", "")
    assert (await shared_fleet.ctl(*get, "--show-managed-fields")).out == owners.out
    edited = await run_verb(
        shared_fleet, "apply", printed.replace("minAvailable: 0", "minAvailable: 1")
    )
    assert edited.out == "modeldeployment/printed configured\n"
    assert (
        "unchanged"
        in (await run_verb(shared_fleet, "apply", (await shared_fleet.ctl(*get)).out)).out
    )


async def test_diff_has_colours_only_on_request(
    shared_fleet: MemoryFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = await run_verb(shared_fleet, "diff", pool_manifest("colour"))
    assert "\x1b" not in plain.out
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = await run_verb(shared_fleet, "diff", pool_manifest("colour"))
    assert "\x1b[32m+kind: NodePool\n\x1b[0m" in shown.out


COUNT = 250
FLAGS = ("--applyset=many", "--prune")


def manifests(prefix: str) -> str:
    return "".join(deployment_manifest(f"{prefix}-{n:03}", replicas=0) for n in range(COUNT))


async def stay(transport: Transport) -> set[str]:
    model_deployments = await objects.list_all(transport, ModelDeployment)
    return {obj.name for obj in model_deployments if obj.metadata.deletion_timestamp is None}


async def of_set(transport: Transport) -> set[str]:
    model_deployments = await objects.list_all(transport, ModelDeployment)
    deployments = [obj for obj in model_deployments if obj.metadata.deletion_timestamp is None]
    return {obj.name for obj in deployments if apply_sets.apply_set_of(obj) == "many"}


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


@pytest.mark.ci
async def test_an_apply_after_a_kill_completes_the_work(
    shared: Fleet, transport: Transport, tmp_path: Path
) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(manifests("old"))
    new.write_text(manifests("new"))
    done = await shared.ctl("apply", "-f", str(old), *FLAGS)
    assert done.code == 0, done.err
    # Kill points in order: after the inventory was extended, after some writes, after some deletions.
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
