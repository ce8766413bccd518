"""Start and stop of a local fleet: in the foreground, detached, and from another process."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.data_dir import DataDir, FleetRecord
from fleetctl.fleets.local_fleet import LocalFleet, stop_engines
from fleetctl.fleets.local_programs import LocalFleetSettings
from machinery import macos_commands, processes
from machinery import process_log as house_logging
from machinery.clock import Clock, SystemClock
from machinery.environment import drop_secrets
from machinery.process_main import run_until_signal
from store.etcd.flags import VARIABLE_PREFIX

# Longer than a fleet needs to become ready, or its engines to drain.
_DETACH_S = 120.0
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
