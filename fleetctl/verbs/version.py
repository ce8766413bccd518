"""`fleetctl version`: of this program and every part of the fleet, and what of it does not get along."""

from typing import Any

import click
import orjson

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.kubectl_hints import unsupported_flag
from fleetctl.fleets import gateways, version_skew
from fleetctl.fleets.version_skew import UNKNOWN, ComponentVersion, FleetVersions
from machinery.version import version as fleet_version
from manifests.yaml import parser
from reconciler.nodes.node_state import MLX_LM
from schemas.node import Node
from store import keys, objects
from store.errors import StoreError
from store.port import Transport


@click.command()
@click.option("--client", is_flag=True, help="Only of this program; asks nobody.")
@click.option("-o", "--output", type=click.Choice(["json", "yaml"]), help="For programs.")
@unsupported_flag("it is short already; -o json has it for programs", "--short")
@store_options
def version(client: bool, output: str | None, **options: Any) -> None:
    """Show the versions of fleetctl, etcd, the reconciler, gateways and node agents.

    Warns where they differ by more than is supported: one minor version from the reconciler's.
    """
    if client:
        ours = fleet_version()
        click.echo(_text({"fleetctl": ours}, output) if output else f"fleetctl: {ours}\n", nl=False)
        return
    run(_print_fleet_versions(output, options))


async def _print_fleet_versions(output: str | None, options: dict[str, Any]) -> None:
    ours = ComponentVersion(part="fleetctl", version=fleet_version())
    try:
        async with open_store(options) as transport:
            found = await read_versions(transport, ours)
    except StoreError as error:
        if not output:
            click.echo(f"fleetctl: {ours.version}")
        click.echo(f"etcd: no answer ({error})", err=True)
        raise click.exceptions.Exit(1) from error
    warned = version_skew.warnings(found, mlx_lm=MLX_LM)
    if output:
        click.echo(_text(version_skew.tree(found, warned), output), nl=False)
    else:
        click.echo("\n".join(version_skew.lines(found)))
    for line in warned:
        click.echo(f"warning: {line}", err=True)


async def read_versions(transport: Transport, client: ComponentVersion) -> FleetVersions:
    """Return every part's version, as they say in the store. Raises StoreError."""
    server = await transport.status()
    leader = await transport.get(keys.ELECTION_RECONCILER)
    leases = await gateways.list_leases(transport)
    nodes = await objects.list_all(transport, Node)
    return FleetVersions(
        client=client,
        etcd=ComponentVersion(part="etcd", version=server.version),
        reconciler=None if leader is None else leader_version(leader.value),
        gateways=[
            ComponentVersion(part="gateway", name=id_, version=lease.version)
            for id_, lease in sorted(leases.items())
        ],
        agents=[
            ComponentVersion(
                part="nodeagent",
                name=node.name,
                version=node.status.agent_version,
                mlx_lm=node.status.mlx_lm_version,
            )
            for node in nodes
            if node.status is not None
        ],
    )


def leader_version(value: bytes) -> ComponentVersion:
    """Return who leads, by the election's key: `host/pid version`; earlier releases did not say their version."""
    name, _, said = value.decode(errors="replace").partition(" ")
    return ComponentVersion(part="reconciler", name=name, version=said or UNKNOWN)


def _text(tree: dict[str, Any], output: str) -> str:
    if output == "yaml":
        return parser.dump(tree)
    return orjson.dumps(tree, option=orjson.OPT_INDENT_2).decode() + "\n"
