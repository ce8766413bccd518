"""The view of the store on a Mac whose agent restarts, and of its port on the network."""

import asyncio
from dataclasses import replace

import pytest

from fleetctl.maintenance.fleet_watch import FleetWatch, NotReadyError
from schemas.node import NodeLease
from store import codec, keys
from store.port import Put, Transport
from tests.support.agent_api import STATUS
from tests.support.clock import SkippingClock
from tests.support.ports import free_port

pytestmark = pytest.mark.etcd


async def agent_there(transport: Transport, port: int, session: str) -> None:
    """Write what an agent of version 0.2.0 writes."""
    status = STATUS.model_copy(
        update={"agent_version": "0.2.0", "agent_url": f"https://127.0.0.1:{port}"}
    )
    lease = codec.encode(NodeLease(uid="u", session=session))
    await transport.commit(
        [],
        [
            Put(key=keys.status_key("Node", "mac-1"), value=codec.encode(status)),
            Put(key=keys.node_lease_key("mac-1"), value=lease),
        ],
    )


async def test_an_agent_behind_a_firewall_is_not_ready(transport: Transport) -> None:
    port, watch = free_port(), FleetWatch(transport, SkippingClock())
    await agent_there(transport, port, "old")
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port):
        before = await watch.look("mac-1")
        assert before.is_reachable
        await agent_there(transport, port, "new")
        await watch.wait_ready("mac-1", "nodeagent", "0.2.0", before=before, limit_s=30)
    with pytest.raises(NotReadyError, match="no longer reaches its agent at https"):
        await watch.wait_ready("mac-1", "nodeagent", "0.2.0", before=before, limit_s=30)
    # An agent that this machine has never reached, such as behind a jump host, is judged by its lease.
    unseen = replace(before, is_reachable=False)
    await watch.wait_ready("mac-1", "nodeagent", "0.2.0", before=unseen, limit_s=30)
    # So is one whose status has a field of a later release.
    newer = b'{"agentVersion": "0.2.0", "agentUrl": "", "ofALaterRelease": 1}'
    await transport.commit([], [Put(key=keys.status_key("Node", "mac-1"), value=newer)])
    await watch.wait_ready("mac-1", "nodeagent", "0.2.0", before=unseen, limit_s=30)
