"""Nodes without a lease: their ports, on real sockets, and what is said of them."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from insight.doctor.lost_nodes import LostNode, PortState, lost_advice, try_lost_nodes, try_port
from schemas.meta import ObjectMeta
from schemas.node import Node
from tests.support.agent_api import STATUS
from tests.support.ports import free_port

OPEN, CLOSED, SILENT = PortState.OPEN, PortState.CLOSED, PortState.SILENT


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def dropping() -> Iterator[int]:
    """Return a port that drops connections, as a firewall does: its queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as stack:
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()[1]


def lost(name: str, url: str) -> Node:
    status = STATUS.model_copy(update={"agent_url": url})
    return Node(metadata=ObjectMeta(name=name), status=status)


def tried(ssh: PortState, agent: PortState) -> LostNode:
    return LostNode(name="mac-2", host="10.0.0.2", ssh=ssh, agent=agent)


async def test_a_port_is_open_closed_or_silent(listening: int, dropping: int) -> None:
    assert await try_port("127.0.0.1", listening) is OPEN
    assert await try_port("127.0.0.1", free_port()) is CLOSED
    assert await try_port("127.0.0.1", dropping) is SILENT


async def test_only_nodes_without_a_lease_are_tried(listening: int) -> None:
    url = f"https://127.0.0.1:{free_port()}"
    nodes = [lost("mac-1", url), lost("mac-2", url), lost("mac-3", "")]
    [node] = await try_lost_nodes(nodes, frozenset({"mac-1"}), ssh_port=listening)
    assert node == LostNode(name="mac-2", host="127.0.0.1", ssh=OPEN, agent=CLOSED)


@pytest.mark.parametrize("agent", [CLOSED, SILENT])
def test_a_mac_that_answers_ssh_alone_waits_for_its_password(agent: PortState) -> None:
    words, advice = lost_advice("mac-2", tried(OPEN, agent))
    assert "FileVault" in words
    assert "`fleetctl node unlock mac-2`" in advice


@pytest.mark.parametrize(
    ("ports", "said"),
    [
        (tried(OPEN, OPEN), ", though its agent's port is open"),
        (tried(CLOSED, CLOSED), ", its Mac answers at 10.0.0.2, and its agent does not run"),
        (tried(SILENT, SILENT), ", and nothing answers at 10.0.0.2"),
        (None, ""),
    ],
)
def test_no_password_is_asked_for_where_something_else_is_the_reason(
    ports: LostNode | None, said: str
) -> None:
    words, advice = lost_advice("mac-2", ports)
    assert words == said
    assert "ssh" not in advice
