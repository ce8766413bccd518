"""The load generator of the gateway's benches sends the kinds of traffic that it is told to."""

import asyncio
from dataclasses import replace
from pathlib import Path

from bench.gateway.load import Load
from tests.support.tcp_server import tcp_server


async def _heads_and_bodies(programs: Path, load: Load, count: int) -> list[tuple[str, str]]:
    """Return the first requests of one connection, each answered with an error."""
    heads: list[tuple[str, str]] = []
    is_done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(heads) < count:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
            heads.append((head, (await reader.readexactly(length)).decode()))
            writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n")
        is_done.set()

    async with (
        tcp_server(serve) as port,
        asyncio.timeout(60),
        replace(load, port=port).running(programs),
    ):
        await is_done.wait()
    return heads


def test_heads_that_never_repeat_have_ids_of_their_own_and_others_are_alike(
    programs: Path,
) -> None:
    load = Load(port=0, connections=1, turns=1, key="sk-1")
    same = asyncio.run(_heads_and_bodies(programs, load, 5))
    fresh = asyncio.run(_heads_and_bodies(programs, replace(load, has_fresh_heads=True), 5))
    assert len({head for head, _ in same}) == 1
    assert "\r\nauthorization: Bearer sk-1\r\n" in same[0][0]
    assert len({body for _, body in same}) == 5
    ids = [line for head, _ in fresh for line in head.splitlines() if line.startswith("x-request")]
    traces = [line for head, _ in fresh for line in head.splitlines() if line.startswith("trace")]
    assert len(set(ids)) == len(set(traces)) == 5


def test_each_second_turn_goes_on_with_the_chat_of_the_first(programs: Path) -> None:
    load = Load(port=0, connections=1, turns=2)
    bodies = [body for _, body in asyncio.run(_heads_and_bodies(programs, load, 4))]
    for first, second in (bodies[:2], bodies[2:]):
        assert first.count('"role"') == 1
        assert second.startswith(first.removesuffix("}]}"))
        assert second.count('"role"') == 3
        assert "#" not in second
    assert bodies[0] != bodies[2]
