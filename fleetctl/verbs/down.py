"""The verb `fleetctl down`: stops the fleet of this machine, or with --fleet that of all Macs."""

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from fleetctl.cli import terminal
from fleetctl.cli.arguments import parse_duration
from fleetctl.cli.connect import etcd_address, open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.resolve import config_path
from fleetctl.fleets import lifecycle
from fleetctl.fleets.data_dir import DataDir
from fleetctl.fleets.known_nodes import KnownNodes
from fleetctl.maintenance import fleet_down, rolling_run
from fleetctl.maintenance.node_targets import (
    NodeSessions,
    find_targets,
    is_on_this_machine,
    target_options,
)
from fleetctl.maintenance.rolling_run import Stage
from fleetctl.remote.ssh_flags import ssh_policy
from fleetctl.remote.target import RemoteTarget, parse_target
from fleetctl.verbs import local_context
from machinery.clock import SystemClock
from schemas.node import Node
from store import objects
from store.errors import StoreError, UnavailableError
from store.port import Transport

_FILE: Final = "fleet-down.json"
_STORE_S: Final = 5.0
_MAX_GRACE_S: Final = 600.0
_OF_THIS_MACHINE: Final = ("data_dir", "context")

_HELP = """Stop the fleet that `fleetctl up` runs on this machine; with --fleet, the services of a whole fleet on all Macs.

--fleet logs in to every Mac over ssh and stops, in this order: gateways (their requests finish first), reconcilers, agents
with their engines, and etcd where it is a service of these Macs. It shows the plan before, and does nothing while a Mac
cannot be reached. Manifests, models and certificates stay. A run that was killed goes on with the same command.

`sudo fleetctl service start` on each Mac starts the fleet again, and so does its next boot.

\b
  fleetctl down
  fleetctl down --fleet --ssh-user admin --dry-run
  fleetctl down --fleet --ssh-user admin --yes --except mac-7
"""


@click.command(help=_HELP, short_help="Stop the fleet of this machine, or of all Macs.")
@click.option("--fleet", "is_fleet", is_flag=True, help="Stop the fleet on all of its Macs.")
@click.option("--dry-run", is_flag=True, help="With --fleet: show the plan, and stop nothing.")
@click.option("-y", "--yes", is_flag=True, help="With --fleet: do not ask for confirmation.")
@click.option(
    "--except",
    "left_out",
    multiple=True,
    metavar="NODE",
    help="With --fleet: leave a Mac out; may be repeated.",
)
@click.option(
    "--grace-period",
    default="30s",
    show_default=True,
    help="With --fleet: time for the requests of an engine to finish before it is killed.",
)
@click.option(
    "--prefix",
    default="",
    help="With --fleet: folder of the programs on the Macs (default: where install.sh puts them).",
)
@target_options
@store_options
def down(data_dir: Path, *, is_fleet: bool, grace_period: str, **options: Any) -> None:
    """Stop the fleet of this machine, or of all Macs."""
    if is_fleet:
        grace_s = parse_duration(grace_period)
        if grace_s > _MAX_GRACE_S:
            raise click.UsageError("--grace-period: expected at most 10m")
        run(_down_fleet(grace_s, {**options, "data_dir": data_dir}))
        return
    # Refuse flags that would have no effect.
    context = click.get_current_context()
    given = [
        max(parameter.opts, key=len)
        for parameter in context.command.params
        if parameter.name not in _OF_THIS_MACHINE
        and context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    ]
    if given:
        belongs = "belongs" if len(given) == 1 else "belong"
        raise click.UsageError(
            f"{', '.join(given)} {belongs} to --fleet; add it, or leave them out"
        )
    folder = DataDir(data_dir)
    folder.check_version()
    was_service = lifecycle.stop_service(folder, has_terminal=sys.stdin.isatty())
    was_running = asyncio.run(lifecycle.stop_fleet(folder, SystemClock())) or was_service
    click.echo("stopped" if was_running else f"no fleet runs in {folder.path}")
    local_context.leave(folder)


async def _down_fleet(grace_s: float, options: dict[str, Any]) -> None:
    known_nodes = KnownNodes(
        config_path(click.get_current_context(), may_be_new=True).parent / _FILE,
        str(etcd_address(options)),
    )
    async with AsyncExitStack() as stack:
        transport = await stack.enter_async_context(open_store(options))
        targets = await _targets(transport, known_nodes, options)
        sessions = NodeSessions.create(targets, ssh_policy(options), stack)
        macs = await rolling_run.open_macs(
            tuple(targets),
            sessions,
            prefix=options["prefix"],
            remedy="leave them out with --except NODE: their engines go on without a fleet",
        )
        for name, mac in macs.items():
            if mac.state.needs_root:
                await (await sessions.open(name)).check_sudo()
        states = {name: mac.state for name, mac in macs.items()}
        stages = fleet_down.plan_stages(states)
        click.echo(f"These services of {len(targets)} Macs stop, in this order:")
        click.echo("\n".join(fleet_down.plan_lines(stages, states, grace_s=grace_s)))
        if options["dry_run"]:
            click.echo("Nothing was stopped.")
            return
        terminal.confirm("Stop the whole fleet?", is_confirmed=options["yes"])
        known_nodes.remember({name: str(target) for name, target in targets.items()})

        async def stop(stage: Stage, node: str) -> None:
            mac = macs[node]
            await mac.release.stop(mac.state, stage.part, grace_s=grace_s)
            click.echo(f"node/{node}: {stage.part} stopped")

        gateways = [stage for stage in stages if stage.part == "gateway"]
        await rolling_run.roll(gateways, stop)
        if gateways:
            await _warn_of_gateways(transport)
        await rolling_run.roll([stage for stage in stages if stage not in gateways], stop)
    known_nodes.forget()
    click.echo(
        f"the fleet is down on {len(targets)} Macs; `fleetctl service start` on each of them starts it again"
    )


async def _targets(
    transport: Transport, kept: KnownNodes, options: dict[str, Any]
) -> dict[str, RemoteTarget]:
    """Return where to log in for each Mac: as the store says, or as a run said that did not end.

    Raises:
        FleetctlError: neither is known, or a flag names an unknown node.

    """
    try:
        async with asyncio.timeout(_STORE_S):
            nodes = await objects.list_all(transport, Node)
    except (UnavailableError, TimeoutError) as error:
        targets = {name: parse_target(text) for name, text in kept.read().items()}
        if not targets:
            raise FleetctlError(
                "etcd does not answer, and no earlier run of this command stopped it: which Macs the fleet has is unknown. "
                "Start etcd, or run `fleetctl service stop --engines` on each Mac"
            ) from error
        click.echo(
            "etcd does not answer; going on with the Macs of the run that stopped it", err=True
        )
    else:
        left_out = set(options["left_out"])
        unknown = left_out - {node.name for node in nodes}
        if unknown:
            raise FleetctlError(f"--except: there is no node {', '.join(sorted(unknown))}")
        chosen = [node for node in nodes if node.name not in left_out]
        if chosen and not options["ssh_targets"] and all(map(is_on_this_machine, chosen)):
            raise FleetctlError(
                "all nodes are on this machine, and --fleet is for other machines: run `fleetctl down`"
            )
        targets = find_targets(chosen, options)
    remote_targets = {
        name: one for name, one in targets.items() if name not in set(options["left_out"])
    }
    if not remote_targets:
        raise FleetctlError("there are no Macs to stop")
    return remote_targets


async def _warn_of_gateways(transport: Transport) -> None:
    try:
        left = await fleet_down.gateways_left(transport, SystemClock())
    except StoreError:
        return  # a run that goes on after etcd was stopped
    for url in left:
        click.echo(
            f"warning: the gateway at {url} is no service of these Macs, and goes on without engines: stop it where it runs",
            err=True,
        )
