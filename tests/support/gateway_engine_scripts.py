"""Scripts of fake engines: good, failing, slow, partial or missing responses."""

import asyncio

import orjson

from tests.support.gateway_fake_engine import Call, Script


def delta(text: str) -> bytes:
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
    }
    return b"data: " + orjson.dumps(body) + b"\n\n"


def completion(text: str) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
    }
    return orjson.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
        }
    )


DONE = b"data: [DONE]\n\n"


async def echo(call: Call) -> None:
    """Answer with the request's own body."""
    await call.answer(call.body)


async def chat(call: Call) -> None:
    """Answer as an engine does, streamed or not."""
    if not orjson.loads(call.body).get("stream"):
        await call.answer(completion(f"hello from {call.engine.replica}"))
        return
    await call.begin_stream()
    for word in ("hello", " from ", call.engine.replica):
        await call.chunk(delta(word))
    await call.chunk(DONE)
    await call.send(b"0\r\n\r\n")


async def dies_at_once(call: Call) -> None:
    call.die()


async def dies_after_the_head(call: Call) -> None:
    await call.begin_stream()
    await asyncio.sleep(0.02)
    call.die()


async def dies_in_the_first_event(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(delta("never to be seen")[:20])
    await asyncio.sleep(0.02)
    call.die()


async def dies_mid_stream(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(delta("one"))
    await call.chunk(delta("two") + delta("half")[:30])
    await asyncio.sleep(0.02)
    call.die()


async def dies_mid_answer(call: Call) -> None:
    body = completion("x" * 200)
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    await call.send(head.encode() + b"\r\n\r\n" + body[:100])
    await asyncio.sleep(0.02)
    call.die()


def refuses(status: int, code: str) -> Script:
    async def script(call: Call) -> None:
        body = orjson.dumps({"error": {"message": code, "type": "server_error", "code": code}})
        await call.answer(body, status, retry_after="1")

    return script


def slow(seconds: float, then: Script = chat) -> Script:
    async def script(call: Call) -> None:
        await asyncio.sleep(seconds)
        await then(call)

    return script


def streams(count: int, *, pause_s: float, size: int = 1) -> Script:
    async def script(call: Call) -> None:
        await call.begin_stream()
        for number in range(count):
            await call.chunk(delta(f"{number} " * size))
            await asyncio.sleep(pause_s)
        await call.chunk(DONE)
        await call.send(b"0\r\n\r\n")

    return script
