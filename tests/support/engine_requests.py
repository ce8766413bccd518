"""Chat and completion requests for tests of the engine, parsed as the engine parses them."""

import json
from typing import Any

import pytest

from engine.openai import request_body
from engine.openai.request_body import GenerationRequest
from schemas.wire.errors import Refusal, RefusedError

TURNS = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> GenerationRequest:
    """Return a chat request with more fields."""
    return request_body.parse_chat(json.dumps({"model": "m", "messages": TURNS} | fields).encode())


def complete(**fields: Any) -> GenerationRequest:
    """Return a completion request with more fields."""
    return request_body.parse_completion(
        json.dumps({"model": "m", "prompt": "hi"} | fields).encode()
    )


def refused(call: Any, *arguments: Any, **fields: Any) -> Refusal:
    """Return the refusal that a call raises."""
    with pytest.raises(RefusedError) as caught:
        call(*arguments, **fields)
    return caught.value.refusal
