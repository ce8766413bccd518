"""`fleetctl version`: of this program, the store and the agents."""

from typing import Any

import click

from fleetctl.connect import opened, run, store_options
from machinery.version import version as fleet_version
from schemas.node import Node
from store import objects
from store.errors import StoreError


@click.command()
@click.option("--client", is_flag=True, help="Only of this program; asks nobody.")
@store_options
def version(client: bool, **options: Any) -> None:
    """Show the versions of fleetctl, etcd and the node agents."""
    click.echo(f"fleetctl: {fleet_version()}")
    if not client:
        run(_servers(options))


async def _servers(options: dict[str, Any]) -> None:
    async with opened(options) as transport:
        try:
            server = await transport.status()
            nodes = await objects.list_all(transport, Node)
        except StoreError as error:
            click.echo(f"etcd: no answer ({error})", err=True)
            raise click.exceptions.Exit(1) from error
    click.echo(f"etcd: {server.version}")
    for node in nodes:
        if node.status is not None:
            click.echo(f"nodeagent {node.name}: {node.status.agent_version}")
