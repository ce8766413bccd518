"""Scripts of fake engines that answer chats as real ones do, with content that a tiny model would never generate."""

from typing import Any

import orjson

from tests.support.gateway_fake_engine import Call, Script

Json = dict[str, Any]

USAGE: Json = {
    "prompt_tokens": 11,
    "completion_tokens": 5,
    "total_tokens": 16,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 1},
}
PERFORMANCE: Json = {
    "queue_s": 0.25,
    "prefill_s": 0.5,
    "ttft_s": 0.75,
    "prompt_tokens_per_s": 14.0,
    "decode_tokens_per_s": 2.0,
    "cached_tokens": 4,
}
CALLS: list[Json] = [
    {"id": "call_a", "name": "weather", "arguments": '{"city": "Paris", "days": 2}'},
    {"id": "call_b", "name": "ping", "arguments": "{}"},
]


def chunk(delta: Json, **choice: Any) -> bytes:
    """Return one event of a stream."""
    shown = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **choice}
    body = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "choices": [shown]}
    return _event({**body, "created": 1, "model": "m", "usage": None})


def totals(**more: Any) -> bytes:
    """Return the event before the last."""
    body = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "choices": [], "usage": USAGE}
    return _event({**body, "performance": PERFORMANCE, **more})


def _event(body: Json) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def says(
    text: str = "", *, thought: str = "", calls: bool = False, finish: str = "stop", **choice: Any
) -> Script:
    """Answer with thinking, text and calls, streamed or not. Counts tokens as 42."""

    async def script(call: Call) -> None:
        asked = orjson.loads(call.body)
        if call.path == "/tokenize":
            await call.answer(b'{"count": 42, "max_model_len": 4096}')
        elif asked.get("stream"):
            await call.begin_stream()
            for piece in pieces(text, thought, calls=calls):
                await call.chunk(piece)
            await call.chunk(chunk({}, finish_reason=finish, **choice) + totals() + DONE)
            await call.send(b"0\r\n\r\n")
        else:
            await call.answer(whole(text, thought, calls=calls, finish=finish, **choice))

    return script


def pieces(text: str, thought: str, *, calls: bool) -> list[bytes]:
    """Return the events of an answer's content, in small pieces."""
    found = [chunk({"role": "assistant", "content": "", "refusal": None})]
    found += [chunk({"reasoning_content": part}) for part in _cut(thought)]
    found += [chunk({"content": part}) for part in _cut(text)]
    for index, one in enumerate(CALLS if calls else ()):
        function = {"name": one["name"], "arguments": ""}
        head = {"index": index, "id": one["id"], "type": "function", "function": function}
        found.append(chunk({"tool_calls": [head]}))
        for part in _cut(one["arguments"]):
            piece = {"index": index, "function": {"arguments": part}}
            found.append(chunk({"tool_calls": [piece]}))
    return found


def _cut(text: str) -> list[str]:
    return [text[at : at + 3] for at in range(0, len(text), 3)]


def whole(text: str, thought: str, *, calls: bool, finish: str, **choice: Any) -> bytes:
    """Return a response that is not streamed."""
    message: Json = {"role": "assistant", "content": text or None, "refusal": None}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in CALLS
        ]
    shown = {"index": 0, "message": message, "finish_reason": finish, **choice}
    body = {"id": "chatcmpl-7", "object": "chat.completion", "choices": [shown], "usage": USAGE}
    return orjson.dumps({**body, "performance": PERFORMANCE})


def dies(after: str) -> Script:
    """Send some text, then die."""

    async def script(call: Call) -> None:
        await call.begin_stream()
        for piece in pieces(after, "", calls=False):
            await call.chunk(piece)
        call.die()

    return script


def fails(after: str) -> Script:
    """Send some text, then an error."""

    async def script(call: Call) -> None:
        error = {"error": {"message": "it broke", "type": "server_error", "code": None}}
        await call.begin_stream()
        for piece in pieces(after, "", calls=False):
            await call.chunk(piece)
        await call.chunk(_event(error))
        await call.send(b"0\r\n\r\n")

    return script


def refuses(status: int, message: str) -> Script:
    """Refuse as an engine does."""

    async def script(call: Call) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        await call.answer(orjson.dumps({"error": error}), status)

    return script
