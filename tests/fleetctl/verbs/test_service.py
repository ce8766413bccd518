"""`fleetctl service` on a machine below a folder: real with the plain supervisor, planned for launchd and systemd."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tests.support import service_stand_ins
from tests.support.fleet import Done
from tests.support.fleetctl_runner import run_fleetctl

ROOT = Path(__file__).parents[3]


@pytest.fixture
def root(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = short_folder / "root"
    (root / "home").mkdir(parents=True)
    service_stand_ins.install_tools(
        short_folder / "bin", short_folder / "state", short_folder / "units"
    )
    monkeypatch.setenv("PATH", f"{short_folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return root


@pytest.fixture
def program(root: Path) -> Path:
    """Return a program in a folder with the interpreter, as in an installation; the real gateway is too slow."""
    folder = root / "venv" / "bin"
    folder.mkdir(parents=True)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    path = folder / "fleet-gateway"
    path.write_text('#!/bin/sh\necho "$@"\nexec sleep 600\n')
    path.chmod(0o755)
    return path


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def words_for(root: Path, verb: str, words: tuple[str, ...]) -> tuple[str, ...]:
    return ("service", verb, "--root", str(root), *words)


async def service(root: Path, verb: str, *words: str) -> Done:
    return await run_fleetctl(*words_for(root, verb, words))


async def service_process(root: Path, verb: str, *words: str) -> Done:
    """Run a process of its own: a supervisor outlives the command that starts it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleetctl", *words_for(root, verb, words)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return Done(code=process.returncode or 0, out=out.decode(), err=err.decode())


@pytest.mark.ci
async def test_a_plain_service_from_install_to_uninstall(root: Path, program: Path) -> None:
    before = tree(root)
    words = ("gateway", "--backend", "plain", "--program", str(program))
    done = await service_process(root, "install", *words, "--", "--port", "4010")
    assert done.code == 0, done.err
    assert "gateway runs" in done.out
    state = root / "home" / ".local" / "share" / "mlx-fleet"
    log = (state / "logs" / "gateway.log").read_text()
    assert log == f"--state-dir {state / 'data' / 'gateway'} --port 4010\n"

    shown = json.loads((await service_process(root, "status", "-o", "json")).out)
    assert [(one["name"], one["state"], one["backend"]) for one in shown] == [
        ("gateway", "running", "plain")
    ]
    assert (await service_process(root, "restart", "gateway")).out == "gateway started\n"
    stopped = await service_process(root, "stop")
    assert stopped.out == "gateway stopped\n"
    status = await service_process(root, "status")
    assert status.code == 3
    assert status.out.split()[6:9] == ["LOG", "gateway", "stopped"]
    other = await service_process(
        root, "install", "gateway", "--backend", "systemd", "--user", "--dry-run"
    )
    assert other.code == 1

    done = await service_process(root, "uninstall")
    assert (done.code, done.out) == (0, "gateway uninstalled\n"), done.err
    assert tree(root) == before
    assert (
        await service_process(root, "uninstall")
    ).out == "no service of the fleet is installed\n"
    assert (await service_process(root, "start")).code == 1


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
    words = ("gateway", "--backend", "plain", "--program", str(program))
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
