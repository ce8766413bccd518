"""`fleetctl up --detach --join` on macOS: a LaunchDaemon, with stand-ins for sudo and launchctl."""

import os
import plistlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import lifecycle
from fleetctl.fleets.data_dir import DataDir
from machinery.clock import SystemClock
from tests.support import service_stand_ins

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a service of the machine needs root")
FLAGS = ("--join", "10.0.0.11", "--port", "4000")
# What the supervisor of a fleet that is ready writes.
SUPERVISOR = """#!/bin/sh
echo "$@" > {root}/words
echo '{{"layout_version": 1, "gateway_url": "http://10.0.0.11:4000", "pid": '$$', "is_ready": true}}' > {data}/fleet.json
exec sleep 600
"""


class Mac:
    """A Mac below a folder, with a stand-in for the supervisor of a fleet."""

    def __init__(self, folder: Path) -> None:
        self.root, self.state, tools = folder / "root", folder / "state", folder / "bin"
        (self.root / "Library" / "LaunchDaemons").mkdir(parents=True)
        service_stand_ins.install_tools(tools, self.state, folder / "units", delays=(0.0, 0.0))
        (tools / "sudo").write_text(f'#!/bin/sh\necho "$@" >> {folder}/sudo\nexec "$@"\n')
        (tools / "sudo").chmod(0o755)
        self.asked = folder / "sudo"
        self.data = DataDir(folder / "data")
        self.data.prepare()
        self.program = folder / "fleetctl"
        self.program.write_text(SUPERVISOR.format(root=folder, data=self.data.path))
        self.program.chmod(0o755)
        self.definition = self.root / "Library" / "LaunchDaemons" / "io.mlxfleet.fleet.plist"
        self.line = lifecycle.service_line(self.data, FLAGS, root=self.root, program=self.program)


@pytest.fixture
def mac(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mac]:
    made = Mac(short_folder)
    monkeypatch.setenv("PATH", f"{short_folder / 'bin'}:{os.environ['PATH']}")
    yield made
    service_stand_ins.end_jobs(made.state)


@pytest.mark.timeout(300)
def test_a_fleet_for_other_macs_is_a_launch_daemon_of_its_user(mac: Mac) -> None:
    fleet = lifecycle.start_service(mac.data, mac.line, SystemClock(), has_terminal=True)
    assert fleet.gateway_url == "http://10.0.0.11:4000"
    job = plistlib.loads(mac.definition.read_bytes())
    data = str(mac.data.path)
    assert job["ProgramArguments"] == [str(mac.program), "up", "--data-dir", data, "--keep-context", "--reset", *FLAGS]  # fmt: skip
    assert job["UserName"] == "root", "the owner of the data folder, which is root in tests only"
    assert job["StandardOutPath"] == f"{data}/logs/up.log"
    assert job["EnvironmentVariables"]["PATH"].startswith("/opt/homebrew/bin:")
    assert len(mac.asked.read_text().splitlines()) == 1, "sudo is asked once"
    assert not lifecycle.stop_service(DataDir(mac.root), has_terminal=True, root=mac.root)
    assert lifecycle.stop_service(mac.data, has_terminal=True, root=mac.root)
    assert not mac.definition.exists()
    assert not lifecycle.stop_service(mac.data, has_terminal=True, root=mac.root)


def test_without_a_terminal_the_line_to_run_is_named(mac: Mac) -> None:
    with pytest.raises(FleetctlError, match="local network privacy") as refused:
        lifecycle.start_service(mac.data, mac.line, SystemClock(), has_terminal=False)
    assert str(refused.value).endswith(f"run\n  sudo {' '.join(mac.line)}")
    assert not mac.asked.exists()
    assert not mac.definition.exists()


@pytest.mark.timeout(300)
def test_a_fleet_never_runs_as_another_user_than_that_of_its_data(mac: Mac) -> None:
    os.chown(mac.data.path, 1, 1)
    words = [word if word != "root" else "nobody" for word in mac.line]
    with pytest.raises(FleetctlError, match="failed with exit code 1"):
        lifecycle.start_service(mac.data, words, SystemClock(), has_terminal=True)
    assert not mac.definition.exists()
