"""`fleetctl service` on a machine below a folder: real with a stand-in for systemctl, planned for launchd and systemd."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import service_stand_ins
from tests.support.fleet import Done
from tests.support.fleetctl_runner import run_fleetctl


@pytest.fixture
def root(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = short_folder / "root"
    units = root / "home" / ".config" / "systemd" / "user"
    units.mkdir(parents=True)
    service_stand_ins.install_tools(short_folder / "bin", short_folder / "state", units)
    monkeypatch.setenv("PATH", f"{short_folder / 'bin'}:{os.environ['PATH']}")
    yield root
    service_stand_ins.end_jobs(short_folder / "state")


@pytest.fixture
def program(root: Path) -> Path:
    """Return a program in a folder with the interpreter, as in an installation; the real gateway is too slow."""
    folder = root / "venv" / "bin"
    folder.mkdir(parents=True)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    path = folder / "fleet-gateway"
    path.write_text(f'#!/bin/sh\necho "$@" > {root}/flags\nexec sleep 600\n')
    path.chmod(0o755)
    return path


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


async def service(root: Path, verb: str, *words: str) -> Done:
    return await run_fleetctl("service", verb, "--root", str(root), *words)


@pytest.mark.ci
async def test_a_service_of_a_user_from_install_to_uninstall(root: Path, program: Path) -> None:
    before = tree(root)
    words = ("gateway", "--backend", "systemd", "--user", "--program", str(program))
    done = await service(root, "install", *words, "--", "--port", "4010")
    assert done.code == 0, done.err
    assert "gateway runs" in done.out
    state = root / "home" / ".local" / "share" / "mlx-fleet"
    flags = root / "flags"
    assert flags.read_text() == f"--state-dir {state / 'data' / 'gateway'} --port 4010\n"
    flags.unlink()

    shown = json.loads((await service(root, "status", "-o", "json")).out)
    assert [(row["name"], row["state"], row["backend"]) for row in shown] == [
        ("gateway", "running", "systemd")
    ]
    assert (await service(root, "restart", "gateway")).out == "gateway started\n"
    assert (await service(root, "stop")).out == "gateway stopped\n"
    status = await service(root, "status")
    assert status.code == 3
    assert status.out.split()[6:9] == ["LOG", "gateway", "stopped"]

    done = await service(root, "uninstall")
    assert (done.code, done.out) == (0, "gateway uninstalled\n"), done.err
    flags.unlink(missing_ok=True)
    assert tree(root) == before
    assert (await service(root, "uninstall")).out == "no service of the fleet is installed\n"
    assert (await service(root, "start")).code == 1


@pytest.mark.skipif(Path("/run/systemd/system").is_dir(), reason="systemd runs here")
async def test_a_linux_without_systemd_is_refused_with_what_to_do_instead(
    root: Path, program: Path
) -> None:
    before = tree(root)
    done = await service(root, "install", "gateway", "--user", "--program", str(program))
    assert done.code == 1
    assert "this machine has no systemd (/run/systemd/system does not exist)" in done.err
    assert "Let what supervises this container run the program itself" in done.err
    assert tree(root) == before
    assert "no service of the fleet is installed" in (await service(root, "status")).out


@pytest.mark.parametrize("backend", ["launchd", "systemd"])
async def test_a_dry_run_lists_what_needs_root_and_changes_nothing(
    root: Path, program: Path, backend: str
) -> None:
    before = tree(root)
    words = ("gateway", "--backend", backend, "--program", str(program), "--dry-run")
    done = await service(root, "install", *words)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "These changes need root:"
    assert "  create user and group _mlxfleet, which cannot log in" in lines
    is_mac = backend == "launchd"
    assert ("  set pmset sleep on mains power: 10 -> 0" in lines) == is_mac
    assert any("application firewall" in line for line in lines) == is_mac
    assert lines[-3] == "  install and start the service gateway"
    assert lines[-2].startswith(f"The service runs: {program} --state-dir {root}")
    assert lines[-1] == "Nothing was changed."
    assert tree(root) == before


async def test_a_service_of_a_user_is_called_second_best(root: Path, program: Path) -> None:
    words = ("gateway", "--backend", "launchd", "--program", str(program), "--dry-run", "--user")
    done = await service(root, "install", *words)
    assert "second best" in done.err
    assert done.out.startswith("These changes need no root:")
    assert "pmset" not in done.out
    assert "_mlxfleet" not in done.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--etcd-password", "hunter2"], "would put a secret into the service's definition"),
        (["--prot", "1"], "No such option"),
        (["--state-dir", "state"], "--state-dir state: a service needs an absolute path"),
        (["--etcd", "http://root:hunter2@mac-1:2379"], "a URL with a password"),
        (["extra"], "unexpected argument 'extra'"),
    ],
)
async def test_flags_are_checked_before_anything_is_changed(
    root: Path, program: Path, flags: list[str], message: str
) -> None:
    before = tree(root)
    words = ("gateway", "--backend", "systemd", "--user", "--program", str(program))
    done = await service(root, "install", *words, "--", *flags)
    assert done.code == 1
    assert message in done.err
    assert "hunter2" not in done.err
    assert tree(root) == before


async def test_a_program_that_is_not_installed_is_reported(root: Path) -> None:
    done = await service(root, "install", "gateway", "--backend", "launchd")
    assert done.code == 1
    assert f"{root}/opt/mlx-fleet/current/bin/fleet-gateway does not exist" in done.err


async def test_an_unknown_user_is_refused(root: Path, program: Path) -> None:
    words = ("gateway", "--backend", "systemd", "--program", str(program))
    done = await service(root, "install", *words, "--service-user", "nobody-here")
    assert done.code == 1
    assert "this machine has no such user" in done.err
