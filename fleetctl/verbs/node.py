"""The verb `fleetctl node`: adds Macs to the fleet and removes them, over ssh."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fleetctl.bundle.release import read_release
from fleetctl.cli.arguments import parse_duration, reason_option, timeout_option
from fleetctl.cli.connect import open_store, store_options, with_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.program import SuggestingGroup
from fleetctl.machines import removal
from fleetctl.machines.add_nodes import NodeAdder, Outcome, read_hosts
from fleetctl.machines.facts import read_facts
from fleetctl.machines.fleet_access import names_by_uuid, open_fleet
from fleetctl.machines.setup import SetupOptions
from fleetctl.remote.session import RemoteMac, connect
from fleetctl.remote.ssh_flags import ssh_options, ssh_policy
from fleetctl.remote.target import RemoteTarget, parse_target
from fleetctl.verbs.delete import delete_node
from fleetctl.verbs.drain import drain_node
from fleetctl.verbs.node_reboot import reboot
from fleetctl.verbs.node_unlock import unlock
from fleetctl.verbs.node_upgrade import upgrade
from fleetctl.verbs.node_wake import wake
from fleetctl.verbs.token import parse_name
from machinery.clock import SystemClock
from schemas.node import Node
from store import objects
from store.port import Transport

_HELP = """Add Macs to the fleet, upgrade, restart, unlock and remove them, over ssh; wake those that sleep.

\b
  fleetctl node add admin@mac-2.local --bundle mlx-fleet-0.1.0-macos-arm64.tar
  fleetctl node upgrade --to mlx-fleet-0.2.0-macos-arm64.tar --ssh-user admin
  fleetctl node reboot mac-2 --drain --ssh-user admin
  fleetctl node unlock mac-2 --ssh-user admin
  fleetctl node wake mac-2
  fleetctl node remove admin@mac-2.local
"""


@click.group(
    "node",
    cls=SuggestingGroup,
    help=_HELP,
    short_help="Add Macs over ssh; upgrade, restart and remove them.",
)
def node() -> None:
    """Add Macs to the fleet, upgrade, restart and remove them, over ssh."""


node.add_command(reboot)
node.add_command(unlock)
node.add_command(upgrade)
node.add_command(wake)


@node.command()
@click.argument("hosts", nargs=-1, metavar="[USER@HOST...]")
@click.option(
    "--hosts",
    "hosts_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with one USER@HOST a line.",
)
@click.option(
    "--bundle",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Archive of `fleetctl bundle create` (default: the programs that are on the Mac).",
)
@click.option("--name", help="Name in the fleet (default: the host name of the Mac).")
@click.option(
    "--python",
    default="",
    metavar="PATH",
    help="Python on the Mac, for an archive that has none.",
)
@click.option(
    "--join-address",
    default="",
    metavar="HOST:PORT",
    help="Address of a join port as the Mac reaches it (default: those of the reconcilers).",
)
@click.option(
    "--allow-linux", is_flag=True, help="Accept a machine with Linux, for a trial without a GPU."
)
@ssh_options
@with_store
async def add(
    transport: Transport, hosts: tuple[str, ...], hosts_file: Path | None, **options: Any
) -> None:
    """Make Macs nodes of this fleet: install the programs, join, and start the agent at boot.

    Eleven steps, each of which looks first and changes only what is missing: run the same command again after any
    failure. The user needs Remote Login and sudo on the Mac. Passwords are asked for in the terminal.
    """
    targets = [parse_target(host) for host in hosts] + (
        read_hosts(hosts_file) if hosts_file else []
    )
    targets = list(dict.fromkeys(targets))
    if not targets:
        raise click.UsageError("which Macs? Give USER@HOST, or --hosts FILE")
    if options["name"] is not None and len(targets) > 1:
        raise click.UsageError("--name is for one Mac; several get the names of their hosts")
    setup = SetupOptions(
        release=read_release(options["bundle"]) if options["bundle"] else None,
        name=None if options["name"] is None else parse_name(options["name"]),
        python=options["python"],
        is_linux_allowed=options["allow_linux"],
    )
    clock = SystemClock()
    adder = NodeAdder(
        fleet=await open_fleet(transport, clock, options["join_address"]),
        policy=ssh_policy(options),
        options=setup,
        clock=clock,
        say=click.echo,
    )
    outcomes = await adder.add_all(targets)
    failed = [outcome for outcome in outcomes if outcome.error]
    if len(outcomes) > 1:
        click.echo(_summary(outcomes, failed), err=bool(failed))
    if failed:
        raise click.exceptions.Exit(1)


def _summary(outcomes: Sequence[Outcome], failed: Sequence[Outcome]) -> str:
    done = f"{len(outcomes) - len(failed)} of {len(outcomes)} machines are nodes"
    if not failed:
        return done
    names = " ".join(str(outcome.target) for outcome in failed)
    return f"{done}. Mend what the lines above name, and run the command again for: {names}"


@node.command()
@click.argument("what", metavar="NAME|USER@HOST")
@click.option(
    "--keep-models/--delete-models",
    default=True,
    show_default=True,
    help="Keep the models on the Mac.",
)
@click.option(
    "--drain/--no-drain",
    default=True,
    show_default=True,
    help="Move its replicas to other nodes first.",
)
@timeout_option("5m", "Time limit of the drain, and of the removal.")
@click.option(
    "--authority-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="FLEET_AUTHORITY_DIR",
    help="Folder with root.env, to delete the etcd user of the node.",
)
@ssh_options
@reason_option
@store_options
async def remove(what: str, **options: Any) -> None:
    """Remove a node: drain it, uninstall it on its Mac, and revoke its certificate.

    With USER@HOST everything that `fleetctl node add` has made on the Mac is undone over ssh. With a NAME the Mac itself
    is left alone, as when it is lost. Run the same command again after any failure.
    """
    timeout_s = parse_duration(options["timeout"])
    if "@" in what:
        await _remove_by_ssh(parse_target(what), timeout_s, options)
        return
    name = parse_name(what)
    await _drain(name, timeout_s, options)
    await _forget(name, timeout_s, options)
    click.echo(
        "note: the Mac itself was left alone; `fleetctl node remove USER@HOST` also uninstalls its agent",
        err=True,
    )


async def _remove_by_ssh(target: RemoteTarget, timeout_s: float, options: dict[str, Any]) -> None:
    async with connect(target, ssh_policy(options)) as mac:
        await mac.check_sudo()
        layout = await removal.machine_layout(mac)
        name = await removal.node_name(mac, layout) or await _name_of(mac, options)
        if name:
            await _drain(name, timeout_s, options)
        for note in await removal.uninstall(mac, layout, keeps_models=options["keep_models"]):
            click.echo(f"{target.host}: {note}")
    if not name:
        click.echo(
            f"the fleet knows no node on {target.host}; `fleetctl node remove NAME` names one",
            err=True,
        )
        return
    async with open_store(options) as transport:
        await removal.wait_until_silent(transport, SystemClock(), name, timeout_s, click.echo)
    await _forget(name, timeout_s, options)


async def _name_of(mac: RemoteMac, options: dict[str, Any]) -> str:
    """Return the name of the node that the fleet knows the machine as: an earlier run may have removed its identity."""
    facts = await read_facts(mac, SystemClock())
    async with open_store(options) as transport:
        fleet_nodes = await objects.list_all(transport, Node)
    return names_by_uuid(fleet_nodes).get(facts.hardware_uuid, "")


async def _drain(name: str, timeout_s: float, options: dict[str, Any]) -> None:
    async with open_store(options) as transport:
        is_known = await objects.get(transport, Node, name) is not None
    if is_known and options["drain"]:
        await drain_node(name, timeout_s, options)


async def _forget(name: str, timeout_s: float, options: dict[str, Any]) -> None:
    if not await delete_node(name, timeout_s, options):
        raise FleetctlError(f"node/{name} was not deleted; run the command again")
