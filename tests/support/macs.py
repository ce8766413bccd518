"""A Mac as its agent reports it: 48 GB, of which 36 are for models."""

from schemas.meta import Condition
from schemas.node import NodeLease, NodeStatus
from store import codec, keys
from store.port import Put

GIB = 1 << 30


def mac_status(name: str, *conditions: Condition) -> NodeStatus:
    """Return the status of a Mac with these conditions."""
    return NodeStatus(
        uid=name,
        hostname=f"{name}.local",
        address="10.0.0.1",
        agent_version="1",
        os="macOS",
        os_version="26.1",
        machine="arm64",
        chip="Apple M4 Pro",
        cpu_cores=12,
        gpu_cores=20,
        memory_bytes=48 * GIB,
        allocatable_bytes=36 * GIB,
        conditions=conditions,
    )


def put_status(name: str, *conditions: Condition) -> Put:
    """Return the write of its status."""
    value = codec.encode(mac_status(name, *conditions))
    return Put(key=keys.status_key("Node", name), value=value)


def mac(name: str, *conditions: Condition) -> list[Put]:
    """Return the writes of a Mac that is alive."""
    lease = NodeLease(uid=name, session="s")
    lease_put = Put(key=keys.node_lease_key(name), value=codec.encode(lease))
    return [put_status(name, *conditions), lease_put]
