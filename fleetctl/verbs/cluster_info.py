"""`fleetctl cluster-info`: the addresses of a fleet, whether its parts are there, and its Macs side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from fleetctl.cli.connect import etcd_address, open_store, process_options
from fleetctl.fleets import node_versions, stop_orders
from fleetctl.fleets.dialer import open_dialer
from fleetctl.fleets.known_nodes import known_nodes
from fleetctl.fleets.node_versions import NodeVersions
from fleetctl.output.printers import align_columns
from identity.dialer import Dialer
from insight import process_client, version_skew
from insight.tls_mode import mode_text, read_mode
from store import keys, object_trees
from store.port import Transport

_MAX_MACS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSummary:
    """The parts of a fleet, as the store knows them."""

    etcd: str
    etcd_version: str
    leader: str
    """Name of the leading reconciler; empty if none leads."""
    gateways: dict[str, str]
    """URLs by gateway id."""
    nodes: int
    ready_nodes: int
    deployments: int
    available_deployments: int
    tls: str
    """The TLS mode in words."""
    macs: tuple[NodeVersions, ...] = ()


@click.command(short_help="Show the addresses of the fleet, and its Macs.")
@process_options
async def cluster_info(**options: Any) -> None:
    """Show the addresses of etcd and the gateways, the leading reconciler, and the Macs side by side."""
    async with open_store(options) as transport:
        dialer = await open_dialer(options, transport)
        known_nodes(options).remember(await stop_orders.read_addresses(transport, dialer))
        summary = await read_summary(transport, str(etcd_address(options)), dialer)
    click.echo(summary_text(summary))


async def read_summary(transport: Transport, etcd: str, dialer: Dialer) -> FleetSummary:
    """Read the parts of a fleet; the agents are asked for their Python. Raises StoreError."""
    server = await transport.status()
    leader = await transport.get(keys.ELECTION_RECONCILER)
    leases = await process_client.list_gateway_leases(transport)
    nodes = await object_trees.list_all(transport, "Node")
    ready = await object_trees.ready_nodes(transport)
    deployments = await object_trees.list_all(transport, "ModelDeployment")
    available = [
        deployment
        for deployment in deployments
        if (object_trees.condition(deployment, "Available") or {}).get("status") == "True"
    ]
    return FleetSummary(
        etcd=etcd,
        etcd_version=server.version,
        leader="" if leader is None else version_skew.leader_version(leader.value).name,
        gateways={id_: lease.url for id_, lease in sorted(leases.items())},
        nodes=len(nodes),
        ready_nodes=sum(object_trees.name_of(node) in ready for node in nodes),
        deployments=len(deployments),
        available_deployments=len(available),
        tls=mode_text(await read_mode(transport)),
        macs=tuple(await node_versions.read_node_versions(transport, dialer)),
    )


def summary_text(found: FleetSummary) -> str:
    """Return the parts as text. Pure."""
    rows = [
        ("etcd", f"{found.etcd} (version {found.etcd_version})"),
        (
            "reconciler",
            f"{found.leader} leads" if found.leader else "none leads: start fleet-reconciler",
        ),
        *((f"gateway {id_}", f"{url.rstrip('/')}/v1") for id_, url in found.gateways.items()),
    ]
    if not found.gateways:
        rows.append(("gateway", "none is registered: start fleet-gateway"))
    rows += [
        ("tls", found.tls),
        ("nodes", f"{found.ready_nodes} of {found.nodes} are Ready"),
        ("deployments", f"{found.available_deployments} of {found.deployments} are Available"),
    ]
    return (
        f"{align_columns(rows)}\n\n{_macs_text(found.macs)}"
        "`fleetctl doctor` checks every part; `fleetctl support-bundle` collects what a helper needs."
    )


def _macs_text(macs: Sequence[NodeVersions]) -> str:
    """Return the first Macs side by side, and where they differ. Pure."""
    if not macs:
        return ""
    rows = [mac.cells() for mac in macs[:_MAX_MACS]]
    lines = [align_columns(rows, ("NODE", *node_versions.COLUMNS))]
    if len(macs) > _MAX_MACS:
        lines.append(f"... and {len(macs) - _MAX_MACS} more: `fleetctl version --nodes`")
    lines += [f"* {line}" for line in node_versions.difference_texts(macs)]
    lines.append("`fleetctl fabric check` looks at the cables and RDMA of groups.")
    return "\n".join([*lines, "", ""])
