"""Start and stop of a local fleet: in the foreground, detached, and from another process."""

import asyncio
import os
import plistlib
import pwd
import shlex
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.data_dir import DataDir, FleetRecord
from fleetctl.fleets.local_fleet import LocalFleet, stop_engines
from fleetctl.fleets.local_programs import LocalFleetSettings
from fleetctl.services.layout import system_layout
from machinery import macos_commands, processes
from machinery import process_log as house_logging
from machinery.clock import Clock, SystemClock
from machinery.environment import drop_secrets
from machinery.process_main import run_until_signal
from nodeagent.hardware.service_definitions import label_of
from schemas import local_network
from store.etcd.flags import VARIABLE_PREFIX

# Longer than a fleet needs to become ready, or its engines to drain.
_DETACH_S = 120.0
# A person types a password meanwhile, and the installation follows.
_SUDO_S = 600.0
_ROOT = Path("/")
_FLEETCTL = Path(sys.executable).with_name("fleetctl")
_STOP_S = 120.0


def run_in_foreground(settings: LocalFleetSettings, on_ready: Callable[[], Awaitable[None]]) -> int:
    """Run the fleet until SIGINT or SIGTERM, and call `on_ready` when it is ready; return the exit code.

    Raises:
        FleetctlError: the fleet cannot be started.

    """
    house_logging.setup("up", "warning")
    # The local fleet has its own etcd: variables that point to another store must not reach its processes.
    drop_secrets(VARIABLE_PREFIX)
    with settings.data_dir.lock(), _awake(settings.data_dir):
        fleet = LocalFleet(settings, SystemClock(), os.getpid())
        failures: list[FleetctlError] = []

        async def run() -> None:
            try:
                await fleet.run(click.echo, on_ready)
            except FleetctlError as error:
                failures.append(error)

        code = run_until_signal(run)
    if failures:
        raise failures[0]
    return code


@contextmanager
def _awake(data_dir: DataDir) -> Iterator[None]:
    """Keep a Mac from sleeping by itself while the block runs, and no longer than this process lives."""
    name, *flags = macos_commands.KEEP_AWAKE.words(pid=str(os.getpid()))
    program = macos_commands.find_program(name)
    if program is None:  # as on Linux
        yield
        return
    try:
        child = processes.spawn((program, *flags), log=data_dir.log(name))
    except OSError as error:
        click.echo(f"warning: this Mac may sleep: cannot run {program}: {error.strerror}", err=True)
        yield
        return
    try:
        yield
    finally:
        child.send(signal.SIGTERM)


def start_detached(data_dir: DataDir, flags: Sequence[str], clock: Clock) -> FleetRecord:
    """Start the fleet's supervisor as a child process that outlives this one, and wait until the fleet is ready.

    `flags`: those of `fleetctl up` that differ from the defaults.

    Raises:
        FleetctlError: the fleet did not become ready; the message quotes the supervisor's log.

    """
    _refuse_second_fleet(data_dir)
    # The local fleet has its own etcd: variables that point to another store must not reach its processes.
    drop_secrets(VARIABLE_PREFIX)
    command = (sys.executable, "-m", "fleetctl", "up", "--data-dir", str(data_dir.path))
    child = processes.spawn((*command, "--keep-context", "--reset", *flags), log=data_dir.log("up"))
    try:
        return asyncio.run(_await_ready(data_dir, child, clock))
    except BaseException:
        # Above all on Ctrl-C: a half-started fleet must not stay behind.
        asyncio.run(_abandon(data_dir, child, clock))
        raise


def service_line(
    data_dir: DataDir, flags: Sequence[str], *, root: Path = _ROOT, program: Path = _FLEETCTL
) -> tuple[str, ...]:
    """Return the command line, for root, that installs the fleet as a LaunchDaemon of its user.

    `root` and `program` are others in tests only.
    """
    user = pwd.getpwuid(data_dir.path.stat().st_uid).pw_name
    return (
        *(sys.executable, "-m", "fleetctl", "service", "install", "fleet", "--backend", "launchd"),
        *(() if root == _ROOT else ("--root", str(root))),
        *("--service-user", user, "--program", str(program), "--"),
        *("--data-dir", str(data_dir.path), "--keep-context", "--reset", *flags),
    )


def start_service(
    data_dir: DataDir, line: Sequence[str], clock: Clock, *, has_terminal: bool
) -> FleetRecord:
    """Install the fleet as a LaunchDaemon with sudo, and wait until it is ready.

    macOS keeps a process that outlives its terminal from other Macs; a LaunchDaemon is exempt (TN3179).

    Raises:
        FleetctlError: there is no terminal for sudo's question, or the fleet did not become ready.

    """
    _refuse_second_fleet(data_dir)
    before = data_dir.read()
    _run_as_root(
        line,
        f"other Macs can join only a fleet that runs as a LaunchDaemon: macOS keeps others from the network when their "
        f"terminal closes ({local_network.NAME})",
        has_terminal=has_terminal,
    )
    return asyncio.run(_await_service(data_dir, None if before is None else before.pid, clock))


def stop_service(data_dir: DataDir, *, has_terminal: bool, root: Path = _ROOT) -> bool:
    """Uninstall the LaunchDaemon of the fleet with sudo; return whether there is one.

    Raises:
        FleetctlError: it is not uninstalled.

    """
    path = system_layout("launchd", root).definitions / f"{label_of('fleet')}.plist"
    try:
        words = plistlib.loads(path.read_bytes())["ProgramArguments"]
    except (OSError, ValueError, KeyError, TypeError, plistlib.InvalidFileException):
        return False
    if str(data_dir.path) not in words:
        return False
    place = () if root == _ROOT else ("--root", str(root))
    line = (sys.executable, "-m", "fleetctl", "service", "uninstall", *place, "fleet")
    _run_as_root(line, "launchd would start the fleet again", has_terminal=has_terminal)
    return True


def _run_as_root(line: Sequence[str], why: str, *, has_terminal: bool) -> None:
    command = ("sudo", *line)
    if not has_terminal:
        raise FleetctlError(f"{why}. This needs root, and no terminal is there for its password: run\n  {shlex.join(command)}")  # fmt: skip
    click.echo(f"{why}: sudo may ask for your password", err=True)
    try:
        code = subprocess.run(command, check=False, timeout=_SUDO_S).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FleetctlError(f"cannot run `{shlex.join(command)}`: {error}") from error
    if code:
        raise FleetctlError(f"`{shlex.join(command)}` failed with exit code {code}; see above")


async def _await_service(data_dir: DataDir, before: int | None, clock: Clock) -> FleetRecord:
    """Wait for the supervisor that launchd started; `before` is the one of an earlier start."""
    deadline = clock.monotonic() + _DETACH_S
    while clock.monotonic() < deadline:
        fleet = data_dir.read()
        if fleet is not None and fleet.pid != before and fleet.is_ready:
            return fleet
        await clock.sleep(0.1)
    last_lines = processes.last_lines(data_dir.log("up"), 2)
    raise FleetctlError(
        f"the service does not become ready: {last_lines}. `fleetctl down` uninstalls it"
    )


def _refuse_second_fleet(data_dir: DataDir) -> None:
    if data_dir.is_locked():
        raise FleetctlError(
            f"a fleet already runs in {data_dir.path}. Stop it with `fleetctl down`, or give this "
            "fleet its own --data-dir"
        )


async def _abandon(data_dir: DataDir, child: processes.ChildProcess, clock: Clock) -> None:
    """Stop the supervisor that this process started, and its children; never a fleet that another process started."""
    await processes.end(child, clock, grace_s=_STOP_S)
    if not data_dir.is_locked():
        await stop_fleet(data_dir, clock)


async def _await_ready(
    data_dir: DataDir, child: processes.ChildProcess, clock: Clock
) -> FleetRecord:
    deadline = clock.monotonic() + _DETACH_S
    while clock.monotonic() < deadline:
        fleet = data_dir.read()
        if fleet is not None and fleet.pid == child.record.pid:
            if fleet.is_ready:
                return fleet
            if fleet.error and not child.running():
                raise FleetctlError(fleet.error)
        if not child.running():
            # Another fleet may have started in the meantime; the log then quotes that one.
            _refuse_second_fleet(data_dir)
            last_lines = processes.last_lines(data_dir.log("up"), 2)
            raise FleetctlError(f"the fleet did not start: {last_lines}")
        await clock.sleep(0.1)
    raise FleetctlError(f"the fleet did not become ready; see {data_dir.log('up')}")


async def stop_fleet(folder: DataDir, clock: Clock) -> bool:
    """Stop the fleet of a data folder; return whether any process was running.

    If the supervisor was killed, its children are found by their records.
    """
    fleet = folder.read()
    found = False
    if fleet is not None and folder.is_locked():
        found = True
        pid = fleet.pid
        supervisor = processes.find_running(pid)
        if supervisor is not None:
            await processes.end(supervisor, clock, grace_s=_STOP_S)
    etcd_records = (folder.etcd / "etcd.pid", folder.restoring / "etcd.pid")
    for path in (*folder.records(), *etcd_records):
        if path.name == "etcd.pid":
            await stop_engines(folder, clock)
        child = processes.adopt(path)
        if child is not None:
            found = True
            await processes.end(child, clock, grace_s=10.0)
        path.unlink(missing_ok=True)
    return found
