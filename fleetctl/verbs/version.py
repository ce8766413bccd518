"""`fleetctl version`: the versions of fleetctl and of every part of the fleet, with warnings about version skew."""

from typing import Any

import click

from fleetctl.cli.connect import open_store, process_options
from fleetctl.cli.documents import print_tree, tree_text
from fleetctl.fleets import node_versions, stop_orders
from fleetctl.fleets.dialer import open_dialer
from fleetctl.fleets.known_nodes import known_nodes
from fleetctl.output.printers import align_columns
from insight import version_skew
from insight.version_skew import ComponentVersion
from machinery.version import commit, version_with_commit
from machinery.version import version as fleet_version
from store.errors import StoreError


@click.command(short_help="Show the versions of all parts of the fleet.")
@click.option("--client", is_flag=True, help="Show only the version of fleetctl.")
@click.option(
    "--nodes",
    is_flag=True,
    help="Compare the Macs: MLX, mlx-lm, Python, macOS and chip; an asterisk marks what differs from most.",
)
@click.option("-o", "--output", type=click.Choice(["json", "yaml"]), help="Output format.")
@process_options
async def version(client: bool, nodes: bool, output: str | None, **options: Any) -> None:
    """Show the versions of fleetctl, etcd, the reconciler, gateways and node agents.

    Warns about versions that are more than one minor version apart from the reconciler.
    """
    if client and nodes:
        raise click.UsageError("give either --client or --nodes")
    if client:
        tree = {"fleetctl": fleet_version()} | ({"commit": commit()} if commit() else {})
        text = tree_text(tree, output) if output else f"fleetctl: {version_with_commit()}\n"
        click.echo(text, nl=False)
        return
    await (_print_nodes(output, options) if nodes else _print_fleet_versions(output, options))


async def _print_nodes(output: str | None, options: dict[str, Any]) -> None:
    async with open_store(options) as transport:
        dialer = await open_dialer(options, transport)
        known_nodes(options).remember(await stop_orders.read_addresses(transport, dialer))
        found = await node_versions.read_node_versions(transport, dialer)
    differences = node_versions.difference_texts(found)
    if output:
        tree = {"nodes": [versions.tree() for versions in found], "differences": differences}
        print_tree(tree, output)
    elif not found:
        click.echo("no agent has reported: `fleetctl get nodes` shows whether there are nodes")
    else:
        click.echo(
            align_columns(
                [versions.cells() for versions in found], ("NODE", *node_versions.COLUMNS)
            )
        )
    for line in differences:
        click.echo(f"warning: {line}", err=True)


async def _print_fleet_versions(output: str | None, options: dict[str, Any]) -> None:
    ours = ComponentVersion(part="fleetctl", version=fleet_version())
    try:
        async with open_store(options) as transport:
            versions = await version_skew.read_versions(transport, ours)
    except StoreError as error:
        if not output:
            click.echo(f"fleetctl: {version_with_commit()}")
        click.echo(f"etcd: no answer ({error})", err=True)
        raise click.exceptions.Exit(1) from error
    warned = version_skew.warnings(versions)
    if output:
        print_tree(version_skew.tree(versions, warned), output)
    else:
        _, *others = version_skew.lines(versions)
        click.echo("\n".join([f"fleetctl: {version_with_commit()}", *others]))
    for line in warned:
        click.echo(f"warning: {line}", err=True)
