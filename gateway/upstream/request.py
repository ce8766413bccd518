"""A request as it is written to an engine; the body as it came wherever that works. Pure."""

import re
from typing import Any

import orjson

from gateway.asks import Ask
from gateway.routing.table import Target

_MODEL_MEMBER = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')


def encode(ask: Ask, target: Target) -> bytes:
    """Return the HTTP request for the engine; the body as it came wherever that works."""
    body = ask.body
    if ask.model not in target.names and target.names:
        # A route's name, or a served name younger than the engine: it answers to its own.
        body = renamed(body, ask.model, target.names[0])
    host, port = target.origin
    named = f"[{host}]" if ":" in host else host
    head = (
        f"POST {ask.path} HTTP/1.1\r\nhost: {named}:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-request-id: {ask.request_id.decode('ascii')}\r\n\r\n"
    )
    return head.encode("ascii") + body


def renamed(body: bytes, old: str, new: str) -> bytes:
    """Return the body with another model name, every other byte as it was if possible."""
    found = list(_MODEL_MEMBER.finditer(body))
    if len(found) == 1 and orjson.loads(found[0][1]) == old:
        return body[: found[0].start(1)] + orjson.dumps(new) + body[found[0].end(1) :]
    # The word is a key elsewhere too, or is written with escapes: only parsing tells them apart.
    tree: dict[str, Any] = orjson.loads(body)
    tree["model"] = new
    return orjson.dumps(tree)
