"""`fleetctl node upgrade`: one release on all Macs, one service after the other, with a way back."""

from contextlib import AsyncExitStack
from typing import Any

import click

from fleetctl.cli import terminal
from fleetctl.cli.arguments import parse_duration, reason_option
from fleetctl.cli.connect import with_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.maintenance import rolling_run
from fleetctl.maintenance.fleet_watch import FleetWatch
from fleetctl.maintenance.node_targets import (
    NodeSessions,
    find_targets,
    target_options,
)
from fleetctl.maintenance.release import TargetRelease, find_release
from fleetctl.maintenance.rolling_run import PlanRefusal
from fleetctl.maintenance.upgrade import Upgrader, read_facts
from fleetctl.maintenance.upgrade_plan import plan_lines, plan_upgrade
from fleetctl.objects import targets
from fleetctl.objects.kind_args import kind_of
from fleetctl.remote.ssh_flags import ssh_policy
from machinery.clock import SystemClock
from schemas.node import Node
from store import object_trees
from store.port import Transport

_HELP = """Install a release on Macs and restart their services with it, one after the other: reconcilers, gateways, agents.

The plan is shown first. The release is installed beside the one in use, over ssh; nothing restarts before that is done on
all Macs. Engines keep running, and the new agent adopts them. A service that is not Ready in time goes back to its release,
and the upgrade stops; so it does not where documents are stored in another shape, as the plan says. A run that was killed
goes on when the command is run again; Macs that run the release are left alone. Without NAME, all nodes.

\b
  fleetctl node upgrade --to mlx-fleet-0.2.0-macos-arm64.tar --ssh-user admin --dry-run
  fleetctl node upgrade mac-1 --to mlx-fleet-0.2.0-macos-arm64.tar --ssh-user admin
  fleetctl node upgrade --to 0.1.0 --target mac-2=admin@mac-2.local     # go back
"""


@click.command("upgrade", help=_HELP)
@click.argument("names", nargs=-1, metavar="[NAME...]")
@click.option(
    "--to",
    required=True,
    metavar="ARCHIVE|VERSION",
    help="Archive of `fleetctl bundle create`, or a version that is installed on the Macs.",
)
@click.option(
    "--max",
    "concurrency",
    type=click.IntRange(1, 20),
    default=1,
    show_default=True,
    help="Number of agents that restart at once.",
)
@click.option(
    "--ready-timeout",
    default="2m",
    show_default=True,
    help="Time for a service to be Ready after its restart.",
)
@click.option(
    "--prefix",
    default="",
    help="Folder of the programs on the Macs (default: where install.sh puts them).",
)
@click.option("--python", default="", help="Python on the Macs, for an archive that has none.")
@click.option("--dry-run", is_flag=True, help="Show the plan, and change nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@target_options
@reason_option
@with_store
async def upgrade(
    transport: Transport, names: tuple[str, ...], to: str, ready_timeout: str, **options: Any
) -> None:
    """Install a release on Macs, and restart their services with it."""
    release, ready_s = find_release(to), parse_duration(ready_timeout)
    async with AsyncExitStack() as stack:
        nodes = await _nodes(transport, names)
        sessions = NodeSessions.create(find_targets(nodes, options), ssh_policy(options), stack)
        macs = await rolling_run.open_macs(
            tuple(node.name for node in nodes),
            sessions,
            prefix=options["prefix"],
            remedy="upgrade the others by name",
        )
        if release.archive is None:  # its stored versions are asked from a Mac that has it
            holders = [mac for mac in macs.values() if release.version in mac.state.installed]
            for mac in holders[:1]:
                stored = await mac.release.stored(mac.state, release.version)
                release = TargetRelease(version=release.version, stored=stored)
        plan = plan_upgrade(await read_facts(transport, nodes, macs), release)
        if isinstance(plan, PlanRefusal):
            raise FleetctlError(plan.message)
        click.echo("\n".join(plan_lines(plan)))
        if options["dry_run"]:
            return
        if not (plan.restarts or plan.installs):
            click.echo("nothing to do")
            return
        terminal.confirm("Go on?", is_confirmed=options["yes"])
        watch = FleetWatch(transport, SystemClock())
        upgrader = Upgrader(plan=plan, macs=macs, watch=watch, say=click.echo, ready_s=ready_s)
        await upgrader.run(python=options["python"], concurrency=options["concurrency"])
    click.echo(f"all {len(nodes)} Macs run {release.version}")


async def _nodes(transport: Transport, names: tuple[str, ...]) -> list[Node]:
    chosen = targets.selection(
        kind_of("nodes"), targets.parse_node_names(names), labels="", is_all=not names
    )
    nodes = await targets.read_nodes(transport, chosen)
    if not names:  # a Mac that left the fleet for good keeps its node until it is deleted
        ready = await object_trees.ready_nodes(transport)
        away = [node.name for node in nodes if node.name not in ready]
        for name in away:
            click.echo(f"warning: node/{name} is not Ready", err=True)
    if not nodes:
        raise FleetctlError("there are no nodes: `fleetctl node add` adds a Mac")
    return nodes
