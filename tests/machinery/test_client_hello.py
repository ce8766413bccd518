"""The server name in the first message of TLS clients, whole, in pieces and broken."""

import asyncio
import socket
import ssl

import pytest

from machinery.client_hello import read_server_name, server_name


def hello(name: str | None) -> bytes:
    """Return the first message of Python's own TLS client."""
    context, out = ssl.create_default_context(), ssl.MemoryBIO()
    context.check_hostname = name is not None
    client = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


@pytest.mark.parametrize("name", ["edge-1.gateway.mlx-fleet.internal", "localhost", None])
def test_the_name_of_a_client_is_read(name: str | None) -> None:
    assert server_name(hello(name)) == (name or "")


def test_no_beginning_of_a_message_raises() -> None:
    whole = hello("edge-1.gateway.mlx-fleet.internal")
    for size in range(len(whole)):
        server_name(whole[:size])
    for at in range(len(whole)):
        server_name(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])


def connected() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    ours.setblocking(False)
    return ours, theirs


async def test_a_message_in_pieces_stays_in_the_socket() -> None:
    ours, theirs = connected()
    with ours, theirs:
        message = hello("mac-1.node.mlx-fleet.internal")
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read_server_name(ours))
            for at in range(0, len(message), 50):
                theirs.sendall(message[at : at + 50])
                await asyncio.sleep(0)
        assert reading.result() == "mac-1.node.mlx-fleet.internal"
        assert ours.recv(1 << 16) == message


async def test_a_client_that_leaves_early_has_no_name() -> None:
    ours, theirs = connected()
    with ours:
        with theirs:
            theirs.sendall(hello("localhost")[:100])
        assert await read_server_name(ours) == ""
