"""Nodes without a lease: what their ports tell about the reason. A Mac that waits for its disk's password answers SSH alone."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

from nodeagent.doctor.readers import try_connect
from schemas.node import Node

_MAX_NODES: Final = 64
_SSH_PORT: Final = 22


class PortState(StrEnum):
    """The end of one connection to a port."""

    OPEN = "Open"
    CLOSED = "Closed"
    """The machine refused it: it runs."""
    SILENT = "Silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """A node without a lease, and two of its ports."""

    name: str
    host: str
    ssh: PortState
    agent: PortState


async def try_port(host: str, port: int) -> PortState:
    """Connect to a port, and close the connection."""
    error = await try_connect(host, port)
    if error is None:
        return PortState.OPEN
    is_closed = isinstance(error, ConnectionRefusedError | ConnectionResetError)
    return PortState.CLOSED if is_closed else PortState.SILENT


async def try_lost_nodes(
    nodes: Sequence[Node], ready: frozenset[str], *, ssh_port: int = _SSH_PORT
) -> tuple[LostNode, ...]:
    """Try the ports of the nodes that do not renew their leases, at the same time; `ssh_port` is another in tests."""
    urls = {
        node.name: urlsplit(node.status.agent_url)
        for node in nodes
        if node.name not in ready and node.status is not None and node.status.agent_url
    }

    async def try_node(name: str, host: str, port: int) -> LostNode:
        ssh, agent = await asyncio.gather(try_port(host, ssh_port), try_port(host, port))
        return LostNode(name=name, host=host, ssh=ssh, agent=agent)

    known = [(name, url.hostname, url.port) for name, url in urls.items()]
    tries = [try_node(name, host, port) for name, host, port in known if host and port]
    return tuple(await asyncio.gather(*tries[:_MAX_NODES]))


def lost_advice(name: str, tried: LostNode | None) -> tuple[str, str]:
    """Return what the ports of a lost node say, and what to do. Pure."""
    removal = f"`fleetctl delete node {name}` removes the node"
    if tried is None or tried.agent is tried.ssh is PortState.SILENT:
        words = "" if tried is None else f", and nothing answers at {tried.host}"
        return words, f"check that the Mac is awake and runs fleet-nodeagent; {removal}"
    if tried.agent is PortState.OPEN:
        return (
            ", though its agent's port is open",
            f"check that it reaches the store, and is not cut off from it: its log says why; {removal}",
        )
    if tried.ssh is PortState.OPEN:
        return (
            f", its Mac answers SSH at {tried.host}, and its agent's port does not answer: the Mac waits for the password "
            "of its disk (FileVault) after a restart, or the agent does not run",
            f"`fleetctl node unlock {name}` gives the password from macOS 26 on; else `fleetctl service status` there",
        )
    return (
        f", its Mac answers at {tried.host}, and its agent does not run",
        f"`fleetctl service status` there; {removal}",
    )
