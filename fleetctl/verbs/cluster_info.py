"""`fleetctl cluster-info`: the addresses of a fleet, and whether its parts are there."""

from dataclasses import dataclass
from typing import Any

import click

from fleetctl.cli.connect import etcd_address, open_store, run, store_options
from fleetctl.fleets import gateways, version_skew
from fleetctl.fleets.tls_mode import mode_text, read_mode
from fleetctl.output.printers import align_columns
from store import keys, object_trees
from store.port import Transport


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


@click.command()
@store_options
def cluster_info(**options: Any) -> None:
    """Show the addresses of etcd and the gateways, the leading reconciler, and how many nodes are Ready."""
    click.echo(summary_text(run(_read(options))))


async def _read(options: dict[str, Any]) -> FleetSummary:
    async with open_store(options) as transport:
        return await read_summary(transport, str(etcd_address(options)))


async def read_summary(transport: Transport, etcd: str) -> FleetSummary:
    """Read the parts of a fleet. Raises StoreError."""
    server = await transport.status()
    leader = await transport.get(keys.ELECTION_RECONCILER)
    leases = await gateways.list_leases(transport)
    nodes = await object_trees.list_all(transport, "Node")
    ready = await object_trees.ready_nodes(transport)
    deployments = await object_trees.list_all(transport, "ModelDeployment")
    available = [
        one
        for one in deployments
        if (object_trees.condition(one, "Available") or {}).get("status") == "True"
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
        f"{align_columns(rows)}\n\n"
        "`fleetctl doctor` checks every part; `fleetctl support-bundle` collects what a helper needs."
    )
