"""Installs and uninstalls a service in processes that are killed (SIGKILL) before one of their changes.

A process of its own, because each attempt is a fork: `python -m tests.support.service_kills FOLDER FIRST STEP`. It prints
one JSON line for each attempt with the differences that it found, and ends when an attempt was not killed any more.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from fleetctl.services.changes import ChangeRecord
from fleetctl.services.host import ROLE_USER, Host
from fleetctl.services.installer import ServiceInstaller
from fleetctl.services.launchd import LaunchdServices
from fleetctl.services.layout import system_layout
from fleetctl.services.plan import InstallSettings
from fleetctl.services.programs import ServiceCommand
from machinery.clock import SystemClock
from tests.support import service_stand_ins

_CHANGES = frozenset(
    {
        *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.chown", "os.symlink"),
        *("subprocess.Popen", "os.posix_spawn", "os.truncate"),
    }
)


class World:
    """A machine below a folder: a tree of files, stand-ins for its programs, and a service to install."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.state = folder / "state"
        (self.root / "Library" / "LaunchDaemons").mkdir(parents=True)
        (self.root / "Library" / "Logs").mkdir()
        # As `sudo fleetctl join` leaves it.
        self.identity = self.root / "identity"
        self.identity.mkdir(mode=0o700)
        (self.identity / "identity.pem").touch(mode=0o600)
        service_stand_ins.install_tools(
            folder / "bin", self.state, folder / "units", delays=(0.0, 0.0)
        )
        os.environ["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.layout = system_layout("launchd", self.root)

    def installer(self) -> ServiceInstaller:
        clock = SystemClock()
        services = LaunchdServices(self.layout.definitions, clock)
        host = Host(services, clock, is_mac=True)
        return ServiceInstaller(self.layout, services, host, clock, settle_s=0.0)

    def settings(self) -> InstallSettings:
        state = self.layout.state
        return InstallSettings(
            part="nodeagent",
            command=ServiceCommand(
                argv=("/bin/sleep", "600"),
                state_folder=state / "nodeagent",
                models_folder=state / "models",
                identity_folder=self.identity,
                folders=(),
            ),
            backend="launchd",
            layout=self.layout,
            user=ROLE_USER,
            group=ROLE_USER,
            wired_limit_mib=1024,
        )

    async def install(self) -> None:
        await self.installer().install(self.settings(), lambda _: None)

    async def uninstall(self) -> None:
        await self.installer().uninstall("nodeagent", lambda _: None)

    def snapshot(self) -> dict[str, object]:
        """Return every file with its owner, its mode and its content, and the settings of the machine."""
        found: dict[str, object] = dict(service_stand_ins.machine_of(self.state))
        for path in sorted(self.root.rglob("*")):
            status = path.lstat()
            content = path.read_bytes().hex() if path.is_file() else ""
            if path.name == "nodeagent.log":
                content = ""
            found[str(path)] = [status.st_mode, status.st_uid, status.st_gid, content]
        found["jobs"] = sorted(path.stem for path in (self.state / "jobs").glob("*.json"))
        return found


def in_child(work: Callable[[], Coroutine[Any, Any, None]], *, kill_before: int = 0) -> bool:
    """Run the work in a fork that is killed before its change of that number; return whether it was killed."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            is_write = event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
            if is_write or event in _CHANGES:
                count += 1
                if count == kill_before:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            asyncio.run(work())
        except BaseException as error:  # noqa: BLE001 - the report of a fork
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    if status:
        raise RuntimeError("a fork failed")
    return False


def difference(one: dict[str, object], other: dict[str, object]) -> list[str]:
    """Return the names of what differs."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def main() -> None:
    """Kill an installation, then an uninstallation, before each change, and report what is left."""
    folder, first, step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    world = World(folder)
    before = world.snapshot()
    in_child(world.install)
    installed = world.snapshot()
    in_child(world.uninstall)
    report("whole", 0, difference(before, world.snapshot()))
    number, alive = first, {"install", "uninstall"}
    while alive:
        if "install" in alive:
            if not in_child(world.install, kill_before=number):
                alive.discard("install")
            in_child(world.uninstall)
            report("install", number, difference(before, world.snapshot()))
        in_child(world.install, kill_before=number)
        in_child(world.install)
        report("install again", number, difference(installed, world.snapshot()))
        if "uninstall" in alive and not in_child(world.uninstall, kill_before=number):
            alive.discard("uninstall")
        in_child(world.uninstall)
        report("uninstall", number, difference(before, world.snapshot()))
        number += step
    assert not ChangeRecord(world.layout.home).path.exists()
    service_stand_ins.end_jobs(world.state)


def report(what: str, number: int, found: list[str]) -> None:
    """Print one attempt."""
    print(json.dumps([what, number, found]), flush=True)


if __name__ == "__main__":
    main()
