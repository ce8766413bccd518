"""A fake engine's script for `/v1/responses`: it tells the number of items that it was sent."""

import secrets
from typing import Any

import orjson

from tests.support.gateway_fake_engine import Call


def response_body(call: Call, text: str) -> dict[str, Any]:
    body = orjson.loads(call.body)
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
    return {
        "id": f"resp_{secrets.token_hex(8)}",
        "object": "response",
        "created_at": 1,
        "model": body["model"],
        "status": "completed",
        "output": [{**message, "content": content}],
        "background": False,
        "store": False,
        "previous_response_id": None,
        **{name: body[name] for name in ("store", "previous_response_id") if name in body},
    }


async def respond(call: Call) -> None:
    """Answer with a response, streamed or not, as an engine does."""
    request = orjson.loads(call.body)
    given = request["input"]
    body = response_body(call, f"{len(given) if isinstance(given, list) else 1} items")
    if not request.get("stream"):
        await call.answer(orjson.dumps(body))
        return
    await call.begin_stream()
    for number, kind in enumerate(("created", "completed")):
        event = {"type": f"response.{kind}", "sequence_number": number, "response": body}
        name = f"event: response.{kind}\ndata: ".encode()
        await call.chunk(name + orjson.dumps(event) + b"\n\n")
    await call.send(b"0\r\n\r\n")
