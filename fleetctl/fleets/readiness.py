"""Waits until the control plane of a local fleet is ready, and its statuses are those of living processes."""

import asyncio

from schemas.deployment import ModelDeployment
from schemas.meta import is_true
from schemas.replica import Replica
from store import keys, objects
from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.port import Transport


async def wait_for_control_plane(etcd: EtcdAddress, names: list[str]) -> None:
    """Wait until the nodes hold their leases, and a reconciler has written what is true since."""
    transport = connect(etcd)
    try:
        while True:
            try:
                listing = await transport.list(keys.NODE_LEASE_PREFIX)
                leader = await transport.get(keys.ELECTION_RECONCILER)
                is_current = await is_readiness_current(transport)
            except StoreError:
                await asyncio.sleep(0.1)
                continue
            present = {item.key.removeprefix(keys.NODE_LEASE_PREFIX) for item in listing.items}
            if present >= set(names) and leader is not None and is_current:
                return
            await asyncio.sleep(0.1)
    finally:
        await transport.close()


async def is_readiness_current(transport: Transport) -> bool:
    """Return whether all replicas that count as ready have an endpoint: statuses outlive the death of all processes."""
    serving = {
        item.key.rpartition("/")[2] for item in (await transport.list(keys.ENDPOINT_PREFIX)).items
    }
    replicas = await objects.list_all(transport, Replica)
    ready = {
        replica.name
        for replica in replicas
        if replica.status and is_true(replica.status.conditions, "Ready")
    }
    deployments = await objects.list_all(transport, ModelDeployment)
    counted = sum(
        deployment.status.ready_replicas
        for deployment in deployments
        if deployment.status is not None
    )
    return ready <= serving and counted <= len(serving)
