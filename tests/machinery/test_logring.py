"""The last lines of a process' own log."""

import asyncio
import logging

from machinery.clock import SystemClock
from machinery.loglines import Want
from machinery.logring import Ring, pieces


def logged(ring: Ring, *messages: str) -> None:
    for message in messages:
        ring.handle(logging.LogRecord("test", logging.INFO, "", 1, message, (), None))


async def never() -> bool:
    return False


async def text(ring: Ring, want: Want) -> str:
    found = [p async for p in pieces(ring, want, SystemClock(), follow=False, is_over=never)]
    return b"".join(found).decode()


async def test_the_last_lines_are_kept_up_to_a_limit() -> None:
    ring = Ring(limit_bytes=10)
    logged(ring, "one", "two", "three", "four")
    assert ring.numbered() == [(2, b"three"), (3, b"four")]
    assert await text(ring, Want()) == "three\nfour\n"
    logged(ring, "a line that is longer than the limit")
    assert await text(ring, Want()) == "a line tha\n"


async def test_so_many_from_the_end() -> None:
    ring = Ring()
    assert await text(ring, Want(lines=5)) == ""
    logged(ring, "one", "two", "three")
    assert await text(ring, Want(lines=2)) == "two\nthree\n"
    assert await text(ring, Want(lines=0)) == ""


async def test_who_follows_gets_what_comes_and_ends_when_it_is_over() -> None:
    ring, over, told = Ring(), False, list[bytes]()
    logged(ring, "before")

    async def is_over() -> bool:
        return over

    async def follow() -> None:
        async for piece in pieces(ring, Want(lines=0), SystemClock(), follow=True, is_over=is_over):
            told.append(piece)
            heard.set()

    heard = asyncio.Event()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(follow())
        while not heard.is_set():
            logged(ring, "news")
            await asyncio.sleep(0.01)
        over = True
    assert told[0].startswith(b"news\n")


async def test_many_lines_come_in_pieces() -> None:
    ring = Ring()
    logged(ring, *("x" * 999 for _ in range(200)))
    found = [p async for p in pieces(ring, Want(), SystemClock(), follow=False, is_over=never)]
    assert sum(map(len, found)) == 200_000
    assert max(map(len, found)) < 70_000
