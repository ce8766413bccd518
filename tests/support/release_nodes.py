"""Macs of a test with a release installed by install.sh, the agent as a service of its user, and an ssh server each.

systemctl is a stand-in: its jobs are real processes.

A release is a small wheel whose programs are the real ones of this checkout, under a version of its own.
"""

import json
import re
import site
import subprocess
import sys
from pathlib import Path

from fleetctl.bundle import archive
from fleetctl.bundle.archive import BundleContents
from machinery.clock import SystemClock
from nodeagent.engines.engine_processes import find_engines, stop_all
from nodeagent.hardware.service_definitions import unit_name
from tests.support import service_stand_ins
from tests.support.fleet import Fleet, engine_port
from tests.support.release_wheels import PLATFORM, PYTHON, SCRIPT, Index, locked, write_wheel
from tests.support.ssh_server import SshServer

ROOT = Path(__file__).parents[2]
_LIMIT_S = 120
BACKEND = ("--backend", "systemd", "--user")
_SCRIPTS = (
    ("fleetctl", "fleetctl"),
    ("fleet-nodeagent", "nodeagent"),
    ("fleet-reconciler", "reconciler"),
    ("fleet-gateway", "gateway"),
)


def write_archive(
    index: Index, root: Path, version: str, *, broken: str = "", stored: int = 1
) -> Path:
    """Return the archive of a release; `broken` is a program that exits with 1, `stored` a number of its documents."""
    stem = f"mlx_fleet-{version}"
    modules = {one: "broken_release" if one == broken else f"{module}.__main__" for one, module in _SCRIPTS}  # fmt: skip
    scripts = "".join(f"{name} = {module}:main\n" for name, module in modules.items())
    versions = (ROOT / "store" / "versions.py").read_text()
    if stored > 1:
        empty = "VERSIONS: Mapping[str, int] = {}"
        assert empty in versions
        versions = versions.replace(empty, f'VERSIONS = {{"Node": {stored}}}')
    parts = {
        # The packages of this checkout and of this environment, after those of the release.
        "checkout.pth": "\n".join([str(ROOT), *site.getsitepackages(), ""]),
        "broken_release.py": "def main():\n    raise SystemExit(1)\n",
        f"{stem}.dist-info/entry_points.txt": f"[console_scripts]\n{scripts}",
        "machinery/commit.txt": "0123456789ab\n",
        "store/versions.py": versions,
        "fleetctl/bundle/install.sh": SCRIPT.read_text(),
        "fleetctl/bundle/requirements.txt": locked(index.folder / "dependency-1.0-py3-none-any.whl"),
        "fleetctl/bundle/requirements-build.txt": locked(index.folder / "uv-0.1-py3-none-any.whl"),
    }  # fmt: skip
    (root / "dist").mkdir(parents=True, exist_ok=True)
    contents = BundleContents(
        wheel=write_wheel(root / "dist", stem, parts), platform=PLATFORM, python=PYTHON
    )
    folder = root / contents.folder_name
    folder.mkdir()
    archive.fill(contents, folder, lambda _: None)
    path = root / f"{contents.folder_name}.tar"
    with path.open("wb") as out:
        archive.write_tar(folder, contents.folder_name, out)
    return path


class ReleaseNode:
    """One Mac: its home, its ssh server, and the agent's service."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        root.mkdir(parents=True)
        self.server = SshServer(root)
        self.home = self.server.home
        self.prefix = self.home / ".local/share/mlx-fleet-programs"
        self._layout = self.home / ".local/share/mlx-fleet"
        self._services = root / "services"
        units = self.home / ".config/systemd/user"
        units.mkdir(parents=True)
        service_stand_ins.install_tools(
            root / "stand-ins", self._services, units, tools=("systemctl",)
        )
        (root / "tools" / "systemctl").symlink_to(root / "stand-ins" / "systemctl")
        self._path = f"{root / 'tools'}:/usr/bin:/bin"

    @property
    def state_dir(self) -> Path:
        return self._layout / "data" / "nodeagent"

    @property
    def target(self) -> str:
        return f"{self.name}={self.server.target}"

    def install(self, path: Path) -> None:
        """Install a release."""
        unpacked = self.home / "unpacked"
        unpacked.mkdir()
        subprocess.run(["tar", "-xf", str(path), "-C", str(unpacked)], check=True)
        (script,) = unpacked.glob("*/install.sh")
        self.run(str(script), "--prefix", str(self.prefix), "--python", sys.executable)

    def install_agent(self, fleet: Fleet) -> None:
        """Install the agent as a service, and start it."""
        self._install_part(
            "nodeagent",
            *("--name", self.name, "--memory", "2Gi", "--part-of-machine"),
            *("--models-dir", str(fleet.models_dir), "--etcd", str(fleet.etcd.address)),
            *("--engine-port", str(engine_port()), "--api-port", "0"),
        )

    def install_reconciler(self, fleet: Fleet) -> None:
        """Install a reconciler as a service, and start it."""
        self._install_part("reconciler", "--etcd", str(fleet.etcd.address))

    def _install_part(self, part: str, *flags: str) -> None:
        program = self.prefix / "current" / "bin"
        self.run(
            *(str(program / "fleetctl"), "service", "install", part, *BACKEND),
            *("--program", str(program / f"fleet-{part}"), "--", *flags),
        )

    def run(self, *words: str) -> str:
        """Run a command as its user, without anything of this test's environment."""
        environment = {"HOME": str(self.home), "PATH": self._path}
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False,
            cwd=self.home,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def current(self) -> str:
        return (self.prefix / "current").readlink().name

    def engine_pids(self) -> set[int]:
        return {engine.child.record.pid for engine in find_engines(self.state_dir / "engines")}

    def running(self, part: str) -> str:
        """Return the release whose files a service runs."""
        job = json.loads((self._services / "jobs" / f"{unit_name(part)}.json").read_text())
        line = Path(f"/proc/{job['pid']}/cmdline").read_bytes().decode()
        release = re.search(r"/versions/([^/]+)/", line)
        return release[1] if release else ""

    async def end(self) -> None:
        """End the services and the engines."""
        service_stand_ins.end_jobs(self._services)
        await stop_all(self.state_dir / "engines", SystemClock(), grace_s=10)
        await self.server.stop()
