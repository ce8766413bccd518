"""Reads the facts that an upgrade is planned from: the store, and each Mac over ssh."""

import asyncio
from collections.abc import Mapping, Sequence

from fleetctl.cli.errors import FleetctlError
from fleetctl.maintenance.mac_release import MacRelease, MacState
from fleetctl.maintenance.upgrade_plan import FleetFacts, NodeFacts
from fleetctl.remote.errors import RemoteError
from insight import version_skew
from insight.version_skew import UNKNOWN, ComponentVersion
from machinery.version import version
from schemas.node import Node
from schemas.replica import Replica
from store import object_trees, objects
from store.port import Transport

_AT_ONCE = 8


async def read_facts(
    transport: Transport, nodes: Sequence[Node], macs: Mapping[str, MacRelease]
) -> FleetFacts:
    """Return the facts. Raises FleetctlError: a Mac does not answer; StoreError."""
    ours = ComponentVersion(part="fleetctl", version=version())
    versions = await version_skew.read_versions(transport, ours)
    ready = await object_trees.ready_nodes(transport)
    slots = asyncio.Semaphore(_AT_ONCE)
    failures: list[str] = []
    states: dict[str, MacState] = {}

    async def read(name: str, mac: MacRelease) -> None:
        async with slots:
            try:
                states[name] = await mac.read()
            except RemoteError as error:
                failures.append(f"  node/{name}: {error}")

    async with asyncio.TaskGroup() as group:
        for name, mac in macs.items():
            group.create_task(read(name, mac))
    if failures:
        raise FleetctlError("\n".join(["nothing was changed:", *sorted(failures)]))
    replicas = await objects.list_all(transport, Replica)
    upgraded = {node.name for node in nodes}
    return FleetFacts(
        nodes=[
            NodeFacts(
                name=node.name,
                is_ready=node.name in ready,
                mac=states[node.name],
                mlx_lm=node.status.mlx_lm_version if node.status is not None else "",
                deployments=tuple(
                    sorted(
                        {
                            replica.spec.deployment
                            for replica in replicas
                            if any(rank.node == node.name for rank in replica.spec.ranks)
                        }
                    )
                ),
            )
            for node in nodes
        ],
        versions={
            server.label: server.version
            for server in versions.servers()
            if server.part != "etcd"
            and server.version != UNKNOWN
            and not (server.part == "nodeagent" and server.name in upgraded)
        },
        etcd=versions.etcd.version,
        gateways=len(versions.gateways),
    )
