"""The built wheel, installed offline far from the checkout: every process of a fleet runs from it.

`make release-check` proves the rest of a release: hashes, formula, uv, pipx and the demo.
"""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.fleet import engine_port
from tests.support.ports import free_port
from tests.support.release_wheels import PLATFORM, PYTHON, real_uv

ROOT = Path(__file__).parent.parent

pytestmark = [pytest.mark.full, pytest.mark.fleet, pytest.mark.mlx, pytest.mark.timeout(600)]


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command in an environment that knows nothing of the checkout, and return its output."""
    known = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_"))}
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(cwd), "PYTHONPATH": ""}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**known, **environment, **variables},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that `make dist` fills."""
    folder = tmp_path_factory.mktemp("dist")
    build(folder)
    return folder


def build(folder: Path) -> None:
    """Build the current work tree."""
    subprocess.run(
        [ROOT / "packaging" / "build.sh", folder, sys.executable, real_uv()],
        check=True,
        env={**os.environ, "UV_SYSTEM_CERTS": "1"},
        timeout=300,
    )


@pytest.fixture(scope="module")
def unpacked(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the unpacked archive for this platform."""
    folder = tmp_path_factory.mktemp("unpacked")
    out = folder / "bundle.tar"
    wheel = next(dist.glob("*.whl"))
    subprocess.run(
        [
            *(sys.executable, "-m", "fleetctl", "bundle", "create", "--wheel", wheel, "--out", out),
            *("--platform", PLATFORM.name, "--python-version", PYTHON),
        ],
        check=True,
        timeout=300,
    )
    with tarfile.open(out) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("mlx-fleet-*"))


@pytest.fixture(scope="module")
def programs(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the installed programs."""
    prefix = tmp_path_factory.mktemp("installed") / "mlx fleet"
    python = getattr(sys, "_base_executable", sys.executable)
    run(unpacked / "install.sh", "--prefix", prefix, "--python", python, cwd=unpacked.parent)
    return prefix / "current" / "bin"


def test_the_same_commit_gives_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    build(tmp_path)
    for path in dist.glob("*.whl"):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_the_version_names_the_commit(programs: Path, tmp_path: Path) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    told = json.loads(run(programs / "fleetctl", "version", "--client", "-o", "json", cwd=tmp_path))
    assert told["commit"].removesuffix("-dirty") == commit
    assert f"({told['commit']})" in run(programs / "fleetctl", "--version", cwd=tmp_path)


def test_the_list_of_repositories_is_installed(programs: Path, tmp_path: Path) -> None:
    shown = run(programs / "fleetctl", "models", "search", "qwen3", "4bit", cwd=tmp_path)
    assert "mlx-community/Qwen3-8B-4bit" in shown


def test_every_process_of_a_fleet_runs_from_the_package(programs: Path, tmp_path: Path) -> None:
    data = ("--data-dir", str(tmp_path / "data"))
    ports = ("--port", str(free_port()), "--engine-port", str(engine_port()))
    fleetctl = programs / "fleetctl"
    run(fleetctl, "up", "--detach", *data, *ports, cwd=tmp_path)
    try:
        run(fleetctl, "wait", "node", "--all", "--for=condition=Ready", *data, cwd=tmp_path)
        assert "Ready" in run(fleetctl, "get", "nodes", *data, cwd=tmp_path)
        commands = list(_commands(tmp_path / "data"))
        parts = {part for part in ("reconciler", "nodeagent", "gateway") if part in str(commands)}
        assert parts == {"reconciler", "nodeagent", "gateway"}
        installed = programs.parent.parent
        strange = [words for words in commands if not _is_below(Path(words[0]), installed)]
        assert [words for words in strange if Path(words[0]).name != "etcd"] == []
        assert str(ROOT) not in str(commands)
    finally:
        run(fleetctl, "down", *data, cwd=tmp_path)


def _commands(data: Path) -> Iterator[list[str]]:
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(str(data) in word for word in words):
            yield words


def _is_below(path: Path, folder: Path) -> bool:
    return folder in path.parents
