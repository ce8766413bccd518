"""Faults of engines below HTTP: truncated, surplus, invalid or no bytes."""

import asyncio

from tests.support.gateway_engine_scripts import completion, delta
from tests.support.gateway_fake_engine import Call, Script


def raw(data: bytes) -> Script:
    """Send exactly these bytes, and close."""

    async def script(call: Call) -> None:
        await call.send(data)
        await asyncio.sleep(0.02)
        call.die()

    return script


def _head(*lines: str) -> bytes:
    return "\r\n".join(("HTTP/1.1 200 OK", *lines)).encode() + b"\r\n\r\n"


_JSON = "content-type: application/json"
_EVENTS = "content-type: text/event-stream"
_BODY = completion("never to be seen")


async def says_nothing(_: Call) -> None:
    """Behave like a stopped process: the kernel accepts, and no process reads."""
    await asyncio.Event().wait()


async def ends_before_the_first_event(call: Call) -> None:
    await call.begin_stream()
    await call.send(b"0\r\n\r\n")


async def shorter_than_it_is(call: Call) -> None:
    """A content-length that cuts the body in two."""
    await call.send(_head(_JSON, f"content-length: {len(_BODY) // 2}") + _BODY)


WRONG = {
    "garbage": raw(b"\x00\x16\x03\x01 what is this\r\n\r\n"),
    "a-head-without-end": raw(b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * 10_000),
    "half-a-head": raw(b"HTTP/1.1 200 OK\r\ncontent-le"),
    "half-a-chunk": raw(_head(_EVENTS, "transfer-encoding: chunked") + b"40\r\n" + delta("a")[:20]),
    "no-chunk-size": raw(_head(_JSON, "transfer-encoding: chunked") + b"zz\r\nhello"),
    "shorter-than-its-length": raw(_head(_JSON, f"content-length: {len(_BODY) + 9}") + _BODY),
    "longer-than-its-length": shorter_than_it_is,
    "not-json": raw(_head(_JSON, "content-length: 5") + b"hello"),
    "ends-before-the-first-event": ends_before_the_first_event,
}
