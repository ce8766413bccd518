"""An uninstall leaves the machine as it was, whatever was killed before."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fleetctl.services.changes import Change, ChangeRecord, ExclusionChange, FirewallChange
from fleetctl.services.macos_settings import NEVER_INDEX
from fleetctl.services.plan import InstallSettings, desired_changes, service_spec
from fleetctl.services.port import ServiceError
from fleetctl.services.programs import ServiceCommand
from tests.support import service_stand_ins
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.service_kills import World, difference


@pytest.fixture
def world(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("PATH", os.environ["PATH"])  # the world changes it
    found = World(short_folder)
    yield found
    service_stand_ins.end_jobs(found.state)


@pytest.mark.ci
async def test_an_uninstall_leaves_the_machine_as_it_was(world: World) -> None:
    before = world.snapshot()
    await world.install()
    machine = service_stand_ins.machine_of(world.state)
    assert machine["power"] == {
        "sleep": "0", "disksleep": "0", "womp": "1", "powernap": "0", "autorestart": "1",
        "tcpkeepalive": "1",
    }  # fmt: skip
    assert machine["wired"] == 1024
    assert len(machine["allowed"]) == 1
    assert set(machine["users"]) == {"root", "_mlxfleet"}
    folder = world.layout.state / "models"
    role_user = machine["users"]["_mlxfleet"][0]
    key = world.identity / "identity.pem"
    assert [path.stat().st_uid for path in (folder, world.identity, key)] == [role_user] * 3
    assert key.stat().st_mode & 0o777 == 0o600
    await world.uninstall()
    assert difference(before, world.snapshot()) == []


def release(world: World, version: str) -> str:
    """Install a release beside the others, use it, and return the real path of its interpreter."""
    folder = world.layout.home / "versions" / version / "bin"
    folder.mkdir(parents=True)
    for name, text in (("python", "exit 1"), ("fleet-nodeagent", "exec sleep 600")):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    current = world.layout.home / "current"
    current.unlink(missing_ok=True)
    current.symlink_to(folder.parent)
    return str((folder / "python").resolve())


@pytest.mark.skipif(os.geteuid() != 0, reason="a service of the machine needs root")
@pytest.mark.parametrize("is_allowed_before", [False, True])
async def test_the_firewall_lets_a_new_release_through_before_it_starts(
    world: World, *, is_allowed_before: bool
) -> None:
    first = release(world, "0.1.0")
    rest = [first] if is_allowed_before else []
    service_stand_ins.change_machine(world.state, allowed=rest)
    command = replace(
        world.settings().command,
        argv=(str(world.layout.home / "current" / "bin" / "fleet-nodeagent"),),
    )
    await world.installer().install(replace(world.settings(), command=command), lambda _: None)
    assert service_stand_ins.machine_of(world.state)["allowed"] == [first]
    second = release(world, "0.2.0")
    restart = ("service", "restart", "nodeagent", "--root", str(world.root))
    done = await run_fleetctl(*restart)
    assert done.code == 0, done.err
    job = json.loads((world.state / "jobs" / "io.mlxfleet.nodeagent.job").read_text())
    assert job["allowed"] == [first, second]
    if not is_allowed_before:
        shutil.rmtree(Path(first).parents[1])
        assert (await run_fleetctl(*restart)).code == 0
        assert service_stand_ins.machine_of(world.state)["allowed"] == [second]
    await world.uninstall()
    assert service_stand_ins.machine_of(world.state)["allowed"] == rest


async def test_etcd_of_homebrew_is_let_through_again_after_its_upgrade(world: World) -> None:
    link = world.root / "homebrew-etcd"
    paths = [world.root / "Cellar" / version / "etcd" for version in ("3.6.4", "3.6.5")]
    command = replace(
        world.settings().command, argv=(str(link),), state_folder=world.root, models_folder=None
    )
    settings = replace(world.settings(), part="etcd", command=command)
    kinds = (FirewallChange, ExclusionChange)
    for path in paths:
        path.parent.mkdir(parents=True)
        path.touch()
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        if path is paths[0]:
            changes = [change for change in desired_changes(settings) if isinstance(change, kinds)]
            await world.installer().apply(changes, "etcd", "launchd", lambda _: None)
    shutil.rmtree(paths[0].parent)  # as `brew cleanup` does
    said: list[str] = []
    await world.installer().renew_firewall("etcd", said.append)
    assert service_stand_ins.machine_of(world.state)["allowed"] == [str(paths[1])]
    assert said == [f"let {paths[1]} through the application firewall"]
    assert service_stand_ins.machine_of(world.state)["excluded"] == [], "backups keep etcd's data"
    await world.installer().uninstall("etcd", lambda _: None)
    assert service_stand_ins.machine_of(world.state)["allowed"] == []


async def test_a_managed_mac_gets_the_service_with_warnings(world: World) -> None:
    refused = ["pmset", "socketfilterfw", "tmutil"]
    service_stand_ins.change_machine(world.state, refused=refused)
    before = world.snapshot()
    said: list[str] = []
    assert len(await world.installer().preview(desired_changes(world.settings()))) > len(refused)
    await world.installer().install(world.settings(), said.append)
    warnings = [line for line in said if line.startswith("warning: this Mac refuses to ")]
    assert len(warnings) == 9
    assert all("cannot be modified from command line" in line for line in warnings)
    assert "io.mlxfleet.nodeagent" in str(world.snapshot()["jobs"])
    await world.uninstall()
    assert difference(before, world.snapshot()) == []


async def test_the_agents_user_may_read_the_reports_of_macos(world: World) -> None:
    await world.install()
    assert service_stand_ins.machine_of(world.state)["members"] == ["_mlxfleet"]
    await world.uninstall()
    assert service_stand_ins.machine_of(world.state)["members"] == []
    service_stand_ins.change_machine(world.state, members=["_mlxfleet"])
    await world.install()
    await world.uninstall()
    assert service_stand_ins.machine_of(world.state)["members"] == ["_mlxfleet"]


def changes_of_user(world: World) -> list[Change]:
    """Return the changes of a service of a user: without an account, power and the firewall."""
    return desired_changes(replace(world.settings(), user="", group=""))


async def test_backup_and_index_leave_out_models_and_state(world: World) -> None:
    models, state = (world.layout.state / name for name in ("models", "nodeagent"))
    models.mkdir(parents=True)
    (models / NEVER_INDEX).write_text("by hand")
    await world.installer().apply(changes_of_user(world), "nodeagent", "launchd", lambda _: None)
    assert service_stand_ins.machine_of(world.state)["excluded"] == [str(models), str(state)]
    assert (state / NEVER_INDEX).read_bytes() == b""
    assert (models / NEVER_INDEX).read_text() == "by hand"
    await world.uninstall()
    assert service_stand_ins.machine_of(world.state)["excluded"] == []
    assert [path.name for path in world.layout.state.rglob("*")] == ["models", NEVER_INDEX]


async def test_the_file_for_spotlight_follows_no_link(world: World) -> None:
    models = world.layout.state / "models"
    models.mkdir(parents=True)
    target = world.root / "target"
    (models / NEVER_INDEX).symlink_to(target)
    said: list[str] = []
    await world.installer().apply(changes_of_user(world), "nodeagent", "launchd", said.append)
    assert not target.exists()
    assert [line for line in said if "warning" in line and "symbolic link" in line]


@pytest.mark.ci
async def test_a_machine_is_prepared_before_its_service_is_installed(world: World) -> None:
    before = world.snapshot()
    said: list[str] = []
    await world.installer().apply(
        desired_changes(world.settings()), "nodeagent", "launchd", said.append
    )
    prepared = world.snapshot()
    assert prepared["jobs"] == []
    assert (world.layout.state / "nodeagent").is_dir()
    assert "create user and group _mlxfleet, which cannot log in" in said
    said.clear()
    await world.installer().apply(
        desired_changes(world.settings()), "nodeagent", "launchd", said.append
    )
    assert said == []
    assert difference(prepared, world.snapshot()) == []
    await world.install()
    assert "io.mlxfleet.nodeagent" in str(world.snapshot()["jobs"])
    await world.uninstall()
    assert difference(before, world.snapshot()) == []


@pytest.mark.full
async def test_a_second_installation_changes_nothing(world: World) -> None:
    await world.install()
    installed = world.snapshot()
    await world.install()
    assert difference(installed, world.snapshot()) == []


@pytest.mark.full
async def test_models_stay_and_settings_that_people_changed_stay(world: World) -> None:
    (world.layout.home / "versions").mkdir(parents=True)
    before = world.snapshot()
    await world.install()
    model = world.layout.state / "models" / "qwen" / "model.safetensors"
    model.parent.mkdir()
    model.write_bytes(b"weights")
    (world.layout.state / "nodeagent" / "identity").write_text("ours")
    machine = service_stand_ins.machine_of(world.state)
    machine["power"]["womp"] = "7"
    (world.state / "machine.json").write_text(json.dumps(machine))
    said: list[str] = []
    await world.installer().uninstall("nodeagent", said.append)
    assert model.read_bytes() == b"weights"
    assert not (world.layout.state / "nodeagent").exists()
    assert any("pmset womp stays 7" in line for line in said)
    assert any("--purge" in line for line in said)
    assert (world.layout.home / "versions").is_dir(), "the installed versions are not ours"
    shutil.rmtree(model.parents[2])
    await world.install()
    model.parent.mkdir()
    await world.installer().uninstall("nodeagent", said.append, is_purge=True)
    left = difference(before, world.snapshot())
    assert [name for name in left if "Application Support" not in name] == ["power"]
    assert not model.parents[2].exists()


@pytest.mark.full
async def test_shared_changes_go_with_the_last_service(world: World) -> None:
    before = world.snapshot()
    await world.install()
    own = world.layout.state / "gateway"
    gateway = replace(
        world.settings(),
        part="gateway",
        wired_limit_mib=None,
        command=ServiceCommand(
            argv=("/bin/sleep", "600"),
            state_folder=own,
            models_folder=None,
            identity_folder=None,
            folders=(),
        ),
    )
    await world.installer().install(gateway, lambda _: None)
    await world.uninstall()
    machine = service_stand_ins.machine_of(world.state)
    assert machine["power"]["sleep"] == "0"
    assert machine["wired"] == 0
    assert own.is_dir()
    assert not (world.layout.state / "nodeagent").exists()
    await world.installer().uninstall("gateway", lambda _: None)
    assert difference(before, world.snapshot()) == []


@pytest.mark.full
async def test_a_program_that_ends_at_once_is_reported_with_its_last_words(world: World) -> None:
    before = world.snapshot()
    settings = replace(
        world.settings(),
        command=replace(
            world.settings().command, argv=("/bin/sh", "-c", "echo no such flag; exit 2")
        ),
    )
    with pytest.raises(ServiceError, match=r"ends at once: no such flag|does not run"):
        await _with_settle(world, settings)
    await world.uninstall()
    assert difference(before, world.snapshot()) == []


async def _with_settle(world: World, settings: InstallSettings) -> None:
    installer = world.installer()
    installer._settle_s = 5.0
    await installer.install(settings, lambda _: None)


@pytest.mark.full
async def test_two_installations_at_once_are_refused(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        first = group.create_task(world.install())
        await asyncio.sleep(0)
        with pytest.raises(ServiceError, match="another fleetctl installs"):
            await world.install()
        await first
    await world.uninstall()


async def test_a_damaged_record_is_never_overwritten(world: World) -> None:
    record = ChangeRecord(world.layout.home)
    record.path.parent.mkdir(parents=True)
    record.path.write_text('{"version": 1, "entries": [{}]}')
    with pytest.raises(ServiceError, match="is damaged"):
        await world.install()
    record.path.write_text('{"version": 2}')
    with pytest.raises(ServiceError, match="has version 2"):
        await world.install()
    assert record.path.read_text() == '{"version": 2}'


def test_a_definition_holds_fixed_variables_only(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_ETCD_PASSWORD", "hunter2")
    spec = service_spec(world.settings())
    assert [name for name, _ in spec.environment] == [
        "HOME", "LANG", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY",
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("first", [3, 8])
def test_kill_9_before_any_change_leaves_nothing(short_folder: Path, first: int) -> None:
    """Each attempt: kill the n-th change of an installation or uninstallation, repeat it, compare the whole tree."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.service_kills", str(short_folder), str(first), "13"],
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    attempts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [attempt for attempt in attempts if attempt[2]] == []
    assert len(attempts) > 20
