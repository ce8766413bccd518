"""The verb `fleetctl stop`: ends all engines of this Mac now, also while etcd or the agent is down."""

import asyncio
from pathlib import Path

import click

from fleetctl.cli.arguments import parse_duration
from fleetctl.cli.connect import data_dir_option
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.kubectl_hints import unsupported_flag
from fleetctl.fleets.data_dir import DataDir
from machinery.clock import SystemClock
from nodeagent.engines.stop_order import StopOrder

_HELP = """End all engines of this Mac now, and start none until --undo.

It needs neither etcd nor the agent: it writes stopped.json into the agent's state folder, and ends the processes. Requests
get --grace-period to finish. Replicas of this Mac are CannotStart meanwhile, and are not moved: use `fleetctl drain` if
there is time and etcd.

\b
  fleetctl stop --local --state-dir ~/.mlx-fleet/agent
  fleetctl stop --local --undo

Without --state-dir it stops the nodes that `fleetctl up` runs from --data-dir. To stop a whole fleet, run it on each Mac.
"""
_OTHER = (
    "`fleetctl scale md/NAME --replicas=0` unloads a model; `fleetctl down` stops the fleet on this machine; "
    "`fleetctl stop --local` ends all engines of this Mac"
)


@click.command(help=_HELP)
@click.argument("models", nargs=-1, metavar="")
@click.option("--local", is_flag=True, help="Stop the engines of this Mac (required).")
@click.option("--undo", is_flag=True, help="Let engines start again, within five minutes.")
@click.option(
    "--state-dir",
    "state_dirs",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    envvar="FLEET_STATE_DIR",
    help="State folder of an agent of this Mac; may be repeated.",
)
@click.option(
    "--grace-period",
    default="10s",
    show_default=True,
    help="Time for requests to finish before an engine is killed.",
)
@unsupported_flag(
    "an agent takes no orders from other machines. Run `fleetctl stop --local` on each Mac, for example over ssh; "
    "`fleetctl get nodes` lists them",
    "--all",
)
@data_dir_option
def stop(
    models: tuple[str, ...],
    state_dirs: tuple[Path, ...],
    grace_period: str,
    data_dir: Path,
    *,
    local: bool,
    undo: bool,
) -> None:
    """End all engines of this Mac now, and start none until --undo."""
    if models or not local:
        raise click.UsageError(f"give --local: {_OTHER}")
    grace_s = parse_duration(grace_period)
    folders = [path.expanduser().resolve() for path in state_dirs] or DataDir(data_dir).nodes()
    if not folders:
        raise FleetctlError(
            f"no agent has its state in {DataDir(data_dir).path}. Name the folder with --state-dir, as for fleet-nodeagent"
        )
    for folder in folders:
        order = StopOrder(folder)
        try:
            if undo:
                was_given = order.take_back()
                click.echo(f"{folder}: {'engines may start again' if was_given else 'not stopped'}")
                continue
            count = asyncio.run(order.execute(SystemClock(), grace_s=grace_s))
        except OSError as error:
            raise FleetctlError(f"cannot write to {folder}: {error.strerror}") from error
        click.echo(
            f"{folder}: {count} engine{'s' if count != 1 else ''} ended, none starts until --undo"
        )
