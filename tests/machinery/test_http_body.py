"""Bodies that arrive in pieces are read whole, and those that are too large are refused early."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from machinery.http_body import BodyTooLargeError, read_limited
from tests.support.tcp_server import tcp_server


async def answer(*pieces: bytes) -> bytes:
    """Return what a client reads, up to 12 bytes, of a server that sends the pieces one after the other."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        for piece in pieces:
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.write(piece)

    async with (
        tcp_server(serve) as port,
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/") as response,
    ):
        return await read_limited(response.content.iter_any(), 12)


async def test_a_body_in_pieces_is_read_whole() -> None:
    assert await answer(b"first", b"second") == b"firstsecond"


async def test_an_empty_body_is_empty() -> None:
    assert await answer() == b""


async def test_a_body_above_the_limit_is_refused_by_size() -> None:
    with pytest.raises(BodyTooLargeError, match="larger than 12 bytes"):
        await answer(b"123456", b"1234567", b"never read")


async def test_the_rest_of_a_large_body_is_not_read() -> None:
    taken = []

    async def endless() -> AsyncIterator[bytes]:
        while True:
            taken.append(1)
            yield b"x" * (1 << 20)

    with pytest.raises(aiohttp.ClientError, match="larger than 3 MiB"):
        await read_limited(endless(), 3 << 20)
    assert len(taken) == 4
